"""`python -m serve.plan.run --plan tiny_here`, entry of `make plan`.

What a deployment costs: checks a second, latencies with queueing, memory, replicas, dollars.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guard.errors import exits_cleanly
from guard.layout import Runs

Parsed = Callable[[str], Any]


def _whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


# Flag -> the plan's key that it replaces, the type of its value, and its help text.
OPTIONS: dict[str, tuple[str, Parsed, str]] = {
    "--model": ("model", str, "a base of recipes/models"),
    "--device": ("device", str, "here, or a name of recipes/devices"),
    "--rate": ("traffic.rate", float, "checks per second of the whole deployment"),
    "--lengths": (
        "traffic.lengths",
        _whole_numbers,
        "tokens of a conversation, as quantiles at equal steps: 87,289,740",
    ),
    "--turns": ("traffic.turns", float, "mean number of checks of a conversation as it grows"),
    "--think": ("traffic.think_s", float, "mean seconds between two turns"),
    "--rules-a-check": (
        "traffic.rules_a_check",
        _whole_numbers,
        "rules of a check, least and most: 5,20",
    ),
    "--fleet": ("traffic.rules", int, "rules that are served"),
    "--zipf": ("traffic.zipf", float, "how much popularity falls; 0: all rules alike"),
    "--trace": (
        "traffic.trace",
        str,
        "a file of recorded checks: JSON lines, or an audit log",
    ),
    "--p95": ("p95_ms", float, "the target in ms for the 95th percentile of latency"),
    "--most-busy": (
        "most_busy",
        float,
        "largest share of its saturation rate a replica gets: 0.85",
    ),
    "--price": ("price_an_hour", float, "USD an hour of a device"),
    "--rank": ("rank", int, "rank of the adapters; on `here` the recipe's alone"),
    "--suffix": ("suffix_tokens", int, "tokens that a rule adds"),
    "--memory": (
        "memory_gib",
        float,
        "GiB of the device's memory that serving may take, with the base's weights and a named "
        "device's workspace",
    ),
    "--host-memory": ("host_gib", float, "GiB of host memory for adapters"),
    "--slots": ("slots", int, "adapters on the device; default: as memory allows"),
    "--judge-input": ("judge.input", float, "the judge's USD per million tokens that it reads"),
    "--judge-output": (
        "judge.output",
        float,
        "the judge's USD per million tokens that it writes",
    ),
    "--policy": ("judge.policy_tokens", int, "tokens of a rule's policy in the judge's prompt"),
    "--checks": ("checks", int, "simulated checks at each rate"),
    "--seed": ("seed", int, "seed of the simulation's draws"),
}


def plan_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The plan's keys that the command line replaces."""
    replaced = {}
    for flag, (key, _, _) in OPTIONS.items():
        value = getattr(arguments, flag.strip("-").replace("-", "_"))
        if value is not None:
            replaced[key] = value
    return replaced


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m serve.plan.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan = "a plan of recipes/plans, or a YAML file (default: tiny_here)"
    made.add_argument("--plan", default="tiny_here", help=plan)
    for flag, (key, type_, text) in OPTIONS.items():
        made.add_argument(flag, type=type_, help=f"{text} (the plan's {key})")
    made.add_argument("--runs", type=Path, default=Runs().root, help="where results go")
    return made


@exits_cleanly
def main() -> None:
    """Plan, write the report and the plot, print the table."""
    arguments = parser().parse_args()
    from serve.plan.plan_file import load_plan

    plan = load_plan(arguments.plan, plan_options(arguments))
    from serve.plan.build import build
    from serve.plan.plot import draw
    from serve.plan.report import table

    report = build(plan, arguments.runs)
    path = arguments.runs / "plan.json"
    report.save(path)
    draw(report, path.with_suffix(".png"))
    print(table(report))
    print(f"written: {path}, {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
