"""The machine's device, what it is fast at, and how busy others keep it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from guard.machine import device
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """Each test tells its own machine, and the tests after it see the real one."""
    kept = (device.installed_device, device.cpu_info)
    for question in kept:
        question.cache_clear()
    yield
    for question in kept:
        question.cache_clear()


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.13.0+cpu", "cpu"), ("2.13.0", "cuda"), ("2.13.0+cu130", "cuda"), (None, "cpu")],
)
def test_a_build_for_cpus_says_so_in_its_version(
    version: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stated(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", stated)
    assert device.installed_device() == expected


@pytest.mark.parametrize(
    ("line", "multiplies", "is_slow"),
    [
        ("flags\t\t: fpu amx_bf16 sse", True, False),
        ("flags\t\t: fpu avx2 avx512f", False, False),
        ("vendor_id\t: AuthenticAMD", False, True),
        ("model name\t: AuthenticAMD amx_bf16", False, False),
    ],
)
def test_the_cpu_says_what_it_is_fast_and_slow_at(
    line: str, multiplies: bool, is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of no file the system tells nothing."""
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "cpuinfo")
    assert device.cpu_info("absent") == ""
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    assert device.multiplies_bfloat16() is multiplies
    assert device.is_slow_in_mkl() is is_slow


def test_what_compiling_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, headers = tmp_path / "cxx", tmp_path / "include"
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(device.sysconfig, "get_path", lambda _: str(headers))
    assert device.missing_for_compiling() == f"a C++ compiler ({compiler})"
    compiler.touch(mode=0o755)
    assert device.missing_for_compiling() == "Python's headers (python3-dev)"
    headers.mkdir()
    (headers / "Python.h").touch()
    assert device.missing_for_compiling() is None


def test_a_busy_process_on_a_usable_core_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    percents = [96.0, 40.0, 100.0]
    monkeypatch.setattr(device.psutil, "cpu_percent", lambda **_: percents)
    for cores, said in (({0, 64}, "1.0 of 2 cores"), ({1}, ""), ({0, 1}, "1.4 of 2 cores")):
        monkeypatch.setattr(device, "usable_cores", lambda cores=cores: cores)
        device.warn_if_busy("it is slow")
        line = f"warning: other processes keep {said} busy: it is slow\n"
        assert capsys.readouterr() == ("", line if said else "")


def test_a_real_busy_process_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    program = f"import os\nos.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\n"
    program += "while True: pass"

    def is_noticed() -> bool:
        device.warn_if_busy("")
        return "warning" in capsys.readouterr().err

    with subprocess.Popen([sys.executable, "-c", program]) as process:
        wait_until(is_noticed)
        process.kill()
