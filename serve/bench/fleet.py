"""Many adapters, one a request: what it costs that every request may have another adapter.

Traffic goes round-robin over 1 to 128 adapters, the worst order for an LRU, or by Zipf's law to a
fleet of 1,024. Requests share no conversation, and the prefix cache is off, because PEFT has none.
Sixteen workers each submit again as soon as they are answered. Every server gets the same requests,
in turns:

    PEFT baseline   plain PEFT with a 25-adapter LRU (`workload/peft_baseline.py`)
    1 slot          the engine with a slot for one adapter at a time
    32 slots        the engine with 32 slots
    all resident    the engine with a slot for every adapter
    bare base       the engine without adapters: the lower bound of the time

The adapters have random weights. LoRAs, which act on every token, come first, then aLoRAs, which
act on the suffix alone. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from guard.prompt.decoder import PromptBuilder
from serve.bench.engines import memory_beside, scores_of, with_room
from serve.bench.harness import Benchmark, Cell, Ratio, Repeat, Sample
from serve.bench.report import Column, GridReport
from serve.bench.workload.adapters import random_adapters
from serve.bench.workload.prompts import conversation, random_rule_text
from serve.engine import Call, GuardEngine, Refusal, Score, ScoreRequest

if TYPE_CHECKING:
    from serve.bench.workload.peft_baseline import PeftBaseline, PeftCall

PEFT, ONE_SLOT, ALL_RESIDENT, BARE_BASE = "PEFT baseline", "1 slot", "all resident", "bare base"
SLOTS, FLEET = 32, 1024
SLOTS_OF = {ONE_SLOT: 1, f"{SLOTS} slots": SLOTS, ALL_RESIDENT: FLEET}
SERVERS = (PEFT, *SLOTS_OF, BARE_BASE)
PLACES = 25  # PEFT's adapters in memory: as many as in Pioneer's comparison
ROUND_ROBIN = (1, 2, 4, 8, 16, SLOTS, SLOTS + 1, 64, 128)  # SLOTS + 1: one more than fits
ALPHAS = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
# Adapters, alpha and requests of each kind of traffic
TRAFFIC: tuple[tuple[int, float | None, int], ...] = (
    *[(adapters, None, 256) for adapters in ROUND_ROBIN],
    *[(FLEET, alpha, 512) for alpha in ALPHAS],
)
QUICK_TRAFFIC = ((1, None, 64), (SLOTS + 1, None, 64), (64, 1.0, 64))
WORKERS = 16
TOKENS = 200  # of a conversation


@dataclass(frozen=True)
class FleetCell(Cell):
    """A server under traffic to `adapters`, round-robin or, with an `alpha`, by Zipf's law."""

    method: str
    adapters: int
    alpha: float | None
    requests: int
    server: str

    @property
    def group(self) -> tuple[str, bool]:
        """Each method has servers of its own, and so has the fleet, which takes more memory."""
        return self.method, self.adapters > max(ROUND_ROBIN)

    def drawn(self, seed: int) -> list[int]:
        """The number of each request's adapter. By Zipf's law the k-th most popular is drawn with a
        probability proportional to k ** -alpha.
        """
        if self.alpha is None:
            return [number % self.adapters for number in range(self.requests)]
        weights = np.arange(1, self.adapters + 1) ** -self.alpha
        shares = weights / weights.sum()
        chosen = np.random.default_rng(seed).choice(self.adapters, size=self.requests, p=shares)
        return [int(adapter) for adapter in chosen]


FleetServer: TypeAlias = "GuardEngine | PeftBaseline"


