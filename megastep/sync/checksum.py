"""A checksum of a tensor that can be taken piece by piece, on whatever device the pieces are.

    sum over the elements of   bits × (1 + odd constant × position)      modulo 2^64

It adds up over pieces, so no rank needs the whole tensor, and it depends on positions, so a piece in the wrong place
shows as well as a flipped bit.
"""

import torch
from torch import Tensor

_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 divided by the golden ratio, as a signed number
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20  # elements looked at together: three times 8 bytes for each


def checksum(piece: Tensor, offset: tuple[int, int] = (0, 0), columns: int | None = None) -> int:
    """Of a piece [rows, columns] or [rows] that begins at `offset` (row, column) of a tensor that is `columns` wide."""
    bits = piece.detach().contiguous().view(_INTEGERS[piece.element_size()])
    bits = bits.reshape(bits.shape[0], -1)
    width = bits.shape[1] if columns is None else columns
    column = torch.arange(bits.shape[1], device=bits.device) + offset[1]
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    step = max(1, _CHUNK // max(1, bits.shape[1]))
    for first in range(0, bits.shape[0], step):
        rows = bits[first : first + step].to(torch.int64)
        row = torch.arange(len(rows), device=bits.device) + (first + offset[0])
        position = row[:, None] * width + column
        total += (rows * (position * _ODD + 1)).sum()
    return total.item()


def add(*sums: int) -> int:
    """Sums of pieces as the sum of the tensor: signed 64 bits, as torch counts."""
    return (sum(sums) + 2**63) % 2**64 - 2**63
