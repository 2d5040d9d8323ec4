"""The doctor: what is broken is called a problem and comes with a remedy; what is not, is not."""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

from guard.head import Head
from guard.layout import Runs
from guard.method import METHODS, PEFT_WEIGHTS
from guard.recipe import MODELS, load_recipe
from guard.rule import load_rule, text_hash
from serve import doctor
from serve.doctor import Finding
from tests.serve.cards import save_card
from tests.serve.guarded import save_adapter

HIDDEN_SIZE = 384  # of the tiny base


def problems(check: str) -> list[Finding]:
    return [finding for finding in doctor.FINDERS[check]() if finding.remedy]


def adapter(folder: Path, rule: str, *, text: str | None = None, **changes: object) -> Path:
    """An adapter with random weights and the card of a trained one."""
    text = load_rule(rule).text(load_recipe("tiny").rule_turn) if text is None else text
    save_adapter(folder, rule, seed=1, text=text)
    save_card(folder, rule, **({"rule_text": text, "rule_hash": text_hash(text)} | changes))
    return folder


def test_the_report_prints_every_finding_and_returns_the_problems(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fine, broken = Finding("one", "all is well"), Finding("two", "it broke", "Mend it")
    assert doctor.report({"a": lambda: iter([fine]), "b": lambda: iter([broken])}) == [broken]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["ok", "one", "all", "is", "well"],
        ["PROBLEM", "two", "it", "broke"],
        ["->", "Mend", "it"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("check", ["interpreter", "packages", "device", "preload", "recipes"])
def test_this_environment_has_no_problem(check: str) -> None:
    assert problems(check) == []


def test_a_package_that_is_missing_or_another_version_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "common.txt").write_text(
        f"# pins\npytest=={metadata.version('pytest')}\nnumpy==0.1\n"
    )
    (tmp_path / "cpu.txt").write_text("-r common.txt\nno-such-package==1.0\n")
    (tmp_path / "cuda.txt").write_text("-r common.txt\nno-such-kernels==2.0\n")
    monkeypatch.setattr(doctor, "SETUP", tmp_path)
    for device, missing in (
        ("cpu", "no-such-package is missing, pinned is 1.0"),
        ("cuda", "no-such-kernels is missing, pinned is 2.0"),
    ):
        monkeypatch.setattr(doctor, "installed_device", lambda device=device: device)
        found = [problem.text for problem in problems("packages")]
        assert found == [f"numpy is {metadata.version('numpy')}, pinned is 0.1", missing]


def test_a_package_that_breaks_torch_for_cpu_is_a_problem_there_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "BREAK_CPU_TORCH", ("pytest",))
    monkeypatch.setattr(doctor, "hardware", lambda: "a processor, no GPU")
    monkeypatch.setattr(doctor, "installed_device", lambda: "cpu")
    assert [problem.remedy for problem in problems("device")] == [
        ".venv/bin/python -m pip uninstall -y pytest"
    ]
    monkeypatch.setattr(doctor, "installed_device", lambda: "cuda")
    assert [problem.remedy for problem in problems("device")] == [
        "There is no GPU: `make setup DEVICE=cpu`"
    ]
    monkeypatch.setattr(doctor, "hardware", lambda: "a processor, NVIDIA H200")
    monkeypatch.setattr(doctor, "gpu_driver", lambda: "580.82.07")
    assert problems("device") == []


@pytest.mark.parametrize(
    ("driver", "glibc", "remedies"),
    [
        ("580.65.06", "2.31", []),
        ("570.124.06", "2.39", ["install driver 580"]),
        ("", "2.39", ["install driver 580"]),
        ("590.10", "2.28", ["need glibc 2.31"]),
    ],
)
def test_a_driver_or_a_libc_older_than_the_pins_need_is_a_problem(
    driver: str, glibc: str, remedies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "installed_device", lambda: "cuda")
    monkeypatch.setattr(doctor, "hardware", lambda: "a processor, NVIDIA H200")
    monkeypatch.setattr(doctor, "gpu_driver", lambda: driver)
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: ("glibc", glibc))
    found = [problem.remedy or "" for problem in problems("device")]
    assert len(found) == len(remedies)
    assert all(remedy in text for remedy, text in zip(remedies, found, strict=True))


