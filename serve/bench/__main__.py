"""`python -m serve.bench` lists the benchmarks, `python -m serve.bench NAME` runs one.

Entry of `make bench`.

To add a benchmark here: a module as `serve.bench.harness` describes it, a row here, and a test.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from guard.errors import GuardError, did_you_mean, exits_cleanly
from guard.layout import Runs
from guard.machine.device import warn_if_busy
from serve.bench.harness import BenchCommand
from serve.bench.report import started_from

# Name -> module.
BENCHES: dict[str, str] = {
    "latency": "serve.bench.latency",
    "encoder": "serve.bench.encoder",
    "calibrate": "serve.bench.calibrate",
    "gpu_check": "serve.bench.gpu_check",
}


@exits_cleanly
def main() -> None:
    """List the benchmarks, or run the one that is named. Raises SystemExit once they are listed,
    GuardError for an unknown name.
    """
    if len(sys.argv) == 1 or sys.argv[1] in ("-h", "--help"):
        print(listing())
        sys.exit(0)
    bench = bench_named(sys.argv[1])
    options = parser_of(bench).parse_args(sys.argv[2:])
    warn_if_busy("the figures will be off")
    started_from()
    bench(options).main()


def bench_named(name: str) -> type[BenchCommand]:
    """The benchmark of this name. Raises GuardError with the nearest valid one."""
    if name not in BENCHES:
        remedy = did_you_mean(name, BENCHES) or f"There are {', '.join(BENCHES)}"
        raise GuardError("there is no such benchmark", got=name, remedy=remedy)
    for value in vars(importlib.import_module(BENCHES[name])).values():
        if not (isinstance(value, type) and issubclass(value, BenchCommand)):
            continue
        if getattr(value, "name", None) == name:
            return value
    raise AssertionError(f"{BENCHES[name]} has no benchmark {name}")


def parser_of(bench: type[BenchCommand]) -> argparse.ArgumentParser:
    """The parser of one benchmark's options."""
    parser = argparse.ArgumentParser(
        prog=f"python -m serve.bench {bench.name}",
        description=sys.modules[bench.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = "a base model of recipes/models (default: tiny)"
    parser.add_argument("--model", default="tiny", help=model)
    runs = f"where adapters are and results go (default: {Runs().root})"
    parser.add_argument("--runs", default=Runs().root, type=Path, help=runs)
    parser.add_argument("--quick", action="store_true", help="a coarse grid")
    bench.add_options(parser)
    return parser


def listing() -> str:
    """All benchmarks as text, a line each."""
    lines = [
        "usage: python -m serve.bench NAME [options]; NAME --help shows its options",
        "Times are for the tiny base on two cores.",
        "",
    ]
    for name in BENCHES:
        bench = bench_named(name)
        lines.append(f"  {name:<10} {bench.summary} ({bench.duration})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
