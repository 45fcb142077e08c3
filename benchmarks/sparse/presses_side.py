"""The half that runs in kvpress's environment: conversations in, records out. Imports nothing of ours.

python presses_side.py WORK.json     a line of JSON on stdout for each conversation: its records, full KV's last
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kvpress
import torch
import transformers
from transformers import DynamicCache

# Ours -> theirs. Theirs averages attention over all later rows where H2O sums it; both drop by that.
PRESSES = {
    "streaming": lambda ratio: kvpress.StreamingLLMPress(ratio, n_sink=4),
    "h2o": kvpress.ObservedAttentionPress,
    "snapkv": lambda ratio: kvpress.SnapKVPress(ratio, window_size=64),
}


@torch.inference_mode()
def ask(model: Any, conversation: dict[str, Any], press: Any) -> list[torch.Tensor]:
    """Logits before every token of every answer: the prompt is compressed, the rest follows at its own positions."""
    tokens, start = torch.tensor(conversation["tokens"]), conversation["num_prompt"]
    cache = DynamicCache()
    observed = isinstance(press, kvpress.ObservedAttentionPress)
    with press(model) if press is not None else nullcontext():
        prompt = model(tokens[None, :start], past_key_values=cache, output_attentions=observed, logits_to_keep=1)
    positions = torch.arange(start, len(tokens))[None]
    rest = model(tokens[None, start:], past_key_values=cache, position_ids=positions)
    logits = torch.cat([prompt.logits[0, -1:], rest.logits[0]]).float()
    return [logits[first - start : last - start] for first, last in conversation["answers"]]


def compared(conversation: dict[str, Any], full: list[torch.Tensor], asked: list[torch.Tensor]) -> list[dict[str, Any]]:
    """Every answer, as benchmarks.quality.compare has it."""
    found = []
    for (first, last), p, q in zip(conversation["answers"], full, asked, strict=True):
        tokens = torch.tensor(conversation["tokens"][first:last])[:, None]
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        found.append(
            {
                "kl": (p.exp() * (p - q)).sum(-1).tolist(),
                "nll_full": (-p.gather(1, tokens)[:, 0]).tolist(),
                "nll": (-q.gather(1, tokens)[:, 0]).tolist(),
                "agrees": (p.argmax(-1) == q.argmax(-1)).tolist(),
                "right": (q.argmax(-1) == tokens[:, 0]).tolist(),
                "right_full": (p.argmax(-1) == tokens[:, 0]).tolist(),
            }
        )
    return found


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(work["threads"])
    load = transformers.AutoModelForCausalLM.from_pretrained
    # Only eager attention hands out the attention that ObservedAttentionPress looks at.
    model = load(work["model"], dtype=torch.bfloat16, attn_implementation="eager").eval()
    for index, conversation in work["conversations"].items():
        full = ask(model, conversation, None)

        def record(policy: str, fraction: float, asked: list[torch.Tensor]) -> dict[str, Any]:
            answers = compared(conversation, full, asked)  # noqa: B023 - called in this round of the loop alone
            return {"index": int(index), "policy": f"kvpress {policy}", "fraction": fraction, "answers": answers}  # noqa: B023

        found = [
            record(name, fraction, ask(model, conversation, press(1 - fraction)))
            for name, press in PRESSES.items()
            for fraction in work["fractions"]
        ]
        print(json.dumps([*found, record("full", 1.0, full)]), flush=True)


if __name__ == "__main__":
    main()
