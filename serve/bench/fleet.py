"""Many adapters, one a request: what it costs that every request may have another adapter.

Requests share no conversation, and the prefix cache is off, because PEFT has none. `adapters` goes
round-robin over 1 to 128 adapters; `fleet` draws from 1,024 by Zipf's law. Sixteen workers each
submit again as soon as they are answered. Every server gets the same requests, in turns; PEFT,
which is so slow, only the first quarter of them, but at least as many as there are adapters:

    PEFT baseline   plain PEFT with a 25-adapter LRU (`peft_baseline.py`)
    1 slot          the engine with a slot for one adapter at a time; round-robin only
    25 slots        the engine with as many slots as PEFT has places; round-robin only
    32 slots        the engine with 32 slots
    all resident    the engine with a slot for every adapter
    bare base       the engine without adapters: the lower bound of the time

The adapters have random weights. LoRAs, which act on every token, come first, then aLoRAs, which
act on the suffix alone. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from serve.bench.harness import Benchmark, Cell, Ratio, Repeat, Sample, add_count
from serve.bench.report import Column, GridReport, label
from serve.bench.workload.adapters import adapter_mib, random_adapters
from serve.bench.workload.fleet_servers import (
    ALL_RESIDENT,
    BARE_BASE,
    CAPACITY,
    PEFT,
    SERVERS,
    SLOTS,
    WORKERS,
    FleetServer,
    servers,
)
from serve.bench.workload.prompts import conversation, random_rule_text
from serve.bench.workload.traffic import FleetCounts, Submitted, closed_loop, zipf

TOKENS = 200  # of a conversation
QUICK_REQUESTS, QUICK_ADAPTERS = 64, 33


@dataclass(frozen=True, kw_only=True)
class FleetCell(Cell):
    """A server under traffic to `adapters`, round-robin or, with an `alpha`, by Zipf's law."""

    method: str
    adapters: int
    alpha: float | None
    server: str

    @property
    def group(self) -> str:
        """Each method has servers of its own."""
        return self.method

    def requests_of(self, requests: int) -> int:
        """The number of a run's requests that the server gets: for PEFT enough that, round-robin,
        every adapter gets one.
        """
        if self.server != PEFT:
            return requests
        return min(requests, max(requests // 4, self.adapters, 2 * WORKERS))

    def drawn(self, requests: int, seed: int) -> list[int]:
        if self.alpha is None:
            # The worst order for an LRU cache
            return [number % self.adapters for number in range(requests)]
        return zipf(self.adapters, self.alpha, requests, seed)


class FleetBench(Benchmark[FleetCell]):
    """What both benchmarks have in common."""

    line = "server"
    columns = (
        Column("", "method"),
        Column("adapters", "adapters"),
        Column("Zipf", "alpha"),
        Column("server", "server"),
        Column("requests", "requests"),
        Column("used", "used_adapters"),
        Column("requests/s (min to max)", "requests_per_second", 1, "spread"),
        Column("ms", "request_ms"),
        Column("p95", "request_ms", part="p95"),
        Column("p99", "request_ms", part="p99"),
        Column("passes", "forward_passes"),
        Column("loads", "adapter_loads"),
        Column("swap-ins", "swap_ins"),
        Column("/all resident", "of_all_resident", 2, unit="x"),
        Column("/base", "of_base", 2, unit="x"),
    )
    ratios = (
        Ratio("of_all_resident", "requests_per_second", ALL_RESIDENT),
        Ratio("of_base", "requests_per_second", BARE_BASE),
    )
    adapters: ClassVar[tuple[int, ...]]
    alphas: ClassVar[tuple[float | None, ...]]
    server_names: ClassVar[tuple[str, ...]]
    requests: ClassVar[int]
    _folders: Mapping[str, Path]
    _running: Mapping[str, FleetServer]

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        add_count(parser, "--requests", cls.requests, "requests of a run")

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        if self.recipe.is_encoder:
            remedy = "Name a decoder; make bench NAME=encoder measures an encoder's rules"
            raise GuardError("not a decoder", where=f"recipe {self.recipe.name}", remedy=remedy)
        self._requests: int = options.requests
        if options.quick:
            self._requests = min(self._requests, QUICK_REQUESTS)
        self._prompts, self._text = PromptBuilder.of(self.recipe), random_rule_text(self.recipe)
        self.facts |= {"workers": WORKERS, "tokens": TOKENS, "PEFT's places": CAPACITY}

    def cells(self) -> list[FleetCell]:
        adapters, alphas, repeats = self.adapters, self.alphas, self.options.repeats
        if self.options.quick:
            adapters = tuple(min(number, QUICK_ADAPTERS) for number in adapters[-1:])
            alphas, repeats = alphas[-1:], 1
        cells: list[FleetCell] = []
        methods, servers = self.recipe.adapter_methods, self.server_names
        for method, number, alpha, server in itertools.product(methods, adapters, alphas, servers):
            cell = FleetCell(method=method, adapters=number, alpha=alpha, server=server)
            cells.append(replace(cell, repeats=repeats))
        return cells

    @contextlib.contextmanager
    def started(self, cells: Sequence[FleetCell]) -> Iterator[None]:
        method, most = cells[0].method, max(cell.adapters for cell in cells)
        names = list(dict.fromkeys(cell.server for cell in cells))
        with (
            random_adapters(self.recipe, [method], most) as self._folders,
            servers(self.recipe, self._folders, names) as self._running,
        ):
            self._warm: set[FleetCell] = set()
            first = next(iter(self._folders.values()))
            self.facts[f"MiB of a {label(method)}"] = f"{adapter_mib(first):.1f}"
            yield

    def measure(self, cell: FleetCell, repeat: Repeat) -> Sample:
        if cell not in self._warm:
            self._warm.add(cell)
            self._run(cell, 2 * WORKERS, seed=0)
        return self._run(cell, cell.requests_of(self._requests), repeat.seed)

    def _run(self, cell: FleetCell, requests: int, seed: int) -> Sample:
        names, server = list(self._folders), self._running[cell.server]
        adapters = [names[number] for number in cell.drawn(self._requests, seed)][:requests]
        seeds = range(seed << 32, (seed << 32) + len(adapters))
        conversations = [conversation(self._prompts, TOKENS, own_seed) for own_seed in seeds]

        def submit(number: int) -> Submitted:
            return server.submit(conversations[number], self._text, adapters[number])

        server.begin()
        before = server.counts
        timed = closed_loop(submit, server.step, len(adapters), WORKERS)
        done = zip(server.counts, before, strict=True)
        counts = FleetCounts(*[after - earlier for after, earlier in done])
        return counts._asdict() | {
            "requests": len(adapters),
            "used_adapters": len(set(adapters)),
            "requests_per_second": timed.per_second,
            "request_ms": [1000 * latency for latency in timed.latencies_s],
            "computed_tokens": server.computed_tokens(),
        }

    def notes(self, report: GridReport) -> list[str]:
        return [
            f"PEFT baseline: a {CAPACITY}-adapter LRU. used: adapters that got a request.",
            "passes: batches that the model computed. loads: adapters read from disk. swap-ins:",
            "adapters copied into a slot (engine) or a place (PEFT). /all resident: throughput",
            "over that with a slot for every adapter.",
        ]


class AdaptersBench(FleetBench):
    """Round-robin over more and more adapters."""

    name = "adapters"
    summary = "round-robin over 1 to 128 adapters, one a request, against a PEFT baseline"
    duration = "29 min, --quick 1"
    adapters = (1, 2, 4, 8, 16, SLOTS, SLOTS + 1, 64, 128)  # SLOTS + 1: one more than fits
    alphas = (None,)
    server_names = SERVERS
    requests = 256


class ZipfBench(FleetBench):
    """A fleet of adapters by Zipf's law."""

    name = "fleet"
    summary = "1,024 adapters, one a request, drawn by Zipf's law, against a PEFT baseline"
    duration = "37 min, --quick 1"
    adapters = (1024,)
    alphas = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
    server_names = (PEFT, f"{SLOTS} slots", ALL_RESIDENT, BARE_BASE)
    requests = 512
