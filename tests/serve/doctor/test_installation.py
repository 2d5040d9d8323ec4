"""The report, and what is installed and what runs here: what is missing, broken or another one is a
problem with a remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from guard.home import ROOT
from serve.doctor import installation, machine
from serve.doctor.__main__ import FINDERS
from serve.doctor.finding import Finding, report


def problems(findings: Iterator[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.remedy]


@pytest.mark.slow
@pytest.mark.parametrize("check", ["interpreter", "packages", "device", "preload", "recipes"])
def test_this_environment_has_no_problem(check: str) -> None:
    assert problems(FINDERS[check]()) == []


def test_the_report_prints_all_and_returns_problems(capsys: pytest.CaptureFixture[str]) -> None:
    fine, broken = Finding("one", "all is well"), Finding("two", "it broke", "Mend it")
    assert report({"a": lambda: iter([fine]), "b": lambda: iter([broken])}) == [broken]
    assert capsys.readouterr().out.split() == (
        ["ok", "one", "all", "is", "well", "PROBLEM", "two", "it", "broke", "->", "Mend", "it"]
    )


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
    found = [problem.text.partition(":")[0] for problem in problems(installation.imports())]
    assert found == ["peft.LoraConfig", "trl.SFTTrainer"]


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
    (missing,) = problems(installation.plugin())
    assert missing.text.endswith("vLLM does not load it: vllm_alora, vllm_encoder")


def test_a_package_breaking_cpu_torch_is_told_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BREAK_CPU_TORCH", ("pytest",))
    monkeypatch.setattr(machine, "installed_device", lambda: "cpu")
    (breaking,) = problems(machine.device())
    assert breaking.remedy == ".venv/bin/python -m pip uninstall -y pytest"


@pytest.mark.parametrize(
    ("gpu", "driver", "glibc", "remedies"),
    [
        ("NVIDIA H200", "580.65.06", "2.31", []),
        ("NVIDIA H200", "570.124.06", "2.39", ["install driver 580"]),
        ("NVIDIA H200", "", "2.39", ["install driver 580"]),
        ("NVIDIA H200", "590.10", "2.28", ["need glibc 2.31"]),
        ("no GPU", "", "2.39", ["There is no GPU: `make setup DEVICE=cpu`"]),
    ],
)
def test_a_gpu_a_driver_or_a_libc_that_the_pins_need_is_told(
    gpu: str, driver: str, glibc: str, remedies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "installed_device", lambda: "cuda")
    monkeypatch.setattr(machine, "hardware", lambda: f"a processor, {gpu}")
    monkeypatch.setattr(machine, "gpu_driver", lambda: driver)
    monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("glibc", glibc))
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
    device: str,
    gpu_gib: float,
    host_gib: float,
    lacking: list[str],
    monkeypatch: pytest.MonkeyPatch,
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
