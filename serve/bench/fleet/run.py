"""Many adapters, one a request: what it costs that every request may have another adapter.

Requests share no conversation, and the prefix cache is off, because PEFT has none. `adapters` goes
round-robin over 1 to 128 adapters; `fleet` draws from 1,024 by Zipf's law. Sixteen workers each
submit again as soon as they are answered. Every server gets the same requests, interleaved; PEFT,
which is so slow, only the first quarter of them, but at least as many as there are adapters:

    PEFT baseline   plain PEFT with a 25-adapter LRU (`peft_baseline.py`)
    1 slot          the engine with a slot for one adapter at a time; round-robin only
    25 slots        the engine with as many slots as PEFT has places; round-robin only
    32 slots        the engine with 32 slots
    all resident    the engine with a slot for every adapter
    bare base       the engine without adapters: the lower bound of the time

The adapters have random weights. LoRAs, which act on every token, come first, then aLoRAs, which
act on the suffix alone. An encoder's LoRA has a head and words of its own, and its bare base is a
head on the frozen encoder. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from guard.arguments import count
from guard.conversation.example import Message
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.fleet.report import (
    ALL_RESIDENT,
    BARE_BASE,
    PEFT,
    SERVERS,
    SLOTS,
    FleetReport,
    FleetRow,
    draw,
    table,
)
from serve.bench.fleet.servers import WORKERS, FleetServer, servers
from serve.bench.report import (
    Spread,
    engine_settings,
    median_count,
    origin,
    percentiles,
    publish,
)
from serve.bench.workload.prompts import conversation, random_rule_text
from serve.bench.workload.random_adapter import adapter_mib, by_name, random_adapters
from serve.bench.workload.traffic import Timed, closed_loop, round_robin, zipf

TOKENS = 200
REPEATS = 3


@dataclass(frozen=True)
class FleetCell:
    """Traffic: `requests` to `adapters`, round-robin or, with an `alpha`, by Zipf's law."""

    adapters: int
    requests: int
    alpha: float | None = None

    def requests_to(self, server: str) -> int:
        """The number of requests that this server gets: for PEFT enough that, round-robin, every
        adapter gets one.
        """
        if server != PEFT:
            return self.requests
        return min(self.requests, max(self.requests // 4, self.adapters, 2 * WORKERS))

    def drawn(self, seed: int) -> list[int]:
        """The number of each request's adapter."""
        if self.alpha is None:
            return round_robin(self.adapters, self.requests)
        return zipf(self.adapters, self.alpha, self.requests, seed)

    def seed(self, repeat: int, number: int) -> int:
        """The seed of a request's conversation."""
        return (self.adapters * 101 + repeat + 1) * 100_003 + number


@dataclass(frozen=True)
class FleetPlan:
    """What a benchmark measures: numbers of adapters, alphas of Zipf's law, servers."""

    adapters: tuple[int, ...]
    alphas: tuple[float | None, ...]
    servers: tuple[str, ...]
    requests: int
    file: str

    def cells(self, requests: int) -> list[FleetCell]:
        """The traffic, with `requests` requests in a run."""
        cells = []
        for adapters in self.adapters:
            cells += [FleetCell(adapters, requests, alpha) for alpha in self.alphas]
        return cells


PLANS: dict[str, FleetPlan] = {
    "adapters": FleetPlan(
        adapters=(1, 2, 4, 8, 16, SLOTS, SLOTS + 1, 64, 128),  # SLOTS + 1: one more than fits
        alphas=(None,),
        servers=tuple(SERVERS),
        requests=256,
        file="adapters_bench.json",
    ),
    "fleet": FleetPlan(
        adapters=(1024,),
        alphas=(0.5, 0.8, 1.0, 1.2, 1.5, 2.0),
        servers=(PEFT, f"{SLOTS} slots", ALL_RESIDENT, BARE_BASE),
        requests=512,
        file="fleet_bench.json",
    ),
}


@dataclass(frozen=True)
class FleetSample:
    """One run of one server under one cell's traffic.

    `working_set`: the number of adapters that got a request.
    """

    timed: Timed
    working_set: int
    forward_passes: int
    adapter_loads: int
    swap_ins: int
    computed_tokens: int


def measure(
    server: FleetServer,
    adapters: Sequence[str],
    conversations: Sequence[tuple[Message, ...]],
    rule_text: str,
) -> FleetSample:
    """Put a request to each of `adapters` in turn. `rule_text`: the text that they read."""
    server.begin()
    passes, loads, swap_ins = server.forward_passes, server.adapter_loads, server.swap_ins
    timed = closed_loop(
        lambda number: server.submit(conversations[number], rule_text, adapters[number]),
        server.step,
        len(adapters),
        WORKERS,
    )
    return FleetSample(
        timed=timed,
        working_set=len(set(adapters)),
        forward_passes=server.forward_passes - passes,
        adapter_loads=server.adapter_loads - loads,
        swap_ins=server.swap_ins - swap_ins,
        computed_tokens=server.computed_tokens,
    )


def summarise(
    server: str, method: str, cell: FleetCell, samples: Sequence[FleetSample], size_mib: float
) -> FleetRow:
    """One server's row: medians over the repeats."""
    latencies_ms: list[float] = []
    for sample in samples:
        latencies_ms += [1000 * latency for latency in sample.timed.latencies_s]
    return FleetRow(
        server=server,
        method=method,
        adapters=cell.adapters,
        alpha=cell.alpha,
        requests=cell.requests_to(server),
        working_set=median_count([sample.working_set for sample in samples]),
        requests_per_second=Spread.of([sample.timed.per_second for sample in samples]),
        **percentiles(latencies_ms),
        forward_passes=median_count([sample.forward_passes for sample in samples]),
        adapter_loads=median_count([sample.adapter_loads for sample in samples]),
        swap_ins=median_count([sample.swap_ins for sample in samples]),
        adapter_mib=size_mib,
        computed_tokens=median_count([sample.computed_tokens for sample in samples]),
    )


def run(
    recipe: Recipe,
    cells: Sequence[FleetCell],
    server_names: Sequence[str],
    repeats: int,
    methods: Sequence[str],
    tokens: int = TOKENS,
) -> FleetReport:
    """Make the adapters, start the servers, measure every cell on every server."""
    total = 0
    for cell in cells:
        total += sum(cell.requests_to(name) for name in server_names)
    rows: list[FleetRow] = []
    with tqdm(total=total * repeats * len(methods), unit="request", desc="measuring") as bar:
        for method in methods:
            most = max(cell.adapters for cell in cells)
            with (
                random_adapters(recipe, [method], most) as folders,
                random_adapters(recipe, _without_adapter(recipe), 1) as heads,
                servers(recipe, folders[method], server_names, by_name(heads)) as running,
            ):
                fleet = FleetServers(recipe, method, folders[method], running, tokens)
                for cell in cells:
                    rows += fleet.measure_cell(cell, repeats, bar)
    return FleetReport(
        **origin(recipe),
        workers=WORKERS,
        conversation_tokens=tokens,
        repeats=repeats,
        engine=engine_settings(recipe),
        rows=tuple(rows),
    )


def _without_adapter(recipe: Recipe) -> list[str]:
    """The methods by which the bare base answers; none for a decoder, which answers by itself."""
    if not recipe.is_encoder:
        return []
    return [method for method in recipe.methods if not METHODS[method].is_adapter]


@dataclass(frozen=True)
class FleetServers:
    """A method's adapters, the servers that have them, and the length of a conversation."""

    recipe: Recipe
    method: str
    folders: Mapping[str, Path]
    running: Mapping[str, FleetServer]
    tokens: int

    def measure_cell(self, cell: FleetCell, repeats: int, bar: tqdm) -> list[FleetRow]:
        """Measure one cell on every server. Every repeat has another order and other
        conversations.
        """
        self._run_repeat(cell, -1, cell.drawn(0)[: 2 * WORKERS], bar)  # a warm-up
        samples: dict[str, list[FleetSample]] = {name: [] for name in self.running}
        for repeat in range(repeats):
            for name, sample in self._run_repeat(cell, repeat, cell.drawn(repeat + 1), bar).items():
                samples[name].append(sample)
                bar.update(cell.requests_to(name))
        size_mib = adapter_mib(next(iter(self.folders.values())))
        return [
            summarise(name, self.method, cell, samples[name], size_mib) for name in self.running
        ]

    def _run_repeat(
        self, cell: FleetCell, repeat: int, drawn: Sequence[int], bar: tqdm
    ) -> dict[str, FleetSample]:
        prompts, names = prompt_builder(self.recipe), list(self.folders)
        adapters = [names[number] for number in drawn]
        seeds = [cell.seed(repeat, number) for number in range(len(drawn))]
        conversations = [conversation(prompts, self.tokens, seed) for seed in seeds]
        text = random_rule_text(self.recipe)
        samples = {}
        for name in random.Random(repeat).sample(list(self.running), len(self.running)):
            bar.set_postfix_str(f"{cell.adapters} {self.method} adapters, {name}", refresh=False)
            server_adapters = adapters[: cell.requests_to(name)]
            samples[name] = measure(self.running[name], server_adapters, conversations, text)
        return samples


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    adapter_methods = [name for name, method in METHODS.items() if method.is_adapter]
    parser.add_argument("--method", choices=adapter_methods, help="default: all of the recipe's")
    add_count(parser, "--repeats", REPEATS, "runs of every cell")
    defaults = ", ".join(f"{name} {plan.requests}" for name, plan in PLANS.items())
    parser.add_argument("--requests", type=count, help=f"requests of a run (default: {defaults})")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and the plot, print the table."""
    recipe, plan = load_recipe(arguments.model), PLANS[arguments.bench]
    methods = recipe.adapter_methods
    if arguments.method:
        methods = [arguments.method]
    cells = plan.cells(arguments.requests or plan.requests)
    report = run(recipe, cells, plan.servers, arguments.repeats, methods)
    publish(report, arguments.runs / plan.file, table, draw)
