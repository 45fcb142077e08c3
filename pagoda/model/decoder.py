"""Decoder: the layers of Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3 over a paged KV pool.

    token_ids ─> embed ─┬─> norm ─> qkv ─> rotate, write KV ─> paged attention ─> o ─┬─> norm ─> gate,up ─> down ─┐
                        └───────────────────────── residual ─────────────────────────┴────────────────────────────┴─>
                                                            x num_layers, then norm ─> lm_head, for the rows asked for

The families differ in optional tensors (biases, norms of queries and keys, norms after o and down), in constants, and
in each layer's window and frequencies, so they are one class. The residual stream is kept apart from a layer's input
(`hidden`, `residual`), so that each addition is fused with the norm after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagoda.kernels import (
    FusedDecoder,
    KVView,
    Matrix,
    SharedPrefix,
    add_rms_norm,
    can_fuse,
    find_shared_prefixes,
    gelu_mul,
    linear,
    paged_attention,
    rms_norm,
    rope_write_kv,
    silu_mul,
)
from pagoda.model.batch import ForwardBatch
from pagoda.model.hooks import LayerHook, LayerInputHook, Narrowing, SteeringHook
from pagoda.model.lora import AdapterRows
from pagoda.model.rope import RopeSpec
from pagoda.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors. Matrices are `[out, in]`; queries, keys and values share one, and so do gate and up."""

    input_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Matrix
    output_bias: torch.Tensor | None
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Matrix
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None
    mlp_out_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All tensors of a model. With tied embeddings `lm_head` and `embedding` are the same matrix."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: Matrix


