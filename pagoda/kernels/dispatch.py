"""The public kernels: check the arguments, then run the backend that was chosen at import.

`PAGODA_KERNELS=reference|native` forces a backend. Otherwise it is the native extension where it was built, and the
reference, with one warning, where it was not. Tensors that are not in CPU memory always go to the reference.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from types import ModuleType

import torch

from pagoda.errors import ConfigError
from pagoda.kernels import checks, reference
from pagoda.kernels.matrices import Matrix
from pagoda.kernels.recall import Recall
from pagoda.kernels.types import AttentionOutput, KVView, SharedPrefix


def _choose_backend() -> ModuleType:
    wanted = os.environ.get("PAGODA_KERNELS", "")
    if wanted not in ("", "native", "reference"):
        raise ConfigError(f"PAGODA_KERNELS={wanted!r}; known: native, reference")
    if wanted == "reference":
        return reference
    try:
        import pagoda.kernels.native as native
    except ImportError as error:
        if wanted == "native":
            raise ConfigError(f"PAGODA_KERNELS=native, but the extension does not load: {error}") from error
        warnings.warn(
            f"Pagoda's native kernels are missing ({error}); the slow reference kernels are used. "
            "Reinstall with a C++20 compiler, or set PAGODA_KERNELS=reference to silence this.",
            RuntimeWarning,
            stacklevel=2,
        )
        return reference
    return native


_backend = _choose_backend()


def backend_name() -> str:
    """`native` or `reference`: what runs for tensors in CPU memory."""
    return _backend.__name__.rpartition(".")[2]


def has_matrix_tiles() -> bool:
    """Whether the kernels run on matrix tiles here (Intel AMX), which also multiply a CompactMatrix as it lies."""
    if backend_name() != "native":
        return False
    import pagoda._native as _native

    isa: str = _native.isa()
    return isa == "amx"


def _backend_for(tensor: torch.Tensor) -> ModuleType:
    return _backend if tensor.is_cpu else reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row by its root mean square and multiply by `weight` (Zhang and Sennrich, arXiv:1910.07467).

    Args:
        x: `[rows, dim]` or `[rows, heads, dim]`; only the last dimension must be contiguous.
        weight: `[dim]`, in the dtype of `x`.
        eps: added to the mean square.

    Returns:
        A new contiguous tensor like `x`; the arithmetic is float32, rounded once.

    Raises:
        KernelError: wrong shapes, dtypes or strides.
    """
    checks.check_norm(x, weight)
    result: torch.Tensor = _backend_for(x).rms_norm(x, weight, eps)
    return result


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` to the residual stream, and normalise the sum as `rms_norm` does.

    Args:
        x: `[rows, dim]`.
        residual: like `x`; not changed.
        weight: `[dim]`.
        eps: added to the mean square.

    Returns:
        The normalised rows and the new residual, both new tensors. The norm sees the rounded residual.

    Raises:
        KernelError: wrong shapes, dtypes or strides.
    """
    checks.check_norm(x, weight, residual)
    result: tuple[torch.Tensor, torch.Tensor] = _backend_for(x).add_rms_norm(x, residual, weight, eps)
    return result


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's product: `silu(gate) * up` (Shazeer, arXiv:2002.05202).

    Args:
        gate_up: `[rows, 2 * inter]`, the gate first.

    Returns:
        A new `[rows, inter]`.

    Raises:
        KernelError: wrong shape, dtype or strides.
    """
    checks.check_gate_up(gate_up)
    result: torch.Tensor = _backend_for(gate_up).silu_mul(gate_up)
    return result


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """GEGLU's product: `gelu(gate) * up`, with Gemma's tanh approximation of GELU (Shazeer, arXiv:2002.05202).

    Args:
        gate_up: `[rows, 2 * inter]`, the gate first.

    Returns:
        A new `[rows, inter]`.

    Raises:
        KernelError: wrong shape, dtype or strides.
    """
    checks.check_gate_up(gate_up)
    result: torch.Tensor = _backend_for(gate_up).gelu_mul(gate_up)
    return result


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`; few BF16 rows take a kernel that reads the weights at memory speed.

    Args:
        x: `[rows, in]`.
        weight: `[out, in]`, in the dtype of `x`, or as int8 codes, or compact with an `x` of bfloat16.
        bias: `[out]`, or None.

    Returns:
        A new `[rows, out]`.

    Raises:
        KernelError: wrong shapes or mixed dtypes.
    """
    checks.check_linear(x, weight, bias)
    result: torch.Tensor = _backend_for(x).linear(x, weight, bias)
    return result


def argmax(values: torch.Tensor) -> torch.Tensor:
    """The index of each row's largest value, the first one if several are.

    Args:
        values: float32 `[rows, width]`, at least one column.

    Returns:
        A new int64 `[rows]`; -1 for a row that has a NaN, or whose largest value is infinite.

    Raises:
        KernelError: another shape or dtype, or gaps between rows.
    """
    checks.check_values(values)
    result: torch.Tensor = _backend_for(values).argmax(values)
    return result


def write_kv(view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Copy each row's keys and values into its slot, quantized as the view is. Mutates the pool, only those slots.

    With staged blocks (see KVView) rows go to the staged copy of their block, and a block whose last slot is among them
    is quantized into the pool: its other slots must have been written before, or be written now. The first tokens of
    sequences (`Staging.firsts`) are the caller's to write, through a view of their own.

    Args:
        view: one layer of the pool.
        k: `[num_rows, num_kv_heads, head_dim]`, rows and heads strided as they like.
        v: like `k`.
        slot_mapping: int64 `[num_rows]`: `block_id * block_size + offset`, all different.

    Raises:
        KernelError: wrong shapes, dtypes or strides, or a slot outside the pool or the staged blocks; then nothing is
            written.
    """
    checks.check_write(view, k, v, slot_mapping)
    _backend_for(k).write_kv(view, k, v, slot_mapping)


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    view: KVView,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys by their positions, and write keys and values to their slots (RoPE, arXiv:2104.09864).

    Dimension `i` of a head is paired with `i + head_dim / 2` (the rotate-half order of Llama and GPT-NeoX checkpoints).
    Mutates `q` (rotated in place) and the pool; `k` and `v` keep their values.

    Args:
        q: `[num_rows, num_heads, head_dim]`.
        k: `[num_rows, num_kv_heads, head_dim]`.
        v: like `k`.
        cos: float32 `[max_pos, head_dim / 2]`, or `[max_pos, head_dim]` of which the first half is used.
        sin: like `cos`.
        positions: int64 `[num_rows]`.
        view: one layer of the pool.
        slot_mapping: int64 `[num_rows]`.

    Returns:
        `q`.

    Raises:
        KernelError: as `write_kv`, or a position outside the tables; then nothing is written.
    """
    checks.check_write(view, k, v, slot_mapping)
    checks.check_rope(q, k, cos, sin, positions)
    result: torch.Tensor = _backend_for(q).rope_write_kv(q, k, v, cos, sin, positions, view, slot_mapping)
    return result


def turn_kv(view: KVView, sources: torch.Tensor, targets: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Copy entries from slots to others, the keys turned on by an angle each. Mutates the pool, at the targets.

    Args:
        view: one layer of the pool, not quantized.
        sources: int64 `[rows]`, slots.
        targets: int64 `[rows]`, all different; none is a source.
        cos: float32 `[rows, head_dim / 2]`, contiguous; dimension `i` is paired with `i + head_dim / 2`.
        sin: like `cos`.

    Raises:
        KernelError: wrong shapes or dtypes, a quantized view, or a slot outside the pool; then nothing is written.
    """
    checks.check_turn(view, sources, targets, cos, sin)
    _backend_for(view.keys).turn_kv(view, sources, targets, cos, sin)


