"""GuardEngine on a backend that is not vLLM: it uses nothing but the protocol.

Several engines behind one check, an encoder's rule beside a decoder's, and what is served after
engines died.
"""

from __future__ import annotations

import math
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import MonkeyPatch
from safetensors.numpy import save_file

from guard.errors import GuardError
from guard.recipe import Recipe
from guard.weights.card import check_rule, load_card, read_card
from guard.weights.head import Head
from serve.engine import GuardEngine, Score, ScoreRequest
from serve.engine.backend import EngineOutput
from serve.engine.engines import GuardEngines
from serve.engine.refusals import Overloaded
from serve.engine.thread.engine_thread import EngineThread
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import RULE_TEXTS, recipe, save_card
from tests.serve.encoder_rules import ENGINE, reference_logit, save_encoder_rule
from tests.serve.encoder_rules import recipe as encoder_recipe
from tests.serve.engine.shared import runner
from tests.serve.engine.toy import STATE_SIZE, ToyBackend
from tests.serve.guarded import (
    CONVERSATION,
    adapter_folders,
    guard_engine,
    peft_logit,
    save_adapter,
)
from tests.serve.heads import HEAD_FILE, save_head
from tests.waiting import wait_until

TEXT = "The assistant must not give medical advice."


def save_rules(root: Path, *names: str) -> dict[str, Path]:
    """One adapter's weights under these names."""
    for name in names:
        shutil.copytree(adapter_folders()["pii_leak"], root / name)
        save_card(root / name, name)
    return {name: root / name for name in names}


def toy_engine(
    folders: Mapping[str, Path], toy: ToyBackend | None = None, **settings: Any
) -> GuardEngine:
    return GuardEngine(recipe(), folders, start_backend=lambda *_: toy or ToyBackend(), **settings)


def broken(*_: object) -> None:
    raise GuardError("the device is gone")


