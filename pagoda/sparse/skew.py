"""Skewing: few numbers per query and key whose products come nearest to the attention scores.

InfiniGen (Lee et al., OSDI 2024, arXiv:2406.19707) turns each head's queries and keys by the right singular vectors of
its queries, so that the first columns carry most of a score, and keeps a third of the columns. Rotary embeddings come
after the projections, so that the turn cannot be folded into weights: it is learnt from rotated queries and keys of a
sample text, and applied to rotated ones.

The paper's turn is orthogonal, the same for queries and keys. With one matrix for each, the first `rank` columns give
the best approximation of that rank there is (Eckart and Young): with Q = U R and K = W S, where R and S are symmetric,

    Q Kt = U (R S) Wt,   R S = X D Yt   ->   Q' = Q inv(R) X sqrt(D),   K' = K inv(S) Y sqrt(D)

R and S come from sums of outer products, so that a sample of any length takes `head_dim * head_dim` numbers a head. The
keys' mean is taken out of S: what all keys share moves all scores of a query alike, and no choice depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SMALLEST = 1e-6  # of the largest eigenvalue: directions that the sample hardly has are not blown up


@dataclass(frozen=True, slots=True)
class Skew:
    """Per layer and KV head, what queries and keys are multiplied by: float32 `[layers, kv_heads, head_dim, rank]`."""

    queries: torch.Tensor
    keys: torch.Tensor


class Moments:
    """Sums over a sample's rotated queries and keys, from which a Skew is made."""

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        shape = (num_layers, num_kv_heads, head_dim, head_dim)
        self._queries = torch.zeros(shape, dtype=torch.float64)
        self._keys = torch.zeros(shape, dtype=torch.float64)
        self._key_sum = torch.zeros(shape[:-1], dtype=torch.float64)
        self._num_keys = [0] * num_layers

    def add(self, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Count a layer's queries `[n, num_heads, head_dim]` and keys `[n, num_kv_heads, head_dim]`, rotated."""
        num_kv_heads, head_dim = keys.shape[1:]
        # The queries of all heads that share a KV head are one sample of what its keys are asked.
        asked = queries.double().view(len(queries), num_kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
        known = keys.double().transpose(0, 1)
        self._queries[layer] += asked.mT @ asked
        self._keys[layer] += known.mT @ known
        self._key_sum[layer] += known.sum(1)
        self._num_keys[layer] += keys.shape[0]

    def skew(self, rank: int) -> Skew:
        """The best `rank` columns for every layer and KV head."""
        counts = torch.tensor(self._num_keys, dtype=torch.float64)[:, None, None, None]
        shared = self._key_sum[..., :, None] * self._key_sum[..., None, :] / counts
        root_q, inverse_q = _roots(self._queries)
        root_k, inverse_k = _roots(self._keys - shared)
        x, d, yt = torch.linalg.svd(root_q @ root_k)
        half = d[..., None, :rank].sqrt()
        return Skew((inverse_q @ x[..., :rank] * half).float(), (inverse_k @ yt.mT[..., :rank] * half).float())


def _roots(squares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The symmetric square roots of `squares` and of their inverses."""
    values, vectors = torch.linalg.eigh(squares)
    roots = values.clamp_min(_SMALLEST * values[..., -1:].clamp_min(_SMALLEST)).sqrt()
    return vectors * roots[..., None, :] @ vectors.mT, vectors / roots[..., None, :] @ vectors.mT
