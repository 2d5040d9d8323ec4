"""The server as a process of its own, on random adapters, and open-loop load on it: checks are sent
when they are due, whatever became of earlier ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import Runs
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from serve.bench.workload.adapters import save_random_adapters
from serve.bench.workload.traffic import RULES, arrivals
from serve.engine.thread.engine_thread import MAX_OPEN

READY = "/v1/check is ready"
SPINS = "10000"  # how long threads spin while they wait, as with `make up`
PATIENCE_S = 30.0  # beyond a check's deadline
AT_ONCE = 2 * MAX_OPEN  # checks under way that saturate a server: half of them wait
SATURATING_CHECKS = 8 * AT_ONCE
SATURATING_DEADLINE_S = 60.0


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

    def memory_mib(self) -> float:
        """The resident memory of the server and the processes that it started. Raises GuardError if
        the server has ended.
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


@dataclass(frozen=True)
class SentCheck:
    """What became of a check. `latency_s`: the time from when it was due to the whole answer.
    `waited_s`: the time from when it was sent, which is later if the client is busy.
    """

    status: int  # 0: no answer at all
    latency_s: float
    waited_s: float


@dataclass(frozen=True)
class HttpRun:
    """A run of traffic, and the time that it took until the last answer."""

    sent: tuple[SentCheck, ...]
    wall_s: float

    @property
    def answered_s(self) -> list[float]:
        return [check.latency_s for check in self.sent if check.status == 200]

    def count(self, status: int) -> int:
        return sum(check.status == status for check in self.sent)

    def late(self, deadline_s: float) -> int:
        """How many checks got verdicts later than `deadline_s` after they were sent."""
        return sum(check.status == 200 and check.waited_s > deadline_s for check in self.sent)


def as_body(messages: Sequence[Message], rules: Sequence[str]) -> dict[str, Any]:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return {"messages": turns, "rules": list(rules)}


def send(
    address: str,
    bodies: Sequence[dict[str, Any]],
    due_s: Sequence[float],
    deadline_s: float,
    at_once: int | None = None,
) -> HttpRun:
    """Send each body when it is due, in seconds from the start, with `deadline_s` to answer it.
    With `at_once` no more than so many checks are under way: the next one is sent when one of them
    is answered.
    """
    return asyncio.run(_send(address, bodies, due_s, deadline_s, at_once))


async def _send(
    address: str,
    bodies: Sequence[dict[str, Any]],
    due_s: Sequence[float],
    deadline_s: float,
    at_once: int | None,
) -> HttpRun:
    places = asyncio.Semaphore(at_once or len(bodies))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(
        base_url=address,
        limits=limits,
        headers={"guard-timeout-ms": str(round(1000 * deadline_s))},
        timeout=deadline_s + PATIENCE_S,
        trust_env=False,
    ) as client:
        started = time.perf_counter()

        async def check(body: dict[str, Any], due: float) -> SentCheck:
            await asyncio.sleep(started + due - time.perf_counter())
            async with places:
                began = time.perf_counter()
                try:
                    status = (await client.post("/v1/check", json=body)).status_code
                except httpx.TransportError:
                    status = 0
                ended = time.perf_counter()
            return SentCheck(status, ended - started - due, ended - began)

        pairs = zip(bodies, due_s, strict=True)
        sent = await asyncio.gather(*[check(body, due) for body, due in pairs])
        return HttpRun(tuple(sent), time.perf_counter() - started)


class OpenLoopTraffic:
    """Checks of new conversations on random rules at `address`, which has RULES[1] rules."""

    def __init__(self, recipe: Recipe, address: str) -> None:
        self._prompts = PromptBuilder.of(recipe)
        self._names = rule_names(RULES[1])
        self._address = address

    def saturation(self) -> float:
        """The checks a second that are answered while AT_ONCE of them are under way. The first and
        the last quarter of the answers do not count: at first the server is slower and batches are
        not yet full, at the end they are no longer full.
        """
        bodies, _ = self._drawn(1.0, SATURATING_CHECKS, seed=1)
        at_once = [0.0] * len(bodies)
        run = send(self._address, bodies, at_once, SATURATING_DEADLINE_S, AT_ONCE)
        return steady_rate(run.answered_s)

    def run(
        self, rate: float, checks: int, seed: int, deadline_s: float
    ) -> tuple[HttpRun, list[float]]:
        """Send checks at `rate` a second. Returns the run, and when each was due in seconds."""
        bodies, due_s = self._drawn(rate, checks, seed)
        return send(self._address, bodies, due_s, deadline_s), due_s

    def _drawn(
        self, rate: float, checks: int, seed: int
    ) -> tuple[list[dict[str, Any]], list[float]]:
        bodies: list[dict[str, Any]] = []
        due_s: list[float] = []
        for arrival in arrivals(self._prompts, rate, checks, seed):
            rules = [self._names[rule] for rule in arrival.rules]
            bodies.append(as_body(arrival.messages, rules))
            due_s.append(arrival.due_s)
        return bodies, due_s


def steady_rate(answered_s: Sequence[float]) -> float:
    """The answers a second between the first quarter and the last, from each one's time in seconds.
    Raises GuardError if there are too few.
    """
    in_order, quarter = sorted(answered_s), len(answered_s) // 4
    if not quarter:
        problem, remedy = "hardly any check was answered", "See the server's log"
        raise GuardError(problem, got=f"{len(answered_s)} answers", remedy=remedy)
    return 2 * quarter / (in_order[3 * quarter - 1] - in_order[quarter - 1])
