"""Skewing: few numbers per query and key whose products come nearest to the attention scores.

InfiniGen (Lee et al., OSDI 2024, arXiv:2406.19707) turns each head's queries and keys by the right singular vectors of
its queries, so that the first columns carry most of a score, and keeps a third of the columns. Rotary embeddings come
after the projections, so that the turn cannot be folded into weights: it is applied to rotated queries and keys as a
model runs. What queries are like is learnt once from a sample text. What the keys are like is seen in the very keys
that are to be told apart: a prompt whose keys differ in directions that a sample hardly has would be lost otherwise.

The paper's turn is orthogonal, the same for queries and keys. With one matrix for each, the first `rank` columns give
the best approximation of that rank there is (Eckart and Young). With A the sum of the queries' outer products, S the
root of the keys', and Y, D the eigenvectors and eigenvalues of S A S, the largest first:

    Q' = Q S Y / D**(1/4),   K' = K inv(S) Y * D**(1/4)

The keys' mean is taken out of S: what all keys share moves all scores of a query alike, and no choice depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SMALLEST = 1e-6  # of the largest eigenvalue: directions that the keys hardly have are not blown up


@dataclass(frozen=True, slots=True)
class Skew:
    """What one layer's queries and keys are multiplied by, float32 `[num_kv_heads, head_dim, rank]` each."""

    queries: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(cls, asked: torch.Tensor, keys: torch.Tensor, rank: int) -> Skew:
        """The best `rank` columns.

        Args:
            asked: the sum of outer products of queries, `[num_kv_heads, head_dim, head_dim]`.
            keys: `[num_kv_heads, n, head_dim]`, those that are to be told apart.
        """
        centred = keys.float() - keys.float().mean(1, keepdim=True)
        values, vectors = torch.linalg.eigh((centred.mT @ centred).double())
        roots = values.clamp_min(_SMALLEST * values[..., -1:].clamp_min(_SMALLEST)).sqrt()
        root = vectors * roots[..., None, :] @ vectors.mT
        inverse = vectors / roots[..., None, :] @ vectors.mT
        squares, turn = torch.linalg.eigh(root @ asked.double() @ root)
        largest, best = squares.flip(-1)[..., None, :rank], turn.flip(-1)[..., :rank]
        scale = largest.clamp_min(_SMALLEST * largest[..., :1].clamp_min(_SMALLEST)).pow(0.25)
        return cls((root @ best / scale).float(), (inverse @ best * scale).float())


class Asked:
    """What a model's queries are like: sums of outer products of a sample's rotated ones, which may come in pieces."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        self.squares = torch.zeros(num_layers, num_kv_heads, head_dim, head_dim, dtype=torch.float64)

    def add(self, layer: int, queries: torch.Tensor) -> None:
        """Count a layer's queries `[n, num_heads, head_dim]`; all that share a KV head are what its keys are asked."""
        _, num_kv_heads, head_dim, _ = self.squares.shape
        grouped = queries.double().view(len(queries), num_kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
        self.squares[layer] += grouped.mT @ grouped
