"""The real server as a process of its own, on random adapters. Knows nothing of measuring."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from guard.errors import GuardError
from guard.layout import ROOT, Runs
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe
from serve.bench.workload.random_adapter import save_random_adapters

READY = "/v1/check is ready"


def rule_names(count: int) -> list[str]:
    """The rules that are served."""
    return [f"rule_{number}" for number in range(count)]


@contextlib.contextmanager
def random_runs(recipe: Recipe, rules: int) -> Iterator[Runs]:
    """A temporary folder of weights, as training would leave it: an adapter for each rule."""
    method = recipe.sharing_methods[0]
    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(Path(scratch))
        folders = [runs.root / recipe.name / name / method for name in rule_names(rules)]
        save_random_adapters(folders, recipe, method, prompt_builder(recipe))
        yield runs


class RunningServer(NamedTuple):
    """A server that takes checks."""

    address: str
    pid: int

    def memory_mib(self) -> float:
        """What it and the processes that it started have in memory, in MiB."""
        process = psutil.Process(self.pid)
        family = [process, *process.children(recursive=True)]
        return float(sum(member.memory_info().rss for member in family)) / 2**20


@contextlib.contextmanager
def server_process(recipe: Recipe, runs: Runs, *options: str) -> Iterator[RunningServer]:
    """`python -m serve.up` on a free port. Raises GuardError if it does not start."""
    command = [sys.executable, "-m", "serve.up", "--model", recipe.name, "--runs", str(runs.root)]
    process = subprocess.Popen(
        [*command, "--port", "0", *options], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if READY in line:
                yield RunningServer(line.partition("/v1/check")[0], process.pid)
                return
        raise GuardError("the server did not start", remedy="Its error stands above")
    finally:
        process.terminate()
        process.wait()
