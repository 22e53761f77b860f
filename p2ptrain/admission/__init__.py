"""Admission: which peers may take part in a run. Pure: no clock, no file, no socket (except ``author``).

The manifest's policy is ``open`` (any peer with the link), ``invite`` or ``allowlist``. The latter two rest on
statements signed with the key that signed the manifest, so every peer can check them by itself at any time:

===========  ===========================================================================================================
Access list  The author's signed list of admitted peers, banned peers and revoked invites. The newest one counts. It
             travels through the DHT and between peers, and each peer keeps it on disk.
Invite       The author's permission for the holder of a key to bring in a number of peers until a date. The secret half
             of that key is in the join link and is never sent.
Certificate  An invite, a peer id signed with the invite's key, and the signature of the invite's issuer that this
             happened in time. A peer shows its certificate to its partners, and beside its presence record in the DHT.
===========  ===========================================================================================================

An invite has an issuer, a bootstrap, because a certificate is valid for the whole run but an invite only for days, and
a peer that holds the invite's key could backdate its own signature. The issuer confirms the date and counts the uses;
it cannot admit peers by itself. No secret is sent, so a copied certificate is of no use to another peer.
"""

from p2ptrain.admission.check import Refusal, refusal, remedy
from p2ptrain.admission.gate import Gate
from p2ptrain.admission.issuer import InviteRegister
from p2ptrain.admission.records import MAX_ACCESS_LIST_BYTES, AccessList, Certificate, Invite, InviteCredential

__all__ = [
    "MAX_ACCESS_LIST_BYTES",
    "AccessList",
    "Certificate",
    "Gate",
    "Invite",
    "InviteCredential",
    "InviteRegister",
    "Refusal",
    "refusal",
    "remedy",
]
