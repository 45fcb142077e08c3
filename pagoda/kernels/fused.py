"""FusedDecoder: all layers of a BF16 decoder as one native call, where the CPU has matrix tiles (Intel AMX).

What a layer does between reading its weights and its KV is small, and doing it call by call from Python costs as much
as the reading; so one call runs all layers, and threads share the tasks of each phase (csrc/decoder/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import is_
from typing import Protocol

import torch

from pagoda.errors import KernelError
from pagoda.kernels import checks
from pagoda.kernels.dispatch import has_matrix_tiles
from pagoda.kernels.matrices import CompactMatrix, Int8Matrix, Matrix, matrix_at
from pagoda.kernels.steering import NO_STEERING, Steering, steering_at
from pagoda.kernels.types import KVView, SharedPrefix

_MATRICES = ("qkv", "output", "gate_up", "down")
_VECTORS = ("qkv_bias", "output_bias", "gate_up_bias", "down_bias", "input_norm", "q_norm", "k_norm", "mlp_norm")
_MAX_HEAD_DIM = 256
_LANES = 16  # rows of a block (csrc/types.h)
_MAX_INPUTS = 1 << 16  # the sum of more products of codes might not fit 32 bits


class LayerTensors(Protocol):
    """One layer: matrices `[out, in]`, queries, keys and values in one, gate and up in one; vectors; None if absent."""

    @property
    def qkv(self) -> Matrix: ...  # noqa: D102
    @property
    def q_norm(self) -> torch.Tensor | None: ...  # noqa: D102
    @property
    def gate_up(self) -> Matrix: ...  # noqa: D102
    @property
    def down(self) -> Matrix: ...  # noqa: D102


class StepTensors(Protocol):
    """The rows of one step, as `paged_attention` and `rope_write_kv` take them; tables and slots per layer group."""

    @property
    def token_ids(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def positions(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def query_start(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def context_lens(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def places(self) -> torch.Tensor | None: ...  # noqa: D102
    @property
    def block_tables(self) -> tuple[torch.Tensor, ...]: ...  # noqa: D102
    @property
    def slot_mapping(self) -> tuple[torch.Tensor, ...]: ...  # noqa: D102
    @property
    def logits_rows(self) -> torch.Tensor: ...  # noqa: D102


class _Cut(IntEnum):
    """Which part of a step a call runs."""

    WHOLE, BEFORE, AFTER = range(3)


@dataclass(frozen=True, slots=True)
class HalfStep:
    """A step that stopped in the middle of `layer`; what is kept of it is for `FusedDecoder.finish` alone."""

    layer: int
    num_rows: int
    lanes: torch.Tensor


_NO_PREFIXES = torch.empty(0, dtype=torch.int32)
_NO_HALF = HalfStep(0, 0, torch.empty(0))


class FusedDecoder:
    """Runs a decoder's layers in one call. Keeps the tensors it was made of; holds scratch memory of its own.

    The residual stream stays in float32 from the embedding to the logits, and a row's numbers do not depend on other
    rows of the batch, but for how attention splits long contexts.
    """

    def __init__(
        self,
        layers: Sequence[LayerTensors],
        windows: Sequence[int | None],
        group_of_layer: Sequence[int],
        *,
        embedding: Matrix,
        final_norm: torch.Tensor,
        lm_head: Matrix,
        cos: torch.Tensor,
        sin: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
    ) -> None:
        import pagoda._native as _native

        self._tensors = (layers, embedding, final_norm, lm_head, cos, sin)
        self._shape, self._num_heads = (num_kv_heads, head_dim), num_heads
        self._vocab_size, self._hidden_size = lm_head.shape
        self._views: tuple[KVView, ...] = ()
        self._parts: list[tuple[object, ...]] = []
        self._native = _native.Decoder(
            matrix_at(embedding),
            matrix_at(lm_head),
            final_norm.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            cos.shape[0],
            lm_head.shape[0],
            embedding.shape[1],
            layers[0].down.shape[1],
            num_heads,
            num_kv_heads,
            head_dim,
            eps,
            scale,
            [
                (
                    [matrix_at(getattr(layer, field)) for field in _MATRICES],
                    [_address(getattr(layer, field)) for field in _VECTORS],
                    group,
                    window or 0,
                )
                for layer, window, group in zip(layers, windows, group_of_layer, strict=True)
            ],
        )

    def forward(
        self, step: StepTensors, views: Sequence[KVView], shared: Sequence[Sequence[SharedPrefix]]
    ) -> torch.Tensor:
        """Compute one step, and write the K and V of every row into `views`, one per layer.

        Args:
            step: the rows, in CPU memory.
            views: as at every call, or others.
            shared: per layer group, what `find_shared_prefixes` found.

        Returns:
            float32 `[num_logits, vocab_size]`.

        Raises:
            KernelError: values out of range, or tensors that do not fit; then nothing is written.
        """
        return self._run(step, views, shared, _Cut.WHOLE, _NO_HALF, None)

    def steered(
        self,
        step: StepTensors,
        views: Sequence[KVView],
        shared: Sequence[Sequence[SharedPrefix]],
        steering: Steering,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one step whose layers do some things otherwise. Mutates what is recalled, too.

        Arguments and errors as for `forward`, and:
            steering: entries that it recalls must be stored in host memory as they are in the views.

        Returns:
            The logits, and the attention mass of each layer, as AttentionOutput has it, of the requests that steering
            names: float32 `[num_layers, requests, num_kv_heads, n]`, n at least the longest of their contexts.
        """
        num_rows, num_requests = step.token_ids.shape[0], step.context_lens.shape[0]
        longest = steering.longest(step.context_lens)
        mass = torch.zeros(len(steering.layers), len(steering.mass_of), self._shape[0], longest)
        at = steering_at(steering, mass, num_rows, num_requests, self._num_heads)
        logits = self._run(step, views, shared, _Cut.WHOLE, _NO_HALF, None, at)
        return logits, mass

    def begin(
        self, step: StepTensors, views: Sequence[KVView], shared: Sequence[Sequence[SharedPrefix]], layer: int
    ) -> HalfStep:
        """Compute a step as far as the K and V of `layer`, which are written for every row, and of those below it.

        Arguments and errors as for `forward`; no logits are computed.
        """
        num_blocks = -(-step.token_ids.shape[0] // _LANES)
        half = HalfStep(layer, step.token_ids.shape[0], torch.empty(num_blocks, self._hidden_size, _LANES))
        self._run(step, views, shared, _Cut.BEFORE, half, None)
        return half

    def finish(
        self,
        step: StepTensors,
        views: Sequence[KVView],
        shared: Sequence[Sequence[SharedPrefix]],
        half: HalfStep,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the rest of a step for some of its rows.

        Arguments, result and errors as for `forward`, and:
            step: describes these rows alone.
            half: what `begin` returned.
            rows: int64 `[num_rows]`: which of the rows of `begin` they are.
        """
        return self._run(step, views, shared, _Cut.AFTER, half, rows)

    def _run(
        self,
        step: StepTensors,
        views: Sequence[KVView],
        shared: Sequence[Sequence[SharedPrefix]],
        part: _Cut,
        half: HalfStep,
        rows: torch.Tensor | None,
        steering: tuple[object, ...] = NO_STEERING,
    ) -> torch.Tensor:
        self._see(views)
        num_rows, num_requests = step.token_ids.shape[0], step.context_lens.shape[0]
        checks.check_step(step.token_ids, step.positions, step.query_start, step.context_lens, step.logits_rows)
        checks.check_places(step.places, num_rows)
        if rows is not None:
            checks.check_kept(rows, num_rows)
        prefixes = [torch.tensor(of_group, dtype=torch.int32) if of_group else _NO_PREFIXES for of_group in shared]
        groups = []
        for table, slots, prefix in zip(step.block_tables, step.slot_mapping, prefixes, strict=True):
            checks.check_tables(table, slots, num_requests, num_rows)
            groups.append(
                (
                    table.data_ptr(),
                    table.stride(0),
                    table.shape[1],
                    slots.data_ptr(),
                    prefix.data_ptr(),
                    prefix.shape[0],
                )
            )
        num_logits = 0 if part is _Cut.BEFORE else step.logits_rows.shape[0]
        logits = torch.empty(num_logits, self._vocab_size)
        self._native.forward(
            step.token_ids.data_ptr(),
            step.positions.data_ptr(),
            step.logits_rows.data_ptr(),
            step.query_start.data_ptr(),
            step.context_lens.data_ptr(),
            _address(step.places),
            num_rows,
            num_requests,
            num_logits,
            groups,
            self._parts,
            logits.data_ptr(),
            (int(part), half.layer, half.lanes.data_ptr(), half.num_rows, _address(rows)),
            steering,
            torch.get_num_threads(),
        )
        return logits

    def _see(self, views: Sequence[KVView]) -> None:
        """Addresses of the pool, which are the same from step to step."""
        from pagoda.kernels.native import pool_at

        if len(views) == len(self._views) and all(map(is_, views, self._views)):
            return
        for view in views:
            checks.check_view(view)
            checks.check_staged_dtype(view, torch.bfloat16)
            if (view.keys.shape[1], view.head_dim) != self._shape:
                raise KernelError(
                    f"the views must have {self._shape[0]} heads of {self._shape[1]}; got {list(view.keys.shape)}"
                )
        self._parts = [pool_at(view) for view in views]
        self._views = tuple(views)


def can_fuse(layers: Sequence[LayerTensors], embedding: Matrix, lm_head: Matrix, head_dim: int) -> bool:
    """Whether this build, this CPU and these shapes allow a FusedDecoder: matrices of BF16 or codes that fill tiles."""
    matrices = [lm_head, *(getattr(layer, field) for layer in layers for field in _MATRICES)]
    vectors = [v for layer in layers for v in (getattr(layer, field) for field in _VECTORS) if v is not None]
    return (
        has_matrix_tiles()
        and all(map(_fills_tiles, matrices))
        and _is_plain(embedding)
        and embedding.shape == lm_head.shape
        and all(map(_is_plain, vectors))
        and head_dim % 8 == 0
        and head_dim <= _MAX_HEAD_DIM
        and len({layer.q_norm is None for layer in layers}) == 1
    )


def _is_plain(tensor: Matrix) -> bool:
    if isinstance(tensor, CompactMatrix):
        return True
    values, dtype = (tensor.codes, torch.int8) if isinstance(tensor, Int8Matrix) else (tensor, torch.bfloat16)
    return values.is_cpu and values.dtype == dtype and values.is_contiguous()


def _fills_tiles(matrix: Matrix) -> bool:
    depth = 64 if isinstance(matrix, Int8Matrix) else 32
    num_out, num_in = matrix.shape
    return _is_plain(matrix) and num_out % 16 == 0 and num_in % depth == 0 and num_in <= _MAX_INPUTS


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