class FleetBench(Benchmark[FleetCell]):
    """One adapter a request, of more and more, and of a fleet."""

    name = "fleet"
    summary = "1 to 128 adapters in turn and 1,024 by Zipf's law, one a request, beside PEFT"
    duration = "45 min, --quick 2"
    line = "server"
    columns = (
        Column("", "method"),
        Column("adapters", "adapters"),
        Column("Zipf", "alpha"),
        Column("requests", "requests"),
        Column("used", "used_adapters"),
        Column("server", "server"),
        Column("requests/s (min to max)", "requests_per_second", 1, "spread"),
        Column("ms", "request_ms"),
        Column("p95", "request_ms", part="p95"),
        Column("hits %", "hit_percent"),
        Column("/PEFT", "of_peft", 2, unit="x"),
        Column("/all resident", "of_all_resident", 2, unit="x"),
        Column("/base", "of_base", 2, unit="x"),
    )
    ratios = (
        Ratio("of_peft", "requests_per_second", PEFT),
        Ratio("of_all_resident", "requests_per_second", ALL_RESIDENT),
        Ratio("of_base", "requests_per_second", BARE_BASE),
    )
    _folders: Mapping[str, Path]
    _running: dict[str, FleetServer]
    _warm: set[FleetCell]

    def cells(self) -> list[FleetCell]:
        traffic, repeats = TRAFFIC, self.options.repeats
        if self.options.quick:
            traffic, repeats = QUICK_TRAFFIC, 1
        cells: list[FleetCell] = []
        methods = self.recipe.adapter_methods
        for method, shape, server in itertools.product(methods, traffic, SERVERS):
            cells.append(FleetCell(method, *shape, server, repeats=repeats))
        return cells

    @contextlib.contextmanager
    def started(self, cells: Sequence[FleetCell]) -> Iterator[None]:
        """Run all servers, on a GPU each base in its part of the memory."""
        from serve.bench.workload.peft_baseline import PeftBaseline

        self.facts |= {"workers": WORKERS, "tokens": TOKENS, "PEFT's places": PLACES}
        most = max(cell.adapters for cell in cells)
        adapters = random_adapters(self.recipe, [cells[0].method], most)
        with contextlib.ExitStack() as stack:
            self._folders, self._running = stack.enter_context(adapters), {}
            for name, slots in SLOTS_OF.items():
                self._running[name] = stack.enter_context(self._engine(min(slots, most)))
            self._running[BARE_BASE] = self._running[ONE_SLOT]
            self._running[PEFT] = PeftBaseline(self.recipe, self._folders, PLACES, WORKERS)
            self._warm = set()
            yield

    def _engine(self, slots: int) -> GuardEngine:
        return GuardEngine(
            with_room(self.recipe, slots),
            self._folders,
            max_loras=slots,
            max_num_seqs=2 * WORKERS,
            enable_prefix_caching=False,  # all prompts begin with the same block
            **memory_beside(1 + len(SLOTS_OF)),
        )

    def measure(self, cell: FleetCell, repeat: Repeat) -> Sample:
        """Measure all requests once, before the first time some for warmth. Raises GuardError for a
        refusal.
        """
        if cell not in self._warm:
            self._warm.add(cell)
            self._run(cell, cell.drawn(seed=0)[: 2 * WORKERS], seed=0)
        return self._run(cell, cell.drawn(repeat.seed), repeat.seed)

    def _run(self, cell: FleetCell, drawn: Sequence[int], seed: int) -> Sample:
        server, requests = self._running[cell.server], self._requests(drawn, seed)
        if cell.server == BARE_BASE:
            requests = [request._replace(adapter=None) for request in requests]
        swapped, started = server.counters.swap_ins, time.perf_counter()
        outcomes = closed_loop(server, requests)
        wall_s = time.perf_counter() - started
        swapped = server.counters.swap_ins - swapped
        scores = scores_of(outcomes, where=cell.server)
        sample: dict[str, float | Sequence[float]] = {
            "used_adapters": len(set(drawn)),
            "requests_per_second": len(requests) / wall_s,
            "request_ms": [score.latency_ms for score in scores],
            "computed_tokens": sum(score.computed_tokens for score in scores),
        }
        if cell.server != BARE_BASE:
            sample["hit_percent"] = 100 * (1 - swapped / len(requests))
        return sample

    def _requests(self, drawn: Sequence[int], seed: int) -> list[ScoreRequest]:
        """A request for each adapter drawn, with a conversation of its own."""
        prompts, text = PromptBuilder.of(self.recipe), random_rule_text(self.recipe)
        names = list(self._folders)
        requests: list[ScoreRequest] = []
        for number, adapter in enumerate(drawn):
            messages = conversation(prompts, TOKENS, (seed << 32) + number)
            requests.append(ScoreRequest(messages, text, names[adapter]))
        return requests

    def notes(self, report: GridReport) -> list[str]:
        return [
            "used: adapters that got a request. hits: requests for which no adapter was copied",
            "into a slot (engine) or read into a place (PEFT). /: throughput over that server's.",
        ]


def closed_loop(server: FleetServer, requests: Iterable[ScoreRequest]) -> list[Score | Refusal]:
    """Keep a request of each worker in flight until all are answered."""
    waiting = deque(requests)
    in_flight: list[Call | PeftCall] = []
    outcomes: list[Score | Refusal] = []
    while waiting or in_flight:
        while waiting and len(in_flight) < WORKERS:
            in_flight.append(server.submit([waiting.popleft()]))
        server.step()
        for call in in_flight:
            if call.done:
                outcomes += call.results()
        in_flight = [call for call in in_flight if not call.done]
    return outcomes
