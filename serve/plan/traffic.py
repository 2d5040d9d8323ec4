"""Checks that arrive: drawn from distributions, or recorded and stretched to a rate.

A trace is a file of recorded checks, a line of JSON for each: in our format, which docs/planning.md
shows, or the server's audit log, whose lines do not state a conversation's length: it follows from
the tokens of all its rules. Knows nothing of what answers the checks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from guard.errors import GuardError
from guard.files.strict_json import in_words, read_json
from guard.files.text_file import read_text
from guard.files.yaml_file import Strict, validate
from serve.plan.plan_file import PlannedTraffic

# A conversation of several turns lasts exponentially long, `turns * think_s` in the mean: the sum
# of geometrically many exponential pauses is exponential. 99 % end within so many times the mean.
WARM_UP_LENGTHS = math.log(100)


class CheckArrival(NamedTuple):
    """One check of a replica's or a deployment's traffic.

    `due_s` counts from the beginning of the traffic. `tokens`: the length of the conversation's
    prompt so far, up to where the rules' suffixes begin. Checks of one `session` are turns of one
    conversation that grows. `cached_tokens`: how many of them the cache held, where a log says so,
    for methods that share conversations; None leaves that to the simulation.
    """

    due_s: float
    session: int
    tokens: int
    rules: tuple[int, ...]
    cached_tokens: int | None = None


@dataclass(frozen=True)
class DrawnTraffic:
    """Arrivals in order; the first `warm_up` of them fill the cache and are not counted."""

    arrivals: list[CheckArrival]
    warm_up: int


@dataclass(frozen=True)
class TrafficSource:
    """The traffic of a replica at any rate: drawn as `planned` says, or a trace.

    A trace keeps its pattern: all its pauses become longer or shorter by the same factor.
    """

    planned: PlannedTraffic
    checks: int
    seed: int
    trace: tuple[CheckArrival, ...] = ()
    left_out: int = 0  # lines of an audit log without a verdict

    def at(self, rate: float) -> DrawnTraffic:
        if not self.trace:
            return draw_traffic(self.planned, rate, self.checks, self.seed)
        stretch = trace_rate(self.trace) / rate
        stretched = [arrival._replace(due_s=arrival.due_s * stretch) for arrival in self.trace]
        return DrawnTraffic(stretched, 0)

    def backlog(self, rate: float) -> list[CheckArrival]:
        """Traffic of `rate` checks a second in its order, but all of it due at once."""
        return [arrival._replace(due_s=0.0) for arrival in self.at(rate).arrivals]


def trace_rate(trace: tuple[CheckArrival, ...]) -> float:
    return len(trace) / max(trace[-1].due_s, 1e-9)


def draw_traffic(planned: PlannedTraffic, rate: float, checks: int, seed: int) -> DrawnTraffic:
    """About `checks` checks at `rate` a second, after those that fill the cache.

    Conversations begin by a Poisson process. Their lengths follow the quantiles, their number of
    turns is geometric, pauses are exponential, and rules are the same ones at every turn.
    """
    draw = np.random.default_rng(seed)
    counted_from_s = 0.0
    if planned.turns > 1:  # in the steady state
        counted_from_s = WARM_UP_LENGTHS * planned.turns * planned.think_s
    until_s = counted_from_s + checks / rate
    sessions = max(1, draw.poisson(until_s * rate / planned.turns))
    begins_s = np.sort(draw.uniform(0, until_s, sessions))
    quantiles = np.linspace(0, 1, len(planned.lengths))
    lengths = np.interp(draw.uniform(size=sessions), quantiles, planned.lengths)
    turns = draw.geometric(1 / planned.turns, sessions)
    arrivals: list[CheckArrival] = []
    for session in range(sessions):
        rules = _rules(planned, draw)
        due_s = float(begins_s[session])
        for turn in range(1, turns[session] + 1):
            tokens = max(1, round(float(lengths[session]) * turn / int(turns[session])))
            arrivals.append(CheckArrival(due_s, session, tokens, rules))
            due_s += float(draw.exponential(planned.think_s))
            if due_s > until_s:
                break
    arrivals.sort()
    warm_up = sum(arrival.due_s < counted_from_s for arrival in arrivals)
    return DrawnTraffic(arrivals, warm_up)


def _rules(planned: PlannedTraffic, draw: np.random.Generator) -> tuple[int, ...]:
    """Different rules, drawn by their popularity: the largest of log weight plus Gumbel noise."""
    least, most = planned.rules_a_check
    count = int(draw.integers(least, most + 1))
    if count == planned.rules:
        return tuple(range(count))
    keys = draw.gumbel(size=planned.rules) - planned.zipf * np.log(np.arange(1, planned.rules + 1))
    return tuple(int(rule) for rule in np.argpartition(-keys, count)[:count])


REMEDY = 'A line is {"time": 12.5, "session": "a", "tokens": 315, "rules": ["pii_leak"]}'


@dataclass(frozen=True)
class Trace:
    """Recorded checks in their order, the first at time 0. `rules`: names by popularity."""

    arrivals: tuple[CheckArrival, ...]
    rules: tuple[str, ...]
    left_out: int  # lines of an audit log without a verdict


class RecordedCheck(Strict):
    """One line of the file."""

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
        where = f"{path}:{number}"
        content = _content(line, suffix_tokens, where)
        if content is None:
            left_out += 1
        else:
            recorded.append(validate(content, RecordedCheck, where=where, remedy=REMEDY))
    if len(recorded) < 2:
        got = f"{len(recorded)} checks"
        raise GuardError("a trace needs at least two checks", where=path, got=got, remedy=REMEDY)
    recorded.sort(key=lambda check: check.time)
    if recorded[-1].time <= recorded[0].time:
        raise GuardError("every check has the same timestamp", where=path, remedy=REMEDY)
    return _trace(recorded, left_out)


def _content(line: str, suffix_tokens: int, where: str) -> Any:
    """A line in our format; None for an audit line of a check that has no verdict."""
    try:
        content = read_json(line)
        if not isinstance(content, dict) or "request_id" not in content:
            return content
        if content.get("rules"):
            return _audited(content, suffix_tokens)
        return None
    except (ValueError, RecursionError) as error:
        problem = f"not a line of JSON: {in_words(error)}"
        raise GuardError(problem, where=where, remedy=REMEDY) from error
    except (KeyError, TypeError) as error:
        problem = f"not a line of an audit log: {error}"
        raise GuardError(problem, where=where, remedy=REMEDY) from error


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
