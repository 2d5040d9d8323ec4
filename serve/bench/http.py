"""What HTTP adds to a check: the time of a request less what its answer says the engine took. The
server is a process of its own; every conversation is new. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from serve.bench.harness import Benchmark, Cell, Repeat, Sample
from serve.bench.report import Column
from serve.bench.workload.prompts import conversation
from serve.bench.workload.server import as_body, random_runs, rule_names, server_process

TOKENS, RULES = (100, 1000), (1, 20)
QUICK_REPEATS = 8
WARM_UP = 3  # checks of each cell


@dataclass(frozen=True, kw_only=True)
class HttpCell(Cell):
    """Checks of one conversation by `rules` rules."""

    tokens: int
    rules: int


class HttpBench(Benchmark[HttpCell]):
    """The server over HTTP beside its engine."""

    name = "http"
    summary = "a check over HTTP, and what its engine takes of that time"
    duration = "1 min"
    line = ""
    repeats = 30
    columns = (
        Column("tokens", "tokens"),
        Column("rules", "rules"),
        Column("check ms (min to max)", "check_ms", 1, "spread"),
        Column("p95", "check_ms", 1, "p95"),
        Column("engine ms", "engine_ms", 1),
        Column("HTTP ms (min to max)", "http_ms", 1, "spread"),
    )

    def cells(self) -> list[HttpCell]:
        repeats = self.options.repeats
        if self.options.quick:
            repeats = min(repeats, QUICK_REPEATS)
        grid = itertools.product(TOKENS, RULES)
        return [HttpCell(tokens=tokens, rules=rules, repeats=repeats) for tokens, rules in grid]

    @contextlib.contextmanager
    def started(self, cells: Sequence[HttpCell]) -> Iterator[None]:
        self._prompts = PromptBuilder.of(self.recipe)
        with (
            random_runs(self.recipe, max(RULES)) as runs,
            server_process(self.recipe, runs) as server,
            httpx.Client(base_url=server.address, timeout=90, trust_env=False) as self._client,
        ):
            for number in range(WARM_UP):
                for cell in cells:
                    self.measure(cell, Repeat(0, 1, seed=number))
            yield

    def measure(self, cell: HttpCell, repeat: Repeat) -> Sample:
        messages = conversation(self._prompts, cell.tokens, repeat.seed)
        body = as_body(messages, rule_names(cell.rules))
        started = time.perf_counter()
        try:
            response = self._client.post("/v1/check", json=body).raise_for_status()
        except httpx.HTTPError as error:
            remedy = "See its words above"
            raise GuardError("the server did not answer", got=error, remedy=remedy) from error
        check_ms = 1000 * (time.perf_counter() - started)
        engine_ms = judged_answer(response)["latency_ms"]
        return {"check_ms": check_ms, "engine_ms": engine_ms, "http_ms": check_ms - engine_ms}


def judged_answer(response: httpx.Response) -> dict[str, Any]:
    """The answer to a check. Raises GuardError if a rule was not judged."""
    answer: dict[str, Any] = response.json()
    if answer["unjudged"]:
        raise GuardError("a rule was not judged", got=answer["unjudged"][0], remedy="make doctor")
    return answer
