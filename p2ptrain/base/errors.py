"""Every exception this project raises on purpose.

::

    P2pTrainError
     ├── UserError            the owner of this machine can mend it; carries what to do; the command line exits 2
     │    ├── ManifestError   a run's description is malformed, edited, unsigned, too large or of another version
     │    ├── JoinLinkError   a join link is malformed, truncated or names another run
     │    ├── AdmissionError  this peer may not take part, or the author's orders about who may cannot be followed
     │    ├── CorpusError     a corpus is unreadable, empty, too short or has the wrong digest
     │    ├── HomeError       a peer's home is locked, unwritable, full or belongs to another run
     │    ├── DeviceError     the model does not fit, or the device or platform cannot run it
     │    ├── ScenarioError   a simulation's scenario or report is malformed, impossible or of another version
     │    └── OutputError     what a command prints cannot be written: a full disk, a pipe whose reader ended
     ├── RemoteError          a peer broke the protocol: costs it trust, we go on
     └── NetworkError         the network failed: a state that heals, we go on
          ├── UnbegunError    the other side ended a link in good order, before a byte of its payload
          └── MisfitError     payloads did not fit the step widths that both sides had agreed on

A fault of our own is none of these: it is a bug and keeps its traceback.
"""

from __future__ import annotations


class P2pTrainError(Exception):
    """Base of all errors below."""


class UserError(P2pTrainError):
    """Something the owner of this machine can mend.

    Args:
        problem: one sentence, what is wrong, with the value that was found.
        remedy: one sentence, what to do about it.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  {remedy}")
        self.problem = problem
        self.remedy = remedy


class ManifestError(UserError):
    """A run's description is malformed, edited after signing, unsigned, too large or of another version."""


class JoinLinkError(UserError):
    """A join link is malformed, truncated or names another run."""


class AdmissionError(UserError):
    """This peer may not take part, or the author's orders about who may cannot be followed."""


class CorpusError(UserError):
    """A corpus is unreadable, empty, too short or has the wrong digest."""


class HomeError(UserError):
    """A peer's home is locked, unwritable, full or belongs to another run."""


class DeviceError(UserError):
    """The model does not fit, or the device or platform cannot run it."""


class ScenarioError(UserError):
    """A simulation's scenario or report is malformed, impossible or of another version."""


class OutputError(UserError):
    """What a command prints cannot be written: its disk is full, or whoever read it has ended."""


class RemoteError(P2pTrainError):
    """A peer broke the protocol. The exchange is dropped and the peer remembered; training goes on."""


class NetworkError(P2pTrainError):
    """The network failed or a deadline passed. The exchange is dropped; training goes on."""


class UnbegunError(NetworkError):
    """The other side ended a link in good order, before a byte of its payload had come."""


class MisfitError(NetworkError):
    """Payloads came whole and did not fit the step widths agreed on. Both sides learnt from it; the next may."""