@pytest.fixture
def mixed(tmp_path: Path) -> GuardEngines:
    parts = (("pii_leak", "a"), ("refund_promise", "b"))
    return GuardEngines(lambda _: [toy_engine(save_rules(tmp_path, *names)) for names in parts])


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Of the rules that `restarted` serves."""
    return save_rules(tmp_path, "good", "bad")


@pytest.fixture
def restarted(folders: dict[str, Path]) -> GuardEngines:
    """An engine of these folders, and when it is started again of what they are by then."""
    return GuardEngines(lambda moved: [toy_engine(moved or folders)])


def test_verdicts_come_in_the_order_asked_whichever_engine_answers(mixed: GuardEngines) -> None:
    names = ["b", "pii_leak", "refund_promise", "a"]
    check = mixed.check(CONVERSATION, names)
    assert [verdict.rule for verdict in check.verdicts] == names
    assert check.computed_tokens > 0 and check.wall_ms > 0
    assert [verdict.rule for verdict in mixed.check(CONVERSATION).verdicts] == list(mixed.rules)
    check = mixed.check(CONVERSATION, ["b", "pii_leek", "a"])
    assert [verdict.rule for verdict in check.verdicts] == ["b", "a"]
    assert "not served" in str(check.refused["pii_leek"])
    assert "Did you mean 'pii_leak'" in str(check.refused["pii_leek"])
    counted = [engine.counters for engine in mixed._engines]
    assert mixed.counters == counted[0] + counted[1] and mixed.counters.adapters == 4
    open_check = mixed.open_check(CONVERSATION)
    assert all(engine.is_busy for engine in mixed._engines)
    mixed.cancel(open_check.call)
    assert not any(engine.is_busy for engine in mixed._engines)


def test_many_rules_cost_no_more_look_ups(mixed: GuardEngines, monkeypatch: MonkeyPatch) -> None:
    asked: list[GuardEngine] = []
    rules = GuardEngine.rules.fget  # type: ignore[attr-defined]
    counting = property(lambda engine: asked.append(engine) or rules(engine))
    monkeypatch.setattr(GuardEngine, "rules", counting)
    times = []
    for names in (["a", "b"], ["pii_leak", "a", "refund_promise", "b"]):
        asked.clear()
        mixed.check(CONVERSATION, names)
        times.append(len(asked))
    assert times[0] == times[1]


def test_rules_change_in_the_engine_of_their_model(mixed: GuardEngines, tmp_path: Path) -> None:
    new = save_rules(tmp_path, "new")["new"]
    mixed.serve("new", new)
    check = mixed.check(CONVERSATION, ["b", "new"])
    assert [verdict.rule for verdict in check.verdicts] == ["b", "new"]
    assert set(check.versions) == set(check.latencies_ms) == {"b", "new"}
    mixed.serve("b", new)
    assert mixed.folder("b") == new
    mixed.remove("new")
    mixed.remove("b")
    assert list(mixed.rules) == ["pii_leak", "a", "refund_promise"]
    save_card(new, "other", model="renamed")  # a recipe of another name on the same base
    mixed.serve("other", new)
    assert "other" in mixed.rules
    save_card(new, "third", base="another")
    with pytest.raises(GuardError, match=r"weights is not served.*another.*Served here: tiny"):
        mixed.serve("third", new)


@pytest.mark.parametrize(
    ("messages", "rules", "problem"),
    [
        (CONVERSATION, "pii_leak", r"rules must be a list of names .*Write \['pii_leak'\]"),
        (CONVERSATION, [], "no rule"),
        (CONVERSATION, ["pii_leak", "pii_leak"], "twice"),
        ("Hello", ["pii_leak"], "messages must be a list of Message .got 'H'.*turns_of"),
        ([{"role": "user", "content": "Hi"}], ["pii_leak"], "messages must be a list of Message"),
    ],
)
@pytest.mark.parametrize("is_mixed", [True, False])
def test_what_is_no_list_of_messages_or_of_different_rules_is_an_error(
    mixed: GuardEngines, messages: Any, rules: Any, problem: str, is_mixed: bool
) -> None:
    engine = mixed if is_mixed else mixed._engines[0]
    with pytest.raises(GuardError, match=problem):
        engine.check(messages, rules)


def test_two_engines_may_not_serve_one_name(tmp_path: Path) -> None:
    folders = save_rules(tmp_path, "pii_leak")
    with pytest.raises(GuardError, match=r"two engines serve one rule \(got pii_leak\)"):
        GuardEngines(lambda _: [toy_engine(folders), toy_engine(folders)])


@pytest.mark.parametrize("first", [0, 1])
def test_one_that_cannot_be_closed_stops_no_other(
    mixed: GuardEngines, monkeypatch: MonkeyPatch, first: int
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(mixed._engines[first].backend, "close", broken)
    monkeypatch.setattr(mixed._engines[1 - first].backend, "close", lambda: closed.append("it"))
    with pytest.raises(GuardError, match="the device is gone"):
        mixed.close()
    assert closed == ["it"]


@pytest.mark.slow
def test_an_encoder_s_rule_and_a_decoder_s_answer_one_check(tmp_path: Path) -> None:
    folder = save_encoder_rule(tmp_path / "of_encoder", seed=1)
    expected = {}
    for name in ("plain", "pii_leak"):
        expected[name] = peft_logit(CONVERSATION, RULE_TEXTS[name], adapter_folders()[name])
    with GuardEngine(encoder_recipe(), {"of_encoder": folder}, **ENGINE) as of_encoder:
        mixed = GuardEngines(lambda _: [guard_engine(), of_encoder])
        check = mixed.check(CONVERSATION, ["plain", "of_encoder", "pii_leak"])
    logits = {verdict.rule: verdict.logit for verdict in check.verdicts}
    assert list(logits) == ["plain", "of_encoder", "pii_leak"]
    of_encoder = reference_logit(CONVERSATION, folder)
    assert logits.pop("of_encoder") == pytest.approx(of_encoder, abs=1e-5)
    assert logits == pytest.approx(expected, abs=2e-3)


def test_engines_work_while_all_bases_answer(mixed: GuardEngines, monkeypatch: MonkeyPatch) -> None:
    for name in ("pii_leak", "a"):
        mixed.remove(name)
    assert mixed.works()
    backend = mixed._engines[1].backend
    step = backend.step

    def nan_step() -> list[EngineOutput]:
        return [output._replace(logit=math.nan) for output in step()]

    for failing in (broken, nan_step):  # which fails, or refuses every check
        monkeypatch.setattr(backend, "step", failing)
        assert not mixed.works()


class Model:
    """What a start has in memory, in a circle as most of an engine is."""

    def __init__(self) -> None:
        self.itself = self


def test_what_died_is_gone_at_the_next_start(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("serve.engine.thread.engine_thread.PAUSES_S", (0.0, 0.0))
    folders = save_rules(tmp_path, "rule")
    started: list[weakref.ref[GuardEngine | Model]] = []
    still_there: list[int] = []

    def start(moved: Mapping[str, Path] | None) -> list[GuardEngine]:
        still_there.append(sum(reference() is not None for reference in started))
        if moved is not None:
            model = Model()
            started.append(weakref.ref(model))
            broken()
        toy = ToyBackend()
        engine = toy_engine(folders, toy)
        started.append(weakref.ref(engine))
        monkeypatch.setattr(toy, "step", broken)
        monkeypatch.setattr(toy, "scrub", broken)
        return [engine]

    thread = EngineThread(GuardEngines(start))
    thread.check(CONVERSATION, ["rule"])
    wait_until(lambda: thread.failure is not None)
    assert "the device is gone" in str(thread.failure)
    assert still_there == [0, 0, 0]


def empty_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"")


def test_one_broken_rule_is_left_out(restarted: GuardEngines, folders: dict[str, Path]) -> None:
    weights = folders["bad"] / "adapter_model.safetensors"
    served_before, not_the_card_s = weights.read_bytes(), "the weights are not those of the card"
    save_card(folders["good"], "good", threshold=0.75)
    empty_weights(folders["bad"])
    for _ in range(2):
        restarted.restart()
        assert list(restarted.rules) == ["good"] and restarted.folder("bad") == folders["bad"]
        with pytest.raises(GuardError, match=not_the_card_s):
            restarted.serve("bad")
    check = restarted.check(CONVERSATION, ["good", "bad"])
    assert list(check.refused) == ["bad"] and len(check.verdicts) == 1
    weights.write_bytes(served_before)
    restarted.serve("bad")
    assert list(restarted.rules) == ["good", "bad"]
    shutil.rmtree(folders["bad"])
    restarted.restart()
    restarted.remove("bad")
    with pytest.raises(GuardError, match="not served"):
        restarted.folder("bad")
    empty_weights(folders["good"])
    with pytest.raises(GuardError, match=not_the_card_s):
        restarted.restart()


SPOILS: list[Callable[[Path], object]] = [
    empty_weights,
    lambda folder: save_card(folder, "bad", prompt_hash="0" * 64),
    lambda folder: save_card(folder, "good"),
]


@pytest.mark.parametrize("spoil", SPOILS)
def test_the_second_start_has_sound_rules(tmp_path: Path, spoil: Any) -> None:
    names = ("bad", "good", "again")
    folders = save_rules(tmp_path, *names)
    starts: list[list[str]] = []
    loads: list[int] = []  # how many starts there were before each

    def start(moved: Mapping[str, Path] | None) -> list[GuardEngine]:
        starts.append(list(moved or folders))
        for rule, folder in (moved or folders).items():
            check_rule(read_card(folder), rule, folder)
        return [toy_engine(moved or folders)]

    with GuardEngines(start) as engine:
        save_card(folders["again"], "again", threshold=0.75)
        spoil(folders["bad"])
        engine.restart(lambda: loads.append(len(starts)))
        assert starts == [list(names), list(names), ["good", "again"]]
        assert loads == [1, 2]
        assert list(engine.rules) == ["good", "again"]
        assert engine.rules["again"].threshold == 0.75
        assert engine.folder("bad") == folders["bad"]


def test_an_engine_that_does_not_start_leaves_its_rules_and_folders_known(tmp_path: Path) -> None:
    folders = save_rules(tmp_path, "medical")
    starts: list[Mapping[str, Path]] = []

    def start(moved: Mapping[str, Path] | None) -> list[GuardEngine]:
        starts.append(dict(moved or {}))
        if len(starts) == 2:
            raise RuntimeError("the device is gone")
        return [toy_engine(folders)]

    with GuardEngines(start) as engine:
        assert engine.works() and engine.is_usable
        with pytest.raises(GuardError, match="cannot be started again: the device is gone"):
            engine.restart()
        assert not engine.is_usable and list(engine.rules) == ["medical"]
        assert engine.folder("medical") == folders["medical"]
        with pytest.raises(GuardError, match="no folder"):
            engine.folder("other")
        for use in (engine.step, lambda: engine.open_check(CONVERSATION), lambda: engine.counters):
            with pytest.raises(Overloaded, match="the engine is down"):
                use()
        engine.restart()
        assert engine.works() and engine.is_usable
        assert starts == [{}, folders, folders]


@pytest.mark.slow
@pytest.mark.parametrize("is_clearable", [True, False])
def test_a_killed_engine_serves_again_what_it_did(tmp_path: Path, *, is_clearable: bool) -> None:
    older, newer = (
        save_adapter(tmp_path / str(seed), "medical", seed=seed, text=TEXT) for seed in (1, 2)
    )
    folders = {name: tmp_path / name for name in ("replaced", "moved")}
    for folder in folders.values():
        shutil.copytree(older, folder)
    started: list[GuardEngine] = []

    def start(moved: Mapping[str, Path] | None) -> list[GuardEngine]:
        started.append(GuardEngine(small_recipe(), folders | dict(moved or {})))
        return started[-1:]

    with GuardEngines(start) as engines:
        thread = EngineThread(engines)
        shutil.copytree(newer, folders["replaced"], dirs_exist_ok=True)
        read_card(newer).model_copy(update={"rule": "replaced"}).save(folders["replaced"])
        thread.serve_rule("moved", newer).result(60)
        thread.serve_rule("replaced").result(60)
        before = thread.check(CONVERSATION).result(60)
        runner(started[0]).model = None  # no batch succeeds any more
        if not is_clearable:
            runner(started[0]).kv_caches = None
        with pytest.raises(GuardError):
            thread.check(CONVERSATION[:1]).result(60)
        wait_until(lambda: len(started) == 2 and thread.is_ready)
        check = thread.check(CONVERSATION).result(60)
        thread.close()
    assert check.versions == before.versions and check.versions["moved"] == load_card(newer).version
    logit = peft_logit(CONVERSATION, TEXT, newer)
    for verdict in (*before.verdicts, *check.verdicts):
        assert verdict.logit == pytest.approx(logit, abs=2e-3)
    assert [verdict.rule for verdict in check.verdicts] == list(folders)


@pytest.fixture
def toy() -> ToyBackend:
    return ToyBackend()


def save_toy_head(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True)
    head = Head(np.full(STATE_SIZE, 0.5, np.float32), 1.0)
    save_file(head.tensors(), folder / HEAD_FILE)
    save_card(folder, name, "head")
    return folder


def test_what_the_backend_refuses_is_refused_and_moves_virtual_time_on(toy: ToyBackend) -> None:
    engine = toy_engine(adapter_folders(), toy)
    toy.is_refusing = True
    check = engine.check(CONVERSATION, ["plain", "pii_leak"])
    assert list(check.refused) == ["plain", "pii_leak"] and check.outcome == "unjudged"
    assert engine._dispatcher.virtual_time > 0
    toy.is_refusing = False
    assert isinstance(engine.score([ScoreRequest(CONVERSATION, "Be nice.", None)])[0], Score)


def test_an_output_that_cannot_be_read_leaves_nobody_waiting_for_those_behind_it(
    toy: ToyBackend, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    heads = {"pii_leak": save_toy_head(tmp_path / "pii_leak", "pii_leak")}
    engine = toy_engine(heads | {"plain": adapter_folders()["plain"]}, toy)

    def step() -> list[EngineOutput]:
        broken, other = engine._dispatcher.in_flight
        wider = np.ones(STATE_SIZE + 1, np.float32)
        return [EngineOutput(broken, 1.0, 0, 1, wider), EngineOutput(other, 1.0, 0, 1)]

    calls = [engine.open_check(CONVERSATION, [rule]).call for rule in ("pii_leak", "plain")]
    monkeypatch.setattr(toy, "step", step)
    with pytest.raises(ValueError, match="size"):
        engine.step()
    assert all(call.done for call in calls) and not engine._dispatcher.in_flight
    assert toy.scrubs == 1 and engine.is_usable


def test_a_head_of_another_width_is_not_loaded(toy: ToyBackend, tmp_path: Path) -> None:
    another_width = f"does not fit the base's states of {STATE_SIZE} numbers"
    folders = {"rule": save_encoder_rule(tmp_path / "rule", seed=1)}
    with pytest.raises(GuardError, match=another_width):
        GuardEngine(encoder_recipe(), folders, start_backend=lambda *_: toy)
    assert toy.loaded == {}
    engine = toy_engine({}, toy)
    with pytest.raises(GuardError, match=another_width):
        engine.add("wide", save_head(tmp_path / "wide", "wide", seed=1))
    assert "wide" not in engine.rules


def test_a_rule_that_is_part_of_the_base_is_changed_by_merging_alone(toy: ToyBackend) -> None:
    """No other weights take its card: the base would go on answering, by their calibration."""
    folder = adapter_folders()["plain"]
    merged, is_part = load_card(folder), r"'plain' is part of the base.*make merge"
    with toy_engine({}, toy, merged=merged) as engine:
        changes: list[Callable[[], object]] = [
            lambda: engine.serve("plain"),
            lambda: engine.remove("plain"),
            lambda: engine.serve("plain", folder),
            lambda: engine.add("plain", folder),
        ]
        for change in changes:
            with pytest.raises(GuardError, match=is_part):
                change()
        assert toy.loaded == {} and engine.rules == {"plain": merged}
    start: Any = lambda *_: pytest.fail("it started")  # noqa: E731
    with pytest.raises(GuardError, match=is_part):
        GuardEngine(recipe(), {"plain": folder}, merged=merged, start_backend=start)


def test_weights_that_cannot_be_unloaded_stay(toy: ToyBackend, monkeypatch: MonkeyPatch) -> None:
    """New ones that give no verdict are not served; old ones are, and never the bare base."""
    with toy_engine(adapter_folders(), toy) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(toy, "unload", lambda _: [][0])
            with pytest.raises(IndexError):
                engine.remove("pii_leak")
            patch.setattr(toy, "step", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.serve("plain", adapter_folders()["plain"])
        assert list(engine.rules) == list(RULE_TEXTS)
        engine.check(CONVERSATION, ["pii_leak"])
        assert toy.submitted[-1].adapter is not None


def test_weights_that_a_cancelled_check_was_the_last_to_need_are_unloaded(toy: ToyBackend) -> None:
    with toy_engine(adapter_folders(), toy) as engine:
        loaded = dict(toy.loaded)
        opened = engine.open_check(CONVERSATION, ["pii_leak"])
        engine.remove("pii_leak")
        assert toy.loaded == loaded
        engine.cancel(opened.call)
        assert len(toy.loaded) == len(loaded) - 1


def test_a_folder_that_cannot_be_served_starts_no_backend(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=r"card\.json"):
        GuardEngine(recipe(), {"a": tmp_path}, start_backend=lambda *_: pytest.fail("it started"))


@pytest.mark.parametrize("of", ["base", "alora"])
def test_heads_are_served_as_fitted(tmp_path: Path, monkeypatch: MonkeyPatch, of: str) -> None:
    """In bfloat16 a head's logit is off by some tenths of a nat."""
    monkeypatch.setattr("guard.recipe.multiplies_bfloat16", lambda: True)
    monkeypatch.setattr("guard.recipe.installed_device", lambda: "cpu")
    base = recipe().model_copy(update={"dtype": "float32", "engine": {}})
    head = save_toy_head(tmp_path / "pii_leak", "pii_leak")
    if of == "alora":
        shutil.copytree(adapter_folders()["pii_leak"], head, dirs_exist_ok=True)
        save_card(head, "pii_leak")
    dtypes = []

    def start(recipe: Recipe, *_: object) -> ToyBackend:
        dtypes.append(recipe.serving_dtype)
        return ToyBackend()

    adapters = {"plain": adapter_folders()["plain"]}
    of_adapters = GuardEngine(base, adapters, start_backend=start)
    GuardEngine(base, {"pii_leak": head, **adapters}, start_backend=start)
    assert dtypes == ["bfloat16", "float32"]
    other_dtype = r"another dtype than the head was fitted in.*pii_leak"
    with pytest.raises(GuardError, match=other_dtype):
        of_adapters.add("pii_leak", head)
    assert "pii_leak" not in of_adapters.rules
    with pytest.raises(GuardError, match=other_dtype):
        GuardEngine(base, {"pii_leak": head}, start_backend=start, dtype="bfloat16")
