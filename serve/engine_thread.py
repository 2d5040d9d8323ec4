"""A thread of its own for the engine, so that many callers share its batches. Knows nothing of HTTP.

Checks that arrive while a batch runs are queued and join the next one: vLLM serves the requests in the order in which they came, so
a check of a hundred rules delays a later one by its own work and no more. Every check has its own future and its own
request ids; what one caller asked cannot be answered to another.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from guard.errors import GuardError
from guard.example import Message
from serve.engine import GuardEngine, OpenCheck
from serve.score import Check

log = logging.getLogger(__name__)

MAX_QUEUED = 256  # checks; what is beyond is refused at once, because an answer minutes late guards nothing


class Overloaded(GuardError):
    """The engine has more work than it can do soon, or is shutting down."""


@dataclass
class _Job:
    messages: tuple[Message, ...]
    rules: tuple[str, ...] | None
    future: Future[Check] = field(default_factory=Future)


class EngineThread:
    """Owns the thread that owns the engine: check, is_alive, close."""

    def __init__(self, engine: GuardEngine) -> None:
        self._engine = engine
        self._jobs: queue.Queue[_Job | None] = queue.Queue(MAX_QUEUED)
        self._open: list[tuple[OpenCheck, Future[Check]]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="guard-engine")
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether checks are being served."""
        return self._thread.is_alive() and not self._closing

    def check(self, messages: Sequence[Message], rules: Sequence[str] | None = None) -> Future[Check]:
        """`GuardEngine.check`, from any thread. Raises Overloaded; the future raises what the check raises."""
        if not self.is_alive:
            raise Overloaded("the server is shutting down")
        job = _Job(tuple(messages), None if rules is None else tuple(rules))
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise Overloaded("too many checks are waiting", remedy="Try again later") from None
        return job.future

    def close(self) -> None:
        """Finish the checks that are queued, then stop. Does not close the engine."""
        self._closing = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            for job in self._arrivals():
                if job is None:
                    self._finish()
                    return
                self._begin(job)
            self._step()

    def _arrivals(self) -> Iterator[_Job | None]:
        """What has come in; waits for something if there is nothing to do."""
        if not self._open:
            yield self._jobs.get()
        while True:
            try:
                yield self._jobs.get_nowait()
            except queue.Empty:
                return

    def _begin(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return  # the caller is gone
        try:
            self._open.append((self._engine.open_check(job.messages, job.rules), job.future))
        except Exception as error:  # to the caller, who is on another thread
            job.future.set_exception(_failure(error))

    def _step(self) -> None:
        try:
            if any(not check.asked.done for check, _ in self._open):
                self._engine.step()
        except Exception as error:  # to every caller whose requests were in the batch; the thread lives on for the next ones
            for check, future in self._open:
                self._engine.cancel(check.asked)
                future.set_exception(_failure(error))
            self._open.clear()
            return
        still_open = []
        for check, future in self._open:
            if check.asked.done:
                future.set_result(check.result())
            else:
                still_open.append((check, future))
        self._open = still_open

    def _finish(self) -> None:
        while self._open:
            self._step()
        while not self._jobs.empty():  # put between `is_alive` and `close`
            if job := self._jobs.get_nowait():
                job.future.set_exception(Overloaded("the server is shutting down"))


def _failure(error: Exception) -> GuardError:
    if isinstance(error, GuardError):
        return error
    log.exception("a check failed")
    failure = GuardError(f"the engine failed: {error}", remedy="See the server's log")
    failure.__cause__ = error
    return failure
