"""`make bench-adapters` and `make bench-fleet`: many adapters, one asked at a time. Knows nothing of what the verdicts mean.

Requests share no conversation, and the prefix cache is off, because PEFT has none: what is measured is what it costs that one request has
another adapter than the next. The sweep asks 1 to 128 adapters in turn; the fleet asks 1,024 by Zipf's law. Sixteen workers ask again as
soon as they are answered. Every cell is put to every server with the same requests (PEFT, which takes so long, with the first quarter of
them), interleaved:

    PEFT        plain PEFT, the 25 adapters used last in memory (`native.py`)
    one slot    the engine with a place for one adapter at a time
    25 slots    the engine with as many places as PEFT; in the sweep only
    32 slots    the engine with 32 places
    all slots   the engine with a place for every adapter
    base        the engine without adapters: the limit

The adapters have random weights, first LoRAs, which multiply every token, then aLoRAs, which multiply the suffix alone.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from guard.errors import GuardError, exits_cleanly
from guard.example import Message
from guard.layout import Runs
from guard.method import METHODS, PEFT_WEIGHTS
from guard.prompt import PromptBuilder
from guard.provenance import peak_memory_mib, provenance
from guard.recipe import Recipe, load_recipe
from serve.bench.fleet.report import CAPACITY, SERVERS, SLOTS, FleetReport, FleetRow, draw, table
from serve.bench.report import publish
from serve.bench.traffic import Done, Timed, closed_loop, round_robin, zipf
from serve.bench.workload import conversation, told
from serve.engine import Call, GuardEngine, Refusal, Score, ScoreRequest

if TYPE_CHECKING:
    from serve.bench.fleet.peft_baseline import NativeServer

WORKERS, TOKENS = 16, 200
ENGINE: dict[str, Any] = {
    "max_num_seqs": 2 * WORKERS,
    "enable_prefix_caching": False,
}  # all prompts begin with the same block
SWEEP = (1, 2, 4, 8, 16, 32, 64, 128)
FLEET, ALPHAS = 1024, (0.5, 0.8, 1.0, 1.2, 1.5, 2.0)


@dataclass(frozen=True)
class Cell:
    """Traffic: `requests` to `adapters`, in turn or, with an `alpha`, by Zipf's law."""

    adapters: int
    requests: int
    alpha: float | None = None

    def requests_to(self, server: str) -> int:
        """How many of the requests are put to this server."""
        return (
            max(self.requests // 4, min(self.requests, 2 * WORKERS))
            if server == "PEFT"
            else self.requests
        )

    def asked(self, seed: int) -> list[int]:
        """Which adapter each request asks."""
        return (
            round_robin(self.adapters, self.requests)
            if self.alpha is None
            else zipf(self.adapters, self.alpha, self.requests, seed)
        )


class Engine:
    """The guard engine as a server of single requests; with `bare` it answers without adapters."""

    def __init__(self, engine: GuardEngine, *, bare: bool = False) -> None:
        self._engine, self._bare = engine, bare
        self._asked: list[Call] = []

    def begin(self) -> None:
        """Forget all conversations: another server of the same engine may have had these."""
        self._engine.forget()
        self._asked = []

    def submit(self, messages: tuple[Message, ...], rule_text: str, name: str) -> Done:
        """Queue one request."""
        asked = self._engine.submit([ScoreRequest(messages, rule_text, None if self._bare else name)])
        self._asked.append(asked)
        return lambda: asked.done

    def step(self) -> None:
        """Answer a batch."""
        self._engine.step()

    @property
    def brought(self) -> int:
        """Adapters that were copied into a slot so far."""
        return self._engine.swap_ins

    @property
    def read(self) -> int:
        """Adapters that were read from disk so far."""
        return self._engine.adapter_loads

    @property
    def computed_tokens(self) -> int:
        """Tokens that were computed since `begin`. Raises GuardError if a request was refused."""
        outcomes = [outcome for asked in self._asked for outcome in asked.results()]
        if refused := next((outcome for outcome in outcomes if isinstance(outcome, Refusal)), None):
            raise GuardError(
                "a benchmark request was refused", got=refused, remedy="Run `make doctor`"
            )
        return sum(outcome.computed_tokens for outcome in outcomes if isinstance(outcome, Score))


class Native:
    """Plain PEFT as a server of single requests."""

    def __init__(self, server: NativeServer) -> None:
        self._server = server
        self.computed_tokens = 0

    def begin(self) -> None:
        """It remembers no conversation."""
        self.computed_tokens = 0

    def submit(self, messages: tuple[Message, ...], rule_text: str, name: str) -> Done:
        """Queue one request."""
        request = self._server.submit(messages, rule_text, name)
        self.computed_tokens += len(request.token_ids)
        return lambda: request.done

    def step(self) -> None:
        """Answer a batch."""
        self._server.step()

    @property
    def brought(self) -> int:
        """Adapters that were given a place so far."""
        return self._server.loads

    read = brought  # straight from disk


@contextlib.contextmanager
def servers(
    recipe: Recipe, folders: Mapping[str, Path], names: Sequence[str]
) -> Iterator[dict[str, Engine | Native]]:
    """Those of `SERVERS` that are named, all running."""
    from serve.bench.fleet.peft_baseline import NativeServer

    slots = {
        "one slot": 1,
        f"{CAPACITY} slots": CAPACITY,
        f"{SLOTS} slots": SLOTS,
        "all slots": len(folders),
    }
    with contextlib.ExitStack() as stack:
        found: dict[str, Engine | Native] = {}
        for name in names:
            if name == "PEFT":
                found[name] = Native(NativeServer(recipe, folders, batch=WORKERS))
            elif name in slots:
                found[name] = Engine(
                    stack.enter_context(
                        GuardEngine(recipe, folders, max_loras=slots[name], **ENGINE)
                    )
                )
        if "base" in names:
            shared = next(server for server in found.values() if isinstance(server, Engine))
            found["base"] = Engine(shared._engine, bare=True)
        yield {name: found[name] for name in names}


@dataclass(frozen=True)
class Sample:
    """One server under one cell's traffic, once."""

    timed: Timed
    read: int
    brought: int
    computed_tokens: int


def measure(
    server: Engine | Native,
    asked: Sequence[int],
    names: Sequence[str],
    conversations: Sequence[tuple[Message, ...]],
    rule_text: str,
) -> Sample:
    """Put the requests to the server; `asked` are places in `names`, `rule_text` is what the adapters read."""
    server.begin()
    read, brought = server.read, server.brought
    timed = closed_loop(
        lambda number: server.submit(conversations[number], rule_text, names[asked[number]]),
        server.step,
        len(asked),
        WORKERS,
    )
    return Sample(timed, server.read - read, server.brought - brought, server.computed_tokens)


def summarise(
    name: str,
    method: str,
    cell: Cell,
    samples: Sequence[Sample],
    working_set: int,
    adapter_mib: float,
) -> FleetRow:
    """Medians over the repeats."""
    rates = [sample.timed.per_second for sample in samples]
    latencies_ms = [1000 * latency for sample in samples for latency in sample.timed.latencies_s]
    read, brought = (
        round(statistics.median(found))
        for found in ([one.read for one in samples], [one.brought for one in samples])
    )
    p50, p95, p99 = (float(np.percentile(latencies_ms, percent)) for percent in (50, 95, 99))
    return FleetRow(
        server=name,
        method=method,
        adapters=cell.adapters,
        alpha=cell.alpha,
        requests=cell.requests_to(name),
        working_set=working_set,
        per_second=statistics.median(rates),
        per_second_min=min(rates),
        per_second_max=max(rates),
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        read=read,
        brought=brought,
        adapter_mib=adapter_mib,
        read_mib=read * adapter_mib,
        brought_mib=brought * adapter_mib,
        computed_tokens=round(statistics.median(sample.computed_tokens for sample in samples)),
    )


def run(
    recipe: Recipe,
    cells: Sequence[Cell],
    server_names: Sequence[str],
    repeats: int,
    methods: Sequence[str] = METHODS,
) -> FleetReport:
    """Make the adapters, start the servers, measure every cell on every server, each repeat with conversations of its own."""
    total = (
        len(methods)
        * repeats
        * sum(cell.requests_to(name) for cell in cells for name in server_names)
    )
    rows: list[FleetRow] = []
    with tqdm(total=total, unit="request", desc="measuring") as bar:
        for method in methods:
            with tempfile.TemporaryDirectory() as scratch:
                folders = _adapters(
                    Path(scratch), recipe, method, max(cell.adapters for cell in cells)
                )
                adapter_mib = (next(iter(folders.values())) / PEFT_WEIGHTS).stat().st_size / 2**20
                with servers(recipe, folders, server_names) as running:
                    for cell in cells:
                        rows += _rows(
                            recipe, method, cell, running, list(folders), repeats, adapter_mib, bar
                        )
    return FleetReport(
        **provenance(),
        model=recipe.name,
        workers=WORKERS,
        conversation_tokens=TOKENS,
        repeats=repeats,
        engine={
            key: str(value) for key, value in (recipe.engine | {"dtype": recipe.dtype}).items()
        },
        peak_memory_mib=peak_memory_mib(),
        rows=tuple(rows),
    )


def _rows(
    recipe: Recipe,
    method: str,
    cell: Cell,
    running: Mapping[str, Engine | Native],
    names: Sequence[str],
    repeats: int,
    adapter_mib: float,
    bar: tqdm[Any],
) -> list[FleetRow]:
    """One cell on every server, in another order in every repeat."""
    prompts = _prompts(recipe)
    samples: dict[str, list[Sample]] = {name: [] for name in running}
    sizes: dict[str, list[int]] = {name: [] for name in running}
    for repeat in range(-1, repeats):  # the first is a warm-up
        asked = cell.asked(repeat + 1)[: None if repeat >= 0 else 2 * WORKERS]
        conversations = [
            conversation(prompts, TOKENS, _seed(cell, repeat, number))
            for number in range(len(asked))
        ]
        for name in random.Random(repeat).sample(list(running), len(running)):
            bar.set_postfix_str(f"{cell.adapters} {method} adapters, {name}", refresh=False)
            sample = measure(
                running[name], asked[: cell.requests_to(name)], names, conversations, told(recipe)
            )
            if repeat >= 0:
                samples[name].append(sample)
                sizes[name].append(len(set(asked[: cell.requests_to(name)])))
                bar.update(cell.requests_to(name))
    return [
        summarise(
            name, method, cell, samples[name], round(statistics.median(sizes[name])), adapter_mib
        )
        for name in running
    ]


def _prompts(recipe: Recipe) -> PromptBuilder:
    return PromptBuilder.of(recipe)


def _adapters(root: Path, recipe: Recipe, method: str, count: int) -> dict[str, Path]:
    from serve.bench.random_adapter import save_random_adapters

    folders = {f"adapter-{number}": root / f"adapter-{number}" for number in range(count)}
    save_random_adapters(
        tqdm(folders.values(), desc="adapters", leave=False), recipe, method, _prompts(recipe)
    )
    return folders


def _seed(cell: Cell, repeat: int, number: int) -> int:
    return (cell.adapters * 101 + repeat + 1) * 100_003 + number


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.bench.fleet.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("traffic", choices=("sweep", "fleet"))
    parser.add_argument(
        "--model", default="tiny", help="a base model of recipes/models (default: %(default)s)"
    )
    parser.add_argument("--method", choices=METHODS, help="default: both")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of every cell (default: %(default)s)"
    )
    parser.add_argument(
        "--requests",
        type=int,
        help="requests of a run (default: 256 in the sweep, 512 in the fleet)",
    )
    parser.add_argument(
        "--runs", type=Path, default=Runs().root, help="where the results go (default: %(default)s)"
    )
    arguments = parser.parse_args()
    arguments.requests = (
        arguments.requests
        if arguments.requests is not None
        else {"sweep": 256, "fleet": 512}[arguments.traffic]
    )
    if min(arguments.repeats, arguments.requests) < 1:
        parser.error("--repeats and --requests must be at least 1")
    return arguments


@exits_cleanly
def main() -> None:
    """Measure, write the report and the plot, print the table."""
    arguments = _arguments()
    recipe = load_recipe(arguments.model)
    methods = (arguments.method,) if arguments.method else METHODS
    if arguments.traffic == "sweep":
        report = run(
            recipe,
            [Cell(adapters, arguments.requests) for adapters in SWEEP],
            SERVERS,
            arguments.repeats,
            methods,
        )
    else:
        cells = [Cell(FLEET, arguments.requests, alpha) for alpha in ALPHAS]
        report = run(
            recipe,
            cells,
            ("PEFT", f"{SLOTS} slots", "all slots", "base"),
            arguments.repeats,
            methods,
        )
    publish(
        report,
        arguments.runs
        / {"sweep": "adapters_bench.json", "fleet": "fleet_bench.json"}[arguments.traffic],
        draw,
        table,
    )


if __name__ == "__main__":
    main()
