"""The engine's thread on an engine of toy steps: who waits, who is answered, and who is dropped.

And what it measures: the pace of answers, and what hangs.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from pytest import LogCaptureFixture, MonkeyPatch

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine import Check, OpenCheck
from serve.engine.refusals import Overloaded, TooLate
from serve.engine.thread.engine_thread import MAX_OPEN, OPENING_S, EngineThread
from serve.engine.thread.pace import LEAST_ANSWERS, REMEMBERED, Pace
from serve.engine.thread.watchdog import Watchdog
from tests.serve.toy_engine import MortalEngine, ToyEngine
from tests.waiting import wait_until

Toy = tuple[ToyEngine, EngineThread]
Mortal = tuple[MortalEngine, EngineThread]
MODULE = "serve.engine.thread.engine_thread"
CLOCKS = "serve.engine.thread.watchdog"
MANY = [f"rule {number}" for number in range(1000)]


def ask(thread: EngineThread, *rules: str, **options: Any) -> Future[Check]:
    return thread.check((), list(rules), **options)


def assert_answers(thread: EngineThread) -> None:
    """It answers a check that comes now."""
    assert list(ask(thread, "fine").result(10).refused) == ["fine"]


def assert_answered(futures: Iterable[Future[Check]], refused: int = 1) -> None:
    for future in futures:
        assert len(future.result(10).refused) == refused


def assert_fail(futures: Iterable[Future[Any]], match: str) -> None:
    for future in futures:
        with pytest.raises(GuardError, match=match):
            future.result(10)


def open_together(monkeypatch: MonkeyPatch) -> None:
    """Let what waits for a batch join it, however long a busy machine takes to open it."""
    monkeypatch.setattr(f"{MODULE}.OPENING_S", 60.0)


def before_opening(monkeypatch: MonkeyPatch, engine: ToyEngine, call: Callable[[], object]) -> None:
    """Call this whenever a check is opened."""

    def open_check(*arguments: Any, **options: Any) -> OpenCheck:
        call()
        return ToyEngine.open_check(engine, *arguments, **options)

    monkeypatch.setattr(engine, "open_check", open_check)


@pytest.fixture
def toy() -> Iterator[Toy]:
    engine = ToyEngine()
    thread = EngineThread(engine)  # type: ignore[arg-type]
    yield engine, thread
    engine.may_step.set()
    thread.close()


def test_a_short_check_does_not_wait_for_a_long_one_that_came_before(toy: Toy) -> None:
    engine, thread = toy
    engine.may_step.clear()
    long, short = ask(thread, *MANY[:50]), ask(thread, "short")
    done: list[str] = []
    long.add_done_callback(lambda _: done.append("long"))
    short.add_done_callback(lambda _: done.append("short"))
    engine.may_step.set()
    assert len(long.result(10).refused) == 50 and list(short.result(10).refused) == ["short"]
    assert done == ["short", "long"]


def test_what_cannot_be_opened_fails_alone(toy: Toy, monkeypatch: MonkeyPatch) -> None:
    _, thread = toy
    with pytest.raises(GuardError, match=r"rules must be a list of names .*\['fine'\]"):
        thread.check((), "fine")
    with pytest.raises(GuardError, match="the check broke"):
        thread.check((Message("user", "breaks"),), ["fine"]).result(10)
    assert thread.open == 0
    with monkeypatch.context() as patch:
        patch.setattr(OpenCheck, "result", lambda self: 1 / 0)
        with pytest.raises(GuardError, match="division by zero"):
            ask(thread, "fine").result(10)
    assert_answers(thread)


def test_a_batch_that_breaks_is_logged_once_fails_its_checks_and_not_the_later_ones(
    toy: Toy, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    engine, thread = toy
    open_together(monkeypatch)
    engine.may_step.clear()
    ask(thread, "fine")
    wait_until(lambda: thread.open)
    futures = [ask(thread, "crash") for _ in range(3)]  # they wait while it steps
    engine.may_step.set()
    assert_fail(futures, "the batch broke")
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert_answers(thread)
    assert thread.is_alive and all(names == [] for names, _ in engine.open)


def test_no_more_checks_are_begun_than_the_engine_is_to_hold_and_the_others_wait(toy: Toy) -> None:
    engine, thread = toy
    engine.may_step.clear()
    futures = [ask(thread, "one", "two") for _ in range(3 * MAX_OPEN)]
    most: list[int] = []
    engine.on_step = lambda: most.append(len([names for names, _ in engine.open if names]))
    engine.may_step.set()
    assert_answered(futures, refused=2)
    assert max(most) == MAX_OPEN


def test_a_batch_does_not_wait_for_all_slow_openings(toy: Toy, monkeypatch: MonkeyPatch) -> None:
    engine, thread = toy
    opened: list[object] = []
    before_opening(monkeypatch, engine, lambda: opened.append(time.sleep(0.03)))
    engine.may_step.clear()
    first = ask(thread, "fine")
    wait_until(lambda: opened)
    futures = [ask(thread, "fine") for _ in range(20)]
    steps = [0]  # how many were opened before each
    engine.on_step = lambda: steps.append(len(opened))
    engine.may_step.set()
    assert_answered((first, *futures))
    assert max(after - before for before, after in itertools.pairwise(steps)) <= 4


def test_a_burst_after_an_idle_pause_is_opened_together(toy: Toy, monkeypatch: MonkeyPatch) -> None:
    engine, thread = toy
    time.sleep(4 * OPENING_S)
    open_together(monkeypatch)
    burst: list[Any] = []
    before_opening(
        monkeypatch, engine, lambda: burst or burst.extend([ask(thread, "fine") for _ in range(3)])
    )
    opened_before_a_step: list[int] = []
    engine.on_step = lambda: opened_before_a_step.append(len(engine.open))
    assert_answered((ask(thread, "fine"), *burst))
    assert opened_before_a_step == [4]


def test_a_thread_that_cannot_go_on_fails_all(toy: Toy, monkeypatch: MonkeyPatch) -> None:
    engine, thread = toy
    monkeypatch.setattr(engine, "cancel", lambda call: 1 / 0)  # it cannot even clear away
    engine.may_step.clear()
    futures = [ask(thread, "crash") for _ in range(MAX_OPEN + 5)]
    engine.may_step.set()
    assert_fail(futures, "the batch broke|division by zero")
    thread.close()
    assert not thread.is_alive
    with pytest.raises(Overloaded, match="its engine has failed"):
        ask(thread, "fine")


def test_a_hanging_engine_does_not_keep_the_server_from_ending(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.CLOSING_S", 0.1)
    engine, held = ToyEngine(), threading.Event()
    engine.on_step = lambda: held.wait(30)
    thread = EngineThread(engine, timeout_s=2.0)  # type: ignore[arg-type]
    futures = [ask(thread, "fine") for _ in range(3)]
    began = time.monotonic()
    thread.close()
    assert time.monotonic() - began < 20  # the batch hangs for longer
    for future in futures:
        with pytest.raises(Overloaded, match="took too long"):
            future.result(0)
    assert thread._thread.daemon  # so that the process ends without it
    assert thread.hangs_for_good and "the engine hangs" in str(thread.failure)
    held.set()


def test_closing_finishes_what_is_under_way_and_refuses_what_comes_later(toy: Toy) -> None:
    engine, thread = toy
    engine.may_step.clear()
    under_way = ask(thread, "one", "two", "three")
    closing = threading.Thread(target=thread.close)
    closing.start()
    wait_until(lambda: not thread.is_ready)
    assert thread.is_alive  # it still answers, and is not to be killed
    with pytest.raises(Overloaded):
        ask(thread, "late")
    engine.may_step.set()
    closing.join(10)
    assert list(under_way.result(0).refused) == ["one", "two", "three"]


def test_a_check_that_is_late_is_not_begun_and_an_answer_that_is_late_is_none(toy: Toy) -> None:
    engine, thread = toy
    with pytest.raises(TooLate):
        ask(thread, "late", deadline=time.monotonic() - 1).result(10)
    assert engine.conversations == []
    engine.on_step = lambda: time.sleep(0.3)
    with pytest.raises(TooLate):
        ask(thread, "fine", deadline=time.monotonic() + 0.1).result(10)
    engine.on_step = lambda: None
    assert ask(thread, "rule", deadline=time.monotonic() + 9).result(10).refused


def test_a_check_that_takes_too_long_is_dropped_wherever_it_is() -> None:
    """In the engine or still waiting; and those that come later are answered."""
    engine = ToyEngine()
    thread = EngineThread(engine, timeout_s=1.0)  # type: ignore[arg-type]
    engine.on_step = lambda: time.sleep(0.02)
    futures = [ask(thread, *MANY) for _ in range(MAX_OPEN + 2)]
    assert_fail((futures[0], futures[-1]), r"took too long.*TIMEOUT=")
    assert_answers(thread)
    assert all(call.done for _, call in engine.open)  # of the others nothing is left
    thread.close()


@pytest.fixture
def mortal(monkeypatch: MonkeyPatch) -> Iterator[Mortal]:
    """An engine that may be started twice in a row, and its thread."""
    monkeypatch.setattr(f"{MODULE}.PAUSES_S", (0.0, 0.05))
    engine = MortalEngine()
    thread = EngineThread(engine)  # type: ignore[arg-type]
    yield engine, thread
    engine.may_start.set()
    thread.close()


def kill(thread: EngineThread) -> None:
    with pytest.raises(GuardError):
        ask(thread, "kill").result(10)


def test_a_dead_engine_fails_all_who_wait_and_is_started_again(mortal: Mortal) -> None:
    engine, thread = mortal
    engine.may_start.clear()
    engine.may_step.clear()
    futures = [ask(thread, rule) for rule in ["kill", *["fine"] * (MAX_OPEN + 5)]]
    replacement = thread.serve_rule("fine")
    engine.may_step.set()
    assert_fail((*futures, replacement), "could be cleared|answers no more")
    wait_until(lambda: engine.starts)
    assert (thread.is_alive, thread.is_ready, thread.failure) == (True, False, None)
    for put in (lambda: ask(thread, "fine"), lambda: thread.serve_rule("fine")):
        with pytest.raises(Overloaded, match="being started again"):
            put()
    engine.may_start.set()
    wait_until(lambda: thread.is_ready)
    assert_answers(thread)
    assert (thread.restarts.started, thread.restarts.failed) == (1, 0)


def test_an_engine_is_dead_if_it_answers_nothing_after_a_failed_batch(mortal: Mortal) -> None:
    engine, thread = mortal
    for does_work, starts in ((True, 0), (False, 1)):
        engine.does_work = does_work
        with pytest.raises(GuardError, match="the batch broke"):
            ask(thread, "crash").result(10)
        wait_until(lambda: thread.is_ready)
        wait_until(lambda starts=starts: len(engine.starts) >= starts)
        wait_until(lambda: thread.is_ready)
        assert_answers(thread)
        assert len(engine.starts) == starts


def test_a_start_is_tried_a_few_times(mortal: Mortal, monkeypatch: MonkeyPatch) -> None:
    """Each try has a time of its own."""
    engine, thread = mortal
    engine.does_start = False
    begun: list[int] = []
    monkeypatch.setattr(thread._watchdog, "load_next", lambda: begun.append(len(engine.starts)))
    kill(thread)
    thread._thread.join(10)
    first, second = engine.starts
    assert second - first >= 0.05 and begun == [0, 1]
    assert (thread.restarts.started, thread.restarts.failed) == (0, 2)
    assert thread.failure is not None and "the device is gone" in str(thread.failure)
    assert not thread.is_alive and not thread.is_ready
    with pytest.raises(Overloaded, match="its engine has failed"):
        ask(thread, "fine")


@pytest.mark.parametrize("lives_long", [False, True])
def test_an_engine_that_dies_soon_after_every_start_is_given_up(
    mortal: Mortal, monkeypatch: MonkeyPatch, lives_long: bool
) -> None:
    _, thread = mortal
    if lives_long:
        monkeypatch.setattr(f"{MODULE}.STABLE_S", -1.0)
    for _ in range(3):
        wait_until(lambda: thread.is_ready)
        kill(thread)
    if lives_long:
        wait_until(lambda: thread.is_ready)
        assert thread.restarts.started == 3
    else:
        thread._thread.join(10)
        assert thread.restarts.started == 2
        assert thread.failure is not None and "again and again" in str(thread.failure)


def test_it_is_closed_before_a_later_restart(mortal: Mortal, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.PAUSES_S", (60.0,))
    engine, thread = mortal
    kill(thread)
    wait_until(lambda: thread.is_alive)  # again, once it is to be started
    began = time.monotonic()
    thread.close()
    assert time.monotonic() < began + 30 and not thread._thread.is_alive()
    assert engine.starts == []
    assert thread.failure is None  # else the process would end as one that broke


def test_what_cannot_drop_is_started_again(mortal: Mortal, monkeypatch: MonkeyPatch) -> None:
    engine, thread = mortal
    engine.may_step.clear()
    monkeypatch.setattr(engine, "cancel", lambda call: 1 / 0)
    running = ask(thread, "fine")
    wait_until(lambda: engine.open)
    given_up = [ask(thread, "fine", deadline=time.monotonic() + 0.2) for _ in range(2)]
    for check in (*given_up, running):
        thread.give_up(check)
    engine.may_step.set()
    for check in (running, *given_up):
        assert isinstance(check.exception(10), GuardError)
    wait_until(lambda: thread.is_ready)
    assert thread.failure is None


@pytest.mark.parametrize("hangs", ["a batch", "a restart", "a change of rules"])
def test_what_hangs_is_a_failure(hangs: str, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.CLOSING_S", 60)
    engine, held = MortalEngine(), threading.Event()
    engine.may_start.clear()
    monkeypatch.setattr(engine, "serve", lambda *_: held.wait(90))
    thread = EngineThread(engine)  # type: ignore[arg-type]
    thread._watchdog = Watchdog(0.1)
    if hangs == "a batch":
        engine.on_step = lambda: held.wait(90)
        ask(thread, "fine")
    elif hangs == "a restart":
        ask(thread, "kill")
    else:
        thread.serve_rule("fine")
    wait_until(lambda: not thread.is_ready)
    assert thread.failure is None
    for name in ("HANGS_FOR_GOOD_S", "LOADING_S"):
        monkeypatch.setattr(f"{CLOCKS}.{name}", 0.1)
    wait_until(lambda: thread.failure)
    assert thread.hangs_for_good
    assert str(thread.failure).startswith(("a batch of the engine", "what the engine loads"))
    began = time.monotonic()
    thread.close()
    assert time.monotonic() < began + 30  # and not CLOSING_S
    held.set()
    engine.may_start.set()


def test_a_check_that_would_be_late_is_refused_at_once(toy: Toy, monkeypatch: MonkeyPatch) -> None:
    engine, thread = toy
    open_together(monkeypatch)
    engine.on_step = lambda: time.sleep(0.05)
    for _ in range(LEAST_ANSWERS):  # by pairs, one of which goes on
        engine.may_step.clear()
        first = ask(thread, "fine")
        wait_until(lambda: thread.open)  # the pair waits for it
        pair = [ask(thread, "fine"), ask(thread, "fine", "again")]
        engine.may_step.set()
        for future in (first, *pair):
            future.result(10)
    engine.on_step = lambda: None
    engine.may_step.clear()
    before = [ask(thread, "fine") for _ in range(20)]
    with pytest.raises(Overloaded, match="before this one is due") as refused:
        ask(thread, "fine", deadline=time.monotonic() + 1)
    assert 0.1 < refused.value.retry_after_s < 30
    engine.may_step.set()
    assert_answered(before)
    wait_until(lambda: not (thread.open or thread.waiting))
    # Nothing is before this one: it is tried, whatever the pace was.
    ask(thread, "fine", deadline=time.monotonic() + 0.01)


def test_the_pace_is_of_batches_of_several_checks_and_counts_work_without_an_answer() -> None:
    pace = Pace()
    for _ in range(100):
        pace.ran(1.0, 1, 1)  # checks that come one by one say nothing of many
    for _ in range(LEAST_ANSWERS - 1):
        pace.ran(0.5, 1, 2)
    assert pace.seconds(32) == 0
    pace.ran(0.5, 1, 2)
    pace.ran(8.0, 0, 20)  # thrown away
    assert pace.seconds(2) == pytest.approx(3.0)


def test_the_pace_is_of_the_last_answers_of_late(monkeypatch: MonkeyPatch) -> None:
    pace = Pace()
    pace.ran(1000.0, 8, 8)
    for _ in range(REMEMBERED):
        pace.ran(0.5, 1, 2)
    assert pace.seconds(2) == pytest.approx(1.0)
    for _ in range(3):  # more answers than are remembered: such a batch counts whole
        pace.ran(2.0, 10 * REMEMBERED, 32)
        assert pace.seconds(REMEMBERED) == pytest.approx(0.2)
    monkeypatch.setattr("serve.engine.thread.pace.FORGET_S", -1.0)
    assert pace.seconds(2) == 0
    pace.ran(0.1, 1, 2)
    monkeypatch.setattr("serve.engine.thread.pace.FORGET_S", 10.0)
    assert pace.seconds(2) == 0  # one answer is not enough


def test_each_load_has_its_time_and_what_fails_none(monkeypatch: MonkeyPatch) -> None:
    watchdog, now = Watchdog(timeout_s=60.0), [1000.0]
    monkeypatch.setattr(f"{CLOCKS}.time.monotonic", lambda: now[0])
    with pytest.raises(ZeroDivisionError), watchdog.loading():
        now[0] += 800.0
        watchdog.load_next()
        now[0] += 900.0
        assert (watchdog.loading_is_late, watchdog.hanging) == (True, None)
        now[0] += 1.0
        assert watchdog.hanging == "what the engine loads"
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), watchdog.batch():
        now[0] += 91.0
        assert watchdog.batch_is_late and watchdog.hanging == "a batch of the engine"
        raise ZeroDivisionError
    assert not (watchdog.batch_is_late or watchdog.loading_is_late or watchdog.hanging)
