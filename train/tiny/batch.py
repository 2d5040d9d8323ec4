"""Lessons as tensors: rows of one conversation and several rules. Knows nothing of the student's
weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from guard.conversation.example import Message
from guard.prompt.decoder import PromptBuilder
from train.tiny.lessons.lesson import Lesson
from train.tiny.lessons.situations import TOPICS, ActLabel

IGNORED = -100
NEXT_TOKEN_SHARE = 0.1  # the share of a conversation's positions that predict the next token
LabelValues = dict[str, tuple[Any, ...]]  # name: values


def labels_of(acts: Sequence[str]) -> LabelValues:
    """The labels that the end of a turn or sentence predicts besides its meaning."""
    return {
        "role": ("user", "assistant", "tool"),
        "act": tuple(acts),
        "topic": tuple(TOPICS),
        "quoted": (False, True),
    }


@dataclass(frozen=True)
class LessonBatch:
    """Rows of one prefix and several suffixes each; a suffix attends to the prefix and itself, and
    continues its positions.

    Shapes: `ids, positions, targets` `[rows, length]`; `mask` `[rows, 1, length, length]` bool;
    `meaning_at` and `verdict_at` `[n, 2]` (row, column); `meanings` `[n, 384]`; `verdicts` `[n]`
    token ids. `labels` `[n, names]`: what is known of what ends at a `meaning_at`, IGNORED where it
    is not.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    targets: Tensor
    meaning_at: Tensor
    meanings: Tensor
    labels: Tensor
    verdict_at: Tensor
    verdicts: Tensor

    def to(self, device: torch.device) -> LessonBatch:
        """The same batch on another device."""
        return LessonBatch(*(tensor.to(device) for tensor in vars(self).values()))


@dataclass(frozen=True)
class _PackedRow:
    """A lesson's prefix and suffixes one after another.

    `segments`: 0 prefix, 1… suffixes; `turns`: the turn an id belongs to, or -1.
    """

    ids: list[int]
    positions: list[int]
    segments: list[int]
    turns: list[int]
    turn_ends: list[int]  # column of each turn's last id
    bounds: list[int]  # where each suffix begins, and where the last one ends


def collate(
    lessons: Sequence[Lesson],
    builder: PromptBuilder,
    labels: LabelValues,
    rng: random.Random,
    *,
    local: bool = False,
) -> LessonBatch:
    """Rows of prefix + suffixes, padded on the right.

    `local`: a turn sees itself and the scaffold before it, not the other turns.
    """
    rows = [_packed(lesson, builder) for lesson in lessons]
    ids = _padded([row.ids for row in rows], 0)
    segments = _padded([row.segments for row in rows], -1)
    turns = None
    if local:
        turns = _padded([row.turns for row in rows], -1)
    meaning_at, meaning_labels = _meaning_targets(lessons, rows, builder, labels)
    verdict_at, verdicts = _verdict_targets(lessons, rows, builder)
    return LessonBatch(
        ids=ids,
        positions=_padded([row.positions for row in rows], 0),
        mask=_mask(segments, turns),
        targets=_next_token_targets(ids, rows, rng),
        meaning_at=meaning_at,
        meanings=_meanings(lessons),
        labels=meaning_labels,
        verdict_at=verdict_at,
        verdicts=verdicts,
    )


def _packed(lesson: Lesson, builder: PromptBuilder) -> _PackedRow:
    ids = builder.prefix_ids(lesson.messages)
    prefix = len(ids)
    positions = list(range(prefix))
    segments = [0] * prefix
    bounds = [prefix]
    for number, question in enumerate(lesson.questions, start=1):
        suffix = builder.suffix_ids(question.rule_text)
        ids += suffix
        positions += range(prefix, prefix + len(suffix))
        segments += [number] * len(suffix)
        bounds.append(len(ids))
    lengths = [len(builder.turn_ids(message)) for message in lesson.messages]
    before = prefix - 2 - sum(lengths)  # <|im_end|> and a line break follow the last turn
    turns = [-1] * before
    for number, length in enumerate(lengths):
        turns += [number] * length
    turns += [-1] * (len(ids) - len(turns))
    turn_ends = [before + end - 1 for end in accumulate(lengths)]
    return _PackedRow(ids, positions, segments, turns, turn_ends, bounds)


def _next_token_targets(ids: Tensor, rows: Sequence[_PackedRow], rng: random.Random) -> Tensor:
    """The next id at some positions of the prefixes, IGNORED elsewhere, `[rows, length]`."""
    targets = torch.full_like(ids, IGNORED)
    for number, row in enumerate(rows):
        for column in range(row.bounds[0] - 1):
            if rng.random() < NEXT_TOKEN_SHARE:
                targets[number, column] = row.ids[column + 1]
    return targets


