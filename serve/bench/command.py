"""What a benchmark's command line has in common with the others'.

Knows nothing of what they measure.

A benchmark is a module with two functions, and a row in the table of `serve.bench.__main__`:

    arguments(parser)   adds its own options to --runs and, if it takes a model, --model
    main(arguments)     measures, writes the report into `arguments.runs` and prints it

Importing the module must not import torch or vLLM: `--help` is answered first.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from guard.arguments import count
from guard.errors import choose_from
from guard.layout import Runs

OFFER = "--offer="


@dataclass(frozen=True)
class Bench:
    """A row of the table of benchmarks.

    `summary`: one line on what it measures. `duration`: how long that takes on two cores. `takes`:
    those options that it accepts of the ones that `make bench` offers to every benchmark.
    """

    module: str
    summary: str
    duration: str
    takes: tuple[str, ...] = ("model",)

    def load(self) -> ModuleType:
        """Import its module."""
        return importlib.import_module(self.module)

    def accepted(self, words: Sequence[str]) -> list[str]:
        """The benchmark's options from the words of a command line.

        `--offer=rule=NAME` becomes `--rule=NAME` where the benchmark takes a rule, and is left out
        where it does not.
        """
        options: list[str] = []
        for word in words:
            offer = word.removeprefix(OFFER)
            if not word.startswith(OFFER):
                options.append(word)
            elif offer.partition("=")[0] in self.takes:
                options.append(f"--{offer}")
        return options


def parser_of(name: str, bench: Bench) -> argparse.ArgumentParser:
    """The parser of one benchmark's options; they hold the benchmark's name as `bench`."""
    module = bench.load()
    parser = argparse.ArgumentParser(
        prog=f"python -m serve.bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(bench=name)
    if "model" in bench.takes:
        add_option(parser, "--model", "tiny", "a base model of recipes/models")
    add_option(parser, "--runs", Runs().root, "where adapters are and results go", type=Path)
    module.arguments(parser)
    return parser


def add_option(
    parser: argparse.ArgumentParser, flag: str, default: object, text: str, **settings: object
) -> None:
    """Add an option whose help states its default."""
    parser.add_argument(flag, default=default, help=f"{text} (default: {default})", **settings)  # type: ignore[arg-type]


def add_count(parser: argparse.ArgumentParser, flag: str, default: int, text: str) -> None:
    """Add an option that is a whole number of at least 1."""
    add_option(parser, flag, default, text, type=count)


def add_parts(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    """Add --parts, a list of some of a benchmark's parts: all of them by default."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in parts:
                problem = f"no such part: {name!r}. {choose_from(name, parts)}"
                raise argparse.ArgumentTypeError(problem)
        return names

    text = "what to measure, separated by commas; the report has nothing else"
    add_option(parser, "--parts", ",".join(parts), text, type=chosen)
