"""``p2ptrain doctor [LINK]``: problems of this machine and its network, and how to fix them.

Without a link the command checks this machine only. With a link it joins the swarm for some seconds without training,
under a temporary identity, and asks the bootstrap and a few live peers (``net.relay.dial_back``) whether they can dial
this machine, which address it comes from, how far its clock is off and how fast bytes pass.

Each check has a deadline and returns findings; an error in a check becomes its finding. A finding that must be fixed
says how, with this machine's own addresses, and makes the exit status 1.
"""

from peer.doctor.command import doctor

__all__ = ["doctor"]