@pytest.mark.parametrize(
    ("device", "gpu_gib", "host_gib", "lacking"),
    [
        ("cpu", 0.0, 48.0, []),
        ("cpu", 0.0, 24.0, ["39.6 GiB of host memory; this machine has 24.0"]),
        ("cuda", 80.0, 24.0, ["32.0 GiB of host memory; this machine has 24.0"]),
        ("cuda", 6.0, 48.0, ["7.6 GiB of GPU memory; this machine has 6.0"]),
        ("cuda", 80.0, 48.0, []),
    ],
)
def test_memory_that_the_recipe_states_and_the_machine_lacks_is_a_problem(
    device: str,
    gpu_gib: float,
    host_gib: float,
    lacking: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "installed_device", lambda: device)
    monkeypatch.setattr(doctor, "gpu_memory_gib", lambda: gpu_gib)
    monkeypatch.setattr(doctor, "host_memory_gib", lambda: host_gib)
    found = [finding.text for finding in doctor.memory("qwen3-4b") if finding.remedy]
    assert len(found) == len(lacking)
    assert all(part in text for part, text in zip(lacking, found, strict=True))


def test_a_library_that_does_not_import_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers", "peft", "trl", "vllm"):
        whole = ModuleType(name)
        for attribute in ("Tensor", "Qwen3ForCausalLM", "LoraConfig", "SFTTrainer", "LLM"):
            setattr(whole, attribute, object())
        monkeypatch.setitem(sys.modules, name, whole)
    assert problems("imports") == []
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    assert [problem.text.split(":")[0] for problem in problems("imports")] == [
        "peft.LoraConfig",
        "trl.SFTTrainer",
    ]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A plugin of this checkout that patches one seam and leaves another."""
    module = ModuleType("vllm_alora")
    module.__file__ = str(doctor.ROOT / "serve" / "vllm_alora" / "__init__.py")
    module.register = lambda: None  # type: ignore[attr-defined]
    module.patched = lambda: {"vllm.a:f": True, "vllm.b:g": False}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_alora", module)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return module


def test_a_seam_that_is_not_patched_is_a_problem(plugin: ModuleType) -> None:
    assert [problem.text.split() for problem in problems("plugin")] == [
        ["NOT", "patched", "vllm.b:g"]
    ]


def test_a_plugin_that_does_not_fit_is_a_problem_in_its_own_words(plugin: ModuleType) -> None:
    def register() -> None:
        raise RuntimeError("vllm.a:f has changed")

    plugin.register = register  # type: ignore[attr-defined]
    assert [problem.text for problem in problems("plugin")] == [
        "RuntimeError: vllm.a:f has changed"
    ]


def test_a_plugin_that_vllm_will_not_load_or_that_is_anothers_is_a_problem(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugin.patched = lambda: {}  # type: ignore[attr-defined]
    assert problems("plugin") == []
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    plugin.__file__ = str(tmp_path / "__init__.py")
    first, second = problems("plugin")
    assert "VLLM_PLUGINS=other" in first.text
    assert str(tmp_path) in second.text and "moved" in str(second.remedy)
    monkeypatch.setattr(doctor, "ENTRY_POINT", "nobody.plugins")
    assert [problem.text for problem in problems("plugin")] == [
        "not installed, so vLLM does not load it: vllm_alora, vllm_encoder"
    ]


def test_weights_are_ready_unfinished_outdated_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "Runs", lambda: Runs(tmp_path))
    assert "none yet" in next(doctor.weights()).text
    adapter(tmp_path / "tiny" / "pii_leak" / "alora", "pii_leak")
    adapter(
        tmp_path / "tiny" / "pii_leak" / "alora-seed1",
        "pii_leak",
        text="The assistant must keep secrets.",
    )
    adapter(
        tmp_path / "tiny" / "pii_leak" / "alora-seed2", "pii_leak", base_revision="of another base"
    )
    (tmp_path / "minilm" / "pii_leak" / ".lora-seed2.part").mkdir(parents=True)
    broken = adapter(tmp_path / "tiny" / "refund_promise" / "alora", "refund_promise")
    (broken / PEFT_WEIGHTS).write_bytes(b"other")
    (tmp_path / "data" / "pii_leak").mkdir(parents=True)
    findings = {finding.text.split(":")[0]: finding for finding in doctor.weights()}
    texts = [findings[name] for name in ("tiny/pii_leak/alora", "tiny/pii_leak/alora-seed1")]
    texts.append(findings["minilm/pii_leak/.lora-seed2.part"])
    texts.append(findings[f"{tmp_path}/tiny/refund_promise/alora"])
    stale = findings[f"{tmp_path}/tiny/pii_leak/alora-seed2"]
    assert (
        len(findings) == 5
        and "trained on another base" in stale.text
        and "make train RULE=pii_leak" in str(stale.remedy)
    )
    assert texts[0].text.endswith("ready") and texts[0].remedy is None
    assert "`make train RULE=pii_leak MODEL=tiny" in texts[1].text and texts[1].remedy is None
    assert (
        "unfinished" in texts[2].text
        and "RULE=pii_leak MODEL=minilm METHOD=lora SEEDS=2`" in texts[2].text
        and texts[2].remedy is None
    )
    assert "not those of the card" in texts[3].text
    assert "restore the folder" not in texts[3].text
    assert str(texts[3].remedy).startswith("Train again or restore the folder.")
    assert str(texts[3].remedy).endswith(
        "`make train RULE=refund_promise MODEL=tiny METHOD=alora FORCE=1`"
    )


def test_valid_weights_are_not_to_be_deleted_for_what_is_wrong_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "Runs", lambda: Runs(tmp_path))
    adapter(tmp_path / "tiny" / "pii_leak" / "alora", "pii_leak", model="tinny")
    adapter(tmp_path / "tiny" / "refund_promise" / "alora", "refund_promise")
    monkeypatch.setattr(doctor, "RULES", tmp_path / "rules")
    of_recipe, of_rule = doctor.weights()
    assert "tinny.yaml: no such file" in of_recipe.text
    assert str(of_recipe.remedy).startswith("Did you mean 'tiny'?")
    assert "refund_promise.yaml: no such file" in of_rule.text
    assert of_rule.remedy == "Known: none"


def test_a_head_is_listed_as_adapters_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "Runs", lambda: Runs(tmp_path))
    recipe = load_recipe("tiny")
    folder = Runs(tmp_path).adapter("tiny", "pii_leak", "head")
    folder.mkdir(parents=True)
    head = Head(np.zeros(HIDDEN_SIZE, np.float32), 0.0)
    save_file(head.tensors(), folder / METHODS["head"].weights)
    text = load_rule("pii_leak").text(recipe.rule_turn)
    save_card(folder, "pii_leak", "head", rule_text=text, rule_hash=text_hash(text))
    (finding,) = doctor.weights()
    assert finding.text == "tiny/pii_leak/head: ready" and finding.remedy is None


def test_a_rule_or_recipe_that_does_not_load_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy.yaml").write_text("nmae: toy\n")
    monkeypatch.setattr(doctor, "MODELS", tmp_path)
    monkeypatch.setattr(doctor, "RULES", tmp_path)
    found = problems("recipes")
    assert [problem.subject for problem in found] == ["recipes", "rules"]
    assert all("toy.yaml" in problem.text for problem in found)
    assert "Did you mean 'name'?" in found[0].text


def test_a_base_without_weights_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(MODELS / "tiny" / "tokenizer.json", base)
    recipe = (MODELS / "tiny.yaml").read_text(encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(
        recipe.replace("base: recipes/models/tiny", "base: base"), encoding="utf-8"
    )
    monkeypatch.setattr("guard.recipe.MODELS", tmp_path / "recipes" / "models")
    monkeypatch.setattr(doctor, "MODELS", tmp_path)
    monkeypatch.setattr(doctor, "RULES", tmp_path / "none")
    assert [problem.remedy for problem in problems("recipes")] == [
        "Restore it: `git checkout base`, if it came with the checkout"
    ]
    (base / "model.safetensors").touch()
    assert problems("recipes") == []


def test_weights_of_another_rule_or_of_other_turns_are_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make up` refuses the former, and the latter judge other turns than the rule says."""
    monkeypatch.setattr(doctor, "Runs", lambda: Runs(tmp_path))
    adapter(tmp_path / "tiny" / "refund_promise" / "alora", "pii_leak")
    (foreign,) = doctor.weights()
    assert "not of the rule 'refund_promise'" in foreign.text
    shutil.rmtree(tmp_path / "tiny")
    adapter(tmp_path / "tiny" / "pii_leak" / "alora", "pii_leak", reads="last tool")
    (outdated,) = doctor.weights()
    assert "ready for its rule as it was" in outdated.text
