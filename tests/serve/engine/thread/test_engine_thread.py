"""The engine's thread on an engine of toy steps: who waits, who is answered, and who is dropped."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine import Call, OpenCheck
from serve.engine.refusals import Overloaded, TooLate
from serve.engine.score import EngineCounters
from serve.engine.thread.engine_thread import MAX_OPEN, MAX_QUEUED, OPENING_S, EngineThread
from serve.engine.thread.pace import LEAST_ANSWERS
from serve.engine.thread.watchdog import Watchdog
from tests.serve.toy_engine import MortalEngine, ToyEngine
from tests.waiting import wait_until

Toy = tuple[ToyEngine, EngineThread]
Mortal = tuple[MortalEngine, EngineThread]
MODULE = "serve.engine.thread.engine_thread"


def open_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what waits for a batch join it, however long a busy machine takes to open it."""
    monkeypatch.setattr(f"{MODULE}.OPENING_S", 60.0)


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
    long = thread.check((), [f"rule {number}" for number in range(50)])
    short = thread.check((), ["short"])
    done: list[str] = []
    long.add_done_callback(lambda _: done.append("long"))
    short.add_done_callback(lambda _: done.append("short"))
    engine.may_step.set()
    assert len(long.result(10).refused) == 50 and list(short.result(10).refused) == ["short"]
    assert done == ["short", "long"]


def test_the_letters_of_a_text_are_no_rules_and_what_cannot_be_opened_says_why(toy: Toy) -> None:
    _, thread = toy
    with pytest.raises(GuardError, match=r"rules must be a list of names .*\['fine'\]"):
        thread.check((), "fine")
    with pytest.raises(GuardError, match="the check broke"):
        thread.check((Message("user", "breaks"),), ["fine"]).result(10)
    assert thread.open == 0


