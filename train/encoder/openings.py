"""Training rows in which no judged speaker has spoken yet.

An encoder's rule reads the judged speaker's turns of a conversation, and all turns where there are
none of these (`guard/prompt/windows.py`), as in a check of a user's message before it is answered.
A rule whose rows all hold judged turns has never learned anything about the others' turns, and
flags them at random. So the openings of some rows, the turns before the first judged one, are rows
as well, and allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from guard.prompt.decoder import Prompt
from guard.prompt.encoder import EncoderPromptBuilder
from train.examples import Row, Rows
from train.job import Job

# One in so many rows has its opening as another row. A head needs fewer, since it reads no words of
# these turns (docs/lessons.md).
ADAPTER_EVERY = 6
HEAD_EVERY = 20


def with_openings(job: Job, rows: Rows, every: int) -> Rows:
    """The rows, and the opening of one training row in `every`, where it has one. Generated rows
    and own ones are counted apart.
    """
    if job.rule.judged == "conversation":
        return rows
    builder = cast(EncoderPromptBuilder, job.builder)
    chosen = (*rows.generated().train[::every], *rows.own().train[::every])
    openings = _openings(builder, job, chosen)
    return replace(rows, train=(*rows.train, *openings))


def _openings(builder: EncoderPromptBuilder, job: Job, rows: Sequence[Row]) -> list[Row]:
    openings: list[Row] = []
    for row in rows:
        token_ids = tuple(builder.opening(row.prompt.token_ids, job.reads))
        if token_ids:
            prompt = Prompt(token_ids, invocation_start=len(token_ids))
            openings.append(replace(row, id=f"{row.id}/opening", label=0, prompt=prompt))
    return openings
