"""`python -m serve.plan.run --plan tiny_here`, entry of `make plan`.

What a deployment costs: checks a second, latencies with queueing, memory, replicas, dollars.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from guard.errors import exits_cleanly
from guard.layout import Runs


@exits_cleanly
def main() -> None:
    """Plan, write the report, print the table."""
    parser = argparse.ArgumentParser(prog="python -m serve.plan.run", description=__doc__)
    plan_help = "a plan of recipes/plans, or a YAML file (default: tiny_here)"
    parser.add_argument("--plan", default="tiny_here", help=plan_help)
    parser.add_argument("--runs", type=Path, default=Runs().root, help="where results go")
    arguments = parser.parse_args()
    from serve.plan.plan_file import load_plan

    plan = load_plan(arguments.plan)
    from serve.plan.report import build

    report = build(plan, arguments.runs)
    path = arguments.runs / "plan.json"
    report.save(path)
    print(report.text)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
