"""The device that the installed torch was built for."""

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
    ("flags", "multiplies"),
    [
        ("flags\t\t: fpu amx_bf16 sse", True),
        ("flags\t\t: fpu avx512_bf16", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("model name\t: amx_bf16", False),
        ("", False),
    ],
)
def test_the_cpu_says_whether_it_multiplies_bfloat16(
    flags: str, multiplies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor\t: 0\n{flags}\n")
    monkeypatch.setattr(device, "CPU_INFO", cpu_info)
    assert multiplies_bfloat16() == multiplies


def test_where_the_system_does_not_tell_the_cpu_multiplies_no_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "none")
    assert not multiplies_bfloat16()


@pytest.mark.parametrize(
    ("line", "is_slow"),
    [
        ("vendor_id\t: AuthenticAMD", True),
        ("vendor_id\t: GenuineIntel", False),
        ("model name\t: AuthenticAMD", False),
        ("", False),
    ],
)
def test_mkl_is_slow_on_an_amd(
    line: str, is_slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor\t: 0\n{line}\nflags\t\t: fpu avx2\n")
    monkeypatch.setattr(device, "CPU_INFO", cpu_info)
    assert is_slow_in_mkl() == is_slow


def test_where_the_system_does_not_tell_mkl_is_not_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "none")
    assert not is_slow_in_mkl()


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
