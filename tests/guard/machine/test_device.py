"""The device that the installed torch was built for."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from guard.machine import device
from guard.machine.device import (
    busy_cores,
    installed_device,
    is_slow_in_mkl,
    missing_for_compiling,
    multiplies_bfloat16,
    usable_cores,
    warn_if_busy,
)


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """Each test tells its own machine, and the tests after it see the real one."""
    kept = (installed_device, device.cpu_info)
    for question in kept:
        question.cache_clear()
    yield
    for question in kept:
        question.cache_clear()


@pytest.mark.parametrize(
    ("version", "device"),
    [("2.13.0+cpu", "cpu"), ("2.13.0", "cuda"), ("2.13.0+cu130", "cuda"), (None, "cpu")],
)
def test_a_build_for_cpus_says_so_in_its_version(
    version: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stated(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", stated)
    assert installed_device() == device


@pytest.mark.parametrize(
    ("line", "multiplies", "is_slow"),
    [
        ("flags\t\t: fpu amx_bf16 sse", True, False),
        ("flags\t\t: fpu avx512_bf16", True, False),
        ("flags\t\t: fpu avx2 avx512f", False, False),
        ("model name\t: amx_bf16", False, False),
        ("vendor_id\t: AuthenticAMD", False, True),
        ("vendor_id\t: GenuineIntel", False, False),
        ("model name\t: AuthenticAMD", False, False),
        (None, False, False),
    ],
)
def test_the_cpu_says_what_it_is_fast_and_slow_at(
    line: str | None,
    multiplies: bool,
    is_slow: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of no file the system tells nothing."""
    if line is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "cpuinfo")
    assert (multiplies_bfloat16(), is_slow_in_mkl()) == (multiplies, is_slow)


def test_what_compiling_lacks_and_which_cores_are_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, headers = tmp_path / "cxx", tmp_path / "include"
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(device.sysconfig, "get_path", lambda _: str(headers))
    assert missing_for_compiling() == f"a C++ compiler ({compiler})"
    compiler.touch(mode=0o755)
    assert missing_for_compiling() == "Python's headers (python3-dev)"
    headers.mkdir()
    (headers / "Python.h").touch()
    assert missing_for_compiling() is None
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)


def busy(
    percents: list[float], own_s: float, cores: set[int], monkeypatch: pytest.MonkeyPatch
) -> float:
    """What others keep busy where this process works `own_s` of a second."""
    own, clock = iter([5.0, 5.0 + own_s]), iter([50.0, 51.0])
    monkeypatch.setattr(device.psutil, "cpu_percent", lambda **_: percents)
    monkeypatch.setattr(device, "usable_cores", lambda: cores)
    monkeypatch.setattr(device.time, "process_time", lambda: next(own))
    monkeypatch.setattr(device.time, "monotonic", lambda: next(clock))
    return busy_cores()


@pytest.mark.parametrize(
    ("own_s", "cores", "expected"),
    [(0.0, {0, 1}, 1.5), (1.0, {0, 1}, 0.5), (1.0, {1}, 0.0), (0.0, {1, 64}, 0.5)],
)
def test_neither_the_own_time_nor_other_cores_are_those_of_others(
    own_s: float, cores: set[int], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert busy([100.0, 50.0], own_s, cores, monkeypatch) == pytest.approx(expected)


@pytest.mark.parametrize(("cores", "is_said"), [(0.5, False), (0.96, True)])
def test_a_busy_machine_is_one_line_on_stderr(
    cores: float,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(device, "busy_cores", lambda: cores)
    monkeypatch.setattr(device, "usable_cores", lambda: {0, 1})
    warn_if_busy("it is slow")
    said = "warning: other processes keep 1.0 of 2 cores busy: it is slow\n"
    assert capsys.readouterr() == ("", said if is_said else "")


def test_a_real_busy_process_is_counted_and_nothing_where_the_system_does_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = "import time\nprint(flush=True)\nwhile time.monotonic(): pass"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        until = time.monotonic() + 30
        while busy_cores() <= 0.1:
            assert time.monotonic() < until
        process.kill()

    def untold(**_: object) -> list[float]:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(device.psutil, "cpu_percent", untold)
    assert busy_cores() == 0.0
