"""Adapters that come, go and change while the engine runs."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch
from safetensors.torch import load_file, save_file

from guard.errors import GuardError
from guard.method import PEFT_WEIGHTS
from serve.engine import GuardEngine
from serve.engine.backend import Loaded
from serve.engine.backends import vllm_engine
from tests.serve.cards import RULE_TEXTS, recipe, save_card, text_of
from tests.serve.engine.shared import NATS, assert_peft, finish, logits_of
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", ["alora", "lora"])
def test_an_adapter_trained_again_answers_by_what_was_loaded_until_it_is_added_again(
    engine: GuardEngine, tmp_path: Path, method: str
) -> None:
    folder = save_adapter(tmp_path / "again", "again", seed=26, method=method)
    newer = save_adapter(tmp_path / "newer", "again", seed=27, method=method)
    engine.add("again", folder)
    expected = assert_peft(engine, ["again"])["again"]
    shutil.copytree(newer, folder, dirs_exist_ok=True)
    assert logits_of(engine.check(CONVERSATION, ["again"])) == pytest.approx([expected], abs=NATS)
    adapter_id = engine._rules._loaded["again"].adapter_id
    engine.remove("again")
    engine.add("again", folder)
    # Not by the count of requests: runner V2 keeps an adapter's id in 32 bits.
    assert engine._rules._loaded["again"].adapter_id == adapter_id + 1
    (logit,) = logits_of(engine.check(CONVERSATION, ["again"]))
    engine.remove("again")
    assert logit == pytest.approx(peft_logit(CONVERSATION, text_of("again"), newer), abs=NATS)
    assert abs(logit - expected) > 5 * NATS


def test_an_adapter_trained_again_is_refused_where_it_may_have_to_be_read_again(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "LOOK_S", 0.0)
    names = ["again", "second", "third"]
    folders = {name: save_adapter(tmp_path / name, name, seed=40) for name in names}
    newer = save_adapter(tmp_path / "newer", "again", seed=41)
    with GuardEngine(recipe(), folders, max_loras=2, max_cpu_loras=2) as engine:
        assert len(engine.check(CONVERSATION).verdicts) == 3
        shutil.copytree(newer, folders["again"], dirs_exist_ok=True)
        refused = engine.check(CONVERSATION, names).refused
        assert list(refused) == ["again"] and "files changed" in refused["again"].why
        engine.serve("again")
        assert_peft(engine, ["again"])


@pytest.mark.parametrize(
    ("replaced", "problem"),
    [("*", "replaced while it was loaded"), (PEFT_WEIGHTS, "not those of the card")],
)
def test_a_folder_replaced_between_its_check_and_its_loading_is_refused_and_does_not_stay(
    engine: GuardEngine, tmp_path: Path, monkeypatch: MonkeyPatch, replaced: str, problem: str
) -> None:
    folder = save_adapter(tmp_path / "moving", "moving", seed=28)
    newer = save_adapter(tmp_path / "newer", "moving", seed=29)
    backend: Any = engine.backend
    load, resident = backend.load, set(backend._loras)

    def replace_and_load(name: str, folder: Path) -> Loaded:
        for path in newer.glob(replaced):
            shutil.copy(path, folder)
        return load(name, folder)  # type: ignore[no-any-return]

    monkeypatch.setattr(backend, "load", replace_and_load)
    with pytest.raises(GuardError, match=problem):
        engine.add("moving", folder)
    assert "moving" not in engine.rules and set(backend._loras) == resident


def test_a_removed_adapter_ends_the_checks_under_way(engine: GuardEngine, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "new", "new", seed=20)
    engine.add("new", folder)
    with pytest.raises(GuardError, match="served already"):
        engine.add("new", folder)
    expected = assert_peft(engine, ["new"])["new"]
    engine.forget()
    adapters = engine.counters.adapters
    under_way = engine.open_check(CONVERSATION, ["new", "plain"])
    engine.remove("new")
    assert "new" in engine.check(CONVERSATION, ["new"]).refused
    finish(engine, under_way.call)
    assert logits_of(under_way.result())[0] == pytest.approx(expected, abs=NATS)
    assert engine._retired == [] and engine.counters.adapters == adapters - 1
    with pytest.raises(GuardError, match="not served"):
        engine.remove("new")


@pytest.mark.parametrize("is_cut", [True, False])
def test_an_adapter_that_vllm_cannot_load_is_refused_and_the_engine_lives_on(
    engine: GuardEngine, tmp_path: Path, is_cut: bool
) -> None:
    folder = save_adapter(tmp_path / "broken", "broken", seed=24)
    weights = folder / PEFT_WEIGHTS
    if is_cut:
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        tensors = load_file(weights)
        next(iter(tensors.values()))[0, 0] = math.nan
        save_file(tensors, weights)
    save_card(folder, "broken")
    with pytest.raises(GuardError, match="cannot load the adapter"):
        engine.add("broken", folder)
    assert list(assert_peft(engine)) == list(RULE_TEXTS)
