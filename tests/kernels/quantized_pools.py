"""Pools of every KV format, full of poison, and a request that is written to one and read from it as the engine does.

poison      codes of 0x7F bytes, scales and zeros of NaN, staged copies of NaN: what was not written shows
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pagoda.kernels import AttentionOutput, FirstTokens, KVView, Staging

CODES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int4": torch.uint8,
}
PAD = 64  # bytes around each part of a block
NUM_FIRSTS = 3  # of which requests have one, ROW
ROW = 1


def make_view(
    key_format: str,
    value_format: str,
    *,
    num_blocks: int = 12,
    num_kv_heads: int = 2,
    block_size: int = 16,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> KVView:
    """A view whose parts are strided as in a pool: a block holds them all, with poison between."""
    heads, tokens = num_kv_heads, block_size
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, kv_format in (("key", key_format), ("value", value_format)):
        codes = CODES[kv_format]
        width = head_dim // 2 if kv_format == "int4" else head_dim
        shapes[f"{name}s"] = (heads, tokens, width), codes
        if kv_format == "int4":
            beside = (heads, head_dim) if name == "key" else (heads, tokens)
            shapes |= {f"{name}_scales": (beside, torch.uint8), f"{name}_zeros": (beside, torch.bfloat16)}
        elif kv_format in ("int8", "fp8_e4m3", "fp8_e5m2"):
            shapes[f"{name}_scales"] = (heads, tokens), torch.bfloat16
    parts = _parts(num_blocks, shapes)
    staging = None
    if key_format == "int4":
        full = (heads, tokens, head_dim), dtype
        copies = _parts(num_blocks, {"keys": full, "values": full})
        one = (heads, 1, head_dim), dtype
        nowhere = torch.full((num_blocks,), -1, dtype=torch.int32)
        firsts = FirstTokens(**_parts(NUM_FIRSTS, {"keys": one, "values": one}), row_of=nowhere.clone())
        staging = Staging(**copies, slot_of=nowhere, firsts=firsts)
    return KVView(**parts, staging=staging)


def _parts(num_blocks: int, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    stride = sum(-(-size // PAD) * PAD + PAD for size in sizes.values()) + PAD
    pool = torch.full((num_blocks, stride), 0x7F, dtype=torch.uint8)
    parts, offset = {}, PAD
    for name, (shape, dtype) in shapes.items():
        typed = pool.view(-1).view(dtype)
        inner = torch.empty(shape).stride()
        strides = (stride // dtype.itemsize, *inner)
        parts[name] = typed.as_strided((num_blocks, *shape), strides, offset // dtype.itemsize)
        if dtype.is_floating_point and dtype.itemsize > 1:
            parts[name].fill_(torch.nan)
        offset += -(-sizes[name] // PAD) * PAD + PAD
    return parts


class Written:
    """A request's keys, values and queries, written to a pool and attended to in chunks."""

    def __init__(
        self, view: KVView, length: int, *, group: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.view = view
        num_blocks, heads, self.block_size, _ = view.keys.shape
        head_dim = view.head_dim
        # Channels of keys differ in size and in what they vary around, as those of models do.
        channel = torch.rand(heads, head_dim, generator=generator) * 2
        offset = torch.randn(heads, head_dim, generator=generator)
        noise = torch.randn(length, heads, head_dim, generator=generator)
        self.k = (offset + channel * noise).to(dtype)
        self.v = torch.randn(length, heads, head_dim, generator=generator).to(dtype)
        self.q = (torch.randn(length, heads * group, head_dim, generator=generator) / 2).to(dtype)
        self.table = torch.randperm(num_blocks, generator=generator)[: -(-length // self.block_size)].to(torch.int32)
        if view.staging is not None:
            # A first token has keys unlike all others. What later blocks read of it is something else here, to show.
            self.k[0] = (3 * torch.randn(heads, head_dim, generator=generator)).to(dtype)
            firsts = view.staging.firsts
            for part in (firsts.keys, firsts.values):
                part[ROW, :, 0] = (2 * torch.randn(heads, head_dim, generator=generator)).to(dtype)
            firsts.row_of[self.table[0]] = ROW

    def slots(self, start: int, stop: int) -> torch.Tensor:
        positions = torch.arange(start, stop)
        return self.table[positions // self.block_size].long() * self.block_size + positions % self.block_size

    def stage(self, start: int, stop: int) -> None:
        """Give the blocks that these tokens are in a staged copy, as the engine does before a step."""
        if self.view.staging is not None:
            for block in self.table[start // self.block_size : -(-stop // self.block_size)].tolist():
                self.view.staging.slot_of[block] = block

    def close(self, stop: int) -> None:
        """Take the staged copies of full blocks away, as the engine does after a step."""
        if self.view.staging is not None:
            for block in self.table[: stop // self.block_size].tolist():
                self.view.staging.slot_of[block] = -1
                self.view.staging.keys[block] = torch.nan
                self.view.staging.values[block] = torch.nan

    def attend(self, backend: object, start: int, stop: int, **options: object) -> AttentionOutput:
        settings = {"window": None, "softcap": None, "need_lse": True, "need_mass": True, "shared_prefixes": ()}
        result = backend.paged_attention(  # type: ignore[attr-defined]
            self.q[start:stop],
            self.view,
            self.table[None],
            torch.tensor([0, stop - start], dtype=torch.int32),
            torch.tensor([stop], dtype=torch.int32),
            scale=self.view.head_dim**-0.5,
            **{**settings, **options},
        )
        assert isinstance(result, AttentionOutput)
        return result

    def step(self, backend: object, start: int, stop: int, **options: object) -> AttentionOutput:
        """Write these tokens and attend from them."""
        self.stage(start, stop)
        backend.write_kv(self.view, self.k[start:stop], self.v[start:stop], self.slots(start, stop))  # type: ignore[attr-defined]
        result = self.attend(backend, start, stop, **options)
        self.close(stop)
        return result


def clone(view: KVView) -> KVView:
    """The same bytes elsewhere."""
    parts = {
        name: part.clone()
        for name in view.__dataclass_fields__
        if isinstance(part := getattr(view, name), torch.Tensor)
    }
    staging = view.staging
    if staging is not None:
        firsts = staging.firsts
        firsts = FirstTokens(firsts.keys.clone(), firsts.values.clone(), firsts.row_of.clone())
        staging = Staging(staging.keys.clone(), staging.values.clone(), staging.slot_of.clone(), firsts)
    return replace(view, **parts, staging=staging)
