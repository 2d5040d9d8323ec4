"""A file of recorded checks, a line of JSON for each: in our format, or the server's audit log.

Our format: `{"time": 12.5, "session": "a7", "tokens": 315, "rules": ["pii_leak", …]}`. `time` is in
seconds from any origin. `tokens` is the length of the conversation's prompt. `rules` has names, or
the number of the most popular rules. Without `session` each check is a conversation of its own;
without `cached_tokens`, and for LoRA, the simulation says what the cache holds. An audit line
(`make up AUDIT=…`) does not state the length: it follows from the tokens of all its rules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from guard.errors import GuardError
from guard.files.strict_json import in_words, read_json
from guard.files.text_file import read_text
from serve.plan.traffic.arrival import CheckArrival

REMEDY = 'A line is {"time": 12.5, "session": "a", "tokens": 315, "rules": ["pii_leak"]}'


@dataclass(frozen=True)
class Trace:
    """Recorded checks in their order, the first at time 0.

    `rules`: names by popularity; a rule's number is its index.
    """

    arrivals: tuple[CheckArrival, ...]
    rules: tuple[str, ...]
    left_out: int  # lines of an audit log without a verdict


@dataclass(frozen=True)
class RecordedCheck:
    """One line of the file. `rules`: names."""

    time_s: float
    session: str
    tokens: int
    rules: tuple[str, ...]
    cached_tokens: int | None


def read_trace(path: Path, suffix_tokens: int) -> Trace:
    """Read the file. `suffix_tokens`: the tokens that a rule adds; an audit log needs it.

    Raises GuardError where there is no file, for a line of neither format, and for fewer than two
    checks.
    """
    if not path.is_file():
        raise GuardError("there is no such trace", where=path, remedy=REMEDY)
    recorded: list[RecordedCheck] = []
    left_out = 0
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        check = _recorded(_object(line, f"{path}:{number}"), suffix_tokens, f"{path}:{number}")
        if check is None:
            left_out += 1
        else:
            recorded.append(check)
    if len(recorded) < 2:
        got = f"{len(recorded)} checks"
        raise GuardError("a trace needs at least two checks", where=path, got=got, remedy=REMEDY)
    return _trace(sorted(recorded, key=lambda check: check.time_s), left_out, path)


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        content = read_json(line)
    except (ValueError, RecursionError) as error:
        raise GuardError(f"not JSON: {in_words(error)}", where=where, remedy=REMEDY) from error
    if not isinstance(content, dict):
        raise GuardError("not an object", where=where, got=line[:60], remedy=REMEDY)
    return content


def _recorded(content: Mapping[str, Any], suffix_tokens: int, where: str) -> RecordedCheck | None:
    """The check of a line; None for an audit line of a check that has no verdict."""
    try:
        if "request_id" in content:
            return _audited(content, suffix_tokens)
        cached = content.get("cached_tokens")
        check = RecordedCheck(
            float(content["time"]),
            str(content.get("session", where)),
            int(content["tokens"]),
            _names(content["rules"]),
            None if cached is None else int(cached),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        why = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise GuardError(f"a line cannot be read: {why}", where=where, remedy=REMEDY) from error
    problem = _problem(check)
    if problem:
        raise GuardError(problem, where=where, got=dict(content), remedy=REMEDY)
    return check


def _names(rules: object) -> tuple[str, ...]:
    """The rules' names; a number stands for the most popular ones. Raises TypeError for others."""
    if isinstance(rules, list):
        return tuple(map(str, rules))
    if isinstance(rules, int) and not isinstance(rules, bool):
        return tuple(f"rule {number}" for number in range(rules))
    raise TypeError(f"rules is neither a list nor a number: {rules!r}")


def _problem(check: RecordedCheck) -> str | None:
    """What is wrong with the values of a line; None if nothing."""
    if not math.isfinite(check.time_s):
        return "time must be a finite number of seconds"
    if check.tokens < 1 or not check.rules or len(set(check.rules)) < len(check.rules):
        return "tokens must be at least 1, and there must be at least one rule, each only once"
    if check.cached_tokens is not None and not 0 <= check.cached_tokens <= check.tokens:
        return "cached_tokens must be from 0 to tokens"
    return None


def _audited(content: Mapping[str, Any], suffix_tokens: int) -> RecordedCheck | None:
    """The check of an audit line, whose rules' prompts add up to cached and computed tokens."""
    rules = tuple(rule["rule"] for rule in content.get("rules", ()))
    if not rules:
        return None
    computed = int(content["computed_tokens"])
    prompts = int(content["cached_tokens"]) + computed
    tokens = max(1, round(prompts / len(rules)) - suffix_tokens)
    cached = max(0, tokens + len(rules) * suffix_tokens - computed)
    time_s = datetime.fromisoformat(content["time"]).timestamp()
    return RecordedCheck(time_s, str(content["request_id"]), tokens, rules, min(cached, tokens))


def _trace(recorded: list[RecordedCheck], left_out: int, path: Path) -> Trace:
    counts = Counter(rule for check in recorded for rule in check.rules)
    names = tuple(name for name, _ in counts.most_common())
    numbers = {name: number for number, name in enumerate(names)}
    sessions: dict[str, int] = {}
    first_s = recorded[0].time_s
    arrivals = []
    for check in recorded:
        session = sessions.setdefault(check.session, len(sessions))
        rules = tuple(numbers[rule] for rule in check.rules)
        due_s = check.time_s - first_s
        arrivals.append(CheckArrival(due_s, session, check.tokens, rules, check.cached_tokens))
    if arrivals[-1].due_s <= 0:
        problem = "every check has the same timestamp"
        raise GuardError(problem, where=path, remedy=REMEDY)
    return Trace(tuple(arrivals), names, left_out)
