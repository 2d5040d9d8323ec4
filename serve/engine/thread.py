"""A thread of its own for the engine, so that many callers share its batches.

Knows nothing of HTTP.

Checks that arrive while a batch runs are queued and join the next one. Every check has its own
future and its own request ids; what one caller asked cannot be answered to another. A check that is
too late, or whose caller is gone, is dropped: an answer minutes late guards nothing, and its work
would delay the others.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from guard.errors import GuardError
from guard.example import Message
from serve.engine.mixed import CheckEngine, OpenedCheck
from serve.engine.score import Check, EngineCounters

log = logging.getLogger(__name__)

MAX_OPEN = 32  # checks in the engine at once: enough to fill its batches
# That a batch may wait for checks to be opened, which takes as long as their texts.
OPENING_S = 0.05
MAX_QUEUED = 256  # checks that wait; what is beyond is refused at once
TIMEOUT_S = 60.0  # from the moment a check comes in
CLOSING_S = 5.0  # beyond that, for the last batch
COUNTERS_S = 0.5  # how old the engine's counters may be while it works


class Overloaded(GuardError):
    """The engine has more work than it can do soon, or is shutting down, or has stopped."""


class TooLate(Overloaded):
    """A check was not answered in time."""


class CallerGone(GuardError):
    """Nobody waits for the check any more."""


def too_late() -> TooLate:
    """What a check is refused with that was not answered in time."""
    return TooLate(
        "the check took too long",
        remedy="Try again later, or start the server with a longer --timeout",
    )


@dataclass
class PendingCheck:
    """A check that was asked for, and where its answer goes."""

    messages: tuple[Message, ...]
    rules: tuple[str, ...] | None
    cache_salt: str | None
    deadline: float  # by time.monotonic
    future: Future[Check] = field(default_factory=Future)
    is_given_up: bool = False

    def failure(self) -> GuardError | None:
        """Why it is not worth any more work, if it is not."""
        if self.is_given_up:
            return CallerGone("the caller is gone")
        if time.monotonic() > self.deadline:
            return too_late()
        return None


@dataclass
class PendingChange:
    """What is to be changed of the engine's rules, and who waits for it."""

    change: Callable[[], None]
    future: Future[None] = field(default_factory=Future)


