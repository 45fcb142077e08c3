"""The decoder as one native call: as near to float32 as the same layers call by call, however the work is cut up."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch

from pagoda.errors import KernelError
from pagoda.kernels import AttentionOutput, KVView, LayerStep, Recall, RowRecall, Steering, recall_entries
from pagoda.model.batch import ForwardBatch
from pagoda.model.decoder import Decoder
from pagoda.model.hooks import Narrowed
from tests.model.models import build, load, save
from tests.model.paged import PagedRun

SIZES = {
    "vocab_size": 144,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
VARIANTS = ["llama", "llama-biased-tied", "qwen2", "qwen3", "qwen3-mixed-windows", "mistral-window"]


def tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def call_by_call(decoder: Decoder) -> Decoder:
    """The same weights, every layer a sequence of calls."""
    twin = Decoder(decoder.spec, decoder.weights)
    twin._can_fuse = False
    return twin


@pytest.fixture(scope="module", params=VARIANTS)
def trio(request, tmp_path_factory):
    """The model in BF16 fused, in BF16 call by call, and the BF16 weights in float32."""
    sizes = {name: size for name, size in SIZES.items() if request.param != "qwen2" or name != "num_key_value_heads"}
    model = build(request.param, **sizes).bfloat16()
    folder = save(model, tmp_path_factory.mktemp("model"))
    fused = load(folder, torch.bfloat16)
    if not fused._can_fuse:
        pytest.skip("no matrix tiles on this machine")
    return fused, call_by_call(fused), load(folder, torch.float32)


@pytest.fixture
def fused(trio):
    return trio[0]


def assert_as_good(got: torch.Tensor, by_calls: torch.Tensor, exact: torch.Tensor) -> None:
    assert got.isfinite().all()
    assert exact.std() > 0.1
    assert (got - exact).abs().mean() <= 1.1 * (by_calls - exact).abs().mean()
    assert (got - exact).abs().max() <= 1.5 * (by_calls - exact).abs().max()


@pytest.mark.parametrize("sizes", [[200], [7, 1, 13, 1, 40, 1], [33, 16, 1]], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_as_near_to_float32_as_call_by_call(trio, sizes, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_as_good(*(PagedRun(decoder, seed=3).chunked(tokens(200), sizes) for decoder in trio))
    finally:
        torch.set_num_threads(before)


def test_rows_that_do_not_fit_the_cache_at_once(tmp_path):
    """More rows than a thread multiplies at once, in parts that threads take from each other."""
    model = build("llama", **{**SIZES, "intermediate_size": 4096})
    folder = save(model.bfloat16(), tmp_path)
    fused, exact = load(folder, torch.bfloat16), load(folder, torch.float32)
    if not fused._can_fuse:
        pytest.skip("no matrix tiles on this machine")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        got = [PagedRun(decoder, seed=3).chunked(tokens(200), [200]) for decoder in (fused, call_by_call(fused), exact)]
    finally:
        torch.set_num_threads(before)
    assert_as_good(*got)


def assert_alone_as_among_others(fused):
    """Decodes of short contexts, alone and among others: the same bits."""
    texts = [tokens(n, seed=n) for n in (25, 11, 30, 18)]
    alone = []
    for text in texts:
        run = PagedRun(fused)
        sequence = run.add(text)
        run.step([(sequence, len(text) - 1)])
        alone.append(run.step([(sequence, 1)]))
    run = PagedRun(fused, seed=9)
    sequences = [run.add(text) for text in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        run.step([(sequence, len(text) - 1)])
    assert torch.equal(run.step([(sequence, 1) for sequence in sequences]), torch.cat(alone))


def test_a_row_does_not_depend_on_its_company(fused):
    assert_alone_as_among_others(fused)


def test_fewer_threads_than_were_asked_for(fused):
    """What is meant for threads that do not come is done by those that do."""
    text, asked = tokens(50), torch.get_num_threads()
    want = PagedRun(fused).chunked(text, [40, 1, 9])
    omp = ctypes.CDLL(
        next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line)
    )
    omp.omp_set_dynamic(1)  # then there are no more of them than processors
    torch.set_num_threads(16 * len(os.sched_getaffinity(0)))
    try:
        got = PagedRun(fused).chunked(text, [40, 1, 9])
    finally:
        omp.omp_set_dynamic(0)
        torch.set_num_threads(asked)
    assert torch.equal(got, want)


def test_only_the_rows_asked_for(trio):
    outcomes = []
    for decoder in trio:
        run = PagedRun(decoder)
        chunks = [(run.add(tokens(n, seed=n)), n) for n in (19, 40, 1)]
        batch = run.batch(chunks)
        wanted = dataclasses.replace(batch, logits_rows=torch.tensor([58, 3, 18]))
        got = decoder.forward(wanted, run.kv, run.group_of_layer)
        everything = decoder.forward(batch, run.kv, run.group_of_layer)
        if decoder is trio[0]:
            assert torch.equal(got, everything[[58, 3, 18]])
        none = dataclasses.replace(batch, logits_rows=torch.empty(0, dtype=torch.int64))
        assert decoder.forward(none, run.kv, run.group_of_layer).shape == (0, SIZES["vocab_size"])
        outcomes.append(got)
    assert_as_good(*outcomes)


def test_writes_the_same_kv(trio):
    pools = []
    for decoder in trio:
        run = PagedRun(decoder)
        run.chunked(tokens(30), [17, 1])
        pools.append(torch.stack([torch.stack([view.keys, view.values]).float() for view in run.kv]))
    assert torch.equal(pools[0].isnan(), pools[1].isnan()), "a slot that nobody was given was written"
    first = [pool[0].nan_to_num() for pool in pools]
    torch.testing.assert_close(first[0], first[1], rtol=2e-2, atol=2e-2)
    assert_as_good(*(pool.nan_to_num() for pool in pools))


def test_requests_on_one_prefix(trio):
    outcomes = []
    for decoder in trio:
        run = PagedRun(decoder)
        prompt = tokens(24)
        first = run.add(prompt + tokens(3, seed=5))
        run.step([(first, 24)])
        second = run.add(prompt + tokens(3, seed=6))
        second.blocks, second.num_computed = [list(blocks) for blocks in first.blocks], 24
        outcomes.append(run.step([(first, 3), (second, 3)]))
    assert_as_good(*outcomes)


class Drop:
    """Drops rows at a layer."""

    def __init__(self, layer: int, rows: list[int]) -> None:
        self.layer, self.rows = layer, rows

    def narrow(self, batch: ForwardBatch) -> Narrowed:
        keep = torch.ones(len(batch.token_ids), dtype=torch.bool)
        keep[self.rows] = False
        return Narrowed.to(batch, keep)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_some_rows_stop_at_a_layer(trio, layer):
    """What they would write above is in the pool from a first pass: the others compute what they computed then."""
    drop = [*range(5, 60), *range(61, 70, 2), *range(80, 119)]
    outcomes = []
    for decoder in trio:
        run = PagedRun(decoder)
        one, two = run.add(tokens(80)), run.add(tokens(50, seed=2))
        run.step([(two, 10)])
        run.step([(one, 80), (two, 40)])
        one.num_computed, two.num_computed = 0, 10
        before = [torch.stack([view.keys, view.values]) for view in run.kv]
        outcomes.append(run.step([(one, 80), (two, 40)], narrowing=Drop(layer, drop), all_logits=False))
        one.num_computed, two.num_computed = 0, 10
        batch = run.batch([(one, 80), (two, 40)], all_logits=False)
        for index, (view, then) in enumerate(zip(run.kv, before, strict=True)):
            slots = batch.slot_mapping[run.group_of_layer[index]][drop]
            now = torch.stack([view.keys, view.values]).transpose(2, 3).flatten(1, 2)[:, slots]
            if index > layer:
                assert torch.equal(now, then.transpose(2, 3).flatten(1, 2)[:, slots])
    assert_as_good(*outcomes)


def test_all_rows_may_stop(fused):
    run = PagedRun(fused)
    batch = run.batch([(run.add(tokens(20)), 20)])
    batch = dataclasses.replace(batch, logits_rows=torch.empty(0, dtype=torch.int64))
    stopped = Drop(1, list(range(20)))
    assert fused.forward(batch, run.kv, run.group_of_layer, narrowing=stopped).shape == (0, SIZES["vocab_size"])
    assert [bool(view.keys.isfinite().any()) for view in run.kv] == [True, True, False]


@pytest.mark.parametrize("field", ["token_ids", "positions", "slot_mapping", "block_tables", "logits_rows"])
@pytest.mark.parametrize("value", [-1, 100_000])
def test_refuses_values_out_of_range_and_writes_nothing(fused, field, value):
    run = PagedRun(fused)
    batch = run.batch([(run.add(tokens(6)), 6)])
    before = [view.keys.clone() for view in run.kv]
    wrong = getattr(batch, field)
    if isinstance(wrong, tuple):
        wrong = tuple(tensor.clone() for tensor in wrong)
        wrong[-1].view(-1)[0] = value
    else:
        wrong = wrong.clone()
        wrong[0] = value
    with pytest.raises(KernelError):
        fused.forward(dataclasses.replace(batch, **{field: wrong}), run.kv, run.group_of_layer)
    assert all(torch.equal(view.keys.isnan(), keys.isnan()) for view, keys in zip(run.kv, before, strict=True))


def test_refuses_other_pools(fused):
    run = PagedRun(fused)
    batch = run.batch([(run.add(tokens(6)), 6)])
    narrow = [KVView(view.keys[..., :8], view.values[..., :8]) for view in run.kv]
    with pytest.raises(KernelError, match="heads of"):
        fused.forward(batch, narrow, run.group_of_layer)
    with pytest.raises(KernelError, match="pool per layer"):
        fused.forward(batch, run.kv[:1], run.group_of_layer)
    short = dataclasses.replace(batch, slot_mapping=tuple(slots[:-1] for slots in batch.slot_mapping))
    with pytest.raises(KernelError, match="slot_mapping"):
        fused.forward(short, run.kv, run.group_of_layer)


def test_a_pool_that_moved_is_seen(fused):
    """The addresses of a pool are remembered from step to step; another pool's must replace them."""
    ids = tokens(20)
    first, second = PagedRun(fused), PagedRun(fused, seed=5)
    one, other = first.add(ids), second.add(ids)
    for count in (12, 1, 7):
        assert torch.equal(first.step([(one, count)]), second.step([(other, count)]))


