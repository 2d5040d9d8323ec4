"""A machine that lacks what the pinned packages or the recipe need is a problem."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve.doctor import machine
from serve.doctor.finding import Finding


def problems(findings: Iterator[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.remedy]


def test_a_package_breaking_cpu_torch_is_told_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BREAK_CPU_TORCH", ("pytest",))
    monkeypatch.setattr(machine, "hardware", lambda: "a processor, no GPU")
    monkeypatch.setattr(machine, "installed_device", lambda: "cpu")
    (breaking,) = problems(machine.device())
    assert breaking.remedy == ".venv/bin/python -m pip uninstall -y pytest"
    monkeypatch.setattr(machine, "installed_device", lambda: "cuda")
    (missing,) = problems(machine.device())
    assert missing.remedy == "There is no GPU: `make setup DEVICE=cpu`"
    monkeypatch.setattr(machine, "hardware", lambda: "a processor, NVIDIA H200")
    monkeypatch.setattr(machine, "gpu_driver", lambda: "580.82.07")
    assert problems(machine.device()) == []


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
    monkeypatch.setattr(machine, "installed_device", lambda: "cuda")
    monkeypatch.setattr(machine, "hardware", lambda: "a processor, NVIDIA H200")
    monkeypatch.setattr(machine, "gpu_driver", lambda: driver)
    monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("glibc", glibc))
    found = [problem.remedy or "" for problem in problems(machine.device())]
    assert len(found) == len(remedies)
    assert all(remedy in text for remedy, text in zip(remedies, found, strict=True))


def test_a_recipe_that_states_no_memory_is_not_called_enough() -> None:
    (finding,) = machine.memory("minilm")
    assert finding == Finding("memory", "minilm: its recipe states no memory")


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
    found = [problem.text for problem in problems(machine.memory("qwen3-4b"))]
    assert len(found) == len(lacking)
    assert all(part in text for part, text in zip(lacking, found, strict=True))
