"""Footprint: the bytes that a model's KV takes, by kv_format, from the same KVLayout that a pool is made with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagoda.kv.formats import KVFormat, parse_format
from pagoda.kv.layout import KVLayout, LayerSpec
from pagoda.kv.room import staged_room
from pagoda.plan.shape import ModelShape


@dataclass(frozen=True, slots=True)
class GroupTerm:
    """The bytes per token of the layers of one attention kind, and the product that gives them."""

    label: str
    num_layers: int
    window: int | None
    formula: str
    bytes_per_token: float


class Footprint:
    """A model's KV in blocks of `block_size` tokens in a format.

    Args:
        copies: how many devices keep the same KV: tensor parallelism beyond the number of KV heads.

    Raises:
        ConfigError: no format has that name.
    """

    def __init__(self, shape: ModelShape, kv_format: str = "bf16", block_size: int = 16, copies: float = 1) -> None:
        self.shape = shape
        self.kv_format = kv_format
        self.copies = copies
        self._format = parse_format(kv_format)
        self.layout = KVLayout(
            [_layer(shape, self._format, block_size, window) for window in shape.windows], block_size
        )

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a token adds to every layer, on all devices together."""
        return self.layout.bytes_per_token * self.copies

    @property
    def block_bytes(self) -> float:
        """Bytes of a block of one layer group, padding included, on all devices together."""
        return self.layout.pool_block_bytes * self.copies

    def staged_bytes(self, num_running: int, step_tokens: int) -> float:
        """Bytes of full copies of blocks that are being filled, on all devices together; 0 if there are none."""
        return staged_room(self.layout, num_running, step_tokens).num_bytes(self.layout) * self.copies

    def terms(self) -> list[GroupTerm]:
        """Bytes per token by attention kind."""
        found = []
        for window in dict.fromkeys(self.shape.windows):
            num_layers = self.shape.windows.count(window)
            each = sum(part.num_bytes for part in self._layer(window).parts) / self.layout.block_size
            label = "full attention" if window is None else f"sliding window {window:,}"
            formula = f"{num_layers} layers x {_formula(self.shape, self._format, self.layout.block_size)}"
            if self.copies != 1:
                formula += f" x {self.copies:g} devices keep a copy"
            found.append(GroupTerm(label, num_layers, window, formula, num_layers * each * self.copies))
        return found

    def blocks(self, num_tokens: int, shared: int = 0) -> int:
        """Blocks that a running request of so many tokens holds and no other does.

        Of layers with a window only the blocks in it are held. `shared` leading tokens, down to a whole block, are in
        blocks that others hold too.
        """
        return sum(max(0, end - max(first, shared // self.layout.block_size)) for first, end in self._held(num_tokens))

    def shared_blocks(self, num_tokens: int, shared: int) -> int:
        """Blocks of the first `shared` tokens that requests of so many tokens hold in common."""
        return self.blocks(num_tokens) - self.blocks(num_tokens, shared)

    def cached_bytes(self, num_tokens: int) -> float:
        """Bytes of so many tokens in the tree or a tier: every layer's blocks, in a window or not."""
        return self.layout.blocks_for(num_tokens) * self.block_bytes

    def read_bytes(self, num_tokens: int) -> float:
        """Bytes that decoding one token reads after so many."""
        return sum(term.bytes_per_token * min(num_tokens, term.window or num_tokens) for term in self.terms())

    def _held(self, num_tokens: int) -> list[tuple[int, int]]:
        """For each layer group, the first block that the latest token reads, and the one after the last."""
        size = self.layout.block_size
        end = -(-num_tokens // size)
        return [
            (0 if group.window is None else max(0, num_tokens - group.window) // size, end)
            for group in self.layout.groups
        ]

    def _layer(self, window: int | None) -> LayerSpec:
        return next(layer for layer in self.layout.layers if layer.window == window)


def without_sharing_heads(shape: ModelShape) -> ModelShape:
    """The same model if each query head had keys and values of its own: no grouped queries, no latent."""
    if shape.latent:
        widths = shape.latent.nope_dim + shape.latent.rope_dim + shape.latent.value_dim
        return replace(shape, latent=None, num_kv_heads=shape.num_heads, head_dim=widths // 2)
    return replace(shape, num_kv_heads=shape.num_heads)


def without_windows(shape: ModelShape) -> ModelShape:
    """The same model if every layer attended to everything."""
    return replace(shape, windows=(None,) * shape.num_layers)


def _layer(shape: ModelShape, kv_format: KVFormat, block_size: int, window: int | None) -> LayerSpec:
    if shape.latent:
        return kv_format.latent(shape.latent.rank + shape.latent.rope_dim, block_size, window)
    return kv_format.attention(shape.num_kv_heads, shape.head_dim, block_size, window, "bfloat16")


def _formula(shape: ModelShape, kv_format: KVFormat, block_size: int) -> str:
    """The bytes of one token in one layer, term by term."""
    if shape.latent:
        row = f"({shape.latent.rank} latent + {shape.latent.rope_dim} rotary)"
        return kv_format.values.formula(row, shape.latent.rank + shape.latent.rope_dim, block_size)
    keys, values = (
        part.formula(f"{shape.head_dim} head_dim", shape.head_dim, block_size)
        for part in (kv_format.keys, kv_format.values)
    )
    if keys == values:
        return f"2 (K, V) x {shape.num_kv_heads} KV heads x {keys}"
    return f"{shape.num_kv_heads} KV heads x (K: {keys} + V: {values})"
