"""The reference of every policy: a dense float32 model, one token at a time, that is told what each head may see.

It keeps the unrotated keys of all tokens, and masks. Which tokens a policy keeps is worked out here once more, on sets
of tokens, from the masked model's own attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers

Kept = list[list[list[int]]]
"""Of each layer and KV head, the tokens that are still there, rising."""


class Masked:
    """A Llama or Qwen2 of Transformers' weights."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model.model
        self.head = model.lm_head
        config = model.config
        self.num_layers, self.num_kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_heads
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * self.num_layers
        self.windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        self.num_tokens = 0
        shape = self.num_layers, 1024, self.num_kv_heads, self.head_dim
        self.keys, self.values = torch.empty(shape), torch.empty(shape)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None, None].double() * self.model.rotary_emb.inv_freq.double()
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos().float(), angles.sin().float()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    @torch.inference_mode()
    def step(self, token: int, kept: Kept, *, packed: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One more token, which sees what is kept and itself.

        Returns logits `[vocab]`, and per layer the attention of each KV head's queries, `[num_kv_heads, tokens]`.
        """
        hidden = self.model.embed_tokens(torch.tensor([token]))
        now = self.num_tokens
        self.num_tokens += 1
        mass = []
        for index, layer in enumerate(self.model.layers):
            normed = layer.input_layernorm(hidden)
            attention = layer.self_attn
            q = attention.q_proj(normed).view(self.num_kv_heads, self.group, self.head_dim)
            keys, values = self.keys[index], self.values[index]
            keys[now] = attention.k_proj(normed).view(self.num_kv_heads, self.head_dim)
            values[now] = attention.v_proj(normed).view(self.num_kv_heads, self.head_dim)
            out = torch.empty_like(q)
            total = torch.zeros(self.num_kv_heads, now + 1)
            for head in range(self.num_kv_heads):
                window = self.windows[index]
                if window is None:
                    seen = torch.tensor([*kept[index][head], now])
                    positions = torch.arange(len(seen)) if packed else seen
                else:
                    seen = positions = torch.arange(max(0, now - window + 1), now + 1)
                turned = self.rotate(keys[seen, head][:, None], positions)[:, 0]
                asked = self.rotate(q[head][None], positions[-1:])[0]
                weights = (asked @ turned.T / self.head_dim**0.5).softmax(-1)
                out[head] = weights @ values[seen, head]
                total[head, seen] = weights.sum(0)
            mass.append(total)
            hidden = hidden + attention.o_proj(out.view(1, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.head(self.model.norm(hidden))[0], mass


@dataclass
class Rule:
    """When to compress, what to look at, and which of the tokens stay, given what attention each had."""

    budget: int
    interval: int
    choose: Callable[[int, list[int], torch.Tensor], list[int]]
    observed: Callable[[int, int], bool] = lambda token, num_prompt: True
    packed: bool = False
    exact: bool = True
    layer_budget: Callable[[int], int] | None = None


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    kept: Kept = field(default_factory=list)
    num_compactions: int = 0


def generate(
    model: transformers.PreTrainedModel,
    prompt: list[int],
    count: int,
    rule: Rule,
    seen_from: int = 0,
    first: int | None = None,
) -> Outcome:
    """Greedy output under a rule.

    `seen_from`: the attention of tokens before it was not seen, as after a hit. `first`: so many tokens are computed
    before anything is dropped, then what is beyond the budget is; None: those of the prompt.
    """
    first = len(prompt) if first is None else first
    masked = Masked(model)
    heads = range(masked.num_kv_heads)
    kept: Kept = [[[] for _ in heads] for _ in range(masked.num_layers)]
    had = [torch.zeros(masked.num_kv_heads, len(prompt) + count) for _ in range(masked.num_layers)]
    full = [layer for layer, window in enumerate(masked.windows) if window is None]
    outcome, tokens = Outcome(), list(prompt)
    for now in range(len(prompt) + count - 1):
        entries = max(len(kept[layer][0]) for layer in full)
        ends = now == first and entries > rule.budget
        if ends or (entries >= rule.budget + rule.interval and (now > first or not rule.exact)):
            outcome.num_compactions += 1
            for layer in full:
                most = rule.budget if rule.layer_budget is None else rule.layer_budget(full.index(layer))
                for head in heads:
                    mine = kept[layer][head]
                    if len(mine) > most:
                        kept[layer][head] = sorted(rule.choose(most, mine, had[layer][head, mine]))
        logits, mass = masked.step(tokens[now], kept, packed=rule.packed)
        for layer in full:
            if now >= seen_from and rule.observed(now, len(prompt)):
                had[layer][:, : now + 1] += mass[layer]
            for head in heads:
                kept[layer][head].append(now)
        if now >= len(prompt) - 1:
            outcome.logprobs.append(logits.float().log_softmax(-1))
            tokens.append(int(logits.argmax()))
    outcome.tokens, outcome.kept = tokens[len(prompt) :], kept
    return outcome


def streaming(budget: int, interval: int, sinks: int = 4, *, exact: bool = True) -> Rule:
    def choose(count: int, mine: list[int], had: torch.Tensor) -> list[int]:
        return mine[:sinks] + mine[len(mine) - (count - sinks) :]

    return Rule(budget, interval, choose, packed=True, exact=exact)


def h2o(budget: int, interval: int, recent: int, sinks: int, *, exact: bool = True) -> Rule:
    def choose(count: int, mine: list[int], had: torch.Tensor) -> list[int]:
        sure = set(mine[:sinks]) | set(mine[len(mine) - recent :])
        others = sorted((t for t in mine if t not in sure), key=lambda t: (-float(had[mine.index(t)]), t))
        return [*sure, *others[: count - len(sure)]]

    return Rule(budget, interval, choose, exact=exact)


def snapkv(budget: int, window: int, kernel: int, layer_budget: Callable[[int], int] | None = None) -> Rule:
    def choose(count: int, mine: list[int], had: torch.Tensor) -> list[int]:
        reach = kernel // 2
        padded = [0.0] * reach + had.tolist() + [0.0] * reach
        votes = [sum(padded[i : i + kernel]) for i in range(len(mine))]
        before = sorted(range(len(mine) - window), key=lambda i: -votes[i])[: count - window]
        return [mine[i] for i in before] + mine[len(mine) - window :]

    def observed(token: int, num_prompt: int) -> bool:
        return num_prompt - window <= token < num_prompt

    return Rule(budget, sys.maxsize, choose, observed, layer_budget=layer_budget)