def test_shapes_that_do_not_fill_tiles_go_call_by_call(tmp_path):
    decoder = load(save(build("llama", **{**SIZES, "hidden_size": 72}), tmp_path), torch.bfloat16)
    assert not decoder._can_fuse
    assert PagedRun(decoder).chunked(tokens(9), [9]).isfinite().all()


class Steered:
    """A SteeringHook that has layers write and read elsewhere, recalls for a row, and notes the mass; by calls, too."""

    needs_mass = True

    def __init__(
        self, run: PagedRun, slots: dict[int, torch.Tensor], recalls: dict[int, Recall], ahead: set[int]
    ) -> None:
        self.decoder, self.slots, self.recalls, self.ahead = run.decoder, slots, recalls, ahead
        self.num_layers = len(run.kv)
        self.masses: dict[int, torch.Tensor] = {}

    def _lens(self, layer: int, batch: ForwardBatch) -> torch.Tensor | None:
        if layer not in self.slots:
            return None
        lens = batch.context_lens.clone()
        lens[0] -= 5
        return lens

    def steering(self, batch: ForwardBatch) -> Steering:
        layers = []
        for layer in range(self.num_layers):
            rows = [RowRecall(len(batch.token_ids) - 1, self.recalls[layer])] if layer in self.recalls else []
            own, foretold = ([], rows) if layer in self.ahead else (rows, [])
            layers.append(LayerStep(self._lens(layer, batch), self.slots.get(layer), own, foretold))
        return Steering(layers, [1])

    def after_layers(self, batch: ForwardBatch, mass: torch.Tensor) -> None:
        self.masses = {layer: of_layer[0] for layer, of_layer in enumerate(mass)}

    def before_layer(self, layer: int, residual: torch.Tensor, batch: ForwardBatch) -> None:
        if layer + 1 in self.ahead and layer + 1 in self.recalls:
            queries = self.decoder.queries(layer + 1, residual[-1:], batch.positions[-1:])
            recall_entries(queries[0], self.recalls[layer + 1])

    def before_attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> ForwardBatch:
        if layer in self.recalls and layer not in self.ahead:
            recall_entries(self.decoder.rotated(layer, q[-1:], batch.positions[-1:])[0], self.recalls[layer])
        lens = self._lens(layer, batch)
        if lens is None:
            return batch
        return dataclasses.replace(batch, context_lens=lens, slot_mapping=(self.slots[layer],))

    def after_attention(self, layer: int, batch: ForwardBatch, output: AttentionOutput) -> None:
        self.masses[layer] = output.mass[1, :, : int(batch.context_lens[1])]


