"""Lease: one request's hold on KV memory, from acquire to release."""

from __future__ import annotations

from pagoda.kv.block_table import BlockTable
from pagoda.kv.keys import Scope
from pagoda.kv.radix_node import TokenArray


class Lease:
    """Blocks that hold a request's KV, one table per layer group. Only KVCache changes it.

    Attributes:
        scope: whose prefixes it shares.
        tables: block tables, one per layer group, equally long.
        prompt: the tokens it was acquired for; what it is expected to compute and share.
        num_hit_tokens: tokens whose KV was there when it was acquired.
        num_computed_tokens: tokens whose KV is there now; the next one is written at this position.
        num_committed_blocks: leading blocks that are in the tree.
        owns_tail: it appends in place to a partial block of the tree, and nobody else may.
    """

    __slots__ = (
        "num_committed_blocks",
        "num_computed_tokens",
        "num_hit_tokens",
        "owns_tail",
        "prompt",
        "released",
        "scope",
        "tables",
    )

    def __init__(self, scope: Scope, tables: list[BlockTable], prompt: TokenArray) -> None:
        self.scope = scope
        self.tables = tables
        self.prompt = prompt
        self.num_hit_tokens = 0
        self.num_computed_tokens = 0
        self.num_committed_blocks = 0
        self.owns_tail = False
        self.released = False

    @property
    def num_blocks(self) -> int:
        """Blocks held now, over all groups."""
        return sum(table.held.size for table in self.tables)

    @property
    def capacity(self) -> int:
        """Tokens that the tables have room for."""
        return len(self.tables[0]) * self.tables[0].block_size
