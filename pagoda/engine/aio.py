"""AsyncEngine: the engine on a thread of its own, streaming to asyncio.

    event loop                         engine thread
    stream() ──add, abort (inbox)───>  core.step(), again and again while there is work
       ^                                   │
       └──RequestOutputs (one hop a step)──┘

The core is touched by its thread alone. The event loop only puts commands into an inbox and takes outputs from queues.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from pagoda.engine.admin import CacheAdmin
from pagoda.engine.engine import Engine
from pagoda.engine.engine_stats import EngineStats, engine_stats
from pagoda.engine.outputs import AgeHistogram, EngineObserver, RequestOutput, TierReport
from pagoda.engine.params import BlendSpec, LeaseSpec, SamplingParams
from pagoda.engine.pressure.ladder import LevelChange
from pagoda.errors import Overloaded, RequestAborted, RequestError
from pagoda.kv.keys import Scope
from pagoda.kv.tiered import TieredCache
from pagoda.model.tokenizer import Tokenizer

T = TypeVar("T")
logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0

Refused = RequestError | Overloaded
Inbox = queue.SimpleQueue[Callable[[], None] | None]


class _Outputs:
    """What is new of one stream, for its one reader. For the event loop alone; half of what an asyncio.Queue costs."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[RequestOutput | Refused] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: RequestOutput | Refused) -> None:
        """Add one, waking the reader."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput | Refused:
        """The oldest, waiting for one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class AsyncEngine:
    """Runs an Engine in the background. All methods are for the event loop that called `start`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._core = engine.core
        self._inbox: Inbox = queue.SimpleQueue()
        self._streams: dict[str, _Outputs] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepting = False
        self._has_ended = False  # told on the event loop: after it, nothing is put into the inbox
        self._asked: set[asyncio.Future[Any]] = set()
        self._stats = engine_stats(self._core)

    @property
    def model_name(self) -> str:
        """The id of the model."""
        return self._engine.model_name

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output."""
        return self._engine.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def is_healthy(self) -> bool:
        """Whether the engine's thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def stats(self) -> EngineStats:
        """The state after the last step; does not wait for the engine."""
        return self._stats

    async def manage(self, work: Callable[[CacheAdmin], T]) -> T:
        """The result of `work` on the cache, between two steps.

        Raises:
            RequestAborted: the engine is not running.
        """
        return await self._between_steps(lambda: work(CacheAdmin(self._core.cache, self._core.history)))

    @property
    def adapters(self) -> Sequence[str]:
        """The names of the loaded adapters."""
        return self._engine.adapters.names

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter while requests run: see `Adapters.load`."""
        adapter = await asyncio.to_thread(self._engine.adapters.read, path)
        await self._between_steps(lambda: self._engine.adapters.add(name, adapter))

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter: see `Adapters.unload`."""
        await self._between_steps(lambda: self._engine.adapters.unload(name))

    async def reload_weights(self, path: str) -> str:
        """Go on with other weights while requests run: see `Engine.install_weights`. Returns their identity."""
        loaded = await asyncio.to_thread(self._engine.read_weights, path)
        await self._between_steps(lambda: self._engine.install_weights(loaded))
        return loaded.weights_identity

    async def _between_steps(self, work: Callable[[], T]) -> T:
        if not self.is_healthy or self._loop is None or self._has_ended:
            raise RequestAborted("the engine is not running")
        loop, result = self._loop, self._loop.create_future()
        self._asked.add(result)
        result.add_done_callback(self._asked.discard)

        def settle(set_result: Callable[[Any], None], value: Any) -> None:
            loop.call_soon_threadsafe(lambda: None if result.done() else set_result(value))

        def run() -> None:
            try:
                value = work()
                # As for outputs: whoever has the answer sees the state it came from.
                self._stats = engine_stats(self._core)
                settle(result.set_result, value)
            except Exception as error:
                settle(result.set_exception, error)

        self._inbox.put(run)
        return cast(T, await result)

    def block_names(self, prompt: Sequence[int], scope: Scope, adapter: str | None = None) -> Sequence[int] | None:
        """What block events call a prompt's whole blocks: see `Engine.block_names`. Any thread may ask."""
        return self._engine.block_names(prompt, scope, adapter)

    def tell_all_blocks(self) -> None:
        """Tell of all cached blocks anew, between two steps, for readers that missed some. Any thread may ask."""
        events = self._core.cache.events
        if events is not None:
            self._inbox.put(events.tell_all)

    def add_observer(self, observer: EngineObserver) -> None:
        """Tell `observer` of every step and request from now on, on the engine's thread."""
        self._core.observers.append(observer)

    def on_pressure(self, listener: Callable[[LevelChange], object]) -> None:
        """Tell `listener` of every change of the pressure level, on the engine's thread: for scaling out, say."""
        self._core.pressure.listeners.append(listener)

    def tiers(self) -> Sequence[TierReport]:
        """The figures of each tier below the device, fastest first. Waits for none."""
        cache = self._core.cache
        return cache.hierarchy.reports() if isinstance(cache, TieredCache) else []

    def block_ages(self) -> Sequence[AgeHistogram]:
        """How long sampled blocks lived, lay idle and waited for a hit. Waits for nothing."""
        return self._core.cache.ages.histograms()

    async def start(self) -> None:
        """Start the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self._accepting, self._has_ended = True, False
        self._thread = threading.Thread(target=self._run, name="pagoda-engine", daemon=True)
        self._thread.start()

    async def stop(self, drain_s: float = 10.0) -> None:
        """Admit nothing more, give running streams `drain_s` seconds to finish, abort the others, close the engine."""
        self._accepting = False
        deadline = asyncio.get_running_loop().time() + drain_s
        while self._streams and self.is_healthy and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._inbox.put(lambda: self._publish(self._core.abort_all()))
        self._inbox.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._engine.close)

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        scope: Scope = Scope(),
        priority: int = 0,
        leases: Sequence[LeaseSpec] = (),
        adapter: str | None = None,
        blend: BlendSpec | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request and yield its outputs as they come. Closing the generator aborts the request.

        Raises:
            RequestError: it cannot be served; raised before the first output.
            Overloaded: it cannot be served now; before the first output, too.
            RequestAborted: the engine is stopping, or its thread died.
            ModelError: the model failed on it.
        """
        name = request_id or uuid.uuid4().hex
        add = partial(
            self._core.add,
            name,
            prompt,
            params,
            scope=scope,
            priority=priority,
            leases=leases,
            adapter=adapter,
            blend=blend,
        )
        return self._stream(name, add)

    def fork(
        self, request_id: str, params: SamplingParams, *, new_id: str | None = None, index: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Go on from all that a live request has so far, in a request of its own: see `EngineCore.fork`.

        Raises:
            RequestError: as `stream`, or there is no such live request.
        """
        name = new_id or uuid.uuid4().hex
        return self._stream(name, partial(self._core.fork, request_id, name, params, index=index))

    async def _stream(self, name: str, start: Callable[[], None]) -> AsyncGenerator[RequestOutput, None]:
        if not self._accepting or not self.is_healthy or self._has_ended:
            raise RequestAborted("the engine is not running")
        outputs = self._streams[name] = _Outputs()
        self._inbox.put(lambda: self._add(name, start))
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                if isinstance(output, Refused):
                    finished = True
                    raise output
                finished = output.finished
                if output.failure is not None:
                    raise output.failure
                yield output
        finally:
            self._streams.pop(name, None)
            if not finished:
                self.abort(name)

    def abort(self, request_id: str) -> None:
        """End a request, if it still runs, and free its blocks."""
        self._inbox.put(lambda: self._publish(self._core.abort(request_id)))

    # -- on the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands():
                outputs = self._core.step() if self._core.has_work else []
                if not outputs:
                    self._core.cache.retention.expire()
                    self._core.pressure.look()
                # First, so that whoever has an output sees the state it came from.
                self._stats = engine_stats(self._core)
                self._publish(outputs)
        except BaseException:
            logger.exception("the engine stopped after an error")
            raise
        finally:
            self._stats = engine_stats(self._core)
            self._fail_all()

    def _take_commands(self) -> bool:
        """Run what is in the inbox, waiting for something to do, a lease to run out or the next look at pressure.

        False when it is time to end.
        """
        wait = not self._core.has_work
        due = (self._core.cache.retention.next_expiry_s, self._core.pressure.next_look_s) if wait else ()
        timeout_s = min((each for each in due if each is not None), default=None)
        while True:
            try:
                command = self._inbox.get(
                    block=wait, timeout=None if timeout_s is None else min(timeout_s, _LONGEST_WAIT_S)
                )
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _add(self, name: str, add: Callable[[], None]) -> None:
        try:
            add()
        except (RequestError, Overloaded) as error:
            self._deliver([(name, error)])

    def _publish(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._deliver([(output.request_id, output) for output in outputs])

    def _deliver(self, items: Sequence[tuple[str, RequestOutput | Refused]]) -> None:
        def put() -> None:
            for name, item in items:
                if (outputs := self._streams.get(name)) is not None:
                    outputs.put(item)

        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(put)

    def _fail_all(self) -> None:
        """Nobody takes what is in the inbox any more: who waits for it is told."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        """On the event loop, so that who asks either is told here or finds that it is over."""
        self._has_ended = True
        for outputs in self._streams.values():
            outputs.put(RequestAborted("the engine stopped"))
        for result in self._asked:
            if not result.done():
                result.set_exception(RequestAborted("the engine stopped"))
