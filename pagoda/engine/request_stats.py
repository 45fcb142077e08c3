"""What observers are told of a request at its end."""

from __future__ import annotations

import time
from itertools import pairwise

from pagoda.engine.outputs import FinishReason, RequestStats
from pagoda.engine.request import Request


def stats_of(request: Request) -> RequestStats:
    """The figures of a request that ends now. Mutates nothing."""
    times = request.token_times
    now = time.perf_counter()
    reasons = [each.finish_reason or FinishReason.ABORT for each in request.samples]
    reason, num_restored_tokens = None, 0
    if request.first_lease is not None and request.explanation is not None:
        report = request.first_lease.restore_report
        reason = request.explanation.with_restore(report).reason
        if report is not None:
            restored = report.num_restored_blocks * request.first_lease.tables[0].block_size
            num_restored_tokens = min(restored, request.num_hit_tokens)
    return RequestStats(
        request_id=request.request_id,
        prompt=request.prompt,
        scope=request.scope,
        finish_reason=FinishReason.ABORT if FinishReason.ABORT in reasons else reasons[0],
        usage=request.usage,
        queue_s=(request.admitted_at or now) - request.arrived_at,
        ttft_s=times[0] - request.arrived_at if times else None,
        itl_s=tuple(later - earlier for earlier, later in pairwise(times)),
        e2e_s=now - request.arrived_at,
        miss_reason=reason,
        num_restored_tokens=num_restored_tokens,
        num_blends_raised=request.blend.num_raised if request.blend else 0,
        num_blends_whole=request.blend.num_whole if request.blend else 0,
    )
