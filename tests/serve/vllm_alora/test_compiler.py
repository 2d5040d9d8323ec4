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


def test_what_is_compiled_is_kept(source: Path, cache: Path, monkeypatch: MonkeyPatch) -> None:
    number = ctypes.c_int(1)
    load(source).increment(ctypes.addressof(number))
    (library,) = cache.iterdir()

    def compile_again(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "_compile", compile_again)
    load(source).increment(ctypes.addressof(number))
    assert library.suffix == ".so" and library.name.startswith("increment-")
    assert number.value == 3


def test_another_source_is_compiled_anew_by_a_command_that_may_have_arguments(
    source: Path, cache: Path, monkeypatch: MonkeyPatch
) -> None:
    load(source)
    source.write_text(source.read_text() + "\n// changed\n")
    monkeypatch.setenv("CXX", "g++ -pipe")
    load(source)
    assert len(list(cache.iterdir())) == 2


def test_a_missing_compiler_says_so(source: Path, cache: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "none")
    with pytest.raises(CompileError, match=r"no C\+\+ compiler"):
        load(source)
    monkeypatch.setenv("CXX", 'g++ "')
    with pytest.raises(CompileError, match="not a command"):
        load(source)
    monkeypatch.delenv("CXX")
    text = source.read_text()
    source.write_text("this is no program\n")
    with pytest.raises(CompileError, match=r"failed: .*error"):
        load(source)
    assert not any(cache.iterdir())
    source.write_text(text)
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


def test_a_home_that_is_a_file(source: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CompileError, match="file"):
        load(source)
