"""A minimal runner: ForwardBatches over a pool with shuffled block ids, one pool and block table per layer group."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pagoda.kernels import KVView
from pagoda.model.batch import ForwardBatch
from pagoda.model.decoder import Decoder
from pagoda.model.hooks import LayerHook, Narrowing
from pagoda.model.spec import ModelSpec


def groups_of(spec: ModelSpec) -> list[int]:
    kinds = list(dict.fromkeys(spec.windows))
    return [kinds.index(window) for window in spec.windows]


@dataclass
class Sequence:
    """Tokens of one request and its block ids per group; `num_computed` of the tokens are in the pool."""

    token_ids: list[int]
    blocks: list[list[int]]
    num_computed: int = 0


@dataclass
class PagedRun:
    decoder: Decoder
    block_size: int = 4
    num_blocks: int = 64
    seed: int = 0
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = self.decoder.spec
        self.group_of_layer = groups_of(spec)
        generator = torch.Generator().manual_seed(self.seed)
        self.free = [
            torch.randperm(self.num_blocks, generator=generator).tolist() for _ in range(max(self.group_of_layer) + 1)
        ]
        # NaN wherever nothing was written: reading a wrong slot cannot go unnoticed.
        shape = (self.num_blocks, spec.num_kv_heads, self.block_size, spec.head_dim)
        self.kv = [
            KVView(*(torch.full(shape, torch.nan, dtype=self.decoder.dtype) for _ in range(2))) for _ in spec.windows
        ]

    def add(self, token_ids: list[int]) -> Sequence:
        sequence = Sequence(list(token_ids), [[] for _ in self.free])
        self.sequences.append(sequence)
        return sequence

    def batch(self, chunks: list[tuple[Sequence, int]], *, all_logits: bool = True) -> ForwardBatch:
        """The next `n` tokens of each sequence as one batch, blocks allocated."""
        rows: list[int] = []
        positions: list[int] = []
        starts = [0]
        slots: list[list[int]] = [[] for _ in self.free]
        for sequence, count in chunks:
            end = sequence.num_computed + count
            assert end <= len(sequence.token_ids)
            for group, blocks in enumerate(sequence.blocks):
                while len(blocks) * self.block_size < end:
                    blocks.append(self.free[group].pop())
                slots[group] += [
                    blocks[p // self.block_size] * self.block_size + p % self.block_size
                    for p in range(sequence.num_computed, end)
                ]
            rows += sequence.token_ids[sequence.num_computed : end]
            positions += range(sequence.num_computed, end)
            starts.append(len(rows))
            sequence.num_computed = end
        tables = []
        for group in range(len(self.free)):
            lists = [sequence.blocks[group] for sequence, _ in chunks]
            longest = max(map(len, lists))
            tables.append(torch.tensor([blocks + [0] * (longest - len(blocks)) for blocks in lists], dtype=torch.int32))
        return ForwardBatch(
            token_ids=torch.tensor(rows),
            positions=torch.tensor(positions),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([sequence.num_computed for sequence, _ in chunks], dtype=torch.int32),
            block_tables=tuple(tables),
            slot_mapping=tuple(torch.tensor(group) for group in slots),
            logits_rows=torch.arange(len(rows)) if all_logits else torch.tensor(starts[1:]) - 1,
        )

    def step(
        self,
        chunks: list[tuple[Sequence, int]],
        hook: LayerHook | None = None,
        *,
        narrowing: Narrowing | None = None,
        all_logits: bool = True,
    ) -> torch.Tensor:
        batch = self.batch(chunks, all_logits=all_logits)
        return self.decoder.forward(batch, self.kv, self.group_of_layer, hook, narrowing=narrowing)

    def chunked(self, token_ids: list[int], sizes: list[int]) -> torch.Tensor:
        """All logits of one sequence computed in chunks of these sizes, the last repeated to the end."""
        sequence = self.add(token_ids)
        parts = []
        while sequence.num_computed < len(token_ids):
            size = sizes[min(len(parts), len(sizes) - 1)]
            parts.append(self.step([(sequence, min(size, len(token_ids) - sequence.num_computed))]))
        return torch.cat(parts)
