"""The clients of the soak test: honest ones of several tenants, some who leave, some who send nonsense.

honest     asks for what is known, streamed or whole; compares; comes back when told to
thrifty    the same, but its tenant allows contexts to be compressed: then its answer is another, as long
leaver     goes away while it waits, or after the first words
vandal     what it sends is wrong, and must be refused as such, or for pressure, and never with a 500
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

PATH = "/v1/completions"
MAX_PAUSE_S = 2.0  # whatever Retry-After says: the crowd is to press


@dataclass(frozen=True)
class Case:
    """A request and the text that it gives when it is computed alone."""

    body: dict[str, Any]
    text: str
    num_tokens: int


@dataclass
class Tally:
    """What the crowd met."""

    answered: Counter[str] = field(default_factory=Counter)  # requests, by tenant
    tokens: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # by code
    left: int = 0
    compressed: int = 0
    nonsense: Counter[int] = field(default_factory=Counter)  # by status
    ttft_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    overtaken: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # answers meanwhile
    faults: list[str] = field(default_factory=list)


class Crowd:
    """Clients of one server.

    Args:
        cases: what honest clients ask for.
        is_enough: whether nobody shall begin anything new, after what they met so far.
    """

    def __init__(
        self, http: httpx.AsyncClient, cases: list[Case], is_enough: Callable[[Tally], bool], seed: int
    ) -> None:
        self.tally = Tally()
        self._http = http
        self._cases = cases
        self._is_enough = is_enough
        self._random = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_over(self) -> bool:
        """Whether nobody begins anything new any more."""
        return self._is_enough(self.tally)

    def add(self, count: int, client: Callable[[str], Awaitable[None]], key: str, pause_s: float = 0.0) -> None:
        """Let so many clients with a key repeat themselves until the end, pausing about so long in between."""

        async def live() -> None:
            while not self.is_over:
                try:
                    await client(key)
                except Exception as error:
                    self.tally.faults.append(f"{key}: {error!r}")
                await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.5))

        self._tasks += [asyncio.create_task(live()) for _ in range(count)]

    async def until_gone(self, patience_s: float) -> None:
        """Wait for the end, and for whoever then still waits for an answer; so long without one is a deadlock."""
        left, last = set(self._tasks), (time.monotonic(), 0)
        while left:
            _, left = await asyncio.wait(left, timeout=0.5)
            progress = self.tally.answered.total() - len(left)
            if progress != last[1]:
                last = time.monotonic(), progress
            if left and time.monotonic() - last[0] > patience_s:
                for each in left:
                    each.cancel()
                raise TimeoutError(f"{len(left)} clients wait for ever")
        await asyncio.gather(*self._tasks)

    async def honest(self, key: str) -> None:
        """Ask, compare, and note how long it took."""
        case = self._random.choice(self._cases)
        streams = self._random.random() < 0.6
        body, started = case.body | {"stream": streams}, (time.monotonic(), self.tally.answered.total())
        async with self._http.stream("POST", PATH, json=body, headers=_as(key)) as answer:
            if answer.status_code != 200:
                return await self._come_back(key, json.loads(await answer.aread()), answer)
            if streams:
                text, error = await self._read(answer, key, started)
            else:
                text, error = json.loads(await answer.aread())["choices"][0]["text"], None
        if error is not None or text != case.text:
            self.tally.faults.append(f"{key}: {error or f'{text!r} is not {case.text!r}'}")
        self.tally.answered[key] += 1
        self.tally.tokens[key] += case.num_tokens

    async def _read(self, answer: httpx.Response, key: str, started: tuple[float, int]) -> tuple[str, Any]:
        text = ""
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return text, chunk["error"]
                if not text:
                    self.tally.ttft_s[key].append(time.monotonic() - started[0])
                    self.tally.overtaken[key].append(self.tally.answered.total() - started[1])
                text += chunk["choices"][0]["text"]
        return text, None

    async def thrifty(self, key: str) -> None:
        """Ask, and compare unless the answer says that its context was compressed."""
        case = self._random.choice(self._cases)
        answer = await self._http.post(PATH, json=case.body, headers=_as(key))
        if answer.status_code != 200:
            return await self._come_back(key, answer.json(), answer)
        told = answer.json()
        text, num_tokens = told["choices"][0]["text"], told["usage"]["completion_tokens"]
        is_compressed = told.get("pagoda", {}).get("kv_policy", {}).get("under_pressure", False)
        if num_tokens != case.num_tokens or (text != case.text and not is_compressed):
            self.tally.faults.append(f"{key}: {text!r} is not {case.text!r}, and it was not compressed")
        self.tally.compressed += is_compressed
        self.tally.answered[key] += 1
        self.tally.tokens[key] += num_tokens

    async def _come_back(self, key: str, body: Any, answer: httpx.Response) -> None:
        if answer.status_code != 429 or "retry-after" not in answer.headers:
            self.tally.faults.append(f"{key}: {answer.status_code} {body}")
        self.tally.refused[body["error"]["code"]] += 1
        await asyncio.sleep(min(MAX_PAUSE_S, float(answer.headers.get("retry-after", 0))))

    async def leaver(self, key: str) -> None:
        """Leave a stream, or the queue."""
        body = self._random.choice(self._cases).body | {"stream": self._random.random() < 0.7}
        patience_s = self._random.choice([0.005, 0.05, 0.3])
        try:
            async with asyncio.timeout(patience_s):
                async with self._http.stream("POST", PATH, json=body, headers=_as(key)) as answer:
                    async for _ in answer.aiter_lines():
                        if self._random.random() < 0.2:
                            break
        except (TimeoutError, httpx.TransportError):
            pass
        self.tally.left += 1

    async def vandal(self, key: str) -> None:
        """Send nonsense."""
        content, wanted = self._random.choice(NONSENSE)
        headers = _as(key) | {"content-type": "application/json"}
        answer = await self._http.post(PATH, content=content, headers=headers)
        self.tally.nonsense[answer.status_code] += 1
        if answer.status_code not in (*wanted, 429):
            self.tally.faults.append(f"{content[:60]!r} gave {answer.status_code}")
        if answer.status_code == 429:
            await asyncio.sleep(0.2)


def _as(key: str) -> dict[str, str]:
    return {"x-api-key": key}


def _json(**body: Any) -> bytes:
    return json.dumps({"prompt": "The tide", "max_tokens": 4} | body).encode()


NONSENSE: list[tuple[bytes, tuple[int, ...]]] = [
    (b"{", (400,)),
    (b"\xff\xfe", (400,)),
    (b"[" * 5000, (400,)),
    (_json(prompt=[10**9]), (400,)),
    (_json(prompt=[5] * 5000), (400,)),
    (_json(prompt=""), (400, 200)),
    (_json(max_tokens=-1), (400,)),
    (_json(temperature="hot"), (400,)),
    (_json(n=1000), (400,)),
    (_json(model="another"), (404,)),
    (_json(kv_retention={"ranges": [{"token_start": 5, "token_end": 1, "priority": 1}]}), (400,)),
    (_json(logit_bias={"1": float(10**6)}), (400,)),
    (_json(user="x" * 300_000), (413,)),
]
