"""An additive checksum of a tensor, on any device.

    sum over the elements of   bits × (1 + odd constant × position)      modulo 2^64

The checksums of slices add up to that of the tensor, so no rank needs all of it. Positions count:
a slice in the wrong place is detected like a flipped bit.
"""

import torch
from torch import Tensor

_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 divided by the golden ratio, as a signed integer
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20  # elements at a time, at 3 × 8 bytes each


def checksum(part: Tensor, offset: tuple[int, int] = (0, 0), columns: int | None = None) -> int:
    """The term of `part` [rows, columns] or [rows] at `offset` (row, column) of a tensor.

    columns: of the whole tensor; by default `part` has all of them.
    """
    bits = part.detach().contiguous().view(_INTEGERS[part.element_size()])
    bits = bits.reshape(bits.shape[0], -1)  # [rows, columns]
    width = bits.shape[1] if columns is None else columns
    column = torch.arange(bits.shape[1], device=bits.device) + offset[1]
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    chunk_rows = max(1, _CHUNK // max(1, bits.shape[1]))
    for first in range(0, bits.shape[0], chunk_rows):
        rows = bits[first : first + chunk_rows].to(torch.int64)
        row = torch.arange(len(rows), device=bits.device) + (first + offset[0])
        position = row[:, None] * width + column  # [chunk rows, columns]
        total += (rows * (position * _ODD + 1)).sum()
    return int(total.item())


def add(*sums: int) -> int:
    """The sum modulo 2^64 as a signed integer, as torch computes it."""
    return (sum(sums) + 2**63) % 2**64 - 2**63