def test_a_batch_that_breaks_is_logged_once_fails_its_checks_and_not_the_later_ones(
    toy: Toy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, thread = toy
    open_together(monkeypatch)
    stepping, go = threading.Event(), threading.Event()

    def hold() -> None:
        stepping.set()
        go.wait(10)

    engine.on_step = hold
    thread.check((), ["fine"])
    assert stepping.wait(10)
    futures = [thread.check((), ["crash"]) for _ in range(3)]  # they wait while it steps
    go.set()
    for future in futures:
        with pytest.raises(GuardError, match="the batch broke"):
            future.result(10)
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert list(thread.check((), ["fine"]).result(10).refused) == ["fine"]
    assert thread.is_alive and all(names == [] for names, _ in engine.open)


def test_no_more_checks_are_begun_than_the_engine_is_to_hold_and_the_others_wait(toy: Toy) -> None:
    engine, thread = toy
    engine.may_step.clear()
    futures = [thread.check((), ["one", "two"]) for _ in range(3 * MAX_OPEN)]
    most: list[int] = []
    engine.on_step = lambda: most.append(len([names for names, _ in engine.open if names]))
    engine.may_step.set()
    assert all(len(future.result(10).refused) == 2 for future in futures)
    assert max(most) == MAX_OPEN


def test_a_batch_runs_although_checks_keep_coming_in(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, thread = toy
    put: list[Any] = []

    def one_more_for_each(*arguments: Any, **options: Any) -> OpenCheck:
        if len(put) < MAX_QUEUED:
            put.append(thread.check((), ["fine"]))
        return ToyEngine.open_check(engine, *arguments, **options)

    monkeypatch.setattr(engine, "open_check", one_more_for_each)
    steps: list[int] = []
    engine.on_step = lambda: steps.append(len(put))
    thread.check((), ["fine"]).result(10)
    assert steps[0] <= 2  # it, and the one that came in meanwhile


def test_a_batch_does_not_wait_for_all_that_take_long_to_open(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, thread = toy
    opened: list[float] = []

    def slow(*arguments: Any, **options: Any) -> OpenCheck:
        time.sleep(0.03)
        opened.append(time.monotonic())
        return ToyEngine.open_check(engine, *arguments, **options)

    monkeypatch.setattr(engine, "open_check", slow)
    engine.may_step.clear()
    first = thread.check((), ["fine"])
    wait_until(lambda: opened)
    futures = [thread.check((), ["fine"]) for _ in range(20)]
    opened_before_a_step: list[int] = []
    engine.on_step = lambda: opened_before_a_step.append(len(opened))
    engine.may_step.set()
    for future in (first, *futures):
        future.result(10)
    steps = [0, *opened_before_a_step]
    assert max(after - before for before, after in itertools.pairwise(steps)) <= 4


def test_a_burst_after_an_idle_pause_is_opened_together(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, thread = toy
    time.sleep(4 * OPENING_S)
    open_together(monkeypatch)
    burst: list[Any] = []

    def with_the_rest_of_the_burst(*arguments: Any, **options: Any) -> OpenCheck:
        if not burst:
            burst.extend([thread.check((), ["fine"]) for _ in range(3)])
        return ToyEngine.open_check(engine, *arguments, **options)

    monkeypatch.setattr(engine, "open_check", with_the_rest_of_the_burst)
    opened_before_a_step: list[int] = []
    engine.on_step = lambda: opened_before_a_step.append(len(engine.open))
    thread.check((), ["fine"]).result(10)
    for future in burst:
        future.result(10)
    assert opened_before_a_step == [4]


class Stubborn(ToyEngine):
    """A toy engine that cannot even clear away what failed."""

    def cancel(self, call: Call) -> None:
        raise RuntimeError("nothing works any more")


def test_a_thread_that_cannot_go_on_fails_everyone_who_waits_and_says_that_it_is_down() -> None:
    engine = Stubborn()
    engine.may_step.clear()
    thread = EngineThread(engine)  # type: ignore[arg-type]
    futures = [thread.check((), ["crash"]) for _ in range(MAX_OPEN + 5)]
    engine.may_step.set()
    for future in futures:
        with pytest.raises(GuardError, match=r"the batch broke|nothing works any more"):
            future.result(10)
    thread.close()
    assert not thread.is_alive
    with pytest.raises(Overloaded, match="its engine has failed"):
        thread.check((), ["fine"])


def test_an_engine_that_hangs_does_not_keep_the_server_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{MODULE}.CLOSING_S", 0.1)
    engine, held = ToyEngine(), threading.Event()
    engine.on_step = lambda: held.wait(30)
    thread = EngineThread(engine, timeout_s=2.0)  # type: ignore[arg-type]
    futures = [thread.check((), ["fine"]) for _ in range(3)]
    began = time.monotonic()
    thread.close()
    assert time.monotonic() - began < 20  # the batch hangs for longer
    for future in futures:
        with pytest.raises(Overloaded, match="took too long"):
            future.result(0)
    assert thread._thread.daemon  # so that the process ends without it
    assert thread.hangs_for_good and "the engine hangs" in str(thread.failure)
    held.set()


def test_a_check_whose_result_cannot_be_made_fails_alone(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, thread = toy
    with monkeypatch.context() as patch:
        patch.setattr(OpenCheck, "result", lambda self: 1 / 0)
        with pytest.raises(GuardError, match="division by zero"):
            thread.check((), ["fine"]).result(10)
    assert list(thread.check((), ["fine"]).result(10).refused) == ["fine"]


def test_closing_finishes_what_is_under_way_and_refuses_what_comes_later(toy: Toy) -> None:
    engine, thread = toy
    engine.may_step.clear()
    under_way = thread.check((), ["one", "two", "three"])
    closing = threading.Thread(target=thread.close)
    closing.start()
    wait_until(lambda: not thread.is_ready)
    assert thread.is_alive  # it still answers, and is not to be killed
    with pytest.raises(Overloaded):
        thread.check((), ["late"])
    engine.may_step.set()
    closing.join(10)
    assert list(under_way.result(0).refused) == ["one", "two", "three"]


def test_a_check_whose_caller_s_deadline_is_over_is_not_begun(toy: Toy) -> None:
    engine, thread = toy
    late = thread.check((), ["late"], deadline=time.monotonic() - 1)
    with pytest.raises(TooLate):
        late.result(10)
    assert engine.conversations == []
    assert thread.check((), ["rule"], deadline=time.monotonic() + 9).result(10).refused


def test_the_engine_s_counters_are_read_when_it_has_nothing_more_to_do(toy: Toy) -> None:
    engine, thread = toy
    assert thread.counters.adapters == 2
    engine.counters = EngineCounters(swap_ins=3)
    thread.check((), ["rule"]).result(10)
    wait_until(lambda: thread.counters.swap_ins == 3)
    assert (thread.waiting, thread.open) == (0, 0)


def test_more_checks_than_the_queue_holds_are_refused_at_once(toy: Toy) -> None:
    engine, thread = toy
    engine.may_step.clear()
    with pytest.raises(Overloaded, match="too many"):
        for _ in range(2 * MAX_QUEUED + 2):
            thread.check((), ["rule"])


def test_a_check_that_takes_too_long_is_dropped_wherever_it_is() -> None:
    """In the engine or still waiting; and those that come later are answered."""
    engine = ToyEngine()
    thread = EngineThread(engine, timeout_s=1.0)  # type: ignore[arg-type]
    try:
        engine.on_step = lambda: time.sleep(0.02)
        opened = thread.check((), [f"rule {number}" for number in range(1000)])
        for _ in range(MAX_OPEN):
            thread.check((), [f"rule {number}" for number in range(1000)])
        waiting = thread.check((), [f"rule {number}" for number in range(1000)])
        for future in (opened, waiting):
            with pytest.raises(Overloaded, match=r"took too long.*TIMEOUT="):
                future.result(10)
        assert list(thread.check((), ["fine"]).result(10).refused) == ["fine"]
        assert all(call.done for _, call in engine.open)  # of the others nothing is left
    finally:
        thread.close()


def test_what_nobody_waits_for_any_more_is_dropped(toy: Toy) -> None:
    engine, thread = toy
    engine.on_step = lambda: time.sleep(0.01)
    future = thread.check((), [f"rule {number}" for number in range(1000)])
    wait_until(lambda: engine.open)
    thread.give_up(future)
    with pytest.raises(GuardError, match="the caller is gone"):
        future.result(8)  # it would have taken ten seconds
    wait_until(lambda: engine.open == [])
    thread.give_up(future)  # it is answered: nothing is left to do


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mortal]:
    """An engine that may be started twice in a row, and its thread."""
    monkeypatch.setattr(f"{MODULE}.PAUSES_S", (0.0, 0.05))
    engine = MortalEngine()
    thread = EngineThread(engine)  # type: ignore[arg-type]
    yield engine, thread
    engine.may_start.set()
    thread.close()


def test_a_dead_engine_fails_all_who_wait_and_is_started_again(mortal: Mortal) -> None:
    engine, thread = mortal
    engine.may_start.clear()
    engine.may_step.clear()
    futures = [thread.check((), [rule]) for rule in ["kill", *["fine"] * (MAX_OPEN + 5)]]
    replacement = thread.serve_rule("fine")
    engine.may_step.set()
    for future in (*futures, replacement):
        with pytest.raises(GuardError, match=r"could be cleared|answers no more"):
            future.result(10)
    wait_until(lambda: engine.starts)
    assert (thread.is_alive, thread.is_ready, thread.failure) == (True, False, None)
    for ask in (lambda: thread.check((), ["fine"]), lambda: thread.serve_rule("fine")):
        with pytest.raises(Overloaded, match="being started again"):
            ask()
    engine.may_start.set()
    wait_until(lambda: thread.is_ready)
    assert list(thread.check((), ["fine"]).result(10).refused) == ["fine"]
    assert (thread.restarts.started, thread.restarts.failed) == (1, 0)


def test_an_engine_is_dead_if_it_answers_nothing_after_a_failed_batch(mortal: Mortal) -> None:
    engine, thread = mortal
    for does_work, starts in ((True, 0), (False, 1)):
        engine.does_work = does_work
        with pytest.raises(GuardError, match="the batch broke"):
            thread.check((), ["crash"]).result(10)
        wait_until(lambda: thread.is_ready)
        wait_until(lambda starts=starts: len(engine.starts) >= starts)
        wait_until(lambda: thread.is_ready)
        assert list(thread.check((), ["fine"]).result(10).refused) == ["fine"]
        assert len(engine.starts) == starts


def test_an_engine_that_does_not_start_is_tried_a_few_times_and_then_a_failure(
    mortal: Mortal,
) -> None:
    engine, thread = mortal
    engine.does_start = False
    with pytest.raises(GuardError):
        thread.check((), ["kill"]).result(10)
    thread._thread.join(10)
    first, second = engine.starts
    assert second - first >= 0.05
    assert (thread.restarts.started, thread.restarts.failed) == (0, 2)
    assert thread.failure is not None and "the device is gone" in str(thread.failure)
    assert not thread.is_alive and not thread.is_ready
    with pytest.raises(Overloaded, match="its engine has failed"):
        thread.check((), ["fine"])


@pytest.mark.parametrize("lives_long", [False, True])
def test_an_engine_that_dies_soon_after_every_start_is_given_up(
    mortal: Mortal, monkeypatch: pytest.MonkeyPatch, lives_long: bool
) -> None:
    _, thread = mortal
    if lives_long:
        monkeypatch.setattr(f"{MODULE}.STABLE_S", -1.0)
    for _ in range(3):
        wait_until(lambda: thread.is_ready)
        with pytest.raises(GuardError):
            thread.check((), ["kill"]).result(10)
    if lives_long:
        wait_until(lambda: thread.is_ready)
        assert thread.restarts.started == 3
    else:
        thread._thread.join(10)
        assert thread.restarts.started == 2
        assert thread.failure is not None and "again and again" in str(thread.failure)


def test_a_thread_is_closed_although_its_engine_is_to_be_started_again_later(
    mortal: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}.PAUSES_S", (60.0,))
    engine, thread = mortal
    with pytest.raises(GuardError):
        thread.check((), ["kill"]).result(10)
    wait_until(lambda: thread.is_alive)  # again, once it is to be started
    began = time.monotonic()
    thread.close()
    assert time.monotonic() < began + 30 and not thread._thread.is_alive()
    assert engine.starts == []
    assert thread.failure is None  # else the process would end as one that broke


def test_while_a_batch_is_late_checks_are_refused_for_that_and_answered_after_it() -> None:
    engine, held = ToyEngine(), threading.Event()
    engine.on_step = lambda: held.wait(90)
    thread = EngineThread(engine)  # type: ignore[arg-type]
    thread._watchdog = Watchdog(0.1)
    thread.check((), ["fine"])
    wait_until(lambda: not thread.is_alive)
    with pytest.raises(Overloaded, match=r"a batch .* longer than a check may.*TIMEOUT="):
        thread.check((), ["fine"])
    held.set()
    wait_until(lambda: thread.is_alive)
    assert list(thread.check((), ["fine"], deadline=time.monotonic() + 60).result(10).refused)
    thread.close()


def test_a_batch_that_hangs_for_good_is_a_failure_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.engine.thread.watchdog.HANGS_FOR_GOOD_S", 0.1)
    monkeypatch.setattr(f"{MODULE}.CLOSING_S", 60)
    engine, held = ToyEngine(), threading.Event()
    engine.on_step = lambda: held.wait(90)
    thread = EngineThread(engine)  # type: ignore[arg-type]
    thread._watchdog = Watchdog(0.1)
    future = thread.check((), ["fine"])
    wait_until(lambda: thread.failure)
    assert "hangs" in str(thread.failure) and not thread.is_alive
    began = time.monotonic()
    thread.close()
    assert time.monotonic() < began + 30  # and not CLOSING_S
    with pytest.raises(Overloaded, match="took too long"):
        future.result(0)
    held.set()


def test_a_restart_that_hangs_is_a_failure_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.engine.thread.watchdog.LOADING_S", 0.1)
    monkeypatch.setattr(f"{MODULE}.CLOSING_S", 60)
    monkeypatch.setattr(f"{MODULE}.PAUSES_S", (0.0,))
    engine = MortalEngine()
    engine.may_start.clear()
    thread = EngineThread(engine, timeout_s=5)  # type: ignore[arg-type]
    killed = thread.check((), ["kill"])
    wait_until(lambda: thread.failure)
    assert "what the engine loads hangs" in str(thread.failure) and thread.hangs_for_good
    with pytest.raises(GuardError):
        killed.result(0)
    began = time.monotonic()
    thread.close()
    assert time.monotonic() < began + 30  # and not CLOSING_S
    engine.may_start.set()


def test_each_try_to_start_an_engine_has_a_time_of_its_own(
    mortal: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, thread = mortal
    begun: list[int] = []
    monkeypatch.setattr(thread._watchdog, "load_next", lambda: begun.append(len(engine.starts)))
    with pytest.raises(GuardError):
        thread.check((), ["kill"]).result(10)
    wait_until(lambda: thread.restarts.started)
    assert begun == [0]


def test_an_answer_that_is_late_is_none() -> None:
    engine = ToyEngine({"fine": 1.0})
    engine.on_step = lambda: time.sleep(0.3)
    thread = EngineThread(engine, timeout_s=30)  # type: ignore[arg-type]
    try:
        late = thread.check((), ["fine"], deadline=time.monotonic() + 0.1)
        with pytest.raises(TooLate):
            late.result(10)
        engine.on_step = lambda: None
        assert thread.check((), ["fine"]).result(10).outcome == "violation"
    finally:
        thread.close()


def test_a_change_of_rules_that_hangs_is_seen_and_at_last_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, held = ToyEngine(), threading.Event()
    monkeypatch.setattr(engine, "serve", lambda *_: held.wait(30), raising=False)
    thread = EngineThread(engine, timeout_s=0.1)  # type: ignore[arg-type]
    thread.serve_rule("fine")
    wait_until(lambda: not thread.is_ready)
    assert thread.failure is None
    monkeypatch.setattr("serve.engine.thread.watchdog.LOADING_S", 0.4)
    wait_until(lambda: thread.failure)
    assert "what the engine loads hangs" in str(thread.failure)
    held.set()
    thread.close()


def test_an_engine_that_cannot_drop_a_check_is_started_again_and_nobody_waits(
    mortal: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, thread = mortal
    engine.may_step.clear()
    monkeypatch.setattr(engine, "cancel", lambda call: 1 / 0)
    running = thread.check((), ["fine"])
    wait_until(lambda: engine.open)
    given_up = [thread.check((), ["fine"], deadline=time.monotonic() + 0.2) for _ in range(2)]
    for check in given_up:
        thread.give_up(check)
    thread.give_up(running)
    engine.may_step.set()
    for check in (running, *given_up):
        assert isinstance(check.exception(10), GuardError)
    wait_until(lambda: thread.is_ready)
    assert thread.failure is None


def test_a_check_that_would_be_too_late_is_refused_as_it_comes(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, thread = toy
    open_together(monkeypatch)
    engine.on_step = lambda: time.sleep(0.05)
    for _ in range(LEAST_ANSWERS):  # by pairs, one of which goes on
        engine.may_step.clear()
        first = thread.check((), ["fine"])
        wait_until(lambda: thread.open)  # the pair waits for it
        pair = [thread.check((), rules) for rules in (["fine"], ["fine", "again"])]
        engine.may_step.set()
        for future in (first, *pair):
            future.result(10)
    engine.on_step = lambda: None
    engine.may_step.clear()
    before = [thread.check((), ["fine"]) for _ in range(20)]
    with pytest.raises(Overloaded, match="before this one is due") as refused:
        thread.check((), ["fine"], deadline=time.monotonic() + 1)
    assert 0.1 < refused.value.retry_after_s < 30
    engine.may_step.set()
    for future in before:
        assert future.result(10)
    wait_until(lambda: not (thread.open or thread.waiting))
    # Nothing is before this one: it is tried, whatever the pace was.
    thread.check((), ["fine"], deadline=time.monotonic() + 0.01)
