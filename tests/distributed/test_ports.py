"""Ranks meet at a port that no outgoing connection can take meanwhile."""

import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from megastep.distributed import ports


def test_a_port_is_free_and_below_the_outgoing_ones():
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in {ports.free_port() for _ in range(50)}:
        assert 1024 <= port < first_outgoing
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_is_taken_is_not_given(monkeypatch):
    with socket.create_server(("", ports.free_port())) as server:
        taken = server.getsockname()[1]
        chance = Mock(randrange=Mock(side_effect=[taken, taken, taken + 1]))
        monkeypatch.setattr(ports.random, "SystemRandom", lambda: chance)
        assert ports.free_port() == taken + 1


def test_none_is_free(monkeypatch):
    with socket.create_server(("", ports.free_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(
            ports.random, "SystemRandom", lambda: Mock(randrange=Mock(return_value=taken))
        )
        with pytest.raises(OSError, match="no port is free"):
            ports.free_port()
