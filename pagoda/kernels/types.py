"""What the kernels take and return besides plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

# The dtype of the codes says the format.
KV_FORMATS: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int8: "int8",
    torch.uint8: "int4",
}
FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """One layer's keys and values, in full, of tokens that sequences begin with; owns nothing.

    Attributes:
        keys, values: `[num_rows, num_kv_heads, 1, head_dim]`, strided as a KVView's.
        row_of: int32 `[num_blocks]`: which of the rows the sequence has that begins with a block; -1: none begins with
            it, or one whose first token is stored as the others.
    """

    keys: torch.Tensor
    values: torch.Tensor
    row_of: torch.Tensor


@dataclass(frozen=True, slots=True)
class Staging:
    """One layer's keys and values, in full, of the blocks that are being filled; owns nothing.

    Attributes:
        keys, values: `[num_staged, num_kv_heads, block_size, head_dim]`, strided as a KVView's.
        slot_of: int32 `[num_blocks]`: which of the staged blocks is the copy of a block of the pool. Only that of
            blocks that the rows of a call are in is read.
        firsts: the first tokens of sequences.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slot_of: torch.Tensor
    firsts: FirstTokens


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer's keys and values in the pool; owns nothing.

    Both are `[num_blocks, num_kv_heads, block_size, head_dim]` with any strides, the last dimension contiguous.

    Quantized ones are codes, and come with scales; keys and values may differ in format, which their dtype says:

        codes           scales                              zeros            a value is
        float8, int8    bf16 [blocks, heads, block_size]    none             code * scale, of keys after `unmix`
        uint8 values    uint8, the same                     bf16, the same   zero + code * scale
        uint8 keys      uint8 [blocks, heads, head_dim]     bf16, the same   zero + code * scale

    uint8 codes are two to a byte, so their last dimension is `head_dim / 2`: dimension `i` in the low four bits,
    `i + head_dim / 2` in the high ones. A uint8 scale is the upper half of a positive float16 (5 bits of exponent, 3 of
    mantissa). Keys with scales by channel are quantized a block at a time, when it is full: until then, and for the
    block's own rows after that, the keys and the values of the block are read from `staging`. The first token of a
    sequence has keys unlike all others: a block that a sequence begins with is quantized as if its second token stood
    in both places, and rows of later blocks read the first from `staging.firsts`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    key_zeros: torch.Tensor | None = None
    value_zeros: torch.Tensor | None = None
    staging: Staging | None = None

    @classmethod
    def of(cls, parts: Mapping[str, torch.Tensor], staging: Staging | None = None) -> KVView:
        """A view from its tensors by name."""
        return cls(
            parts["keys"],
            parts["values"],
            parts.get("key_scales"),
            parts.get("value_scales"),
            parts.get("key_zeros"),
            parts.get("value_zeros"),
            staging,
        )

    def parts(self) -> list[torch.Tensor]:
        """All tensors of the pool that this has, but not what is staged."""
        found = (self.keys, self.values, self.key_scales, self.value_scales, self.key_zeros, self.value_zeros)
        return [part for part in found if part is not None]

    @property
    def key_format(self) -> str:
        """The kv_format of the keys."""
        return KV_FORMATS[self.keys.dtype]

    @property
    def value_format(self) -> str:
        """The kv_format of the values."""
        return KV_FORMATS[self.values.dtype]

    @property
    def head_dim(self) -> int:
        """Values of one head of one token."""
        width: int = self.keys.shape[3]
        return 2 * width if self.keys.dtype == torch.uint8 else width

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are codes."""
        return self.key_scales is not None or self.value_scales is not None

    @property
    def keys_are_mixed(self) -> bool:
        """Whether the keys' codes are of keys that `mix` (quantized.py) had spread over all channels."""
        return self.key_scales is not None and self.key_zeros is None

    def are_finite(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Whether entries are finite numbers, bool `[n]`; of blocks quantized as a whole once they are.

        What is not finite makes the scale or the zero of its entry, or of its channel in the block, NaN.
        """
        values = next(part for part in (self.value_zeros, self.value_scales, self.values) if part is not None)
        finite = values[blocks, :, offsets].isfinite().flatten(1).all(1)
        if self.key_zeros is not None:
            return finite & self.key_zeros[blocks].isfinite().flatten(1).all(1)
        keys = self.keys if self.key_scales is None else self.key_scales
        return finite & keys[blocks, :, offsets].isfinite().flatten(1).all(1)

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether keys and values are stored as they are, in this dtype."""
        return self.keys.dtype == self.values.dtype == dtype and dtype in FLOATS


class SharedPrefix(NamedTuple):
    """Adjacent requests of a batch whose block tables start with the same `num_blocks` blocks."""

    first_request: int
    num_requests: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """What attention computed.

    Attributes:
        out: `[num_rows, num_heads, head_dim]`, in the dtype of the queries.
        lse: natural log of each row's softmax denominator, float32 `[num_rows, num_heads]`, if asked for.
        mass: probability that each KV entry received, summed over the request's rows and over the query heads of each
            KV head, float32 `[num_requests, num_kv_heads, max_context]` (zero past a request's context), if asked for.
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None
    mass: torch.Tensor | None = None
