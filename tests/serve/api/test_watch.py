"""Rules that were trained again are found and replaced; what cannot be served is tried once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.api.service import CheckService
from serve.api.watch import watch
from tests.serve.guarded import save_card
from tests.serve.toy_engine import ToyEngine

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
        card = json.loads((folder / "card.json").read_text())
        engine.rules[rule].weights_sha256 = card["weights_sha256"]
        engine.rules = {**engine.rules, rule: _copy(engine.rules[rule])}
    return engine


def _copy(card: object) -> object:
    return type(card)(**vars(card))


def watched(engine: ToyEngine, seconds: float) -> None:
    async def run() -> None:
        service = CheckService(engine)  # type: ignore[arg-type]
        service.start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(watch(service, interval_s=0.02), seconds)
        await asyncio.to_thread(service.close)

    asyncio.run(run())


def train_again(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"others")
    save_card(folder, folder.name)


def test_what_is_as_it_was_is_left_alone(engine: ToyEngine) -> None:
    watched(engine, 0.3)
    assert engine.replaced == []


def test_a_rule_that_was_trained_again_is_replaced(engine: ToyEngine) -> None:
    train_again(engine.folders["other"])
    watched(engine, 0.3)
    assert set(engine.replaced) == {"other"}


def test_weights_that_cannot_be_served_are_tried_once(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, folder: Path | None = None) -> None:
        engine.replaced.append(name)
        raise GuardError("no adapter")

    monkeypatch.setattr(engine, "replace", refuse)
    train_again(engine.folders["fine"])
    watched(engine, 0.4)
    assert engine.replaced == ["fine"]


def test_a_folder_that_is_being_written_is_looked_at_again_later(engine: ToyEngine) -> None:
    (engine.folders["fine"] / "card.json").write_text("{")
    watched(engine, 0.2)
    assert engine.replaced == []
