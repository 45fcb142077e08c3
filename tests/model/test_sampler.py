"""The sampler against plain definitions: exact penalties, exact candidate sets, and chi-square over draws."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from pagoda.engine.params import SamplingParams
from pagoda.errors import InvalidRequest, ModelError
from pagoda.model.sampler import SampledToken, SamplerState, candidates, sample

VOCAB = 23


def logits_of(rows: int = 1, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def state(vocab: int = VOCAB, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params) -> SamplerState:
    made = SamplerState(SamplingParams(**params), vocab, prompt)
    for token in output:
        made.append(token)
    return made


def reference_distribution(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """Temperature, min_p, top_k, top_p spelled out over a Python list."""
    weights = [math.exp(x / params.temperature) for x in (logits - logits.max()).double().tolist()]
    total = sum(weights)
    probs = {token: weight / total for token, weight in enumerate(weights)}
    floor = params.min_p * max(probs.values())
    ranked = sorted(((p, t) for t, p in probs.items() if p >= floor), key=lambda pair: (-pair[0], pair[1]))
    ranked = ranked[: params.top_k or None]
    mass = sum(p for p, _ in ranked)
    kept: list[tuple[float, int]] = []
    before = 0.0
    for p, token in ranked:
        if before >= params.top_p:
            break
        kept.append((p, token))
        before += p / mass
    final = [0.0] * len(logits)
    mass = sum(p for p, _ in kept)
    for p, token in kept:
        final[token] = p / mass
    return final


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 5},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_distribution_is_exact(options):
    params = SamplingParams(**options)
    for seed in range(5):
        logits = logits_of(seed=seed)[0]
        weights, ids = candidates(logits, params)
        got = torch.zeros(VOCAB, dtype=torch.float64)
        got[torch.arange(VOCAB) if ids is None else ids] = weights.double() / weights.double().sum()
        torch.testing.assert_close(
            got, torch.tensor(reference_distribution(logits, params)).double(), atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize("top_p", [0.5, 0.999999])
def test_a_nucleus_wider_than_the_first_guess_is_found(top_p):
    params = SamplingParams(top_p=top_p)
    logits = logits_of(vocab=3000, seed=3)[0] * 0.01
    weights, ids = candidates(logits, params)
    assert ids is not None
    expected = reference_distribution(logits, params)
    assert {i for i, p in zip(ids.tolist(), weights.tolist(), strict=True) if p > 0} == {
        i for i, p in enumerate(expected) if p > 0
    }


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"temperature": 1.7, "top_k": 6}], ids=str)
def test_draws_follow_the_distribution(options):
    params = SamplingParams(seed=11, **options)
    logits = logits_of(seed=4)
    draws = 4000
    one = SamplerState(params, VOCAB)
    counts: Counter[int] = Counter()
    for _ in range(draws):
        (outcome,) = sample(logits, [one])
        assert isinstance(outcome, SampledToken)
        counts[outcome.token_id] += 1
        one.append(outcome.token_id)
    expected = {t: p * draws for t, p in enumerate(reference_distribution(logits[0], params)) if p > 0}
    assert set(counts) <= set(expected)
    rare = sum(e for e in expected.values() if e < 5)
    common = {t: e for t, e in expected.items() if e >= 5}
    chi_square = sum((counts[t] - e) ** 2 / e for t, e in common.items())
    if rare >= 5:
        chi_square += (draws - sum(counts[t] for t in common) - rare) ** 2 / rare
    degrees = len(common) - 1 + (rare >= 5)
    # Four standard deviations above the mean of a chi-square; the seed is fixed, so this never flickers.
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_greedy_takes_the_likeliest_of_every_row():
    logits = logits_of(6)
    outcomes = sample(logits, [state(temperature=0.0) for _ in range(6)])
    assert outcomes == [SampledToken(i) for i in logits.argmax(-1).tolist()]


def test_a_tiny_temperature_is_nearly_greedy_and_does_not_overflow():
    logits = logits_of() * 50
    assert sample(logits, [state(temperature=1e-6, seed=1)]) == [SampledToken(int(logits.argmax()))]


def rollout(seed: int | None, steps: int, others: int, position: int, index: int = 0) -> list[int]:
    """Tokens of one seeded request, in a batch with other requests at some position."""
    mine = SamplerState(SamplingParams(seed=seed), VOCAB, index=index)
    tokens = []
    for step in range(steps):
        rows = logits_of(others + 1, seed=1000 + step * 7 + others)
        rows[position] = logits_of(seed=step)[0]
        states = [state(seed=i, top_p=0.8) for i in range(others)]
        states.insert(position, mine)
        outcome = sample(rows, states)[position]
        assert isinstance(outcome, SampledToken)
        mine.append(outcome.token_id)
        tokens.append(outcome.token_id)
    return tokens


def test_a_seed_gives_the_same_tokens_in_any_batch():
    alone = rollout(5, 30, others=0, position=0)
    assert rollout(5, 30, others=4, position=2) == alone
    assert rollout(5, 30, others=7, position=7) == alone
    assert rollout(6, 30, others=0, position=0) != alone
    assert rollout(5, 30, others=0, position=0, index=1) != alone


def test_requests_without_a_seed_draw_differently(monkeypatch):
    monkeypatch.undo()  # the draws that tests/conftest.py fixes
    assert rollout(None, 30, 0, 0) != rollout(None, 30, 0, 0)


def test_a_draw_depends_on_the_number_of_tokens_so_far_and_not_on_earlier_calls():
    logits = torch.zeros(1, VOCAB)
    one = state(seed=3)
    first = sample(logits, [one])
    assert sample(logits, [one]) == first
    draws = [sample(logits, [state(seed=3, output=(1,) * length)])[0] for length in range(20)]
    assert draws[0] == first[0]
    assert len({draw.token_id for draw in draws if isinstance(draw, SampledToken)}) > 5


def test_penalties_are_exact():
    logits = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5])
    both = state(
        vocab=5,
        prompt=(0, 1, 1),
        output=(2, 2, 3),
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
    )
    # Repetition over prompt and output, once whatever the count; presence and frequency over the output alone.
    expected = torch.tensor([0.5, -2.0, 1.0 - 0.25 - 1.0, -4.0 - 0.25 - 0.5, 0.5])
    assert torch.equal(both.shaped(logits), expected)
    assert torch.equal(logits, torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5])), "the input is not changed"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"repetition_penalty": 2.0}, [0.5, -2.0, 1.0, -4.0, 0.5]),
        ({"presence_penalty": -1.0}, [1.0, -1.0, 3.0, -1.0, 0.5]),
        ({"frequency_penalty": 1.0}, [1.0, -1.0, 0.0, -3.0, 0.5]),
        ({"logit_bias": {0: -100, 4: 7.5}}, [-99.0, -1.0, 2.0, -2.0, 8.0]),
    ],
)
def test_each_alone(options, expected):
    logits = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5])
    shaped = state(vocab=5, prompt=(0, 1), output=(2, 2, 3), **options).shaped(logits)
    assert torch.equal(shaped, torch.tensor(expected))


def test_bias_and_penalties_steer_greedy_rows_too():
    logits = torch.tensor([[1.0, 2.0, 3.0]]).repeat(3, 1)
    states = [
        state(vocab=3, temperature=0.0, logit_bias={0: 10}),
        state(vocab=3, temperature=0.0, output=(2,), frequency_penalty=1.5),
        state(vocab=3, temperature=0.0),
    ]
    assert sample(logits, states) == [SampledToken(0), SampledToken(1), SampledToken(2)]


def test_a_bias_outside_the_vocabulary_is_refused():
    for token in (-1, VOCAB):
        with pytest.raises(InvalidRequest, match="logit_bias") as caught:
            state(logit_bias={token: 1.0})
        assert caught.value.param == "logit_bias"


def test_logprobs_are_of_the_raw_logits():
    logits = logits_of(4)
    states = [
        state(temperature=0.0, logprobs=3, logit_bias={0: 100}),
        state(seed=1, temperature=0.3, top_k=2, logprobs=0),
        state(seed=1),
        state(temperature=0.0, logprobs=20),
    ]
    outcomes = sample(logits, states)
    expected = logits.double().log_softmax(-1)
    first = outcomes[0]
    assert first.token_id == 0
    assert first.logprobs.chosen == pytest.approx(float(expected[0, 0]), abs=1e-5)
    values, ids = expected[0].topk(3)
    assert [t for t, _ in first.logprobs.top] == ids.tolist()
    assert [v for _, v in first.logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert outcomes[1].logprobs.top == ()
    assert outcomes[1].logprobs.chosen == pytest.approx(float(expected[1, outcomes[1].token_id]), abs=1e-5)
    assert outcomes[2].logprobs is None
    assert len(outcomes[3].logprobs.top) == 20


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_poisoned_row_fails_alone(poison, temperature):
    logits = logits_of(3)
    clean = sample(logits, [state(seed=i, temperature=temperature) for i in range(3)])
    logits[1, 5] = poison
    outcomes = sample(logits, [state(seed=i, temperature=temperature) for i in range(3)])
    assert isinstance(outcomes[1], ModelError)
    assert "not finite" in str(outcomes[1])
    assert (outcomes[0], outcomes[2]) == (clean[0], clean[2])


def test_a_row_of_minus_infinity_fails():
    assert isinstance(sample(torch.full((1, VOCAB), -math.inf), [state()])[0], ModelError)


def test_masked_tokens_are_never_drawn():
    logits = logits_of()
    logits[0, 3:] = -math.inf
    one = state(seed=2)
    for _ in range(200):
        (outcome,) = sample(logits, [one])
        assert outcome.token_id < 3
        one.append(outcome.token_id)


def test_empty_and_mismatched_batches():
    assert sample(torch.empty(0, VOCAB), []) == []
    with pytest.raises(TypeError, match="2 sampler states for 1"):
        sample(logits_of(1), [state(), state()])
