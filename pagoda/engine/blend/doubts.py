"""Doubts: a prompt whose blend leaves the model unsure of its first token is computed whole instead.

    blended prompt ──> logits ──> likeliest token's probability ──┬── min_confidence or more: it goes on
                                                                  └── less: back to the queue, without passages

How much the KV deviates does not tell which prompts lose by it; how sure the model still is does (docs/blend.md). It
costs a second prefill, so it is for the few.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagoda.engine.scheduler import Scheduler
from pagoda.engine.step_plan import Rows


class Doubts:
    """Sends prompts back to `scheduler`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def settle(self, plan: Sequence[Rows], logits: torch.Tensor) -> tuple[Sequence[Rows], torch.Tensor]:
        """What is left of a computed step, and its logits, once doubted prompts are back in the queue."""
        if all(rows.sample.request.blend is None for rows in plan):
            return plan, logits
        wanted = [rows for rows in plan if rows.needs_logits]
        doubted = [row for row, rows in enumerate(wanted) if _is_doubted(rows, logits[row])]
        if not doubted:
            return plan, logits
        again = {wanted[row].sample for row in doubted}
        for sample in again:
            assert sample.request.blend is not None, "only a blend is doubted"
            sample.request.blend.abandon(sample.running_lease.num_hit_tokens)
            self._scheduler.restart(sample)
        kept = [row for row in range(len(wanted)) if row not in doubted]
        return [rows for rows in plan if rows.sample not in again], logits[kept]


def _is_doubted(rows: Rows, logits: torch.Tensor) -> bool:
    """Whether an answer begins with these logits, passages have a part in them, and they are not sure enough."""
    request = rows.sample.request
    blend = request.blend
    if blend is None or not blend.num_blended or not request.max_tokens or rows.stop != request.prompt.size:
        return False
    return float(logits.softmax(-1).max()) < blend.spec.min_confidence
