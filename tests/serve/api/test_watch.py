"""Rules that were trained again are found and replaced, also where their files come one by one."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from guard.layout import Runs
from guard.weights.card import load_card, read_card
from serve.api import watch as watch_module
from serve.api.engine_service import EngineService
from serve.api.watch import watch
from serve.engine.refusals import Overloaded
from serve.registry.registry import RegisteredRule, Registry
from serve.registry.rollout import Mode, Rollout, TrialVersion, trial_name
from tests.serve.cards import save_card
from tests.serve.found import Found
from tests.serve.toy_engine import ToyEngine
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def engine(tmp_path: Path) -> ToyEngine:
    engine = ToyEngine({"fine": 1.0, "other": 1.0})
    for rule in engine.rules:
        folder = tmp_path / rule
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(rule.encode())
        save_card(folder, rule)
        engine.folders[rule] = folder
        engine.rules[rule] = read_card(folder)  # type: ignore[assignment]
    return engine


def watched(
    engine: ToyEngine,
    meanwhile: Callable[[], object],
    seconds: float = 0.1,
    find: Callable[[str], Path | Rollout | None] = lambda rule: None,
) -> None:
    """Watch while that is done in another thread, and for some time longer."""

    async def run() -> None:
        service = EngineService(engine, source=Found(find))  # type: ignore[arg-type]
        service.start()
        watching = asyncio.create_task(watch(service, interval_s=0.02))
        try:
            await asyncio.to_thread(meanwhile)
            await asyncio.sleep(seconds)
            assert not watching.done()
        finally:
            watching.cancel()
            await asyncio.to_thread(service.close)

    asyncio.run(run())


def test_what_is_published_is_served_and_what_is_trained_is_not(
    engine: ToyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[str, Path | None]] = []
    monkeypatch.setattr(engine, "serve", lambda rule, folder: served.append((rule, folder)))
    registry = Registry(Runs(tmp_path / "runs"))
    folder = engine.folders["fine"]
    card = read_card(folder)
    rule = RegisteredRule.of(card)

    def find(name: str) -> Path | None:
        return registry.champions(card.model, card.method).get(name)

    first = registry.register(folder, actor="ann", note="trained")
    engine.folders["fine"] = first.folder  # as `make up` serves it
    train_again(folder)
    second = registry.register(folder, actor="ann", note="trained")
    watched(engine, lambda: None, seconds=0.3, find=find)
    assert served == []

    def publish() -> None:
        registry.publish(rule, second.id, actor="ann", reason="better")
        wait_until(lambda: served)

    watched(engine, publish, find=find)
    assert set(served) == {("fine", second.folder)}


def train_again(folder: Path, rule: str | None = None) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"others")
    save_card(folder, rule or folder.name)


def test_a_rule_that_was_trained_again_is_replaced_and_no_other(engine: ToyEngine) -> None:
    watched(engine, lambda: None, seconds=0.3)
    assert engine.replaced == []
    train_again(engine.folders["other"])
    watched(engine, lambda: wait_until(lambda: engine.replaced))
    assert set(engine.replaced) == {"other"}
    save_card(engine.folders["fine"], "fine", threshold=0.75)
    watched(engine, lambda: wait_until(lambda: "fine" in engine.replaced))


def test_a_card_that_comes_before_its_weights_is_tried_once_and_again_with_them(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, serve = [], engine.serve

    def serve_checked(name: str, folder: Path | None = None) -> None:
        try:
            load_card(engine.folders[name])
        except GuardError:
            refused.append(name)
            raise
        serve(name, folder)

    monkeypatch.setattr(engine, "serve", serve_checked)
    weights = engine.folders["fine"] / "adapter_model.safetensors"
    old = weights.read_bytes()
    train_again(weights.parent)
    new = weights.read_bytes()
    weights.write_bytes(old)

    def bring_the_weights() -> None:
        wait_until(lambda: refused)
        time.sleep(0.3)
        weights.write_bytes(new)
        wait_until(lambda: engine.replaced)

    watched(engine, bring_the_weights)
    assert (refused, set(engine.replaced)) == (["fine"], {"fine"})


def test_what_is_being_copied_is_not_tried(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = engine.folders["fine"]
    train_again(folder)
    looks = 0

    def grow(*arguments: Any, **keywords: Any) -> list[str]:
        nonlocal looks
        looks += 1
        (folder / ".words.safetensors.part").write_bytes(b"x" * looks)
        return look(*arguments, **keywords)

    look = watch_module._look
    monkeypatch.setattr(watch_module, "_look", grow)
    watched(engine, lambda: wait_until(lambda: looks > 12))
    assert engine.replaced == []


def test_what_there_is_no_room_for_is_tried_again_after_pauses_that_double(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []

    def refuse(name: str, folder: Path | None = None) -> None:
        tries.append(time.monotonic())
        if len(tries) <= 4:
            raise Overloaded("not now")
        engine.rules[name] = read_card(engine.folders[name])  # type: ignore[assignment]

    monkeypatch.setattr(engine, "serve", refuse)
    monkeypatch.setattr(watch_module, "FIRST_PAUSE_S", 0.04)
    monkeypatch.setattr(watch_module, "MAX_PAUSE_S", 0.2)
    train_again(engine.folders["fine"])
    watched(engine, lambda: wait_until(lambda: len(tries) > 4))
    pauses = [after - before for before, after in pairwise(tries)]
    for pause, at_least in zip(pauses, (0.04, 0.08, 0.16, 0.2), strict=True):
        assert pause >= at_least


def test_a_trial_that_there_is_no_room_for_is_tried_again(
    engine: ToyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "other version"
    shutil.copytree(engine.folders["fine"], folder)
    train_again(folder, "fine")
    trial = TrialVersion(version=load_card(folder).version, folder=folder, mode=Mode(share=0.0))
    rollout = Rollout(folder=engine.folders["fine"], trial=trial)
    tries: list[str] = []

    def serve(name: str, folder: Path) -> None:
        tries.append(name)
        if len(tries) == 1:
            raise Overloaded("not now")
        engine.rules[name] = read_card(folder)  # type: ignore[assignment]

    monkeypatch.setattr(engine, "serve", serve)
    monkeypatch.setattr(watch_module, "FIRST_PAUSE_S", 0.04)
    watched(
        engine,
        lambda: wait_until(lambda: len(tries) > 1),
        find=lambda rule: rollout if rule == "fine" else None,
    )
    assert tries == [trial_name("fine", trial.version)] * 2


def test_a_card_that_cannot_be_read_is_not_served_and_is_logged_once(
    engine: ToyEngine, caplog: pytest.LogCaptureFixture
) -> None:
    (engine.folders["fine"] / "card.json").write_text("{")
    watched(engine, lambda: wait_until(lambda: caplog.records), seconds=0.2)
    (record,) = caplog.records
    assert "fine is served as before" in record.getMessage()
    assert "card.json" in record.getMessage() and engine.replaced == []


def test_after_looks_and_changes_that_fail_there_are_others_and_each_reason_is_logged_once(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, failures, tried = EngineService.wanted, ["away", "gone", "gone"], []

    def changed_meanwhile(self: EngineService, rule: str) -> Rollout:
        if failures:
            raise KeyError(failures.pop())
        return wanted(self, rule)

    async def serve(self: EngineService, rule: str) -> None:
        tried.append(rule)
        raise HTTPException(404, "removed meanwhile")

    monkeypatch.setattr(EngineService, "wanted", changed_meanwhile)
    monkeypatch.setattr(EngineService, "serve", serve)
    train_again(engine.folders["other"])
    watched(engine, lambda: wait_until(lambda: len(tried) > 1, 20))
    assert set(tried) == {"other"}
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert logged[:3] == ["'gone'", "'away'", "404: removed meanwhile"]
