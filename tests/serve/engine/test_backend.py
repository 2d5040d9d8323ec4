"""GuardEngine on a backend that is not vLLM: it uses nothing but the protocol."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import MonkeyPatch
from safetensors.numpy import save_file

from guard.errors import GuardError
from guard.recipe import Recipe
from guard.weights.card import load_card
from guard.weights.head import Head
from serve.engine import GuardEngine, Score, ScoreRequest
from serve.engine.backend import EngineOutput
from tests.serve.cards import RULE_TEXTS, recipe, save_card
from tests.serve.encoder_rules import recipe as encoder_recipe
from tests.serve.encoder_rules import save_encoder_rule
from tests.serve.engine.toy import STATE_SIZE, ToyBackend
from tests.serve.guarded import CONVERSATION, adapter_folders
from tests.serve.heads import HEAD_FILE, save_head


@pytest.fixture
def toy() -> ToyBackend:
    return ToyBackend()


def started(toy: ToyBackend, folders: Mapping[str, Path], **settings: Any) -> GuardEngine:
    """A guard engine on the toy."""
    return GuardEngine(recipe(), folders, start_backend=lambda *_: toy, **settings)


def save_toy_head(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True)
    head = Head(np.full(STATE_SIZE, 0.5, np.float32), 1.0)
    save_file(head.tensors(), folder / HEAD_FILE)
    save_card(folder, name, "head")
    return folder


def test_what_the_backend_refuses_is_refused_and_moves_virtual_time_on(toy: ToyBackend) -> None:
    engine = started(toy, adapter_folders())
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
    engine = started(toy, heads | {"plain": adapter_folders()["plain"]})

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
    engine = started(toy, {})
    with pytest.raises(GuardError, match=another_width):
        engine.add("wide", save_head(tmp_path / "wide", "wide", seed=1))
    assert "wide" not in engine.rules


def test_a_rule_that_is_part_of_the_base_is_changed_by_merging_alone(toy: ToyBackend) -> None:
    """No other weights take its card: the base would go on answering, by their calibration."""
    folder = adapter_folders()["plain"]
    merged, is_part = load_card(folder), r"'plain' is part of the base.*make merge"
    with started(toy, {}, merged=merged) as engine:
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
    with started(toy, adapter_folders()) as engine:
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
    with started(toy, adapter_folders()) as engine:
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
