"""C++ is compiled once a machine, and what goes wrong is told."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest import MonkeyPatch
from vllm_alora import compiler
from vllm_alora.compiler import CompileError, compiled

pytestmark = pytest.mark.slow

ARGUMENTS = (ctypes.c_void_p,)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Path]:
    """A cache of compiled sources that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.cache_clear()
    yield tmp_path / "vllm_alora"
    compiled.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "increment.cpp"
    file.write_text('extern "C" void increment(int* number) { ++*number; }\n')
    return file


def load(source: Path) -> ctypes.CDLL:
    """The source in a process that has not loaded it."""
    compiled.cache_clear()
    return compiled(source, ("increment",), ARGUMENTS)


def test_what_is_compiled_is_kept_and_another_source_is_compiled_anew(
    source: Path, cache: Path, monkeypatch: MonkeyPatch
) -> None:
    number = ctypes.c_int(1)
    load(source).increment(ctypes.addressof(number))
    (library,) = cache.iterdir()
    assert library.suffix == ".so" and library.name.startswith("increment-")
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
        load(source).increment(ctypes.addressof(number))
    assert number.value == 3
    source.write_text(source.read_text() + "\n// changed\n")
    monkeypatch.setenv("CXX", "g++ -pipe")  # a command may have arguments
    load(source)
    assert len(list(cache.iterdir())) == 2


def test_what_cannot_be_compiled_says_so(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no program\n")
    for variable, value, file, problem in (
        ("CXX", "none", source, r"no C\+\+ compiler"),
        ("CXX", 'g++ "', source, "not a command"),
        ("CXX", "g++", broken, r"failed: .*error"),
        ("XDG_CACHE_HOME", str(source), source, "increment"),  # a home that is a file
    ):
        with monkeypatch.context() as patch, pytest.raises(CompileError, match=problem):
            patch.setenv(variable, value)
            load(file)
    assert not any(cache.iterdir())
    with pytest.raises(CompileError, match="decrement"):
        compiled(source, ("decrement",), ARGUMENTS)


def test_what_is_kept_and_broken_is_compiled_anew(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    load(source)
    (library,) = cache.iterdir()
    other = tmp_path / "other" / "vllm_alora" / library.name  # which this process has not loaded
    other.parent.mkdir(parents=True)
    other.write_text("no library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    load(source)
    assert other.stat().st_size == library.stat().st_size