def paged_attention(
    q: torch.Tensor,
    view: KVView,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    need_lse: bool = False,
    need_mass: bool = False,
    shared_prefixes: Sequence[SharedPrefix] = (),
    places: torch.Tensor | None = None,
) -> AttentionOutput:
    """Causal attention of ragged rows over a paged KV pool, one softmax pass (PagedAttention, arXiv:2309.06180).

    Row `i` of a request with `n` rows sees KV entries `j <= context_len - n + i`, and with a window also
    `j > context_len - n + i - window`. Block table entries of blocks that no row of the request sees are never used.
    Keys and values are what the view's codes mean; with staged blocks (see KVView) a row reads those of its own block
    from the staged copy and those of all blocks before from the pool, but for the first token of the sequence. What is
    not finite makes NaN of the rows that see it, and of no others of quantized views.

    Args:
        q: `[num_rows, num_heads, head_dim]`; query head `h` reads KV head `h // (num_heads / num_kv_heads)`.
        view: one layer of the pool, the new rows' entries already written.
        block_table: int32 `[num_requests, max_blocks]`.
        query_start: int32 `[num_requests + 1]`, row offsets.
        context_lens: int32 `[num_requests]`, KV entries of each request, the new rows included.
        scale: multiplies the scores; usually `head_dim ** -0.5`.
        window: how many entries each row sees at most.
        softcap: scores become `softcap * tanh(score / softcap)`.
        need_lse: also return each row's log-sum-exp.
        need_mass: also return the attention mass of each KV entry (what H2O, arXiv:2306.14048, keeps by).
        shared_prefixes: requests that attend to their common leading blocks together, which reads those once (see
            `find_shared_prefixes`); in order of requests, without overlap. The result is the same without them.
        places: int32 `[num_rows]`, where some of a request's rows are left out: the KV entry of each row, rising within
            a request. Row `i` then sees entries `j <= places[i]`, and with a window also `j > places[i] - window`. Of
            staged blocks, those from a request's first row on must all be staged.

    Returns:
        New tensors; see AttentionOutput.

    Raises:
        KernelError: wrong shapes, dtypes, strides, lengths, places or block ids, or prefixes that are not shared, that
            reach into the rows, or that come with a window.
    """
    checks.check_attention(q, view, block_table, query_start, context_lens, window, softcap, places)
    result: AttentionOutput = _backend_for(q).paged_attention(
        q,
        view,
        block_table,
        query_start,
        context_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        need_lse=need_lse,
        need_mass=need_mass,
        shared_prefixes=shared_prefixes,
        places=places,
    )
    return result


def recall_entries(queries: torch.Tensor, recall: Recall) -> None:
    """Copy what one row's queries want of a request's KV from host memory into its places in the pool.

    For each KV head the units that score best by their sketches come over those in a place that score worst, as long as
    they score better by more than `stay` and within `alpha` of the best: InfiniGen's choice, arXiv:2406.19707, of what
    is not there yet.
    Scores are float32. Mutates the pool, `resident` and `fetched`, as Recall says.

    Args:
        queries: `[num_heads, head_dim]`, rotated.
        recall: what is wanted, and what there is.

    Raises:
        KernelError: wrong shapes, dtypes or strides, or ids out of range; then nothing is written.
    """
    recall.check_queries(queries)
    _backend_for(recall.view.keys).recall_entries(queries, recall)
