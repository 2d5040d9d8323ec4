"""`python -m serve.bench` lists the benchmarks, `python -m serve.bench NAME` runs one.

Entry of `make bench`.

To add a benchmark: a module as `serve.bench.command` describes it, a row here, and a test.
"""

from __future__ import annotations

import sys

from guard.errors import GuardError, did_you_mean, exits_cleanly
from guard.machine.neighbours import warn_if_busy
from serve.bench.command import Bench, parser_of
from serve.bench.report import started_from

BENCHES: dict[str, Bench] = {
    "latency": Bench(
        "serve.bench.latency.run",
        "1 to 100 rules on one conversation: LoRA, aLoRA, the bare base, and the lower bound",
        "30 min, --quick 2, --wide 57",
        takes=("model", "quick", "wide", "force"),
    ),
    "encoder": Bench(
        "serve.bench.encoder.run",
        "1 to 100 rules of an encoder on one conversation, and of a decoder beside it",
        "6 min, --quick 1",
        takes=("model", "quick", "force"),
    ),
    "load": Bench(
        "serve.bench.load.run",
        "open-loop load: Poisson arrivals at rising rates, until a method is saturated",
        "41 min",
    ),
    "http": Bench(
        "serve.bench.http.run",
        "the server over HTTP: what it adds to the engine, and load up to twice saturation",
        "4 min, --quick 1",
        takes=("model", "quick"),
    ),
    "reload": Bench(
        "serve.bench.http.reload.run",
        "200 replacements of rules during 20,000 checks: is an answer lost, or of other weights",
        "10 min, --quick 1",
        takes=("model", "quick"),
    ),
    "soak": Bench(
        "serve.bench.http.soak",
        "the server at 70 % of saturation for an hour: its memory and its latencies",
        "1 h, --quick 4 min",
        takes=("model", "quick"),
    ),
    "adapters": Bench(
        "serve.bench.fleet.run",
        "round-robin over 1 to 128 adapters, one a request, against a PEFT baseline",
        "29 min",
    ),
    "fleet": Bench(
        "serve.bench.fleet.run",
        "1,024 adapters, one a request, drawn by Zipf's law, against a PEFT baseline",
        "37 min",
    ),
    "race": Bench(
        "serve.bench.race.run",
        "live: one conversation against 100 rules, LoRA and aLoRA side by side; draws an SVG",
        "2 min",
        takes=("model", "rule"),
    ),
    "calibrate": Bench(
        "serve.bench.planning.calibrate",
        "what a step takes on this machine, for make plan -> runs/calibration.json",
        "3 min",
    ),
}


@exits_cleanly
def main() -> None:
    """List the benchmarks, or run the one that is named.

    Raises SystemExit once they are listed, GuardError for an unknown name.
    """
    if len(sys.argv) == 1 or sys.argv[1] in ("-h", "--help"):
        print(listing())
        sys.exit(0)
    name = sys.argv[1]
    bench = bench_named(name)
    arguments = parser_of(name, bench).parse_args(bench.accepted(sys.argv[2:]))
    warn_if_busy("the figures will be off")
    started_from()
    bench.load().main(arguments)


def bench_named(name: str) -> Bench:
    """The benchmark of this name. Raises GuardError with the nearest valid one."""
    if name not in BENCHES:
        remedy = did_you_mean(name, BENCHES) or f"There are {', '.join(BENCHES)}"
        raise GuardError("there is no such benchmark", got=name, remedy=remedy)
    return BENCHES[name]


def listing() -> str:
    """All benchmarks as text, a line each."""
    lines = [
        "usage: python -m serve.bench NAME [options]; NAME --help shows its options",
        "Times are for the tiny base on two cores.",
        "",
    ]
    for name, bench in BENCHES.items():
        lines.append(f"  {name:<14} {bench.summary} ({bench.duration})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
