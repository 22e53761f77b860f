"""``p2ptrain doctor [LINK]``: what is wrong with this machine or its network, and the words that fix it.

Without a link it looks at this machine alone: versions, device, memory, disk, and whether the port is free. With one it
joins the swarm as a bystander for some seconds, under a name of its own that it forgets again, and asks the bootstrap
and a few live peers what they see (``net.relay.dial_back``): whether they can dial this machine, which address it comes
from, how far its clock is off, how fast bytes pass.

Every check has a deadline and ends in one ``Finding``; what goes wrong in one is its finding and nothing more. What has
to be fixed makes the exit status 1, and says how, with this machine's own addresses in it.

========  =====================================================================================
command   options in, findings out, exit status
findings  what a check found; how it is shown (pure)
machine   checks of this machine
network   checks that take others: observations in the course of some seconds
sockets   from which port a connection left
verdicts  what the observations mean (pure)
========  =====================================================================================
"""

from peer.doctor.command import doctor

__all__ = ["doctor"]
"""The command."""
