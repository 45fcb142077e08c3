from __future__ import annotations

import pytest
import torch

from pagoda.sparse.skew import Moments, Skew

LAYERS, KV_HEADS, GROUP, DIM = 2, 2, 3, 8


def sample(num_tokens: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of all layers, with strong and weak directions and keys that share an offset."""
    generator = torch.Generator().manual_seed(seed)
    strength = torch.logspace(0, -2, DIM)
    queries = torch.randn(LAYERS, num_tokens, KV_HEADS * GROUP, DIM, generator=generator) * strength.flip(0)
    keys = torch.randn(LAYERS, num_tokens, KV_HEADS, DIM, generator=generator) * strength + 3.0
    mixing = torch.linalg.qr(torch.randn(DIM, DIM, generator=generator))[0]
    return queries @ mixing, keys @ mixing


def skew_of(queries: torch.Tensor, keys: torch.Tensor, rank: int, pieces: int = 1) -> Skew:
    moments = Moments(LAYERS, KV_HEADS, DIM)
    for layer in range(LAYERS):
        for q, k in zip(queries[layer].chunk(pieces), keys[layer].chunk(pieces), strict=True):
            moments.add(layer, q, k)
    return moments.skew(rank)


def of_head(queries: torch.Tensor, keys: torch.Tensor, layer: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = queries[layer].view(-1, KV_HEADS, GROUP, DIM)[:, head]
    return grouped.transpose(0, 1).flatten(0, 1).double(), keys[layer][:, head].double()


def test_all_columns_give_the_scores() -> None:
    queries, keys = sample()
    skew = skew_of(queries, keys, DIM)
    other_queries, other_keys = sample(seed=1)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            q, k = of_head(other_queries, other_keys, layer, head)
            skewed = (q @ skew.queries[layer, head].double()) @ (k @ skew.keys[layer, head].double()).T
            torch.testing.assert_close(skewed, q @ k.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_fewer_columns_are_the_best_approximation_of_their_rank(rank: int) -> None:
    queries, keys = sample()
    skew = skew_of(queries, keys, rank)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            q, k = of_head(queries, keys, layer, head)
            centred = k - k.mean(0)
            scores = q @ centred.T
            skewed = (q @ skew.queries[layer, head].double()) @ (centred @ skew.keys[layer, head].double()).T
            least = torch.linalg.svdvals(scores)[rank:].square().sum().sqrt()
            torch.testing.assert_close((scores - skewed).norm(), least, rtol=1e-3, atol=1e-6)
            turn = torch.linalg.svd(q)[2].T[:, :rank]  # the paper's: right singular vectors of the queries
            assert (scores - q @ turn @ turn.T @ centred.T).norm() > 1.02 * least


def test_a_sample_may_come_in_pieces() -> None:
    queries, keys = sample()
    whole, pieces = skew_of(queries, keys, 3), skew_of(queries, keys, 3, pieces=4)
    for one, other in ((whole.queries, pieces.queries), (whole.keys, pieces.keys)):
        torch.testing.assert_close(one.abs(), other.abs(), rtol=1e-3, atol=1e-5)  # a column's sign is free


def test_a_direction_that_the_sample_lacks_stays_finite() -> None:
    queries, keys = sample()
    queries[..., 0] = 0.0
    skew = skew_of(queries, torch.zeros_like(keys), 3)
    assert skew.queries.isfinite().all()
    assert skew.keys.isfinite().all()
