"""Compressor: level 3 of the ladder. Running contexts that allow it are made smaller: the longest first, one a step.

    running   ████████████████ no kv_policy        stays as it is
              ████████████     under_pressure      ──> ███      its blocks are the pool's again
              ██████           under_pressure          its turn is in the next step, if the level lasts

A request that was compressed once goes on under its policy to its end: what was dropped is gone. Only samples that are
generating are: a prompt is computed whole, as it would be without pressure.
"""

from __future__ import annotations

from pagoda.engine.request import Sample
from pagoda.engine.scheduler import Scheduler
from pagoda.engine.sparse.sparsity import Sparsity
from pagoda.sparse.dropping import Dropping
from pagoda.sparse.spec import begins_late


class Compressor:
    """Shrinks what the scheduler runs.

    Attributes:
        num_compressed: contexts that were made smaller.
    """

    def __init__(self, scheduler: Scheduler, sparsity: Sparsity) -> None:
        self.num_compressed = 0
        self._scheduler = scheduler
        self._sparsity = sparsity

    def shrink_longest(self) -> None:
        """Make the longest running context smaller of those that allow it and are larger than they must be."""
        for sample in sorted(self._scheduler.running, key=_num_entries, reverse=True):
            if self._shrink(sample):
                self.num_compressed += 1
                return

    def _shrink(self, sample: Sample) -> bool:
        """Whether that dropped anything. Where the pool has no room to copy what stays, it is tried again later."""
        request = sample.request
        if request.is_pressed or request.is_internal:
            return False
        policy = self._sparsity.yielded(request.params.wished_policy, request.scope.namespace)
        if not isinstance(policy, Dropping) or not policy.compresses_output:
            return False
        if sample.sparse is None and not begins_late(policy):
            return False
        if _num_entries(sample) < policy.num_tokens + policy.num_between:  # what it does not hold more than anyway
            return False
        before = _num_compactions(sample)
        self._sparsity.compress(sample, policy)
        request.is_pressed = _num_compactions(sample) > before
        return request.is_pressed


def _num_compactions(sample: Sample) -> int:
    return 0 if sample.sparse is None else sample.sparse.report.num_compactions


def _num_entries(sample: Sample) -> int:
    lease = sample.running_lease
    return lease.num_computed_tokens - lease.tables[0].num_dropped
