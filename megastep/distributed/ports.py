"""A port for others to meet at."""

import random
import socket
from pathlib import Path

_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_BELOW = 12_000  # how many ports below the outgoing ones are tried


def free_port() -> int:
    """One that nobody listens at now. Not from those that the kernel gives to outgoing connections: ranks open hundreds
    of them, and one could take the port before it is used."""
    first_outgoing = int(_OUTGOING.read_text().split()[0]) if _OUTGOING.exists() else 32_768
    chance = random.SystemRandom()  # two processes that ask at once should not get the same
    for _ in range(1000):
        port = chance.randrange(max(1024, first_outgoing - _BELOW), max(2048, first_outgoing))
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")
