"""The server as a process of its own, on random adapters."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import Runs
from guard.recipe import Recipe
from serve.bench.workload.adapters import save_random_adapters

READY = "/v1/check is ready"
SPINS = "10000"  # how long threads spin while they wait, as with `make up`


def rule_names(count: int) -> list[str]:
    return [f"rule_{number}" for number in range(count)]


@contextlib.contextmanager
def random_runs(recipe: Recipe, rules: int) -> Iterator[Runs]:
    """A temporary folder of weights, as training would leave it: an adapter for each rule."""
    method = recipe.sharing_method
    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(Path(scratch))
        folders = [runs.root / recipe.name / name / method for name in rule_names(rules)]
        save_random_adapters(folders, recipe, method)
        yield runs


class RunningServer(NamedTuple):
    """A running server that takes checks."""

    address: str
    process: subprocess.Popen[str]


@contextlib.contextmanager
def server_process(recipe: Recipe, runs: Runs) -> Iterator[RunningServer]:
    """Run `python -m serve.up` on a free port, as `make up` does: its threads leave the cores to
    others. Raises GuardError if it does not start.
    """
    command = [sys.executable, "-m", "serve.up", "--model", recipe.name, "--port", "0"]
    command += ["--runs", str(runs.root)]
    environment = dict(os.environ)
    if not environment.get("OMP_WAIT_POLICY"):
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if READY in line:
                yield RunningServer(line.partition("/v1/check")[0], process)
                return
        raise GuardError("the server did not start", remedy="Its error stands above")
    finally:
        process.terminate()
        process.wait()


def as_body(messages: Sequence[Message], rules: Sequence[str]) -> dict[str, Any]:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return {"messages": turns, "rules": list(rules)}
