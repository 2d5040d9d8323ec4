"""Versions that are published are found and served."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

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


def published(engine: ToyEngine, rule: str) -> Callable[[str], Path | None]:
    """Of this rule another version than the engine serves."""
    folder = engine.folders[rule].with_name(f"{rule}-2") / rule
    shutil.copytree(engine.folders[rule], folder)
    train_again(folder)
    return {rule: folder}.get


def test_what_cannot_be_served_is_tried_once(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str, folder: Path | None = None) -> None:
        raise GuardError("these weights cannot be served")

    monkeypatch.setattr(engine, "serve", refuse)
    find = published(engine, "fine")
    watched(engine, lambda: wait_until(lambda: caplog.records), seconds=0.3, find=find)
    (record,) = caplog.records
    assert "fine is served as before: these weights cannot" in record.getMessage()


def test_what_there_is_no_room_for_is_tried_again_after_pauses_that_double(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []

    def refuse(name: str, folder: Path | None = None) -> None:
        tries.append(time.monotonic())
        if len(tries) <= 4:
            raise Overloaded("not now")
        engine.rules[name] = read_card(folder or engine.folders[name])  # type: ignore[assignment]

    monkeypatch.setattr(engine, "serve", refuse)
    monkeypatch.setattr(watch_module, "FIRST_PAUSE_S", 0.04)
    monkeypatch.setattr(watch_module, "MAX_PAUSE_S", 0.2)
    find = published(engine, "fine")
    watched(engine, lambda: wait_until(lambda: len(tries) > 4), find=find)
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
    find = published(engine, "other")
    watched(engine, lambda: wait_until(lambda: len(tried) > 1, 20), find=find)
    assert set(tried) == {"other"}
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert logged[:3] == ["'gone'", "'away'", "404: removed meanwhile"]
