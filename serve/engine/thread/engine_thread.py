"""The loop that owns the engines, on a thread of its own: deadlines, batches, restarts.

Checks that arrive while a batch runs join the next one; each has its own future and request ids. A
check that is too late, or whose caller is gone, is dropped: an answer minutes late guards nothing,
and its work would delay the others. So one that will hardly be answered before its deadline, by the
pace of the last answers, is refused as it comes. An engine that is dead is started again: what
waits then fails, and what comes meanwhile is refused.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from guard.arguments import names_listed
from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine.engines import CheckEngine, OpenedCheck, Restartable
from serve.engine.refusals import CallerGone, Overloaded, engine_failure, too_late, without_frames
from serve.engine.score import Check, EngineCounters
from serve.engine.thread.pace import Pace
from serve.engine.thread.watchdog import Watchdog

log = logging.getLogger(__name__)

MAX_OPEN = 32  # checks in the engine at once: enough to fill its batches
# Seconds that a batch waits for checks to be opened; tokenising long texts takes time.
OPENING_S = 0.05
MAX_QUEUED = 256  # checks that wait; what is beyond is refused at once
# The share of its time that a check may be expected to wait: the pace may change.
EXPECTED_SHARE = 0.7
TIMEOUT_S = 60.0  # from the moment a check comes in
CLOSING_S = 5.0  # beyond that, for the last batch
COUNTERS_S = 0.5  # how old the engine's counters may be while it works
# Before each start in a row; after the last one the process has to be started again.
PAUSES_S = (0.0, 1.0, 5.0, 15.0, 30.0)
STABLE_S = 120.0  # an engine that has lived this long begins with the first pause again


@dataclass(frozen=True)
class Restarts:
    """How often a dead engine was started again, and how often that failed."""

    started: int = 0
    failed: int = 0


@dataclass
class PendingCheck:
    """A check that was asked for, and where its answer goes."""

    messages: tuple[Message, ...]
    rules: tuple[str, ...] | None
    cache_salt: str | None
    deadline: float  # by time.monotonic
    policies: tuple[str, ...] = ()
    future: Future[Check] = field(default_factory=Future)
    is_given_up: bool = False

    def failure(self) -> GuardError | None:
        """The reason why no more work should go into it; None if there is no such reason."""
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


def _fail(pending: PendingCheck | PendingChange, error: BaseException) -> None:
    pending.future.set_exception(engine_failure(error))


class EngineThread:
    """Takes checks and changes of rules from any thread, and owns the thread that runs them. A
    check has `timeout_s` seconds. A `Restartable` engine is started again once it is dead, and
    `on_restart` called; another one, or one that is dead too often, is a `failure`.
    """

    def __init__(
        self,
        engine: CheckEngine,
        timeout_s: float = TIMEOUT_S,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._restartable = engine if isinstance(engine, Restartable) else None
        self._on_restart = on_restart
        self._is_restarting = False
        self._starts_in_a_row = 0
        self._started_at = -math.inf  # the last restart, by time.monotonic
        self._failure: GuardError | None = None
        self.restarts = Restarts()
        # None: close
        self._queued: queue.Queue[PendingCheck | PendingChange | None] = queue.Queue()
        self._open: list[tuple[OpenedCheck, PendingCheck]] = []  # the checks in the engine
        self._pending: dict[Future[Check], PendingCheck] = {}
        self._closing = threading.Event()
        self._is_abandoned = False
        self._watchdog = Watchdog(timeout_s)
        self._busy_since = time.monotonic()
        self._pace = Pace()
        self.counters: EngineCounters = engine.counters  # at most COUNTERS_S old while it works
        self._counters_read_at = time.monotonic()
        # Nothing is queued once `_closing` is set, so nobody waits for an answer that never comes.
        self._queue_lock = threading.Lock()
        # A daemon: if it hangs, the process can end.
        self._thread = threading.Thread(target=self._run, name="guard-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether checks are answered, or will be soon. Not while a batch takes too long."""
        works = self._is_restarting or self._engine.is_usable
        return self._thread.is_alive() and works and not self._watchdog.batch_is_late

    @property
    def is_ready(self) -> bool:
        """Whether the queue would take one more check now, whatever time that has."""
        is_open = not self._closing.is_set() and not self._is_restarting
        is_open = is_open and not self._watchdog.loading_is_late
        return self.is_alive and is_open and self.waiting < MAX_QUEUED

    @property
    def hangs_for_good(self) -> bool:
        """Whether a batch, or what is loaded, has taken so long that nobody should wait on, or has
        outlasted `close`. The engine must not be closed under it.
        """
        return self._is_abandoned or self._watchdog.hanging is not None

    @property
    def failure(self) -> GuardError | None:
        """The reason why nothing more will be answered, if so: start the process again."""
        if self.hangs_for_good:
            problem = f"{self._watchdog.hanging or 'the engine'} hangs and cannot be ended"
            return GuardError(problem, remedy="Start the server again")
        return self._failure

    @property
    def waiting(self) -> int:
        return self._queued.qsize()

    @property
    def open(self) -> int:
        return len(self._open)

    def check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
        deadline: float = math.inf,
        policies: Sequence[str] = (),
    ) -> Future[Check]:
        """`GuardEngine.check`, from any thread. Nobody waits for it after `deadline`, by
        time.monotonic. Raises Overloaded, also where it would hardly be answered by then, and
        GuardError for rules that are no list; the future raises what the check raises.
        """
        names = None if rules is None else names_listed(rules, "rules")
        deadline = min(deadline, time.monotonic() + self._timeout_s)
        pending = PendingCheck(tuple(messages), names, cache_salt, deadline, tuple(policies))
        with self._queue_lock:
            self._check_takes_work()
            self._check_is_in_time(deadline)
            self._queued.put(pending)
            self._pending[pending.future] = pending
        pending.future.add_done_callback(self._pending.pop)
        return pending.future

    def serve_rule(self, rule: str, folder: Path | None = None) -> Future[None]:
        """`GuardEngine.serve` between two batches. Raises Overloaded; the future what it raises."""
        return self._put(PendingChange(partial(self._engine.serve, rule, folder)))

    def remove_rule(self, rule: str) -> Future[None]:
        """`GuardEngine.remove`, as `serve_rule`."""
        return self._put(PendingChange(partial(self._engine.remove, rule)))

    def _put(self, pending: PendingChange) -> Future[None]:
        with self._queue_lock:
            self._check_takes_work()
            self._queued.put(pending)
        return pending.future

    def give_up(self, future: Future[Check]) -> None:
        """Note that nobody waits for this check: it is not begun, or ends after this batch."""
        pending = self._pending.get(future)
        if pending is not None:
            pending.is_given_up = True

    def close(self) -> None:
        """Finish the checks that are queued and not too late, then stop. Does not close the engine.
        A batch is waited for no longer than a check may take; it `hangs_for_good` then.
        """
        with self._queue_lock:
            self._closing.set()
        self._queued.put(None)
        self._thread.join(0 if self.hangs_for_good else self._timeout_s + CLOSING_S)
        if self._thread.is_alive():
            log.error("the engine hangs and is abandoned")
            self._is_abandoned = True
            self._fail_all(too_late())

    def _check_takes_work(self) -> None:
        if self._is_restarting:
            problem = "the engine has failed and is being started again"
            raise Overloaded(problem, remedy="Try again in a few seconds")
        is_late = self._watchdog.batch_is_late and not self.hangs_for_good
        if is_late and not self._closing.is_set():
            problem = "a batch of the engine takes longer than a check may"
            raise Overloaded(problem, remedy="Try again later, or raise TIMEOUT= of `make up`")
        if self._closing.is_set() or not self.is_alive:
            problem = "no checks are served: the server is shutting down, or its engine has failed"
            raise Overloaded(problem, remedy="Start it again; if it failed, its log says why")
        if self.waiting >= MAX_QUEUED:
            raise Overloaded("too many checks are waiting", remedy="Try again later")

    def _check_is_in_time(self, deadline: float) -> None:
        """Raise Overloaded if what is before a check will take most of the time that it has; the
        first one is always taken, as the pace may be another by now.
        """
        before = self.waiting + self.open
        expected_s = self._pace.seconds(before + 1)
        time_s = EXPECTED_SHARE * (deadline - time.monotonic())
        if before > 0 and expected_s > time_s:
            problem = "more checks are waiting than can be answered before this one is due"
            overloaded = Overloaded(problem, remedy="Try again later")
            overloaded.retry_after_s = expected_s - time_s
            raise overloaded

    def _run(self) -> None:
        while (death := self._serve_until_it_dies()) is not None:
            with self._queue_lock:
                is_wanted = not self._closing.is_set()
                self._is_restarting = self._restartable is not None and is_wanted
                if not self._is_restarting:
                    self._closing.set()
                    self._failure = death
            # Nobody may wait for an engine that is dead.
            self._fail_all(death)
            if not self._is_restarting or not self._start_again():
                return

    def _serve_until_it_dies(self) -> GuardError | None:
        """Answer checks; why the engine is dead, or None once all are answered and it is closed."""
        try:
            while self._open_arrivals():
                is_answered = self._step()
                if self._is_dead(has_failed=not is_answered):
                    problem = "the engine failed and answers no more checks"
                    return GuardError(problem, remedy="Start the server again; its log says why")
                self._count()
            while self._open:
                self._step()
        except BaseException as error:
            return without_frames(engine_failure(error))
        return None

    def _is_dead(self, *, has_failed: bool) -> bool:
        """Whether nothing is answered any longer; `has_failed` says that the last batch failed."""
        if not self._engine.is_usable:
            return True
        if not has_failed or self._restartable is None:
            return False
        with self._watchdog.batch():
            return not self._restartable.works()

    def _start_again(self) -> bool:
        """Start the dead engine again, after growing pauses; True if it works again. It is a
        `failure` if it does not, unless the thread is closed meanwhile.
        """
        assert self._restartable is not None
        if time.monotonic() > self._started_at + STABLE_S:
            self._starts_in_a_row = 0
        failure = GuardError("the engine died again and again", remedy="Its log says why")
        for pause_s in PAUSES_S[self._starts_in_a_row :]:
            self._starts_in_a_row += 1
            log.error("the engine is dead; it is started again in %g s", pause_s)
            if self._closing.wait(pause_s):  # nobody needs it any more, and nothing has failed
                self._is_restarting = False
                return False
            try:
                with self._watchdog.loading():
                    self._restartable.restart(self._watchdog.load_next)
                    self._on_restart()
            except BaseException as error:
                failure = without_frames(engine_failure(error))
                self.restarts = replace(self.restarts, failed=self.restarts.failed + 1)
                log.error("the engine does not start: %s", failure)
                continue
            self.restarts = replace(self.restarts, started=self.restarts.started + 1)
            self._started_at = time.monotonic()
            self._is_restarting = False
            log.warning("the engine was started again")
            return True
        with self._queue_lock:
            self._failure = failure
            self._closing.set()
            self._is_restarting = False
        return False

    def _open_arrivals(self) -> bool:
        """Begin what is queued, for OPENING_S or a little more; False once it is time to close."""
        # From the first arrival on: it is waited for without a limit, and the rest of a burst is to
        # be opened with it.
        until = math.inf
        for pending in self._arrivals():
            until = min(until, time.monotonic() + OPENING_S)
            if pending is None:
                return False
            if pending.future.set_running_or_notify_cancel():
                if isinstance(pending, PendingChange):
                    self._change(pending)
                else:
                    self._open_check(pending)
            if time.monotonic() > until:
                break
        return True

    def _arrivals(self) -> Iterator[PendingCheck | PendingChange | None]:
        """The queued items that may begin; waits for one if there is nothing to do."""
        if not self._open:
            arrival = self._queued.get()
            self._busy_since = time.monotonic()
            yield arrival
        for _ in range(min(self._queued.qsize(), MAX_OPEN - len(self._open))):
            yield self._queued.get_nowait()

    def _change(self, pending: PendingChange) -> None:
        try:
            with self._watchdog.loading():
                pending.change()
        except BaseException as error:  # to the caller, who is on another thread
            _fail(pending, error)
        else:
            pending.future.set_result(None)
        self._busy_since = time.monotonic()  # loading is not counted as work on checks

    def _open_check(self, pending: PendingCheck) -> None:
        try:
            if failure := pending.failure():
                raise failure
            check = self._engine.open_check(
                pending.messages,
                pending.rules,
                cache_salt=pending.cache_salt,
                policies=pending.policies,
            )
        except BaseException as error:  # to the caller, who is on another thread
            _fail(pending, error)
        else:
            self._open.append((check, pending))

    def _step(self) -> bool:
        """Run a batch, if there is anything to compute, and give answers; False if it fails."""
        self._drop_unwanted()
        try:
            if any(not check.call.done for check, _ in self._open):
                with self._watchdog.batch():
                    self._engine.step()
        except Exception as error:
            for check in self._fail_open(engine_failure(error)):  # once: it is logged
                self._engine.cancel(check.call)
            return False
        together = len(self._open)
        answers = self._answer_finished()
        now = time.monotonic()
        self._pace.ran(now - self._busy_since, answers, together)
        self._busy_since = now
        return True

    def _drop_unwanted(self) -> None:
        """End the checks that nobody waits for any longer, or that are too late."""
        unwanted: list[OpenedCheck] = []
        for check, pending in self._open:
            if failure := pending.failure():
                _fail(pending, failure)
                unwanted.append(check)
        # First: if the engine fails, nobody is told twice.
        self._open = [item for item in self._open if not item[1].future.done()]
        for check in unwanted:
            self._engine.cancel(check.call)

    def _answer_finished(self) -> int:
        finished = [(check, pending) for check, pending in self._open if check.call.done]
        self._open = [(check, pending) for check, pending in self._open if not check.call.done]
        for check, pending in finished:
            try:
                if failure := pending.failure():  # its batch took too long
                    raise failure
                pending.future.set_result(check.result())
            except Exception as error:
                _fail(pending, error)
        return len(finished)

    def _count(self) -> None:
        """Read the engine's counters, now and then, and when it has nothing to do."""
        now = time.monotonic()
        is_idle = not self._open and self._queued.empty()
        if self._engine.is_usable and (is_idle or now > self._counters_read_at + COUNTERS_S):
            self.counters, self._counters_read_at = self._engine.counters, now

    def _fail_all(self, error: GuardError) -> None:
        """Give `error` to everyone who waits; the engine may be dead, and is asked nothing."""
        self._fail_open(error)
        while not self._queued.empty():
            queued = self._queued.get_nowait()
            if queued is not None and queued.future.set_running_or_notify_cancel():
                _fail(queued, error)

    def _fail_open(self, error: GuardError) -> list[OpenedCheck]:
        """Give `error` to whose checks are in the engine; these checks."""
        failed, self._open = self._open, []
        for _, pending in failed:
            _fail(pending, error)
        return [check for check, _ in failed]
