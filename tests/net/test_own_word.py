"""Requests to a p2pd that has died or answers nonsense raise our errors, whatever hivemind raises."""

from types import SimpleNamespace

import pytest
import virtual_time
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from p2ptrain.base.errors import NetworkError
from p2ptrain.net.p2pd.daemon import Daemon


@pytest.mark.parametrize("error", [P2PDaemonError("x"), ControlFailure("x"), ConnectionRefusedError(), EOFError()])
def test_a_p2pd_that_falters_is_an_error_of_the_network(error):
    async def identify():
        raise error

    daemon = SimpleNamespace(p2p=SimpleNamespace(_client=SimpleNamespace(identify=identify)))
    with pytest.raises(NetworkError, match="p2pd does not answer"):
        virtual_time.run(Daemon.own_addresses(daemon))
