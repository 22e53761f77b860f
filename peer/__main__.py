"""``python -m peer LINK``: an alias of ``p2ptrain peer LINK``."""

from p2ptrain.cli import run_command
from peer.cli import peer

if __name__ == "__main__":
    run_command(peer, name="python -m peer")
