"""Servers: the real one as a process of its own, on random adapters, and an app in this process.

Knows nothing of measuring.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import uvicorn
from fastapi import FastAPI

from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import Runs
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe
from serve.api.input.bounded_heads import BoundedHeads
from serve.bench.workload.random_adapter import save_random_adapters

READY = "/v1/check is ready"
SPINS = "10000"  # how long threads spin while they wait, as with `make up`


def rule_names(count: int) -> list[str]:
    """The names of the rules that are served."""
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
    """A running server that takes checks."""

    address: str
    process: subprocess.Popen[str]

    def memory_mib(self) -> float:
        """The resident memory of the server and the processes that it started.

        Raises GuardError if the server has ended.
        """
        if self.process.poll() is not None:
            status = f"status {self.process.returncode}"
            raise GuardError("the server has ended", got=status, remedy="Its error stands above")
        server = psutil.Process(self.process.pid)
        total = 0
        for process in (server, *server.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                total += process.memory_info().rss
        return total / 2**20


def server_environment() -> dict[str, str]:
    """The environment of a server as `make up` starts it: its threads leave the cores to others."""
    environment = dict(os.environ)
    if not environment.get("OMP_WAIT_POLICY"):
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
    return environment


@contextlib.contextmanager
def server_process(recipe: Recipe, runs: Runs, *options: str) -> Iterator[RunningServer]:
    """Run `python -m serve.up` on a free port. Raises GuardError if it does not start."""
    command = [sys.executable, "-m", "serve.up", "--model", recipe.name, "--runs", str(runs.root)]
    process = subprocess.Popen(
        [*command, "--port", "0", *options],
        cwd=ROOT,
        env=server_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
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


@contextlib.contextmanager
def served_here(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of the app, which runs in a thread of this process on a free port."""
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedHeads, log_level="critical"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with httpx.Client(base_url=address, timeout=90, trust_env=False) as client:
                while not server.started:
                    time.sleep(0.01)
                yield client
        finally:
            server.should_exit = True
            thread.join()
