"""Keys at new positions: what turns a key from the place where it was computed to the one where it is used.

A key at position p is `factor * R(p * frequencies) k`, and turns add up: R(b) = R(b - a) R(a). The model's own tables
of cosines and sines give the turn between two of their rows, so that a moved key is what the model would have
written, whichever way its frequencies were made (plain, linear, Llama 3, YARN, factors of their own; a table for
each kind of layer). Frequencies that change with the length of the sequence have no such table: RopeSpec refuses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pagoda.kernels import KVView, turn_kv


class Rotations(NamedTuple):
    """A model's tables, float32 `[max_context, head_dim / 2]` each, any constant factor on both included."""

    cos: torch.Tensor
    sin: torch.Tensor


def turns(tables: Rotations, old: torch.Tensor, new: torch.Tensor) -> Rotations:
    """The turn of each row from position `old` to `new`, both int64 `[rows]`: float32 `[rows, head_dim / 2]` each.

    It keeps lengths: a constant factor is in the keys already.
    """
    a, b = (torch.complex(tables.cos[at].double(), tables.sin[at].double()) for at in (old, new))
    turn = b / a
    turn /= turn.abs()
    return Rotations(turn.real.float(), turn.imag.float())


def turn_keys(keys: torch.Tensor, turn: Rotations) -> torch.Tensor:
    """Rotated keys `[rows, num_kv_heads, head_dim]` turned on, float32: dimension i is paired with i + head_dim / 2."""
    first, second = keys.float().chunk(2, dim=-1)
    cos, sin = turn.cos[:, None], turn.sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def gather(view: KVView, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values at slots, int64 `[rows]`: new tensors `[rows, num_kv_heads, head_dim]`."""
    size = view.keys.shape[2]
    blocks, offsets = slots // size, slots % size
    return view.keys[blocks, :, offsets], view.values[blocks, :, offsets]


def move(
    views: Sequence[KVView],
    turns_of: Sequence[Rotations],
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> None:
    """Copy KV from slots to others in several layers. Mutates the pool behind the views, at the targets.

    Args:
        views: the layers to copy.
        turns_of: for each of them, the rows' turns.
        sources, targets: for each of them int64 `[rows]`; no slot is in both.
    """
    for view, turn, source, target in zip(views, turns_of, sources, targets, strict=True):
        turn_kv(view, source, target, turn.cos, turn.sin)
