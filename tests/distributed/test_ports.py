"""Free ports lie below the range of outgoing connections; a listener keeps its port."""

import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from megastep.distributed import ports


def test_a_port_is_free_and_below_the_outgoing_range():
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in {ports.free_port() for _ in range(50)}:
        assert 1024 <= port < first_outgoing
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_in_use_is_skipped(monkeypatch):
    with socket.create_server(("", ports.free_port())) as server:
        taken = server.getsockname()[1]
        generator = Mock(randrange=Mock(side_effect=[taken, taken, taken + 1]))
        monkeypatch.setattr(ports.random, "SystemRandom", lambda: generator)
        assert ports.free_port() == taken + 1


def test_no_free_port_is_an_error(monkeypatch):
    with socket.create_server(("", ports.free_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(
            ports.random, "SystemRandom", lambda: Mock(randrange=Mock(return_value=taken))
        )
        with pytest.raises(OSError, match="no port is free"):
            ports.free_port()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_listener_keeps_its_port(host):
    with ports.listen(host) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use"):
            ports.listen(host, port)
        socket.create_connection((host, port), timeout=5).close()
