"""Weights in BF16 at 12 bits a value: every bit is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagoda.errors import KernelError
from pagoda.memory import ByteArray, host_memory

# See csrc/linear/compact.h.
STRIP, DEPTH = 16, 32
_GROUPS, _LINES, _HIGH_BYTES = 4, 3, 16
_TILE_BYTES = 64 * _LINES * _GROUPS
_MOST_EXCEPTIONS = 1 / 64  # of all values; with more of them the matrix is not worth it


@dataclass(frozen=True, slots=True)
class CompactMatrix:
    """A BF16 matrix `[out, in]` in about 12 bits a value, without loss, after DFloat11 (arXiv:2504.11651).

    `out` is a multiple of 16 and `in` of 32; a strip is 16 outputs. csrc/linear/compact.h has the layout.

    Attributes:
        strips: uint8 `[out / 16, in / 32, 768]`: the low byte of every value and four bits for its high byte.
        high_bytes: uint8 `[out / 16, 16]`: what those four bits stand for in each strip.
        first_exceptions: int64 `[out / 16 + 1]`: where each strip's exceptions begin.
        exceptions: int64: the values whose high byte is not among the 16; place in the strip, and bits shifted by 32.
    """

    strips: torch.Tensor
    high_bytes: torch.Tensor
    first_exceptions: torch.Tensor
    exceptions: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return torch.Size((self.strips.shape[0] * STRIP, self.strips.shape[1] * DEPTH))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        parts = (self.strips, self.high_bytes, self.first_exceptions, self.exceptions)
        return sum(part.nbytes for part in parts)

    @classmethod
    def of(cls, weight: torch.Tensor, take: Callable[[int], ByteArray] = host_memory) -> CompactMatrix | None:
        """The same matrix, or None where nothing is gained: tiles that are not full, or too many exceptions.

        Args:
            weight: bfloat16 `[out, in]`, contiguous, in CPU memory.
            take: gives the memory, so many bytes, that the strips are put into.

        Raises:
            KernelError: another dtype, gaps between rows, or another device.
        """
        if not (weight.is_cpu and weight.is_contiguous() and weight.dtype == torch.bfloat16):
            raise KernelError("only a contiguous bfloat16 matrix in CPU memory can be made compact")
        num_out, num_in = weight.shape
        if num_out % STRIP or num_in % DEPTH:
            return None
        import pagoda._native as _native

        high_bytes = torch.empty(num_out // STRIP, _HIGH_BYTES, dtype=torch.uint8)
        first_exceptions = torch.empty(num_out // STRIP + 1, dtype=torch.int64)
        source, threads = (weight.data_ptr(), num_out, num_in), torch.get_num_threads()
        _native.plan_compact(*source, high_bytes.data_ptr(), first_exceptions.data_ptr(), threads)
        num_exceptions = int(first_exceptions[-1])
        if num_exceptions > _MOST_EXCEPTIONS * weight.numel():
            return None
        shape = (num_out // STRIP, num_in // DEPTH, _TILE_BYTES)
        strips = torch.from_numpy(take(math.prod(shape))).view(shape)
        matrix = cls(strips, high_bytes, first_exceptions, torch.empty(num_exceptions, dtype=torch.int64))
        _native.compact(*source, matrix.addresses(), threads)
        return matrix

    def addresses(self) -> tuple[int, int, int, int, int]:
        """As `matrix_at` has it."""
        first, exceptions = self.first_exceptions.data_ptr(), self.exceptions.data_ptr()
        return self.strips.data_ptr(), 0, self.high_bytes.data_ptr(), first, exceptions

    def __getitem__(self, outputs: slice) -> CompactMatrix | torch.Tensor:
        """The rows of some outputs: a view if they are whole strips, else a new tensor."""
        begin, end, step = outputs.indices(self.shape[0])
        if begin % STRIP or end % STRIP or step != 1:
            return self.rows(torch.arange(begin, end, step))
        strips = slice(begin // STRIP, end // STRIP)
        first = self.first_exceptions[strips.start : strips.stop + 1]
        return CompactMatrix(self.strips[strips], self.high_bytes[strips], first, self.exceptions)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """The chosen outputs' weights, bfloat16 `[len(index), in]`.

        Args:
            index: int64, one-dimensional.
        """
        strip, row = index // STRIP, index % STRIP
        pair, half = row % 4 // 2, row % 2
        # A line is 64 bytes: eight of one row, eight of the other, and so on.
        lines = self.strips.view(*self.strips.shape[:2], _GROUPS, _LINES, 4, 2, 8)
        low = lines[strip, :, row // 4, pair, :, half].flatten(1)
        codes = lines[strip, :, row // 4, 2, :, half].flatten(1) >> (4 * pair[:, None]) & 15
        high = self.high_bytes[strip].gather(1, codes.long())
        bits = high.int() << 8 | low
        first, count = self.first_exceptions[strip], self.first_exceptions[strip + 1] - self.first_exceptions[strip]
        of_row = torch.repeat_interleave(torch.arange(len(index)), count)
        ends = count.cumsum(0)
        found = self.exceptions[torch.arange(len(of_row)) - (ends - count - first)[of_row]]
        place = found & 0xFFFFFFFF
        mine = place % (STRIP * DEPTH) // DEPTH == row[of_row]
        column = place // (STRIP * DEPTH) * DEPTH + place % DEPTH
        bits[of_row[mine], column[mine]] = (found[mine] >> 32 & 0xFFFF).int()
        return bits.to(torch.int16).view(torch.bfloat16)

    def expand(self) -> torch.Tensor:
        """The matrix as a tensor, bfloat16 `[out, in]`."""
        return self.rows(torch.arange(self.shape[0]))
