"""Workers: daemon threads that run what they are given, and keep nothing from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """A few daemon threads that run what is submitted. `ThreadPoolExecutor` would join hung ones when Python exits."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        for _ in range(num_threads):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` when a thread is free; cancelling the future before that prevents it."""
        future: Future[T] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except Exception as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        self._jobs.put(job)
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # or what it holds would live until the next one comes

    def close(self) -> None:
        """Let the threads end when they have run what is queued; waits for none."""
        for _ in range(self._num_threads):
            self._jobs.put(None)