class Decoder:
    """A model that computes logits and leaves its KV in the caller's pool. Stateless between calls."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self.weights = weights
        self.device = weights.final_norm.device
        self.dtype = weights.final_norm.dtype
        tables = {rope: _rotations(spec, rope, self.device) for rope in set(spec.ropes)}
        self._rotations = [tables[rope] for rope in spec.ropes]
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.dtype, device=self.device)
        self._multiply_gate = {"silu": silu_mul, "gelu_tanh": gelu_mul}[spec.activation]
        self._can_fuse = (
            len(tables) == 1
            and not spec.sandwich_norms
            and can_fuse(weights.layers, weights.embedding, weights.lm_head, spec.head_dim)
        )
        self._fused: dict[tuple[int, ...], FusedDecoder] = {}

    @property
    def rotations(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's cosines and sines by position, float32 `[max_context, head_dim / 2]`; layers share tables."""
        return self._rotations

    def forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[KVView],
        group_of_layer: Sequence[int],
        hook: LayerHook | None = None,
        adapters: AdapterRows | None = None,
        narrowing: Narrowing | None = None,
    ) -> torch.Tensor:
        """Compute one step. Writes the K and V of every row into `kv` at the batch's slots.

        Args:
            batch: the rows, on the model's device.
            kv: one view of the pool per layer.
            group_of_layer: which of the batch's block tables and slot mappings each layer uses.
            hook: sees and steers each layer's attention.
            adapters: change what the layers compute for some of the rows.
            narrowing: drops rows at a layer; not together with a hook, which counts on them.

        Returns:
            float32 `[num_logits, vocab_size]`, in the order of `batch.logits_rows`.
        """
        if self._can_fuse and hook is None and adapters is None and narrowing is None:
            # Nothing of torch's computes here, and entering its inference mode would take a hundredth of a short step.
            shared = self._shared_prefixes(batch, kv[0])
            return self._fused_for(tuple(group_of_layer)).forward(batch, kv, shared)
        return self._forward(batch, kv, group_of_layer, hook, adapters, narrowing)

    @torch.inference_mode()
    def _forward(
        self,
        batch: ForwardBatch,
        kv: Sequence[KVView],
        group_of_layer: Sequence[int],
        hook: LayerHook | None,
        adapters: AdapterRows | None,
        narrowing: Narrowing | None,
    ) -> torch.Tensor:
        """See `forward`."""
        spec = self.spec
        shared = self._shared_prefixes(batch, kv[0])
        can_fuse = self._can_fuse and adapters is None
        if can_fuse and hook is None and narrowing is not None:
            fused = self._fused_for(tuple(group_of_layer))
            half = fused.begin(batch, kv, shared, narrowing.layer)
            left = narrowing.narrow(batch)
            return fused.finish(left.batch, kv, self._shared_prefixes(left.batch, kv[0]), half, left.rows)
        if can_fuse and isinstance(hook, SteeringHook) and (steering := hook.steering(batch)) is not None:
            logits, mass = self._fused_for(tuple(group_of_layer)).steered(batch, kv, shared, steering)
            hook.after_layers(batch, mass)
            return logits
        hidden = self._embed(batch.token_ids) * self._embedding_scale
        residual = torch.zeros_like(hidden)
        input_hook = hook if isinstance(hook, LayerInputHook) else None
        for index, layer in enumerate(self.weights.layers):
            normed, residual = add_rms_norm(hidden, residual, layer.input_norm, spec.norm_eps)
            if input_hook:
                input_hook.before_layer(index, residual, batch)
            q, k, v = self._project(index, normed, adapters)
            group = group_of_layer[index]
            used = hook.before_attention(index, q, k, v, batch) if hook else batch
            slots, view = used.slot_mapping[group], kv[index]
            q = rope_write_kv(q, k, v, *self._rotations[index], used.positions, view, slots)
            if narrowing is not None and index == narrowing.layer:
                left = narrowing.narrow(batch)
                if not len(left.rows):
                    return torch.empty(0, spec.vocab_size, device=self.device)
                used = batch = left.batch
                q, residual = q[left.rows], residual[left.rows]
                shared = self._shared_prefixes(batch, view)
                adapters = adapters.select(left.rows) if adapters else None
            attention = paged_attention(
                q,
                view,
                used.block_tables[group],
                used.query_start,
                used.context_lens,
                scale=spec.attention_scale,
                window=spec.windows[index],
                softcap=spec.attention_softcap,
                need_mass=hook is not None and hook.needs_mass,
                shared_prefixes=shared[group] if used is batch and spec.windows[index] is None else (),
                places=used.places,
            )
            attended = attention.out
            if hook:
                hook.after_attention(index, batch, attention)
            if index == spec.num_layers - 1:
                # Nothing reads the other rows any more.
                attended, residual = attended[batch.logits_rows], residual[batch.logits_rows]
                adapters = adapters.select(batch.logits_rows) if adapters else None
            attended = attended.flatten(1)
            hidden = linear(attended, layer.output, layer.output_bias)
            if adapters:
                adapters.add(hidden, attended, index, "output")
            if layer.attention_out_norm is not None:
                hidden = rms_norm(hidden, layer.attention_out_norm, spec.norm_eps)
            normed, residual = add_rms_norm(hidden, residual, layer.mlp_norm, spec.norm_eps)
            gate_up = linear(normed, layer.gate_up, layer.gate_up_bias)
            if adapters:
                adapters.add(gate_up, normed, index, "gate_up")
            gated = self._multiply_gate(gate_up)
            hidden = linear(gated, layer.down, layer.down_bias)
            if adapters:
                adapters.add(hidden, gated, index, "down")
            if layer.mlp_out_norm is not None:
                hidden = rms_norm(hidden, layer.mlp_out_norm, spec.norm_eps)
        normed, _ = add_rms_norm(hidden, residual, self.weights.final_norm, spec.norm_eps)
        logits = linear(normed, self.weights.lm_head).float()
        if spec.logit_softcap is None:
            return logits
        return logits.div_(spec.logit_softcap).tanh_().mul_(spec.logit_softcap)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedding = self.weights.embedding
        return embedding[token_ids] if isinstance(embedding, torch.Tensor) else embedding.rows(token_ids).to(self.dtype)

    def _fused_for(self, group_of_layer: tuple[int, ...]) -> FusedDecoder:
        """All layers in one call, made at the first step: which layers share block tables is the caller's to say."""
        if group_of_layer not in self._fused:
            spec, weights = self.spec, self.weights
            cos, sin = self._rotations[0]
            self._fused[group_of_layer] = FusedDecoder(
                weights.layers,
                spec.windows,
                group_of_layer,
                embedding=weights.embedding,
                final_norm=weights.final_norm,
                lm_head=weights.lm_head,
                cos=cos,
                sin=sin,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                eps=spec.norm_eps,
                scale=spec.attention_scale,
            )
        return self._fused[group_of_layer]

    def release(self) -> None:
        """Let go of the native decoder and its scratch memory; the next step would make it anew."""
        self._fused.clear()

    def _shared_prefixes(self, batch: ForwardBatch, view: KVView) -> list[tuple[SharedPrefix, ...]]:
        """Per layer group, the requests that attend to common blocks together."""
        if self.device.type != "cpu":
            return [()] * len(batch.block_tables)
        block_size = view.keys.shape[2]
        return [
            find_shared_prefixes(table, batch.query_start, batch.context_lens, block_size, batch.places)
            for table in batch.block_tables
        ]

    def queries(self, layer: int, residual: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The rotated queries `[rows, num_heads, head_dim]` that a layer makes of its input, adapters left out.

        Args:
            residual: the residual stream `[rows, hidden_size]`, of this layer or, as a forecast, of an earlier one.
            positions: int64 `[rows]`.
        """
        spec, weights = self.spec, self.weights.layers[layer]
        size = spec.num_heads * spec.head_dim
        bias = None if weights.qkv_bias is None else weights.qkv_bias[:size]
        normed = rms_norm(residual, weights.input_norm, spec.norm_eps)
        q = linear(normed, weights.qkv[:size], bias).view(len(normed), -1, spec.head_dim)
        if weights.q_norm is not None:
            q = rms_norm(q, weights.q_norm, spec.norm_eps)
        return self.rotated(layer, q, positions)

    def rotated(self, layer: int, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A layer's queries `[rows, num_heads, head_dim]`, rotated by their positions, int64 `[rows]`; a new tensor."""
        cos, sin = (table[positions, None] for table in self._rotations[layer])
        first, second = queries.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(queries.dtype)

    def _project(
        self, index: int, x: torch.Tensor, adapters: AdapterRows | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A layer's queries, keys and values, each `[rows, heads, head_dim]`."""
        spec, layer = self.spec, self.weights.layers[index]
        qkv = linear(x, layer.qkv, layer.qkv_bias)
        if adapters:
            adapters.add(qkv, x, index, "qkv")
        qkv = qkv.view(len(x), -1, spec.head_dim)
        first_key, first_value = spec.num_heads, spec.num_heads + spec.num_kv_heads
        q, k, v = qkv[:, :first_key], qkv[:, first_key:first_value], qkv[:, first_value:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, spec.norm_eps)
            k = rms_norm(k, layer.k_norm, spec.norm_eps)
        return q, k, v


def _rotations(spec: ModelSpec, rope: RopeSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position, float32 `[max_context, head_dim / 2]` each."""
    positions = torch.arange(spec.max_context, dtype=torch.float32)
    angles = torch.outer(positions, rope.frequencies(spec.head_dim))
    return (angles.cos() * rope.attention_factor).to(device), (angles.sin() * rope.attention_factor).to(device)
