"""Steering: what the layers of a step do otherwise than its rows say, all of it known before the first one runs.

Where it is not known, layers are run one by one (model/hooks.py): a call into Python in every layer costs as much as
the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagoda.kernels import checks
from pagoda.kernels.recall import Recall


@dataclass(frozen=True, slots=True)
class RowRecall:
    """A row of the step, whose request recalls KV."""

    row: int
    recall: Recall


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One layer's part.

    Attributes:
        context_lens: int32 `[num_requests]`, instead of the step's; None: those.
        slots: int64 `[num_rows]`, instead of those of the layer's group; None: those.
        own: what is recalled for the layer's own queries, before it attends.
        foretold: what is recalled for the queries that the input of the layer before makes of it, before that runs.
    """

    context_lens: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    own: Sequence[RowRecall] = ()
    foretold: Sequence[RowRecall] = ()


@dataclass(frozen=True, slots=True)
class Steering:
    """A step's: one part for each layer, and the requests whose attention mass is wanted."""

    layers: Sequence[LayerStep]
    mass_of: Sequence[int] = ()

    def longest(self, context_lens: torch.Tensor) -> int:
        """The most KV entries that a request whose mass is wanted sees in any layer."""
        if not self.mass_of:
            return 0
        lens = [layer.context_lens for layer in self.layers if layer.context_lens is not None]
        return max(int(of_layer[self.mass_of].max()) for of_layer in (context_lens, *lens))


NO_STEERING = ((), (), 0)


def steering_at(
    steering: Steering, mass: torch.Tensor, num_rows: int, num_requests: int, num_heads: int
) -> tuple[object, ...]:
    """A step's steering as the extension takes it, and where its mass goes, `[num_layers, requests, num_kv_heads, n]`.

    Raises:
        KernelError: wrong shapes, dtypes or strides.
    """
    layers = [
        _layer_at(layer, mass[index].data_ptr(), num_rows, num_requests, num_heads)
        for index, layer in enumerate(steering.layers)
    ]
    return layers, steering.mass_of, mass.shape[3]


def _layer_at(layer: LayerStep, mass: int, num_rows: int, num_requests: int, num_heads: int) -> tuple[object, ...]:
    checks.check_layer_step(layer.context_lens, layer.slots, num_rows, num_requests)
    return (
        0 if layer.context_lens is None else layer.context_lens.data_ptr(),
        0 if layer.slots is None else layer.slots.data_ptr(),
        mass,
        [_recall_at(each, num_heads) for each in layer.own],
        [_recall_at(each, num_heads) for each in layer.foretold],
    )


def _recall_at(given: RowRecall, num_heads: int) -> tuple[int, tuple[object, ...]]:
    from pagoda.kernels.native import recall_at

    return given.row, recall_at(given.recall, num_heads)
