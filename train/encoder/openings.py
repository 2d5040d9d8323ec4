"""Training rows in which nobody whom a rule judges has spoken yet.

Of a conversation an encoder's rule reads the turns of whom it judges, and all turns where nobody it
judges speaks (`guard/prompt/encoder.py`), as in a check of a user's message before it is answered.
A rule whose rows all hold somebody it judges has never learned anything about the others' turns,
and flags them at random. So some rows' beginnings, up to where somebody is judged, are rows as
well, and allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from guard.prompt.decoder import Prompt
from guard.prompt.encoder import EncoderPromptBuilder
from train.examples import Row, Rows
from train.job import Job

# Of so many rows one has its opening as another row. A head, for which no words of these count,
# needs fewer (docs/log/quality.md).
ADAPTER_EVERY = 6
HEAD_EVERY = 20


def with_openings(job: Job, rows: Rows, every: int) -> Rows:
    """The rows, and of one training row in `every` its opening, where it has one; of generated rows
    and of others alike.
    """
    if job.rule.judged == "conversation":
        return rows
    builder = cast(EncoderPromptBuilder, job.builder)
    generated = [row for row in rows.train if row.is_generated]
    own_rows = [row for row in rows.train if not row.is_generated]
    openings = _openings(builder, job, [*generated[::every], *own_rows[::every]])
    return replace(rows, train=(*rows.train, *openings))


def _openings(builder: EncoderPromptBuilder, job: Job, rows: Sequence[Row]) -> list[Row]:
    openings: list[Row] = []
    for row in rows:
        token_ids = tuple(builder.opening(row.prompt.token_ids, job.reads))
        if token_ids:
            prompt = Prompt(token_ids, invocation_start=len(token_ids))
            openings.append(replace(row, id=f"{row.id}/opening", label=0, prompt=prompt))
    return openings
