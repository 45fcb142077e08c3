"""One vLLM, asked line by line: run by its own Python, in this repository's root.

    PYTHON -m benchmarks.vllm_driver '{"model": ..., "kv_transfer_config": {...} or null, ...}'

Reads JSON lines and answers each with one on the same stdout that it had at the start; what vLLM prints goes to stderr.

    {"op": "run", "tokens": [...], "max_tokens": 1, "params": {...}, "salt": null}
                                     -> {"tokens": [...], "seconds": s, "cached": n, "params": {...} or null}
    {"op": "reset"}                  -> {"done": true}       vLLM forgets its prefix cache
    {"op": "metrics"}                -> {"lines": [...]}     what /metrics would say of Pagoda
    {"op": "end"}                    -> {"done": true}       and the process ends
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    import prometheus_client
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        settings["model"],
        dtype=settings.get("dtype", "bfloat16"),
        max_model_len=settings.get("context", 2048),
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=False,
        kv_transfer_config=settings["kv_transfer_config"],
        **settings.get("options", {}),
    )

    def run(ask: dict[str, Any]) -> dict[str, Any]:
        extra = {"kv_transfer_params": ask["params"]} if ask.get("params") else None
        sampling = SamplingParams(max_tokens=ask["max_tokens"], temperature=0.0, ignore_eos=True, extra_args=extra)
        prompt = {"prompt_token_ids": ask["tokens"]} | ({"cache_salt": ask["salt"]} if ask.get("salt") else {})
        started = time.perf_counter()
        [output] = llm.generate([prompt], sampling, use_tqdm=False)
        return {
            "seconds": time.perf_counter() - started,
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "params": output.kv_transfer_params,
        }

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    say({"ready": True})
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["op"] == "run":
            say(run(ask))
        elif ask["op"] == "reset":
            say({"done": llm.reset_prefix_cache()})
        elif ask["op"] == "metrics":
            text = prometheus_client.generate_latest().decode()
            say({"lines": [line for line in text.splitlines() if line.startswith("pagoda_")]})
        else:
            llm.llm_engine.engine_core.shutdown()
            say({"done": True})
            break


if __name__ == "__main__":
    main()
