"""Free ports for rendezvous addresses."""

import random
import socket
from pathlib import Path

_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RANGE = 12_000  # how many ports below the outgoing range are tried


def free_port() -> int:
    """A port without a listener, below the range of outgoing connections.

    Ranks open hundreds of those, and one could take the port before it is used.
    """
    first_outgoing = int(_OUTGOING.read_text().split()[0]) if _OUTGOING.exists() else 32_768
    low = max(1024, first_outgoing - _RANGE)
    high = max(2048, first_outgoing)
    generator = random.SystemRandom()  # concurrent processes should not draw the same port
    for _ in range(1000):
        port = generator.randrange(low, high)
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket; port 0 is a free one, which nobody can take while the socket is open."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)