class EngineThread:
    """Owns the thread that owns the engine: its checks, its rules, how it is.

    A check has `timeout_s` seconds.
    """

    def __init__(self, engine: CheckEngine, timeout_s: float = TIMEOUT_S) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        # None: close
        self._queued: queue.Queue[PendingCheck | PendingChange | None] = queue.Queue()
        self._open: list[tuple[OpenedCheck, PendingCheck]] = []
        self._pending: dict[Future[Check], PendingCheck] = {}
        self._closing = False
        self._step_since: float | None = None  # by time.monotonic, while a batch runs
        self._counters = engine.counters
        self._counted = time.monotonic()
        # Nothing is queued once `_closing` is set, so nobody waits for an answer that never comes.
        self._putting = threading.Lock()
        # A daemon: if it hangs, the process can end.
        self._thread = threading.Thread(target=self._run, name="guard-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether checks are answered, and will be again after what is under way.

        Not while a batch takes longer than a check may.
        """
        since = self._step_since
        hangs = since is not None and time.monotonic() > since + self._timeout_s
        return self._thread.is_alive() and self._engine.is_usable and not hangs

    @property
    def is_ready(self) -> bool:
        """Whether one more check would be taken now."""
        return self.is_alive and not self._closing and self.waiting < MAX_QUEUED

    @property
    def waiting(self) -> int:
        """Checks that are queued."""
        return self._queued.qsize()

    @property
    def open(self) -> int:
        """Checks in the engine."""
        return len(self._open)

    @property
    def counters(self) -> EngineCounters:
        """The engine's, not older than COUNTERS_S while it works; for any thread."""
        return self._counters

    def check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
        deadline: float = math.inf,
    ) -> Future[Check]:
        """`GuardEngine.check`, from any thread.

        Nobody waits for it after `deadline`, by time.monotonic. Raises Overloaded; the future
        raises what the check raises.
        """
        names = None if rules is None else tuple(rules)
        deadline = min(deadline, time.monotonic() + self._timeout_s)
        pending = PendingCheck(tuple(messages), names, cache_salt, deadline)
        with self._putting:
            self._check_takes_work()
            self._queued.put(pending)
            self._pending[pending.future] = pending
        pending.future.add_done_callback(self._pending.pop)
        return pending.future

    def serve(self, rule: str, folder: Path | None = None) -> Future[None]:
        """`GuardEngine.serve`, from any thread, between two batches. As `remove`."""
        return self._put(PendingChange(partial(self._engine.serve, rule, folder)))

    def remove(self, rule: str) -> Future[None]:
        """`GuardEngine.remove`, from any thread, between two batches.

        Raises Overloaded; the future raises what the engine raises.
        """
        return self._put(PendingChange(partial(self._engine.remove, rule)))

    def _put(self, pending: PendingChange) -> Future[None]:
        with self._putting:
            self._check_takes_work()
            self._queued.put(pending)
        return pending.future

    def give_up(self, future: Future[Check]) -> None:
        """Nobody waits for this check any more.

        Its work is not begun, or ends after the batch that runs.
        """
        pending = self._pending.get(future)
        if pending is not None:
            pending.is_given_up = True

    def close(self) -> None:
        """Finish the checks that are queued and not too late, then stop. Does not close the engine.

        A batch that hangs is not waited for longer than a check may take.
        """
        with self._putting:
            self._closing = True
        self._queued.put(None)
        self._thread.join(self._timeout_s + CLOSING_S)
        if self._thread.is_alive():
            log.error("the engine hangs and is left behind")
            self._fail(too_late())

    def _check_takes_work(self) -> None:
        """Raise Overloaded if nothing more can be queued."""
        if self._closing or not self.is_alive:
            problem = "no checks are served: the server is shutting down, or its engine has failed"
            raise Overloaded(problem, remedy="Start it again; if it failed, its log says why")
        if self.waiting >= MAX_QUEUED:
            raise Overloaded("too many checks are waiting", remedy="Try again later")

    def _run(self) -> None:
        try:
            while self._serve():
                self._step()
                self._count()
            while self._open:
                self._step()
        # Nobody may wait for a thread that is gone; `is_alive` says that it is.
        except BaseException as error:
            with self._putting:
                self._closing = True
            self._fail(_failure(error))

    def _serve(self) -> bool:
        """Begin what has come in, for a moment at least; whether more is to come."""
        until = time.monotonic() + OPENING_S
        for pending in self._arrivals():
            if pending is None:
                return False
            if isinstance(pending, PendingChange):
                self._change(pending)
            else:
                self._begin(pending)
            if time.monotonic() > until:
                break
        return True

    def _arrivals(self) -> Iterator[PendingCheck | PendingChange | None]:
        """What has come in and may begin; waits for something if there is nothing to do."""
        if not self._open:
            yield self._queued.get()
        for _ in range(min(self._queued.qsize(), MAX_OPEN - len(self._open))):
            yield self._queued.get_nowait()

    def _begin(self, pending: PendingCheck) -> None:
        if not pending.future.set_running_or_notify_cancel():
            return
        try:
            failure = pending.failure()
            if failure is not None:
                raise failure
            check = self._engine.open_check(
                pending.messages, pending.rules, cache_salt=pending.cache_salt
            )
            self._open.append((check, pending))
        except BaseException as error:  # to the caller, who is on another thread
            pending.future.set_exception(_failure(error))

    def _change(self, pending: PendingChange) -> None:
        if not pending.future.set_running_or_notify_cancel():
            return
        try:
            pending.change()
        except BaseException as error:  # to the caller, who is on another thread
            pending.future.set_exception(_failure(error))
        else:
            pending.future.set_result(None)

    def _step(self) -> None:
        self._drop()
        try:
            if any(not check.call.done for check, _ in self._open):
                self._step_since = time.monotonic()
                self._engine.step()
        except Exception as error:
            self._fail_batch(error)
            return
        finally:
            self._step_since = None
        self._answer()

    def _count(self) -> None:
        """Read the engine's counters, now and then, and when it has nothing to do."""
        now = time.monotonic()
        is_idle = not self._open and self._queued.empty()
        if self._engine.is_usable and (is_idle or now > self._counted + COUNTERS_S):
            self._counters, self._counted = self._engine.counters, now

    def _fail_batch(self, error: Exception) -> None:
        """Give `error` to all whose requests were in the batch; the thread lives on for the
        next.
        """
        failed = self._open
        self._open = []
        for _, pending in failed:
            pending.future.set_exception(_failure(error))
        for check, _ in failed:
            self._engine.cancel(check.call)

    def _answer(self) -> None:
        """Give the checks that are done to those who wait for them."""
        done = [(check, pending) for check, pending in self._open if check.call.done]
        self._open = [(check, pending) for check, pending in self._open if not check.call.done]
        for check, pending in done:
            try:
                pending.future.set_result(check.result())
            except Exception as error:
                pending.future.set_exception(_failure(error))

    def _drop(self) -> None:
        """End the checks that nobody waits for any more, or that are too late."""
        still_open = []
        for check, pending in self._open:
            failure = pending.failure()
            if failure is None:
                still_open.append((check, pending))
            else:
                self._engine.cancel(check.call)
                pending.future.set_exception(failure)
        self._open = still_open

    def _fail(self, error: GuardError) -> None:
        """Give `error` to everyone who waits."""
        for _, pending in self._open:
            pending.future.set_exception(error)
        self._open.clear()
        while not self._queued.empty():
            queued = self._queued.get_nowait()
            if queued is not None and queued.future.set_running_or_notify_cancel():
                queued.future.set_exception(error)


def _failure(error: BaseException) -> GuardError:
    if isinstance(error, GuardError):
        return error
    log.exception("a check failed")
    failure = GuardError(f"the engine failed: {error}", remedy="See the server's log")
    failure.__cause__ = error
    return failure
