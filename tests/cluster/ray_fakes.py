"""What the Ray test runs: a server of a fake engine as each replica, and a client that reports what it saw."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from pagoda.server.app import create_app
from tests.server.fake_backend import FakeBackend


def make(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    backend = FakeBackend()
    backend.model_name = f"pid-{os.getpid()}"
    return create_app(backend, served_model_names=["m"]), backend


def main() -> None:
    import httpx
    import ray
    from ray import serve

    from pagoda.cluster.ray_app import application

    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": 18555})
    serve.run(
        application({}, min_replicas=2, max_replicas=2, num_cpus=0.5, make="tests.cluster.ray_fakes:make"),
        name="pagoda",
    )
    seen: dict[str, Any] = {}
    with httpx.Client(base_url="http://127.0.0.1:18555", timeout=30, trust_env=False) as client:

        def who(text: str, **more: Any) -> str:
            messages = [{"role": "user", "content": text * 200}]
            answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3, **more})
            assert answer.status_code == 200, answer.text
            return answer.json()["system_fingerprint"]

        first = who("alice ")
        seen["alice"] = len({first, *(who("alice ") for _ in range(4))})
        seen["all"] = len({who(f"{name} ") for name in ("bob", "carol", "dave", "erin", "frank", "grace")})
        with client.stream(
            "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}
        ) as answer:
            seen["stream"] = [line for line in answer.iter_lines() if line][-1]
            seen["type"] = answer.headers["content-type"]
        seen["refused"] = client.post("/v1/chat/completions", json={"messages": 7}).status_code
        seen["unreadable"] = client.post(
            "/v1/messages", content=b"{", headers={"content-type": "application/json"}
        ).json()["type"]
        seen["models"] = client.get("/v1/models").json()["data"][0]["id"]
    print("SEEN " + json.dumps(seen), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
