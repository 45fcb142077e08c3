"""Ray Serve in a network namespace that has only loopback: Ray listens on the machine's outer address otherwise."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagoda.cluster.prompts import read_prompt

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (pagoda-kv[ray])"),
    pytest.mark.slow,
]


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"pagoda-{uuid.uuid4().hex[:8]}"
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2), with which a network namespace is made")
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def test_requests_go_where_their_prefix_is(namespace: str) -> None:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "tests.cluster.ray_fakes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
    assert told, done.stdout[-3000:] + done.stderr[-3000:]
    seen = json.loads(told[0].removeprefix("SEEN "))
    assert seen == {
        "alice": 1,
        "all": 2,
        "stream": "data: [DONE]",
        "type": "text/event-stream; charset=utf-8",
        "refused": 400,
        "unreadable": "error",
        "models": "m",
    }


@pytest.mark.parametrize(
    ("pressures", "current", "wanted"),
    [([0.7, 0.7], 2, 2), ([1.0, 1.0], 2, 3), ([0.0, 0.0], 2, 1), ([1.0] * 4, 4, 5), ([], 3, 3)],
)
def test_pressure_decides_how_many_run(pressures: list[float], current: int, wanted: int) -> None:
    from pagoda.cluster.ray_router import PRESSURE, scale_on_pressure

    context = SimpleNamespace(
        aggregated_metrics={PRESSURE: dict(enumerate(pressures))},
        current_num_replicas=current,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=5,
    )
    assert scale_on_pressure(context) == (wanted, {})


async def test_replicas_that_take_nothing_are_chosen_among_only_if_all_take_nothing() -> None:
    from pagoda.cluster.ray_router import PrefixRouter

    router = PrefixRouter.__new__(PrefixRouter)  # without Ray's loops
    router.initialize_state()
    replicas = [SimpleNamespace(replica_id=name, routing_stats={}) for name in ("a", "b", "c")]
    for place, each in enumerate(replicas):
        router._places[each.replica_id] = place
        router._placement.set_up(place, True)

    async def ask(name: str) -> str:
        prompt = read_prompt({"prompt": "The tide comes in twice a day. " * 40}, b"")
        metadata = SimpleNamespace(internal_request_id=name)
        pending = SimpleNamespace(args=[SimpleNamespace(prompt=prompt)], metadata=metadata)
        ranked = await router.choose_replicas(replicas, pending)
        router.on_request_routed(pending, ranked[0][0].replica_id, None)
        router.on_request_completed(ranked[0][0].replica_id, name)
        return ranked[0][0].replica_id

    first = await ask("first")
    assert await ask("second") == first
    [has_it] = [each for each in replicas if each.replica_id == first]
    has_it.routing_stats["takes_requests"] = False
    assert await ask("third") != first
    for each in replicas:
        each.routing_stats["takes_requests"] = False
    assert {await ask(f"all {number}") for number in range(9)} < {"a", "b", "c"}