def _meanings(lessons: Sequence[Lesson]) -> Tensor:
    """The teacher's embeddings of sentences, turns and the first rule of each lesson, `[n,
    384]`.
    """
    embeddings = []
    for lesson in lessons:
        embeddings += [lesson.sentence_embeddings, lesson.turn_embeddings]
        embeddings.append(lesson.rule_embedding[None])
    return torch.cat(embeddings)


def _meaning_targets(
    lessons: Sequence[Lesson],
    rows: Sequence[_PackedRow],
    builder: PromptBuilder,
    labels: LabelValues,
) -> tuple[Tensor, Tensor]:
    """The positions with a meaning, `[n, 2]`, and the labels there, `[n, names]`."""
    meaning_at, values = [], []
    for number, (lesson, row) in enumerate(zip(lessons, rows, strict=True)):
        for meaning in _ends(lesson, row, builder):
            meaning_at.append((number, meaning.column))
            values.append(_label_values(labels, meaning.role, meaning.act))
    return torch.tensor(meaning_at), torch.tensor(values)


def _verdict_targets(
    lessons: Sequence[Lesson], rows: Sequence[_PackedRow], builder: PromptBuilder
) -> tuple[Tensor, Tensor]:
    """The positions at which a verdict is predicted, `[n, 2]`, and its token ids, `[n]`."""
    token_of = (builder.no_id, builder.yes_id)
    verdict_at, verdicts = [], []
    for number, (lesson, row) in enumerate(zip(lessons, rows, strict=True)):
        for end, question in zip(row.bounds[1:], lesson.questions, strict=True):
            verdict_at.append((number, end - 1))
            verdicts.append(token_of[question.label])
    return torch.tensor(verdict_at), torch.tensor(verdicts)


@dataclass(frozen=True)
class Meaning:
    """A column of a row that has a meaning, the act that ends there and its speaker, if any."""

    column: int
    act: ActLabel | None
    role: str | None


def _ends(lesson: Lesson, row: _PackedRow, builder: PromptBuilder) -> Iterator[Meaning]:
    """The ends of sentences, turns and the first rule, in the order of the lesson's embeddings."""
    acts_of_turns = lesson.act_labels or [[] for _ in lesson.messages]
    turns = list(zip(lesson.messages, lesson.sentences, acts_of_turns, row.turn_ends, strict=True))
    for message, sentences, acts, end in turns:
        start = end + 1 - len(builder.turn_ids(message))
        act_at = {act.upto: act for act in acts}
        for text in accumulate(sentences, "{} {}".format):
            # All but the line break that ends the turn.
            upto = builder.turn_ids(Message(message.role, text))[:-1]
            yield Meaning(start + len(upto) - 1, act_at.get(text), message.role)
    for message, _, acts, end in turns:
        last_act = acts[-1] if acts else None
        yield Meaning(end, last_act, message.role)
    # The line break that ends the rule turn is the last but one token.
    rule = row.ids[: row.bounds[1] - 1]
    line_break = row.ids[row.turn_ends[0]]
    yield Meaning(_last_index(rule, line_break), None, None)


def _last_index(ids: Sequence[int], token_id: int) -> int:
    """The last index of the token. Raises ValueError if it does not occur."""
    from_the_end = list(reversed(ids)).index(token_id)
    return len(ids) - 1 - from_the_end


def _label_values(labels: LabelValues, role: str | None, act: ActLabel | None) -> list[int]:
    """The index of each label's value, IGNORED where it is not known."""
    known_values: dict[str, Any] = {"role": role}
    if act is not None:
        known_values |= {"act": act.act, "topic": act.topic, "quoted": act.quoted}
    indices = []
    for name, values in labels.items():
        index = IGNORED
        if known_values.get(name) in values:
            index = values.index(known_values[name])
        indices.append(index)
    return indices


def _mask(segments: Tensor, turns: Tensor | None) -> Tensor:
    """What each position sees, `[rows, 1, length, length]`: the prefix and its own segment; of the
    turns, if given, its own.
    """
    is_seen = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    if turns is not None:
        in_scaffold = (turns[:, :, None] < 0) | (turns[:, None, :] < 0)
        is_seen &= in_scaffold | (turns[:, :, None] == turns[:, None, :])
    length = segments.shape[1]
    mask = (is_seen & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
    # A padded position attends to itself, never to nothing.
    return mask | torch.eye(length, dtype=torch.bool)


def _padded(rows: Sequence[list[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])
