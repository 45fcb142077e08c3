from __future__ import annotations

import json
from pathlib import Path

import httpx

from benchmarks.cluster import Run, ask, made_up, recorded


def test_recorded_sessions_end_before_the_first_prompt_that_is_too_long(tmp_path: Path) -> None:
    rows = [{"input": "task"}, {"input": "task and more"}, {"input": "task and more" + "x" * 50}]
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "two.jsonl").write_text(json.dumps({"input": "y" * 60}))
    assert recorded(tmp_path, 5, 5, 40) == [["task", "task and more"]]


def test_made_up_sessions_share_a_head_and_grow() -> None:
    sessions = made_up(3, 2, 900)
    assert {session[0][:300] for session in sessions} == {sessions[0][0][:300]}
    assert len({session[0] for session in sessions}) == 3
    for first, second in sessions:
        assert second.startswith(first)
        assert len(second) <= 900


async def test_answers_refusals_and_losses_are_told_apart() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["prompt"]
        if prompt == "dead":
            raise httpx.ConnectError("refused")
        if prompt in ("400", "503"):
            return httpx.Response(int(prompt))
        usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
        chunks = [{"choices": []}] if prompt == "broken" else [{"choices": []}, {"usage": usage}]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        return httpx.Response(200, text=body, headers={"x-pagoda-replica": "1"})

    run = Run("x")
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://r") as http:
        for prompt in "fine", "dead", "400", "503", "broken":
            await ask(http, prompt, 4, run)
    figures = run.figures()
    assert (figures["requests"], figures["token_hit_rate"], figures["by_replica"]) == (1, 0.4, {"1": 1})
    assert (figures["refused"], figures["lost"], figures["broken"]) == (1, 2, 1)
