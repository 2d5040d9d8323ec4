"""The reload benchmark's numbers: `runs/reload_bench.json` and the table in the terminal.

Knows nothing of servers.
"""

from __future__ import annotations

from serve.bench.report import BenchReport, Spread, notes, source


class ReloadReport(BenchReport):
    """Everything in `runs/reload_bench.json`."""

    checks: int
    replacements: int
    rules: int
    versions_a_rule: int
    clients: int
    errors: dict[str, int]  # checks without verdicts, by status or kind of error
    unjudged_rules: int  # in the checks that were answered
    right: int  # verdicts of a version that was served meanwhile
    wrong_version: int  # verdicts of another version
    no_version: int  # verdicts of no version: a mix, or stale blocks
    told_nothing: int  # verdicts where two versions score the conversation nearly alike
    replacement_ms: Spread


def table(report: ReloadReport) -> str:
    """The report as text."""
    errors = ", ".join(f"{count} {problem}" for problem, count in report.errors.items()) or "none"
    verdicts = report.right + report.wrong_version + report.no_version + report.told_nothing
    lines = [
        f"{report.replacements} replacements of {report.rules} rules during {report.checks:,} "
        f"checks by {report.clients} clients",
        f"checks without an answer      {errors}",
        f"rules without a verdict       {report.unjudged_rules:,}",
        f"verdicts                      {verdicts:,}",
        f"  of a version then served    {report.right:,}",
        f"  of another version          {report.wrong_version:,}",
        f"  of no version               {report.no_version:,}",
        f"  not told apart              {report.told_nothing:,}",
        f"a replacement                 {report.replacement_ms.text()} ms",
    ]
    lines += notes(
        "Of no version: a mix of two, or keys and values of other weights. Not told apart: a "
        "version that was served and one that was not score the conversation nearly alike."
    )
    return "\n".join([*lines, f"{source(report)}; random aLoRAs."])
