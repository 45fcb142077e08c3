"""Token hit rates of eviction policies on request traces, between LRU and Belady's bound.

    python benchmarks/eviction.py conversation_trace.jsonl synthetic_trace.jsonl
    python benchmarks/eviction.py --format sessions --share 10 25 50 FOLDER_OF_SESSIONS

A capacity is a share of the trace's different blocks. "gap" is how much of the distance from LRU to Belady's bound a
policy closes, averaged over the capacities at which that is at least a point. A request is served at once unless
--prefill and --decode say how long it holds its blocks. Sessions start --interval seconds apart and keep their own
pace. --skip leaves out the first seconds of the trace, --until what comes after.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from pagoda.kv.eviction import POLICIES, make_policy
from pagoda.plan.belady import belady_hits, count_blocks
from pagoda.plan.replay import Replay, Report, Service
from pagoda.plan.traces import TraceRequest, overlap, read_bailian, read_mooncake, read_session


def main() -> None:
    args = arguments()
    service = Service(args.prefill, args.decode)
    results = []
    for trace in args.traces:
        requests = list(cut(reader(args.format, args.interval)(trace), args.skip, args.until))
        total = count_blocks(requests)
        print(f"\n{trace.stem}: {len(requests)} requests, {total} different blocks")
        print(f"{'':10}" + "".join(f"{share:>8g}%" for share in args.share) + f"{'gap':>9}{'requests/min':>14}")
        capacities = [max(1, int(total * share / 100)) for share in args.share]
        bounds = [bound(requests, capacity) for capacity in capacities]
        floor: list[float] = []
        for name in ["lru", *(name for name in args.policies if name != "lru")]:
            start = time.process_time()
            reports = [Replay(capacity, make_policy(name), service).run(requests) for capacity in capacities]
            speed = 60 * len(requests) * len(capacities) / (time.process_time() - start)
            rates = [report.token_hit_rate for report in reports]
            floor = floor or rates
            closed = [
                (rate - low) / (high - low)
                for rate, low, high in zip(rates, floor, bounds, strict=True)
                if high - low >= 0.01
            ]
            gap = sum(closed) / max(1, len(closed))
            show(name, rates, f"{gap:>8.1%}{speed:>14,.0f}")
            for share, capacity, report, rate in zip(args.share, capacities, reports, rates, strict=True):
                results.append(row(trace, name, share, capacity, rate) | {"waste": report.waste})
        show("belady", bounds, "")
        for share, capacity, rate in zip(args.share, capacities, bounds, strict=True):
            results.append(row(trace, "belady", share, capacity, rate))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.plot:
        plot(results, args.plot)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="trace files, or folders of sessions")
    parser.add_argument("--format", choices=["mooncake", "bailian", "sessions"], default="mooncake")
    parser.add_argument("--share", nargs="+", type=float, default=[1, 5, 10, 25], help="capacities, %% of all blocks")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--interval", type=float, default=4.0, help="seconds between the starts of sessions")
    parser.add_argument("--skip", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--until", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--prefill", type=float, default=0.0, metavar="SECONDS", help="per prompt token computed")
    parser.add_argument("--decode", type=float, default=0.0, metavar="SECONDS", help="per token generated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write hit rates over capacities as PNG; needs matplotlib")
    args = parser.parse_args()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib")
    return args


def reader(name: str, interval: float) -> Callable[[Path], Iterable[TraceRequest]]:
    if name == "sessions":
        return lambda folder: overlap([read_session(file) for file in sorted(folder.glob("*.jsonl"))], interval)
    return read_mooncake if name == "mooncake" else read_bailian


def cut(requests: Iterable[TraceRequest], skip: float, until: float) -> Iterator[TraceRequest]:
    for request in requests:
        if skip <= request.time < until:
            yield replace(request, time=request.time - skip)


def bound(requests: list[TraceRequest], capacity: int) -> float:
    report = Report()
    for request, num_hits in zip(requests, belady_hits(requests, capacity), strict=True):
        report.count(request, num_hits)
    return report.token_hit_rate


def row(trace: Path, policy: str, share: float, capacity: int, rate: float) -> dict[str, object]:
    return {"trace": trace.stem, "policy": policy, "share": share, "capacity": capacity, "token_hit_rate": rate}


def show(name: str, rates: list[float], rest: str) -> None:
    print(f"{name:10}" + "".join(f"{100 * rate:>9.1f}" for rate in rates) + rest, flush=True)


def plot(results: list[dict[str, object]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(result["trace"] for result in results))
    figure, axes = pyplot.subplots(1, len(traces), figsize=(6 * len(traces), 4.5), squeeze=False)
    for axis, trace in zip(axes[0], traces, strict=True):
        for name in dict.fromkeys(result["policy"] for result in results):
            points = [r for r in results if r["trace"] == trace and r["policy"] == name]
            style = {"color": "black", "linestyle": "--"} if name == "belady" else {"marker": "o", "markersize": 3}
            axis.plot([p["share"] for p in points], [p["token_hit_rate"] for p in points], label=name, **style)
        axis.set(title=trace, xlabel="capacity, % of different blocks", ylabel="token hit rate", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
