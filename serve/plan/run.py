"""`python -m serve.plan.run --plan tiny_here traffic.rate=200 p95_ms=300`, entry of `make plan`.

What a deployment costs: checks a second, latencies with queueing, memory, replicas, dollars.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs


def replaced_keys(words: list[str]) -> dict[str, Any]:
    """The plan's keys that the command line replaces: `traffic.lengths=[87,289,740]`.

    Raises GuardError for what is not `key=value`.
    """
    replaced: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            remedy = "Write `key=value` with a key of docs/planning.md, as traffic.rate=200"
            raise GuardError("not a key of the plan with its value", got=word, remedy=remedy)
        try:
            replaced[key] = json.loads(value)
        except ValueError:
            replaced[key] = value  # a name or a path, without JSON's quotes
    return replaced


@exits_cleanly
def main() -> None:
    """Plan, write the report, print the table."""
    parser = argparse.ArgumentParser(prog="python -m serve.plan.run", description=__doc__)
    plan_help = "a plan of recipes/plans, or a YAML file (default: tiny_here)"
    parser.add_argument("--plan", default="tiny_here", help=plan_help)
    parser.add_argument("--runs", type=Path, default=Runs().root, help="where results go")
    keys_help = "instead of the plan's own: traffic.rate=200"
    parser.add_argument("keys", nargs="*", metavar="key=value", help=keys_help)
    arguments = parser.parse_args()
    from serve.plan.plan_file import load_plan

    plan = load_plan(arguments.plan, replaced_keys(arguments.keys))
    from serve.plan.report import build

    report = build(plan, arguments.runs)
    path = arguments.runs / "plan.json"
    report.save(path)
    print(report.text)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
