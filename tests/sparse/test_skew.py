from __future__ import annotations

import pytest
import torch

from pagoda.sparse.skew import Asked, Skew

LAYERS, KV_HEADS, GROUP, DIM = 2, 2, 3, 8


def sample(num_tokens: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of all layers, with strong and weak directions and keys that share an offset."""
    generator = torch.Generator().manual_seed(seed)
    strength = torch.logspace(0, -2, DIM)
    queries = torch.randn(LAYERS, num_tokens, KV_HEADS * GROUP, DIM, generator=generator) * strength.flip(0)
    keys = torch.randn(LAYERS, num_tokens, KV_HEADS, DIM, generator=generator) * strength + 3.0
    mixing = torch.linalg.qr(torch.randn(DIM, DIM, generator=generator))[0]
    return queries @ mixing, keys @ mixing


def skews_of(queries: torch.Tensor, keys: torch.Tensor, rank: int, pieces: int = 1) -> list[Skew]:
    asked = Asked(LAYERS, KV_HEADS, DIM)
    for layer in range(LAYERS):
        for piece in queries[layer].chunk(pieces):
            asked.add(layer, piece)
    return [Skew.of(asked.squares[layer], keys[layer].transpose(0, 1), rank) for layer in range(LAYERS)]


def of_head(queries: torch.Tensor, keys: torch.Tensor, layer: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = queries[layer].view(-1, KV_HEADS, GROUP, DIM)[:, head]
    return grouped.transpose(0, 1).flatten(0, 1).double(), keys[layer][:, head].double()


def test_all_columns_give_the_scores() -> None:
    queries, keys = sample()
    skews = skews_of(queries, keys, DIM)
    other_queries, other_keys = sample(seed=1)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            q, k = of_head(other_queries, other_keys, layer, head)
            skewed = (q @ skews[layer].queries[head].double()) @ (k @ skews[layer].keys[head].double()).T
            torch.testing.assert_close(skewed, q @ k.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_fewer_columns_are_the_best_approximation_of_their_rank(rank: int) -> None:
    queries, keys = sample()
    skews = skews_of(queries, keys, rank)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            q, k = of_head(queries, keys, layer, head)
            centred = k - k.mean(0)
            scores = q @ centred.T
            skewed = (q @ skews[layer].queries[head].double()) @ (centred @ skews[layer].keys[head].double()).T
            least = torch.linalg.svdvals(scores)[rank:].square().sum().sqrt()
            torch.testing.assert_close((scores - skewed).norm(), least, rtol=1e-3, atol=1e-6)
            turn = torch.linalg.svd(q)[2].T[:, :rank]  # the paper's: right singular vectors of the queries
            assert (scores - q @ turn @ turn.T @ centred.T).norm() > 1.02 * least


def test_a_sample_may_come_in_pieces() -> None:
    queries, keys = sample()
    for whole, pieces in zip(skews_of(queries, keys, 3), skews_of(queries, keys, 3, pieces=4), strict=True):
        for one, other in ((whole.queries, pieces.queries), (whole.keys, pieces.keys)):
            torch.testing.assert_close(one.abs(), other.abs(), rtol=1e-3, atol=1e-5)  # a column's sign is free


def test_a_direction_that_nothing_has_stays_finite() -> None:
    queries, keys = sample()
    queries[..., 0] = 0.0
    for of_keys in (torch.zeros_like(keys), keys[:, :1], keys):
        for skew in (*skews_of(queries, of_keys, DIM), *skews_of(torch.zeros_like(queries), of_keys, 3)):
            assert skew.queries.isfinite().all()
            assert skew.keys.isfinite().all()


def test_keys_that_differ_where_a_sample_does_not_are_told_apart() -> None:
    """Their own directions are what columns go by."""
    asked = torch.eye(DIM).expand(KV_HEADS, DIM, DIM)
    keys = torch.zeros(KV_HEADS, 20, DIM)
    keys[:, :, 5] = torch.arange(20.0)
    skew = Skew.of(asked, keys, 1)
    query = torch.zeros(KV_HEADS, 1, DIM)
    query[..., 5] = 1.0
    scores = (query @ skew.queries) @ (keys @ skew.keys).mT
    torch.testing.assert_close(scores.diff(), torch.ones(KV_HEADS, 1, 19), rtol=1e-3, atol=1e-3)
