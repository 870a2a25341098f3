"""Shared prefixes of token sequences."""

import numpy as np


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """The number of leading entries that are equal: [5 6 7] and [5 6 8 9] share 2."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n
