"""Where the swarm of a scenario can be watched meanwhile: at a page of its first bootstrap."""

from __future__ import annotations

import os
import secrets

from lab.stages import StageName
from p2ptrain.base.errors import UserError
from p2ptrain.page.listen_address import LOOPBACK, ListenAddress, check_listen_address, listener_at

TOKEN = "P2PTRAIN_PAGE_TOKEN"
"""A variable that bootstraps read: the page's address stays what it was when its bootstrap is started again."""
HOSTS = "P2PTRAIN_PAGE_HOSTS"
"""Another: the names by which the page opens."""
OWN_NAMES = f"{LOOPBACK},localhost"


def looked_at(page: str, stage: StageName) -> str:
    """What is to be asked of this stage: ``page`` itself, or on stage docker a port of this computer; empty: no page.

    Raises UserError where nothing can be shown there.
    """
    if not page:
        return ""
    if stage == "namespaces":
        raise UserError(
            "No page can be opened on stage namespaces: no link leads out of there.",
            "Do without --page, or choose --stage docker or --stage local.",
        )
    place = ListenAddress.parse(page)
    if stage == "local":
        check_listen_address(place)
        return page
    if place.host not in (LOOPBACK, "localhost"):
        raise UserError(
            "On stage docker the page is published at 127.0.0.1 alone.",
            "Give a port, such as --page 8080. From elsewhere: ssh -L 8080:127.0.0.1:8080.",
        )
    with listener_at(ListenAddress(LOOPBACK, place.port)) as listener:
        return str(listener.getsockname()[1])


def token() -> str:
    """The owner's, or one drawn."""
    return os.environ.get(TOKEN) or secrets.token_urlsafe(18)
