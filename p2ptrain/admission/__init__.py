"""Who may take part in a run. Pure: no clock, no file, no socket; only keys.

The manifest says ``open`` (whoever has the link), ``invite`` or ``allowlist``. What decides in the latter two is signed
by the key that signed the manifest, so any peer checks it alone, at any time, and nobody need be asked:

========  ==============================================================================================================
Rulings   the author's present word on names: who is admitted, who is banned, which invites are revoked. One document,
          the newest counts. It travels through the DHT and from peer to peer, and each keeps it on disk.
Invite    the author's word that a key of its own, the invite's, brings in so many peers until a date. The secret half
          of that key is in the join link, and is shown to nobody.
Badge     an invite, a peer id signed with the invite's key, and a witness's signature that this happened in time. A
          peer shows its badge to whoever it talks with, and beside its presence record in the DHT.
========  ==============================================================================================================

Why a witness. A badge must hold for as long as the run, and an invite only for days; but the guest holds the invite's
key, and could date its own signature back. So somebody else must have seen it in time, and must have counted the uses:
a node that the invite itself names, usually the run's bootstrap. It is asked once, when a peer joins, and can admit
nobody by itself: it has not got the invite's key. Nothing secret is ever sent, so a badge that everybody has seen
is of use to its peer alone.

records   the three above as bytes, signed and checked
check     ``refusal``: whether a peer may take part, and why not
gate      ``Gate``: what one node knows of all this, and whom it lets in
witness   ``InviteRegister``: what a witness signs, and how often
office    what the author does: invite, admit, revoke (files of the run's directory)
"""

from p2ptrain.admission.check import Refusal, refusal, remedy
from p2ptrain.admission.gate import Gate
from p2ptrain.admission.issuer import InviteRegister
from p2ptrain.admission.records import MAX_RULINGS_BYTES, AccessList, Certificate, Invite, InviteCredential

__all__ = [
    "MAX_RULINGS_BYTES",
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
