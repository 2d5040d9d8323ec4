"""A LoRA in the base's weights: the verdicts are the adapter's, nothing else changes, no aLoRA."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.layout import Runs
from guard.recipe import MethodSettings
from guard.weights.card import load_card, read_card
from serve.api.app import create_app
from serve.engine import GuardEngine, Score, ScoreRequest
from serve.merge import _card, merge, mergeable_method, merged_engine
from serve.merge import main as merge_command
from serve.registry.registry import Registry
from serve.selection import RegisteredRollouts, Selection, ServedPart, start_engines
from serve.up import main
from tests.serve.cards import RULE_TEXTS, recipe, text_of
from tests.serve.guarded import (
    CONVERSATION,
    adapter_folders,
    guard_engine,
    peft_logit,
    save_adapter,
)
from tests.serve.serving import serving

pytestmark = pytest.mark.slow

NATS = 2e-3


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged") / "merged"
    merge(recipe(), adapter_folders()["plain"], folder)
    return folder


@pytest.fixture(scope="module")
def engine(merged: Path) -> Iterator[GuardEngine]:
    """The merged rule's, with the LoRA beside it that has had its threshold chosen anew."""
    folder = Path(shutil.copytree(merged, merged.parent / "served" / "merged"))
    lora = Path(shutil.copytree(adapter_folders()["plain"], folder.with_name("lora")))
    load_card(lora).model_copy(update={"threshold": 0.75}).save(lora)
    unmerged = guard_engine()
    with merged_engine(recipe(), folder, kv_cache_memory_bytes=2**26, max_model_len=1024) as engine:
        yield engine
    verdicts = unmerged.check(CONVERSATION).verdicts  # closing one leaves the other
    assert [verdict.rule for verdict in verdicts] == list(RULE_TEXTS)


def test_a_quantised_base_is_not_merged(tmp_path: Path) -> None:
    quantised = recipe().model_copy(update={"serving_quantization": "int8"})
    with pytest.raises(GuardError, match="serving_quantization: merged weights are not quantised"):
        merge(quantised, adapter_folders()["plain"], tmp_path / "merged")


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.iterdir() if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_merged_rule_answers_as_its_adapter_beside_others(engine: GuardEngine) -> None:
    folder = adapter_folders()["plain"]
    assert list(engine.rules) == ["plain"]
    for turns in (1, 2, 3):
        conversation = CONVERSATION[:turns]
        (verdict,) = engine.check(conversation).verdicts
        assert verdict.rule == "plain"
        merged, bare = [peft_logit(conversation, RULE_TEXTS["plain"], of) for of in (folder, None)]
        assert verdict.logit == pytest.approx(merged, abs=NATS)
        assert verdict.logit != pytest.approx(bare, abs=0.01)
        (answer,) = guard_engine().check(conversation, ["plain"]).verdicts
        assert verdict.p_violation == pytest.approx(answer.p_violation, abs=NATS)
    assert list(engine.check(CONVERSATION, ["pii_leak"]).refused) == ["pii_leak"]
    (score,) = engine.score([ScoreRequest(CONVERSATION, RULE_TEXTS["plain"], "plain")])
    assert isinstance(score, Score) and score.logit == pytest.approx(verdict.logit, abs=1e-4)
    too_long = engine.check([Message("user", "word " * 2000)]).refused["plain"]
    assert too_long.subject == "rule 'plain'"


def test_a_merged_rule_is_listed_with_a_threshold_that_was_chosen_anew(
    engine: GuardEngine, merged: Path
) -> None:
    """As a changed `max_fpr` does, which trains nothing."""
    assert _card(recipe(), merged)[0].threshold == 0.25  # no adapter beside it: its own
    assert engine.check(CONVERSATION).verdicts[0].threshold == 0.75
    assert (engine.counters.adapters, engine.counters.swap_ins) == (0, 0)  # it has none
    with serving(create_app(engine)) as client:
        (listed,) = client.get("/v1/rules").json()
    assert listed["rule"] == "plain" and listed["text"] == RULE_TEXTS["plain"]