def recalls_of(run: PagedRun, table: torch.Tensor, dtype: torch.dtype) -> dict[int, Recall]:
    """In every layer some other keys and values for the first twelve entries of a request, few of which it has yet."""
    dim, units = SIZES["head_dim"], 40
    generator = torch.Generator().manual_seed(8)
    recalls = {}
    for layer, view in enumerate(run.kv):
        heads = view.keys.shape[1]
        keys = torch.randn(heads, units, dim, generator=generator)
        columns = torch.randn(heads, dim, 8, generator=generator)
        resident = torch.stack([torch.randperm(units, generator=generator)[:12] for _ in range(heads)])
        values = torch.randn(heads, units, dim, generator=generator)
        known = keys @ columns if layer != 1 else torch.cat([keys, keys], dim=-1)
        recalls[layer] = Recall(
            sketches=known.mT.contiguous().to(dtype),
            columns=columns if layer != 1 else None,
            scale=0.25,
            resident=resident,
            fetched=torch.zeros(heads, dtype=torch.int64),
            entries=torch.stack([keys, values], dim=2).to(dtype),
            slots=torch.arange(units),
            view=view,
            table=table,
            unit=1,
            alpha=math.inf,
            stay=0.5,
        )
    return recalls


def test_layers_do_otherwise_as_they_would_call_by_call(trio):
    """Lengths and slots of one layer, the mass of one request, units that own and foretold queries want."""
    outcomes, masses, residents = [], [], []
    for decoder in trio:
        run = PagedRun(decoder)
        first, second, third = (run.add(tokens(n, seed=n)) for n in (30, 26, 40))
        run.step([(first, 29), (second, 22), (third, 39)])
        batch = run.batch([(first, 1), (second, 4), (third, 1)])
        if len(batch.block_tables) > 1:
            pytest.skip("one group of layers is enough")
        slots = batch.slot_mapping[0].clone()
        slots[0] -= 5
        hook = Steered(run, {1: slots}, recalls_of(run, batch.block_tables[0][2].clone(), decoder.dtype), {2})
        outcomes.append(decoder.forward(batch, run.kv, run.group_of_layer, hook))
        masses.append([hook.masses[layer] for layer in range(3)])
        residents.append([recall.resident.sort(dim=1).values for recall in hook.recalls.values()])
        assert all((recall.fetched > 0).all() for recall in hook.recalls.values())
    assert_as_good(*outcomes)
    for got, by_calls, exact in zip(*masses, strict=True):
        torch.testing.assert_close(got.sum(1), torch.full_like(got.sum(1), got.sum(1)[0].item()), rtol=1e-2, atol=0)
        assert (got[:, :26] - exact[:, :26]).abs().max() <= 2 * (by_calls[:, :26] - exact[:, :26]).abs().max()
    for got, by_calls in zip(*residents[:2], strict=True):
        assert sum(len(set(a) - set(b)) for a, b in zip(got.tolist(), by_calls.tolist(), strict=True)) <= 2
