"""What a judge's answers on one rule cost, and how many of them could be used.

Knows nothing of how they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eval.answer import Answer
from eval.judge.answer import JudgeRow
from guard.files.yaml_file import Strict


class JudgeRecord(Strict):
    """Who judged, and what that cost; `endpoint` is None where the base model judged.

    Unparseable answers, and conversations that the endpoint refused, count as wrong. Tokens and
    cost are those of the answers whose tokens the endpoint stated; `without_usage` counts the
    others.
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
    """The record of an endpoint's rows. `cost_usd` takes prompt and completion tokens."""
    answers = [row for row in rows if not row.refused]
    # An answer that several rows share was paid for once.
    paid_rows = list({row.key: row for row in answers}.values())
    p50 = p95 = None
    if paid_rows:
        p50, p95 = np.percentile([row.latency_ms for row in paid_rows], [50, 95]).tolist()
    prompt, completion, with_usage = _usage(paid_rows)
    return JudgeRecord(
        name=name,
        endpoint=endpoint,
        unparseable=sum(row.violates is None for row in answers),
        refused=len(rows) - len(answers),
        prompt_tokens=prompt if with_usage else None,
        completion_tokens=completion if with_usage else None,
        without_usage=len(paid_rows) - with_usage,
        latency_p50_ms=p50,
        latency_p95_ms=p95,
        cost_usd=cost_usd(prompt, completion) if with_usage else None,
    )


def _usage(answers: Sequence[JudgeRow]) -> tuple[int, int, int]:
    """Prompt and completion tokens of the answers that state both, and the number of these."""
    prompt_tokens, completion_tokens, stated = 0, 0, 0
    for row in answers:
        if row.prompt_tokens is not None and row.completion_tokens is not None:
            prompt_tokens += row.prompt_tokens
            completion_tokens += row.completion_tokens
            stated += 1
    return prompt_tokens, completion_tokens, stated
