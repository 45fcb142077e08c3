"""The decoder against Transformers, token by token, however the work is cut up."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pagoda.kernels import AttentionOutput
from pagoda.model.batch import ForwardBatch
from pagoda.model.decoder import Decoder
from tests.model.models import SIZES, VARIANTS, build, load, reference_logits, save
from tests.model.paged import PagedRun

TOLERANCE = 1e-3


def tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    model = build(request.param)
    return model, load(save(model, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    return save(build("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llama(llama_folder):
    return build("llama"), load(llama_folder)


@pytest.mark.parametrize("sizes", [[60], [7, 1, 13, 1], [1], [33, 1]], ids=str)
def test_logits_equal_transformers(pair, sizes):
    model, decoder = pair
    ids = tokens(60)
    expected = reference_logits(model, ids)
    got = PagedRun(decoder).chunked(ids, sizes)
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < TOLERANCE
    assert expected.std() > 0.1, "the reference is not degenerate"


def test_mixed_batch_of_prefills_and_decodes(pair):
    model, decoder = pair
    run = PagedRun(decoder)
    texts = [tokens(n, seed=n) for n in (25, 11, 30)]
    a, b, c = (run.add(text) for text in texts)
    logits: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}

    def step(*chunks):
        out = run.step([(run.sequences[i], n) for i, n in chunks])
        for (i, _), part in zip(chunks, out.split([n for _, n in chunks]), strict=True):
            logits[i].append(part)

    step((0, 10), (1, 10))
    step((1, 1), (2, 17), (0, 3))
    step((0, 12), (2, 1))
    step((2, 12))
    assert [s.num_computed for s in (a, b, c)] == [25, 11, 30]
    for i, text in enumerate(texts):
        assert (torch.cat(logits[i]) - reference_logits(model, text)).abs().max() < TOLERANCE


def test_only_the_rows_asked_for_get_logits(llama):
    model, decoder = llama
    run = PagedRun(decoder)
    first, second = run.add(tokens(9)), run.add(tokens(5, seed=2))
    got = run.step([(first, 9), (second, 5)], all_logits=False)
    expected = torch.stack([reference_logits(model, s.token_ids)[-1] for s in (first, second)])
    assert (got - expected).abs().max() < TOLERANCE
    third = run.add(tokens(6, seed=3))
    batch = dataclasses.replace(run.batch([(third, 6)]), logits_rows=torch.empty(0, dtype=torch.int64))
    assert decoder.forward(batch, run.kv, run.group_of_layer).shape == (0, SIZES["vocab_size"])


def test_bfloat16_stays_near_float32(llama, llama_folder):
    model, _ = llama
    decoder = load(llama_folder, torch.bfloat16)
    ids = tokens(40)
    expected = reference_logits(model, ids)
    got = PagedRun(decoder).chunked(ids, [16, 1])
    in_bfloat16 = reference_logits(build("llama").to(torch.bfloat16), ids)
    # No worse than Transformers' own rounding, with room for a different order of the same sums.
    assert (got - expected).abs().mean() < 1.5 * (in_bfloat16 - expected).abs().mean()


def test_forward_leaves_autograd_alone_and_weights_unchanged(llama):
    _, decoder = llama
    before = decoder.weights.layers[0].qkv.clone()
    logits = PagedRun(decoder).chunked(tokens(8), [8])
    assert not logits.requires_grad
    assert torch.equal(before, decoder.weights.layers[0].qkv)


class Recorder:
    """Notes what it sees and changes nothing."""

    needs_mass = False

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, tuple[int, ...]]] = []

    def before_attention(self, layer, q, k, v, batch):
        assert k.shape == v.shape
        self.seen.append(("before", layer, tuple(q.shape)))
        return batch

    def after_attention(self, layer, batch: ForwardBatch, output: AttentionOutput):
        self.seen.append(("after", layer, tuple(output.out.shape)))


def test_hook_sees_every_layer_and_changes_nothing_by_itself(llama):
    _, decoder = llama
    ids = tokens(7)
    plain = PagedRun(decoder)
    expected = plain.step([(plain.add(ids), 7)])
    run, hook = PagedRun(decoder), Recorder()
    assert torch.equal(run.step([(run.add(ids), 7)], hook), expected)
    shape = (7, SIZES["num_attention_heads"], SIZES["head_dim"])
    assert hook.seen == [(when, layer, shape) for layer in range(3) for when in ("before", "after")]


class SeesOnly(Recorder):
    """Makes every layer attend to the first blocks of the context alone."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.context = context

    def before_attention(self, layer, q, k, v, batch: ForwardBatch):
        return dataclasses.replace(batch, context_lens=torch.full_like(batch.context_lens, self.context))


def test_hook_may_change_what_a_layer_reads(llama):
    _, decoder = llama
    ids = tokens(13)
    run = PagedRun(decoder)
    sequence = run.add(ids)
    run.step([(sequence, 12)])
    full = PagedRun(decoder).chunked(ids, [12, 1])[-1]
    got = run.step([(sequence, 1)], SeesOnly(8))[0]
    assert got.isfinite().all()
    assert (got - full).abs().max() > TOLERANCE


def test_decoder_holds_rotations_for_its_context_only(llama):
    _, decoder = llama
    assert isinstance(decoder, Decoder)
    run = PagedRun(decoder)
    batch = run.batch([(run.add([1]), 1)])
    beyond = dataclasses.replace(batch, positions=torch.tensor([decoder.spec.max_context]))
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        decoder.forward(beyond, run.kv, run.group_of_layer)


def test_requests_on_one_prefix_attend_to_it_together(pair):
    """Two samples of one prompt share its blocks; their logits are those of a request of its own."""
    model, decoder = pair
    run = PagedRun(decoder)
    prompt, endings = tokens(24), [tokens(3, seed=5), tokens(3, seed=6)]
    first = run.add(prompt + endings[0])
    run.step([(first, 24)])
    second = run.add(prompt + endings[1])
    second.blocks, second.num_computed = [list(blocks) for blocks in first.blocks], 24
    batch = run.batch([(first, 3), (second, 3)])
    assert all((table[0, :6] == table[1, :6]).all() for table in batch.block_tables)
    got = decoder.forward(batch, run.kv, run.group_of_layer).split(3)
    for ending, logits in zip(endings, got, strict=True):
        assert (logits - reference_logits(model, prompt + ending)[24:]).abs().max() < TOLERANCE


class AsksAhead:
    """Notes what `Decoder.queries` says of each layer's input, and the queries that the layer really has."""

    needs_mass = False

    def __init__(self, decoder: Decoder, run: PagedRun) -> None:
        self.decoder, self.run = decoder, run
        self.foretold: list[torch.Tensor] = []
        self.real: list[torch.Tensor] = []

    def before_layer(self, layer, residual, batch):
        self.foretold.append(self.decoder.queries(layer, residual, batch.positions))

    def before_attention(self, layer, q, k, v, batch):
        cos, sin = (table[batch.positions, None] for table in self.decoder._rotations[layer])
        first, second = q.chunk(2, dim=-1)
        self.real.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
        return batch

    def after_attention(self, layer, batch, output):
        return None


def test_queries_are_those_that_a_layer_makes_of_its_input(pair):
    _, decoder = pair
    run, ids = PagedRun(decoder), tokens(9)
    hook = AsksAhead(decoder, run)
    run.step([(run.add(ids), 9)], hook)
    assert len(hook.foretold) == decoder.spec.num_layers
    for foretold, real in zip(hook.foretold, hook.real, strict=True):
        torch.testing.assert_close(foretold, real, rtol=1e-4, atol=1e-4)
