"""Formats: how keys and values are stored. A kv_format is a name, and a layout of codes and scales in a block.

    name               bytes of a value   beside them                                        read by its own block
    fp32, bf16, fp16   4, 2, 2            nothing                                            as stored
    fp8_e4m3, _e5m2    1                  a scale per token and head, 2 bytes                as stored, keys mixed
    int8               1                  a scale per token and head, 2 bytes                as stored, keys mixed
    int4               1/2                keys: scale and zero per channel of a block,       in full
                                          values: per token; 3 bytes each

Keys and values may have different formats: `int8/int4` is keys in INT8 and values in INT4. Keys in INT4 are quantized a
block at a time, so a block that is being filled is kept in full beside the pool (`LayerSpec.staged`), which its own
tokens read, and hits end where blocks end; the first token of a sequence stays in full for good (`KVLayout.firsts`).
All other formats quantize a token as it is written, and every token reads every key so. Keys that have a scale per
token are mixed first, which spreads large channels over all (mixed.py).

One file a format. A format says which parts it keeps (metadata, for layouts and plans) and encodes and decodes whole
blocks in numpy (for tiers and audits); the kernels do it a token at a time in kernels/quantized.py, to the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.errors import ConfigError
from pagoda.kv.formats.base import PartFormat
from pagoda.kv.formats.fp8 import FP8_E4M3, FP8_E5M2
from pagoda.kv.formats.int4 import INT4_CHANNELS, INT4_ROWS
from pagoda.kv.formats.int8 import INT8
from pagoda.kv.formats.mixed import Mixed
from pagoda.kv.formats.plain import BF16, FP16, FP32
from pagoda.kv.layout import LayerSpec

__all__ = ["FORMATS", "PART_FORMATS", "KVFormat", "PartFormat", "default_block_size", "parse_format", "plain_format"]

_BY_ROW: dict[str, PartFormat] = {each.name: each for each in (FP32, BF16, FP16, FP8_E4M3, FP8_E5M2, INT8, INT4_ROWS)}
_OF_KEYS: dict[str, PartFormat] = {
    **_BY_ROW,
    **{each.name: Mixed(each) for each in (FP8_E4M3, FP8_E5M2, INT8)},
    INT4_CHANNELS.name: INT4_CHANNELS,
}
FORMATS = tuple(_BY_ROW)
PART_FORMATS: dict[tuple[bool, str], PartFormat] = {
    (is_keys, each.parts("any", 1, 1, 2)[0].dtype): each
    for is_keys, formats in ((False, _BY_ROW), (True, _OF_KEYS))
    for each in formats.values()
}
"""The format of codes of a dtype, for keys and for other parts."""
_PLAIN_OF_DTYPE = {each.dtype: each for each in (FP32, BF16, FP16)}


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The formats of a layer's keys and values; the latent of multi-head latent attention has that of `values`."""

    keys: PartFormat
    values: PartFormat

    @property
    def name(self) -> str:
        """As `parse_format` reads it."""
        return self.keys.name if self.keys.name == self.values.name else f"{self.keys.name}/{self.values.name}"

    @property
    def is_staged(self) -> bool:
        """Whether blocks that are being filled are kept in full."""
        return self.keys is INT4_CHANNELS

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are kept in another form than they are computed in."""
        return not {self.keys, self.values} <= set(_PLAIN_OF_DTYPE.values())

    def attention(self, num_kv_heads: int, head_dim: int, block_size: int, window: int | None, dtype: str) -> LayerSpec:
        """What a layer keeps in a block.

        Args:
            dtype: of activations, a key of DTYPE_BYTES: what staged blocks are in.

        Raises:
            ConfigError: the format cannot hold heads of this size.
        """
        shape = num_kv_heads, block_size, head_dim
        parts = self.keys.parts("keys", *shape) + self.values.parts("values", *shape)
        full = _PLAIN_OF_DTYPE[dtype]
        staged = full.parts("keys", *shape) + full.parts("values", *shape) if self.is_staged else ()
        return LayerSpec(parts, window, staged)

    def latent(self, width: int, block_size: int, window: int | None) -> LayerSpec:
        """What a layer of multi-head latent attention keeps in a block."""
        return LayerSpec(self.values.parts("latent", 1, block_size, width), window)


def parse_format(name: str) -> KVFormat:
    """The format that `--kv-format` names: one of FORMATS, or two of them as KEYS/VALUES.

    Raises:
        ConfigError: there is no such format.
    """
    keys, differ, values = name.partition("/")
    values = values if differ else keys
    for each in (keys, values):
        if each not in FORMATS:
            raise ConfigError(
                f"no KV format is called {each!r}; there are {', '.join(FORMATS)}, and KEYS/VALUES of them"
            )
    return KVFormat(_OF_KEYS[keys], _BY_ROW[values])


def default_block_size(kv_format: str) -> int:
    """Tokens of a block where nobody chose: 16, or 32 if keys have scales for each block.

    Larger blocks have fewer of these: more tokens in the same memory, and less to do for each when they are read.

    Args:
        kv_format: what `parse_format` takes, or `auto`.

    Raises:
        ConfigError: no format has that name.
    """
    return 32 if kv_format != "auto" and parse_format(kv_format).is_staged else 16


def plain_format(dtype: str) -> KVFormat:
    """Keys and values as they are, in a dtype of activations."""
    plain = _PLAIN_OF_DTYPE[dtype]
    return KVFormat(plain, plain)
