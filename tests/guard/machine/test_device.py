"""The device that the installed torch was built for."""

import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from guard.machine import device
from guard.machine.device import (
    installed_device,
    is_slow_in_mkl,
    missing_for_compiling,
    multiplies_bfloat16,
    usable_cores,
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
    ("version", "device"), [("2.13.0+cpu", "cpu"), ("2.13.0", "cuda"), ("2.13.0+cu130", "cuda")]
)
def test_a_build_for_cpus_says_so_in_its_version(
    version: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert installed_device() == device


def test_without_torch_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert installed_device() == "cpu"


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


def test_what_the_compiler_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, headers = tmp_path / "cxx", tmp_path / "include"
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(device.sysconfig, "get_path", lambda _: str(headers))
    assert missing_for_compiling() == f"a C++ compiler ({compiler})"
    compiler.touch(mode=0o755)
    assert missing_for_compiling() == "Python's headers (python3-dev)"
    headers.mkdir()
    (headers / "Python.h").touch()
    assert missing_for_compiling() is None


def test_cores_are_those_that_the_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == {min(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)
