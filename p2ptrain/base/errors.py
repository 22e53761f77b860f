"""Exceptions that this project raises on purpose.

A ``UserError`` ends a command with status 2. After a ``RemoteError`` or ``NetworkError`` training continues.
Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations


class P2pTrainError(Exception):
    """Base class of all errors below."""


class UserError(P2pTrainError):
    """A problem that the owner of this machine can fix.

    Args:
        problem: a sentence that says what is wrong, with the value that was found.
        remedy: an imperative sentence; no full stop after a command that ends it, so that it can be copied.
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
    """This peer may not take part, or the author's access list cannot be applied."""


class CorpusError(UserError):
    """A corpus is unreadable, empty, too short or has the wrong digest."""


class WeightsError(UserError):
    """The weights from which a run begins are unavailable, unusable or not those that the run names."""


class HomeError(UserError):
    """A peer's home is locked, unwritable, full or belongs to another run."""


class DeviceError(UserError):
    """The model does not fit, or the device or platform cannot run it."""


class OutputError(UserError):
    """A command's output cannot be written: the disk is full or the terminal has closed."""


class ClosedPipeError(OutputError):
    """The program that read a command's output has closed the pipe, as ``head`` does: nothing to report."""


class RemoteError(P2pTrainError):
    """A peer violated the protocol. The exchange is dropped, the peer is noted, and training continues."""


class NetworkError(P2pTrainError):
    """The network failed or a deadline passed. The exchange is dropped; training continues."""


class TrainerAwayError(P2pTrainError):
    """There is no trainer at this moment; another one is being started.

    Args:
        is_torn: whether the last one died while it moved the fast weights, so that some of them have made its last
            step and others have not.
    """

    def __init__(self, is_torn: bool = False) -> None:
        super().__init__("the trainer is being replaced")
        self.is_torn = is_torn


class UnbegunError(NetworkError):
    """The other side closed a link cleanly before the first byte of its payload."""


class MisfitError(NetworkError):
    """Complete payloads did not fit the agreed step widths. Both sides learn from it, so the next ones may fit."""


MISFIT = "its weights do not fit the agreed step widths; the next exchange adapts them"
"""Text of a MisfitError, and reason in the event log."""
