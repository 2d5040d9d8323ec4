"""What the doctor has to say, line by line. Knows nothing of what is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report. A `remedy` makes it a problem."""

    subject: str
    text: str
    remedy: str | None = None


def report(checks: dict[str, Callable[[], Iterator[Finding]]]) -> list[Finding]:
    """Print every finding as it is made; return the problems."""
    problems = []
    for check in checks.values():
        for finding in check():
            if finding.remedy is None:
                print(f"     ok  {finding.subject:<9} {finding.text}", flush=True)
                continue
            print(f"PROBLEM  {finding.subject:<9} {finding.text}", flush=True)
            print(f"{'':18} -> {finding.remedy}", flush=True)
            problems.append(finding)
    return problems
