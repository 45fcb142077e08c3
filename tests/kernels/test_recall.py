"""What is recalled: the reference against what it must mean, and the native kernel against the reference."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from pagoda.errors import KernelError
from pagoda.kernels import KVView, Recall, recall_entries, reference
from pagoda.kernels.recall import margins, sketched, swaps

built = pytest.mark.skipif(
    importlib.util.find_spec("pagoda._native") is None, reason="the native extension is not built"
)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- choosing ---------------------------------------------------------------------------------------------------------


def chosen(margin: torch.Tensor, resident: torch.Tensor, alpha: float, stay: float) -> list[set[int]]:
    after = resident.clone()
    heads, places, units = swaps(margin, resident, alpha, stay)
    after[heads, places] = units
    return [set(row.tolist()) for row in after]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 2.0, math.inf])
@pytest.mark.parametrize("stay", [0.0, 0.7])
@pytest.mark.parametrize("places", [1, 3, 12])
def test_swaps_bring_what_scores_well_and_keep_the_best_of_the_rest(alpha: float, places: int, stay: float) -> None:
    for seed in range(5):
        margin = -randn(3, 12, seed=seed).abs()
        margin -= margin.amax(1, keepdim=True)
        resident = torch.stack(
            [torch.randperm(12, generator=torch.Generator().manual_seed(i))[:places] for i in range(3)]
        )
        after = chosen(margin, resident, alpha, stay)
        for head in range(3):
            before = set(resident[head].tolist())
            fetchable = {u for u in range(12) if margin[head, u] >= -alpha} | before
            worth = {u: float(margin[head, u]) + (stay if u in before else 0.0) for u in fetchable}
            best = sorted(fetchable, key=lambda u: -worth[u])[:places]
            assert after[head] == set(best)


def test_swaps_fetch_nothing_when_all_is_there() -> None:
    everything = torch.arange(6).expand(2, 6)
    assert all(not each.numel() for each in swaps(-randn(2, 6).abs(), everything, math.inf, 0.0))


def test_a_unit_is_wanted_if_any_query_head_wants_it() -> None:
    queries = torch.tensor([[[9.0, 0.0, 0.0], [0.0, 2.0, 1.0]]])
    assert margins(queries, torch.eye(3)[None]).tolist() == [[0.0, 0.0, -1.0]]


# -- a call -----------------------------------------------------------------------------------------------------------

HEADS, DIM, BLOCK_SIZE, NUM_BLOCKS = 3, 16, 4, 80


@dataclass
class Call:
    """What one call is about, with memory of its own."""

    queries: torch.Tensor
    recall: Recall

    def copy(self) -> Call:
        of = self.recall
        view = KVView(of.view.keys.clone(), of.view.values.clone())
        fresh = replace(of, view=view, resident=of.resident.clone(), fetched=of.fetched.clone())
        return Call(self.queries, fresh)

    def with_changes(self, **changes: Any) -> Call:
        return Call(self.queries, replace(self.copy().recall, **changes))

    def run(self, function: Callable[[torch.Tensor, Recall], None], alpha: float, stay: float = 0.0) -> list[int]:
        """How many units came, for each KV head."""
        before = self.recall.fetched.clone()
        function(self.queries, replace(self.recall, alpha=alpha, stay=stay))
        return (self.recall.fetched - before).tolist()

    def worth(self) -> torch.Tensor:
        """How good what is in the places is, whichever of equals it is."""
        of = self.recall
        asked = sketched(self.queries.float().view(HEADS, -1, DIM) * of.scale, of.columns)
        return margins(asked, of.sketches).gather(1, of.resident).sort(dim=1).values

    def holds_what_is_resident(self) -> None:
        of = self.recall
        tokens = (of.resident[..., None] * of.unit + torch.arange(of.unit)).flatten(1)
        at = torch.arange(tokens.shape[1])
        blocks = of.table.long()[at // BLOCK_SIZE]
        for head in range(HEADS):
            rows = of.entries[head, of.slots[tokens[head]]]
            assert torch.equal(of.view.keys[blocks, head, at % BLOCK_SIZE], rows[:, 0])
            assert torch.equal(of.view.values[blocks, head, at % BLOCK_SIZE], rows[:, 1])


def call(
    *,
    units: int = 100,
    places: int = 20,
    unit: int = 1,
    group: int = 3,
    width: int | None = 9,
    dtype: torch.dtype,
    ties: bool,
) -> Call:
    """Without a width, sketches are bounds."""
    num_slots = units * unit + 50
    columns = None if width is None else randn(HEADS, DIM, width, seed=6)
    sketches = randn(HEADS, 2 * DIM if width is None else width, units + 7, seed=1)
    queries = randn(HEADS * group, DIM, seed=2)
    if ties:
        sketches, queries = sketches.round(), queries.round()
        columns = None if columns is None else columns.round()
    entries = randn(HEADS, num_slots, 2, DIM, seed=3).to(dtype)
    order = torch.Generator().manual_seed(4)
    resident = torch.stack([torch.randperm(units, generator=order)[:places] for _ in range(HEADS)])
    shape = (2, NUM_BLOCKS, HEADS, BLOCK_SIZE, DIM)
    keys, values = torch.zeros(*shape).to(dtype)
    made = Recall(
        sketches=sketches.to(dtype)[:, :, :units],
        columns=columns,
        scale=0.5,
        resident=resident,
        fetched=torch.full((HEADS,), 5),
        entries=entries,
        slots=torch.randperm(num_slots, generator=order)[: units * unit],
        view=KVView(keys, values),
        table=torch.randperm(NUM_BLOCKS, generator=order).int(),
        unit=unit,
        alpha=math.inf,
        stay=0.0,
    )
    for place in range(places):  # what is resident is there
        for head in range(HEADS):
            for i in range(unit):
                entry = place * unit + i
                row = entries[head, made.slots[resident[head, place] * unit + i]]
                block = int(made.table[entry // BLOCK_SIZE])
                keys[block, head, entry % BLOCK_SIZE], values[block, head, entry % BLOCK_SIZE] = row
    return Call(queries.to(dtype), made)


SHAPES: list[dict[str, Any]] = [
    {"units": 64, "places": 1, "unit": 1, "group": 1, "width": 1},
    {"units": 100, "places": 20, "unit": 1, "group": 3, "width": 19},
    {"units": 129, "places": 129, "unit": 1, "group": 4, "width": 32},
    {"units": 31, "places": 7, "unit": 3, "group": 9, "width": 40},
    {"units": 70, "places": 8, "unit": 2, "group": 2, "width": None},
    {"units": 300, "places": 3, "unit": 1, "group": 2, "width": 16},
]


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_native_brings_what_the_reference_does(isa: str, shape: dict[str, Any], ties: bool, dtype: torch.dtype) -> None:
    for alpha, stay in itertools.product((0.0, 3.0, math.inf), (0.0, 1.0)):
        expected = call(**shape, dtype=dtype, ties=ties)
        got = expected.copy()
        assert got.run(recall_entries, alpha, stay) == expected.run(reference.recall_entries, alpha, stay)
        torch.testing.assert_close(got.worth(), expected.worth(), rtol=1e-5, atol=1e-5)
        assert all(len(set(row)) == shape["places"] for row in got.recall.resident.tolist())
        got.holds_what_is_resident()
        expected.holds_what_is_resident()


@pytest.mark.parametrize("function", [recall_entries, reference.recall_entries])
def test_ids_out_of_range_are_refused_before_anything_is_written(
    function: Callable[[torch.Tensor, Recall], None],
) -> None:
    whole = call(dtype=torch.float32, ties=False)
    of = whole.recall
    wrong = [
        whole.with_changes(resident=torch.full_like(of.resident, 100)),
        whole.with_changes(resident=of.resident - 100),
        whole.with_changes(slots=of.slots + 100),
        whole.with_changes(table=of.table + NUM_BLOCKS),
        whole.with_changes(table=of.table[:4]),
    ]
    for each in wrong:
        with pytest.raises(KernelError):
            each.run(function, math.inf)
        assert torch.equal(each.recall.view.keys, of.view.keys)


def test_wrong_shapes_are_refused() -> None:
    whole = call(dtype=torch.float32, ties=False)
    of = whole.recall
    wrong: list[dict[str, Any]] = [
        {"columns": None},
        {"columns": of.columns.double()},
        {"columns": of.columns[:, :, :4]},
        {"sketches": of.sketches[:2]},
        {"resident": of.resident.int()},
        {"fetched": of.fetched[:2]},
        {"slots": of.slots[:50]},
        {"table": of.table.long()},
        {"entries": of.entries[..., :4]},
        {"unit": 2},
    ]
    for changes in wrong:
        with pytest.raises(KernelError):
            replace(of, **changes)
    for queries in (whole.queries[:4], whole.queries[:, :4], whole.queries.double()):
        with pytest.raises(KernelError):
            recall_entries(queries, of)
