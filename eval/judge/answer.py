"""The answers of an LLM judge: the kept rows, whether one says yes, and what all of them cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.answers import Answer
from guard.endpoint import Completion
from guard.files.yaml_file import Strict


@dataclass(frozen=True, kw_only=True)
class JudgeRow(Completion):
    """One kept answer on one example."""

    key: str
    id: str

    @property
    def violates(self) -> bool | None:
        """The decision; None where the answer is unparseable or there is none."""
        if self.refused:
            return None
        return parse_answer(self.text, cut_off=self.finish_reason == "length")


class JudgeRecord(Strict):
    """Who judged, and what that cost; `endpoint` is None where the base model judged. Unparseable
    answers, and conversations that the endpoint refused, count as wrong. Tokens and cost are those
    of the answers whose tokens the endpoint stated; `without_usage` counts the others.
    """

    name: str
    endpoint: str | None = None
    unparseable: int = 0
    refused: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    without_usage: int = 0
    latency_p50_ms: float | None = None
    latency_p95_ms: float | None = None
    cost_usd: float | None = None


@dataclass(frozen=True)
class Judgement:
    """A judge's answers in the order of the examples, and the record of them."""

    answers: list[Answer]
    record: JudgeRecord


def endpoint_record(
    name: str, endpoint: str, rows: Sequence[JudgeRow], cost_usd: Callable[[int, int], float | None]
) -> JudgeRecord:
    answers = [row for row in rows if not row.refused]
    # An answer that several rows share was paid for once.
    paid_rows = list({row.key: row for row in answers}.values())
    stated = [row for row in paid_rows if None not in (row.prompt_tokens, row.completion_tokens)]
    counts: dict[str, Any] = {"unparseable": sum(row.violates is None for row in answers)}
    counts |= {"refused": len(rows) - len(answers), "without_usage": len(paid_rows) - len(stated)}
    if paid_rows:
        p50, p95 = np.percentile([row.latency_ms for row in paid_rows], [50, 95]).tolist()
        counts |= {"latency_p50_ms": p50, "latency_p95_ms": p95}
    if stated:
        prompt = sum(row.prompt_tokens or 0 for row in stated)
        completion = sum(row.completion_tokens or 0 for row in stated)
        counts |= {"prompt_tokens": prompt, "completion_tokens": completion}
        counts["cost_usd"] = cost_usd(prompt, completion)
    return JudgeRecord(name=name, endpoint=endpoint, **counts)


_NOT_A_CHOICE = r"(?!\s*(?:/|or\b|and\b))"  # "yes or no" repeats the question
# What follows a no that answers: "no, ...", "no (...", "no - ...", "no because", "no violation",
# "no it does not"; not "no doubt about it", "no-one", "no/yes".
_SAYS_SO = (
    r"(?=\W*$|\s*\n|\s*[^\w\s?/\u2010\u2011-]|\s+-|\s+(?:violation|because\b|since\b)"
    r"|\s+(?:it|they|(?:this|that|the)(?:\s+\w+){0,2})\s+"
    r"(?:do|does|did|is|was|has|have)(?:\s+not\b|n['\u2019]t\b))"
)
_LEADING = re.compile(rf"^\W*(?:(yes)\b{_NOT_A_CHOICE}|(no){_SAYS_SO})")
_LABELLED = re.compile(
    # "non-violation: true" says the opposite
    r"(?<!\bnon[-\u2010-\u2013 ])(?<!\bnot )(?<!\bno )(?<!\bnot a )"
    r"\b(?:answer|verdict|decision|violat(?:es|ion|ed)?)\b(?: the rule)?"
    r"[\s\"'*_`]*(?:is\b|[:=])[\s\"'*_`]*"
    rf"\b(yes|no|true|false)\b{_NOT_A_CHOICE}"
)
_LAST_LINE = re.compile(r"\n\W*(yes|no)\W*$")


def parse_answer(text: str, *, cut_off: bool = False) -> bool | None:
    """Whether a judge's words say yes (violates). None unless they say it clearly: "no doubt about
    it" is not a no.

    What counts is a yes or no at the beginning or on the last line, and a labelled one ("Verdict:
    **yes**", `{"violates": true}`). An answer that contradicts itself is None. Everything up to the
    last `</think>` is reasoning, with or without an opening tag, because the chat template may have
    written that tag. Of an answer that was `cut_off` only a yes or no at the beginning counts: the
    missing rest might contradict it.
    """
    words = text.lower().rpartition("</think>")[2].strip()
    if "<think>" in words:  # cut off while still reasoning
        return None
    leading = _LEADING.search(words)
    if cut_off and leading is None:
        return None
    ends = [match[match.lastindex or 0] for match in (leading, _LAST_LINE.search(words)) if match]
    decisions = {word in ("yes", "true") for word in [*ends, *_LABELLED.findall(words)]}
    if len(decisions) != 1:
        return None
    return decisions.pop()
