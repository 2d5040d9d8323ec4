"""A file of recorded checks, a line of JSON for each: in our format, or the server's audit log.

Our format: `{"time": 12.5, "session": "a7", "tokens": 315, "rules": ["pii_leak", …]}`. `time` is in
seconds from any origin. `tokens` is the length of the conversation's prompt. `rules` has names, or
the number of the most popular rules. Without `session` each check is a conversation of its own;
without `cached_tokens`, and for LoRA, the simulation says what the cache holds. An audit line
(`make up AUDIT=…`) does not state the length: it follows from the tokens of all its rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from guard.errors import GuardError
from guard.files.strict_json import in_words, read_json
from guard.files.text_file import read_text
from guard.files.yaml_file import Strict, validate
from serve.plan.traffic import CheckArrival

REMEDY = 'A line is {"time": 12.5, "session": "a", "tokens": 315, "rules": ["pii_leak"]}'


@dataclass(frozen=True)
class Trace:
    """Recorded checks in their order, the first at time 0.

    `rules`: names by popularity; a rule's number is its index.
    """

    arrivals: tuple[CheckArrival, ...]
    rules: tuple[str, ...]
    left_out: int  # lines of an audit log without a verdict


class RecordedCheck(Strict):
    """One line of the file. `rules`: names, or how many of the most popular ones."""

    model_config = ConfigDict(allow_inf_nan=False, extra="ignore")

    time: float
    session: str | int | None = None
    tokens: int = Field(ge=1)
    rules: tuple[str, ...] | int
    cached_tokens: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _is_possible(self) -> RecordedCheck:
        names = self.names
        if not names or len(set(names)) < len(names):
            raise ValueError("rules: at least one, each only once")
        if self.cached_tokens is not None and self.cached_tokens > self.tokens:
            raise ValueError("cached_tokens must be from 0 to tokens")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The rules' names, also where the line has their number."""
        if isinstance(self.rules, int):
            return tuple(f"rule {number}" for number in range(self.rules))
        return self.rules


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
        check = _recorded(line, suffix_tokens, f"{path}:{number}")
        if check is None:
            left_out += 1
        else:
            recorded.append(check)
    if len(recorded) < 2:
        got = f"{len(recorded)} checks"
        raise GuardError("a trace needs at least two checks", where=path, got=got, remedy=REMEDY)
    recorded.sort(key=lambda check: check.time)
    if recorded[-1].time <= recorded[0].time:
        raise GuardError("every check has the same timestamp", where=path, remedy=REMEDY)
    return _trace(recorded, left_out)


def _recorded(line: str, suffix_tokens: int, where: str) -> RecordedCheck | None:
    """The check of a line; None for an audit line of a check that has no verdict."""
    try:
        content = read_json(line)
        if isinstance(content, dict) and "request_id" in content:
            if not content.get("rules"):
                return None
            content = _audited(content, suffix_tokens)
    except (ValueError, RecursionError) as error:
        problem = f"not a line of JSON: {in_words(error)}"
        raise GuardError(problem, where=where, remedy=REMEDY) from error
    except (KeyError, TypeError) as error:
        problem = f"not a line of an audit log: {error}"
        raise GuardError(problem, where=where, remedy=REMEDY) from error
    return validate(content, RecordedCheck, where=where, remedy=REMEDY)


def _audited(content: Mapping[str, Any], suffix_tokens: int) -> dict[str, Any]:
    """An audit line in our format: its rules' prompts add up to cached and computed tokens."""
    rules = [rule["rule"] for rule in content["rules"]]
    computed = int(content["computed_tokens"])
    prompts = int(content["cached_tokens"]) + computed
    tokens = max(1, round(prompts / len(rules)) - suffix_tokens)
    cached = max(0, tokens + len(rules) * suffix_tokens - computed)
    return {
        "time": datetime.fromisoformat(content["time"]).timestamp(),
        "session": str(content["request_id"]),
        "tokens": tokens,
        "rules": rules,
        "cached_tokens": min(cached, tokens),
    }


def _trace(recorded: list[RecordedCheck], left_out: int) -> Trace:
    counts: Counter[str] = Counter()
    for check in recorded:
        counts.update(check.names)
    names = tuple(name for name, _ in counts.most_common())
    numbers = {name: number for number, name in enumerate(names)}
    sessions: dict[str | int, int] = {}
    arrivals = []
    for line, check in enumerate(recorded):
        key = f"line {line}" if check.session is None else check.session
        session = sessions.setdefault(key, len(sessions))
        rules = tuple(numbers[name] for name in check.names)
        due_s = check.time - recorded[0].time
        arrivals.append(CheckArrival(due_s, session, check.tokens, rules, check.cached_tokens))
    return Trace(tuple(arrivals), names, left_out)
