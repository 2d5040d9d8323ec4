"""Settings of every test, and how the suite is shared between processes.

The suite runs in as many processes as it has cores, at most MAX_WORKERS, each on cores of its own:
most tests are Python or small products, which two threads hardly speed up, and threads of two
processes on one core slow both. A process gets a whole file at a time, the longest first.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path

import hypothesis
import pytest

from tests.long_files import LONG_FILES_S

MAX_WORKERS = 4  # each may hold an engine, in a few GiB
QUICK = "not slow"  # the marker expression of `make test QUICK=1`
SLOW_FILE = "\npytestmark = pytest.mark.slow\n"
ROOT = Path(__file__).parent.parent


def cores_of_worker(cores: list[int], environment: dict[str, str]) -> list[int]:
    """The cores that this process of the suite computes on: all where it is the only one."""
    worker = environment.get("PYTEST_XDIST_WORKER", "")
    if not worker.startswith("gw"):
        return cores
    workers = int(environment["PYTEST_XDIST_WORKER_COUNT"])
    return cores[int(worker.removeprefix("gw")) :: workers] or cores


def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` in pyproject.toml stands for."""
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def pytest_configure(config: pytest.Config) -> None:
    """Let no engine start in a quick run: whatever imports vLLM fails."""
    if config.option.markexpr == QUICK:
        sys.modules["vllm"] = None  # type: ignore[assignment]


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their length: what gzip writes holds the time, and every process of the suite
    has to collect the same names."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In a quick run do not even import a file that is slow as a whole: that takes seconds."""
    if config.option.markexpr != QUICK or not collection_path.is_file():
        return None
    return SLOW_FILE in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin the longest files first and quick ones last, so that all processes end together."""
    files = {item: item.path.relative_to(ROOT).as_posix() for item in items}
    with_slow = {files[item] for item in items if item.get_closest_marker("slow")}

    def seconds(item: pytest.Item) -> float:
        return LONG_FILES_S.get(files[item], 1.0 if files[item] in with_slow else 0.0)

    items.sort(key=seconds, reverse=True)  # which keeps the order within a file


def pytest_collection_finish() -> None:
    """What is imported stays: no collection of garbage need look through it again and again.

    vLLM collects seven times for each engine, freezes what is there then, which would keep a closed
    engine for ever, and unfreezes everything at its end, which would make all later ones slow.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the bases that the test makes of others."""
    monkeypatch.setattr("guard.made_base.CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine that the test or its processes start compiles its model, as on a machine without a
    C++ compiler: that takes several times as long as the start.
    """
    # Which reads CXX once: other tests of this process may compile.
    importlib.import_module("torch._inductor.config")
    monkeypatch.setenv("CXX", "none")


# Before anything imports torch, which reads them once.
_CORES = cores_of_worker(sorted(os.sched_getaffinity(0)), dict(os.environ))
os.sched_setaffinity(0, _CORES)
os.environ["OMP_NUM_THREADS"] = str(len(_CORES))

# The same cases in every run, nothing kept between runs, and no deadline: a slow machine is no
# failure.
hypothesis.settings.register_profile("project", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("project")
