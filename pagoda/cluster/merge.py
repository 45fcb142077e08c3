"""Merging: the answers of all replicas as one, for what one alone cannot tell, or must not do alone.

GET  /v1/usage          what tenants used       added up by tenant and key
GET  /v1/kv             blocks                  added up, by tenant
GET  /v1/kv/overview    the whole look          added up; levels and signals: the highest; maps side by side
GET  /v1/caches         named caches            ┐ all of them, each with its replica's number,
GET  /v1/kv/leases      leases                  │ which `X-Pagoda-Replica` asks for
GET  /v1/kv/tree        cached prefixes         ┘
POST /v1/kv/purge       forget                  done by all; added up
POST /v1/kv/clear       evict                   likewise
/v1/caches/ID, ...      what one of them keeps  from the one that has it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

Answer = dict[str, Any]
Answers = Mapping[int, Answer]  # by the replica's number; at least one

_MAX_COLORS = 7  # tenants that a map tells apart
_FINE = "ok"  # the state of a tier that works


def added(one: Any, other: Any) -> Any:
    """Two answers as one: numbers are added, tables entry by entry; of anything else, and of nothing, the first."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: added(one.get(name), other.get(name)) for name in {**one, **other}}
    are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (one, other))
    return one + other if are_numbers else one


def _sum(answers: Iterable[Any]) -> Any:
    return reduce(added, answers)


def _by(rows: Iterable[Answer], *names: str) -> list[Answer]:
    """Rows that are of the same added up, in the order of their names."""
    found: dict[tuple[Any, ...], list[Answer]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return [_sum(found[key]) for key in sorted(found)]


def _rows(answers: Answers, name: str) -> list[Answer]:
    return [row for answer in answers.values() for row in answer[name]]


def _listed(answers: Answers) -> Answer:
    """One list of all, each entry with the number of its replica."""
    data = [{**row, "replica": number} for number, answer in answers.items() for row in answer["data"]]
    more = {"has_more": any(each["has_more"] for each in answers.values())} if "has_more" in _first(answers) else {}
    return {**_first(answers), "data": data, **more}


def _usage(answers: Answers) -> Answer:
    return {
        **_first(answers),
        "since": min(each["since"] for each in answers.values()),
        "data": _by(_rows(answers, "data"), "tenant", "key"),
        "total": _sum(each["total"] for each in answers.values()),
    }


def _kv(answers: Answers) -> Answer:
    blocks = _sum(each["blocks"] for each in answers.values())
    return {**_first(answers), "blocks": blocks, "tenants": _by(_rows(answers, "tenants"), "tenant")}


def _overview(answers: Answers) -> Answer:
    looks = list(answers.values())
    misses = _by(_rows(answers, "misses"), "reason")
    return {
        **_first(answers),
        "server": {**looks[0]["server"], "started": max(each["server"]["started"] for each in looks)},
        "pool": _sum(each["pool"] for each in looks),
        "pressure": _pressure([each["pressure"] for each in looks]),
        "map": _map([each["map"] for each in looks]),
        "tenants": _by(_rows(answers, "tenants"), "tenant"),
        "tree": [{**row, "replica": number} for number, each in answers.items() for row in each["tree"]],
        "tiers": _tiers(_rows(answers, "tiers")),
        "requests": _sum(each["requests"] for each in looks),
        "ttft": {kind: _quantiles([each["ttft"][kind] for each in looks]) for kind in ("cold", "warm")},
        "misses": sorted(misses, key=lambda each: -each["requests"]),
    }


def _pressure(each: Sequence[Answer]) -> Answer:
    highest = max(each, key=lambda one: one["level"])
    signals = {name: max(one["signals"][name] for one in each) for name in highest["signals"]}
    limits = [one["memory_limit_bytes"] for one in each]
    return {
        **_sum(each),
        "level": highest["level"],
        "name": highest["name"],
        "memory_level": max(one["memory_level"] for one in each),
        "signals": signals,
        "memory_limit_bytes": None if None in limits else sum(limits),
    }


def _map(maps: Sequence[Answer]) -> Answer:
    """Maps side by side. Colours are of one replica's tenants each: here they are of all."""
    names = list(dict.fromkeys(name for one in maps for name in one["tenants"] if name is not None))[:_MAX_COLORS]
    owners = ""
    for one in maps:
        place = [names.index(name) if name in names else len(names) for name in one["tenants"]]
        owners += one["owners"].translate({ord(str(old)): str(new) for old, new in enumerate(place)})
    filled = [one["filled"] for one in maps]
    return {
        **maps[0],
        "counts": _sum(one["counts"] for one in maps),
        "uses": "".join(one["uses"] for one in maps),
        "filled": None if None in filled else [count for part in filled for count in part],
        "owners": owners,
        "tenants": [*names, None],
    }


def _tiers(rows: Sequence[Answer]) -> list[Answer]:
    """Tiers by name. A tier that replicas share is counted as often as they report it."""
    worst: dict[str, str] = {}
    for row in rows:
        if worst.get(row["name"], _FINE) == _FINE:
            worst[row["name"]] = row["state"]
    return [{**tier, "state": worst[tier["name"]]} for tier in _by(rows, "name")]


def _quantiles(each: Sequence[Answer]) -> Answer:
    """The replicas' quantiles, averaged by how many requests each is of."""
    count = sum(one["count"] for one in each)
    if not count:
        return dict(each[0])
    known = [one for one in each if one["count"]]
    means = {name: sum(one[name] * one["count"] for one in known) / count for name in ("p50_s", "p95_s")}
    return {"count": count, **means}


def _first(answers: Answers) -> Answer:
    return next(iter(answers.values()))


def _done(answers: Answers) -> Answer:
    done: Answer = _sum(answers.values())
    return done


Merge = Callable[[Answers], Answer]

_MERGES: Mapping[tuple[str, str], Merge] = {
    ("GET", "/v1/usage"): _usage,
    ("GET", "/v1/caches"): _listed,
    ("GET", "/v1/kv"): _kv,
    ("GET", "/v1/kv/leases"): _listed,
    ("GET", "/v1/kv/tree"): _listed,
    ("GET", "/v1/kv/overview"): _overview,
    ("POST", "/v1/kv/purge"): _done,
    ("POST", "/v1/kv/clear"): _done,
}
_KEPT = ("/v1/caches/", "/v1/responses/", "/v1/kv/leases/", "/v1/kv/explain/")  # and an id that only one of them knows


def merge_for(method: str, path: str) -> Merge | None:
    """How answers of all replicas to a request become one; None: it is for one of them.

    It raises KeyError, TypeError or AttributeError for what are no answers of Pagoda's.
    """
    if (merge := _MERGES.get((method, path))) is not None:
        return merge
    return _first if path.startswith(_KEPT) and method != "POST" else None
