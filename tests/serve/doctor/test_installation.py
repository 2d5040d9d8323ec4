"""Packages, libraries and the plugin: what is missing, broken or another one is a problem."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from guard.home import ROOT
from serve.doctor import installation
from serve.doctor.finding import Finding


def problems(findings: Iterator[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.remedy]


def test_a_missing_or_other_package_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_library_that_does_not_import_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers", "peft", "trl", "vllm"):
        whole = ModuleType(name)
        for attribute in ("Tensor", "Qwen3ForCausalLM", "LoraConfig", "SFTTrainer", "LLM"):
            setattr(whole, attribute, object())
        monkeypatch.setitem(sys.modules, name, whole)
    assert problems(installation.imports()) == []
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    assert [problem.text.split(":")[0] for problem in problems(installation.imports())] == [
        "peft.LoraConfig",
        "trl.SFTTrainer",
    ]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
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
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugin.patched = lambda: {}  # type: ignore[attr-defined]
    assert problems(installation.plugin()) == []
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    plugin.__file__ = str(tmp_path / "__init__.py")
    first, second = problems(installation.plugin())
    assert "VLLM_PLUGINS=other" in first.text
    assert str(tmp_path) in second.text and "moved" in str(second.remedy)
    monkeypatch.setattr(installation, "ENTRY_POINT", "nobody.plugins")
    assert [problem.text for problem in problems(installation.plugin())] == [
        "not installed, so vLLM does not load it: vllm_alora, vllm_encoder"
    ]
