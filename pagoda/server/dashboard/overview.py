"""GET /v1/kv/overview: the cache at one moment, for the dashboard and `pagoda top`. One look between two steps.

With the admin key: every tenant, and the texts of prefixes. Without: one's own prefixes, no texts, and of others'
blocks that they are there. Without API keys either: no salts, for all callers are one tenant.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pagoda import __version__
from pagoda.engine.admin import BlockMap, BlockUse, CacheAdmin, PrefixView, TenantUsage
from pagoda.server.admin import anonymous_report, pool_report, prefix_report
from pagoda.server.auth import is_admin
from pagoda.server.backend import Backend
from pagoda.server.dashboard.recent import Recent
from pagoda.server.openai.respond import Served
from pagoda.server.pressure import pressure_overview
from pagoda.server.tier_metrics import health_of

MAX_CELLS = 2048
MAX_PREFIXES = 240
MAX_COLORS = 7  # tenants that a map tells apart

_LETTERS = np.frombuffer(b".cpslo", dtype=np.uint8)  # of each BlockUse, and of what others use
_OTHERS_USE = len(BlockUse)


@dataclass(frozen=True, slots=True)
class _Look:
    blocks: BlockMap
    names: list[str]
    usage: list[TenantUsage]
    prefixes: list[PrefixView]


def overview_router(served: Served, recent: Recent, admin_key: str | None) -> APIRouter:
    """The route, without its prefix. It expects the tenant in `request.state.namespace`."""
    router, engine = APIRouter(), served.engine

    texts: dict[tuple[int, ...], str] = {}  # of the last look alone: what was purged since is kept nowhere

    def runs(look: _Look, own: str | None) -> list[dict[str, Any]]:
        nonlocal texts
        if own is None:
            known, decode = texts, partial(engine.tokenizer.decode, skip_special_tokens=False)
            texts = {each.head: known.get(each.head) or decode(each.head) for each in look.prefixes}
            return [prefix_report(each, texts[each.head]) for each in look.prefixes]
        if own == "":
            return [anonymous_report(each) for each in look.prefixes]
        return [prefix_report(each, None) for each in look.prefixes]

    @router.get("/kv/overview")
    async def overview(request: Request) -> Response:
        admin = is_admin(request, admin_key)
        own = None if admin else str(request.state.namespace)
        look = await engine.manage(lambda cache: _look(cache, own))
        stats = engine.stats()
        return JSONResponse(
            {
                "object": "kv.overview",
                "viewer": "admin" if admin else "tenant",
                "server": {
                    "model": served.model_names[0],
                    "version": __version__,
                    "started": round(recent.started, 3),
                    "block_size": stats.block_size,
                },
                "pool": {
                    **pool_report(stats),
                    "running": stats.num_running,
                    "waiting": stats.num_waiting,
                },
                "pressure": pressure_overview(stats.pressure),
                "map": _map_report(look, own),
                "tenants": [asdict(tenant) for tenant in look.usage],
                "tree": await asyncio.to_thread(runs, look, own),
                "tiers": _tiers_report(engine),
                **recent.report(),
            },
            headers={"Cache-Control": "no-store"},
        )

    return router


def _look(cache: CacheAdmin, own: str | None) -> _Look:
    usage = [tenant for tenant in cache.usage() if own in (None, tenant.tenant)]
    return _Look(cache.block_map(MAX_CELLS), cache.tenants(), usage, cache.outline(own, MAX_PREFIXES))


def _map_report(look: _Look, own: str | None) -> dict[str, Any]:
    """Cells as letters: what of, and whose, by the place of a tenant in `tenants`, where null is all others."""
    blocks = look.blocks
    by_size = sorted(look.usage, key=lambda tenant: -(tenant.num_held_blocks + tenant.num_cached_blocks))
    shown = [tenant.tenant for tenant in by_size[:MAX_COLORS]]
    place = np.full(len(look.names) + 1, len(shown), dtype=np.int64)  # the last one is of NO_LABEL
    for index, name in enumerate(shown):
        place[look.names.index(name)] = index
    owners = place[blocks.labels]
    used = blocks.uses != BlockUse.FREE
    uses = blocks.uses if own is None else np.where(used & (owners == len(shown)), _OTHERS_USE, blocks.uses)
    return {
        "blocks_per_cell": blocks.blocks_per_cell,
        "counts": {use.name.lower(): int(count) for use, count in zip(BlockUse, blocks.counts, strict=True)},
        "uses": _text(_LETTERS[uses]),
        "filled": None if blocks.blocks_per_cell == 1 else blocks.filled.tolist(),
        "owners": _text(np.where(used, ord("0") + owners, ord("."))),
        "tenants": [*shown, None],
    }


def _text(letters: npt.NDArray[np.integer]) -> str:
    return letters.astype(np.uint8).tobytes().decode("ascii")


def _tiers_report(engine: Backend) -> list[dict[str, Any]]:
    reports = engine.tiers()
    return [
        {
            **health,
            "written_records": tier.num_stored + tier.num_demoted,
            "loaded_records": tier.num_loaded,
            "restored_tokens": tier.num_restored_tokens,
            "skipped_records": tier.num_skipped,
            "lost_records": tier.num_lost,
            "slower_blocks": tier.num_slower,
            "late_blocks": tier.num_late,
            "failures": tier.failures,
        }
        for health, tier in zip(health_of(reports), reports, strict=True)
    ]