def test_other_loras_are_served_beside_the_merged_one_as_their_difference(
    merged: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(merged, tmp_path / "plain" / "merged"))
    shutil.copytree(adapter_folders()["plain"], folder.with_name("lora"))
    tail = {"pii_leak": tmp_path / "pii_leak/lora", "dose": tmp_path / "dose/lora"}
    for rank, (rule, lora) in zip((8, 16), tail.items(), strict=True):
        save_adapter(lora, rule, seed=rank, method="lora", rank=rank)
    parts = [ServedPart(recipe(), "lora", {"plain": folder.with_name("lora"), **tail})]
    (engine,) = start_engines(parts, is_merged=True)
    with engine:
        assert list(engine.rules) == ["plain", *tail]
        for turns in (1, 3):
            conversation = CONVERSATION[:turns]
            verdicts = engine.check(conversation).verdicts
            loras = [adapter_folders()["plain"], *tail.values()]
            for verdict, lora in zip(verdicts, loras, strict=True):
                expected = peft_logit(conversation, text_of(verdict.rule), lora)
                assert verdict.logit == pytest.approx(expected, abs=1e-4)
        Registry(Runs(tmp_path)).register(tail["pii_leak"], actor="a", note="champion")
        rollouts = RegisteredRollouts(Selection(is_merged=True, runs=Runs(tmp_path)), parts)
        assert rollouts.find("pii_leak", engine.rules["pii_leak"]) is None  # it stays
    alora = save_adapter(tmp_path / "alora", "pii_leak", seed=9)
    with pytest.raises(GuardError, match="nor served beside merged ones: its weights act from its"):
        merged_engine(recipe(), folder, {"pii_leak": alora})


def test_merging_leaves_the_base_and_the_adapter_as_they_are(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "lora", "plain", seed=9, method="lora")
    before = contents(Path(recipe().base_path)), contents(adapter)
    merge(recipe(), adapter, tmp_path / "merged")
    first = contents(tmp_path / "merged")
    merge(recipe(), adapter, tmp_path / "merged")  # again, over what is there
    assert (contents(Path(recipe().base_path)), contents(adapter)) == before
    assert contents(tmp_path / "merged") == first
    assert not list(tmp_path.glob(".*"))


def test_what_does_not_act_on_the_whole_prompt_is_not_merged_and_the_error_says_why(
    tmp_path: Path,
) -> None:
    adapter = save_adapter(tmp_path / "alora", "pii_leak", seed=9)
    why = r"(?s)cannot be merged.*: its weights act from its invocation on.*lora"
    with pytest.raises(GuardError, match=why):
        merge(recipe(), adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    assert mergeable_method(recipe()) == "lora"
    heads_only = recipe().model_copy(update={"methods": {"head": MethodSettings()}})
    with pytest.raises(GuardError, match=r"no method of the recipe can be merged \(got head\)"):
        mergeable_method(heads_only)


def test_a_checkpoint_that_is_not_as_it_was_merged_or_older_than_its_lora_is_refused(
    merged: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(merged, tmp_path / "other")
    card = read_card(other)

    def refused(why: str, folder: Path = other) -> None:
        with pytest.raises(GuardError, match=rf"(?s){why}"):
            merged_engine(recipe(), folder)

    card.model_copy(update={"base_revision": "of another base"}).save(other)
    refused("merged into another base")
    (other / "card.json").write_text((other / "card.json").read_text().replace("0.25", "0.75"))
    refused("no merged checkpoint: the card was edited.*make merge")
    card.save(other)
    generation = other / "generation_config.json"
    for file, content in ((generation, b"{}"), (other / "chat_template.jinja", b"")):
        before = file.read_bytes()
        file.write_bytes(content)
        refused("not the one that was written.*make merge")
        file.write_bytes(before)
    assert _card(recipe(), other)[0].version == card.version
    assert card.version != load_card(adapter_folders()["plain"]).version
    refused("no merged checkpoint.*make merge", tmp_path)
    save_adapter(tmp_path / "lora", "plain", seed=9, method="lora")
    refused("trained again since it was merged.*make merge RULE=plain")


def test_the_commands_merge_one_rule_and_serve_it_alone_once_it_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for rule in ("pii_leak", "plain"):
        save_adapter(Runs(tmp_path).adapter("tiny", rule, "lora"), rule, seed=3, method="lora")

    def refused(command: Callable[[], None], *options: str) -> str:
        monkeypatch.setattr("sys.argv", ["command", "--runs", str(tmp_path), *options])
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code == 2
        return str(capsys.readouterr().err)

    assert "make merge RULE=" in refused(main, "--merged", "--rules", "plain")
    assert "pii_leak/merged" in refused(main, "--merged", "--rules", "pii_leak,plain")
    assert "one rule is merged" in refused(main, "--merged")
    assert "Name one rule" in refused(merge_command, "--rule", "pii_leak,plain")
    monkeypatch.setattr("sys.argv", ["merge", "--runs", str(tmp_path), "--rule", "pii_leak"])
    merge_command()
    assert (tmp_path / "tiny" / "pii_leak" / "merged" / "model.safetensors").is_file()
    assert "make up RULE=pii_leak MODEL=tiny MERGED=1" in capsys.readouterr().out
