"""Cuts the turns of a conversation into the windows that an encoder reads, and these into the spans
that a head reads.

No turn that fits a window is ever cut, and a window begins with the last turns of the one before
it, so that an answer is read with its question. Which turns count depends on who speaks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from guard.rule import LAST_OF, SPEAKERS, Reads

OVERLAP = 0.25  # the largest share of a window's tokens that repeats the window before it
SPAN_TOKENS = 24  # the longest part of a turn whose mean state is one span: a sentence or two
UNKNOWN = ""  # the speaker of a turn that begins with no label
SILENT = "nobody"  # the speaker of a turn that is a label and nothing else


class Span(NamedTuple):
    """The tokens of a window from `start` to before `end`, all of one turn, whose `speaker` is a
    role, UNKNOWN or SILENT. `turn` is that turn's number in the conversation, from 0.
    """

    start: int
    end: int
    speaker: str
    turn: int


@dataclass(frozen=True)
class Window:
    """The tokens that an encoder reads at once. `turns` are the places of the turns in it that
    count for a rule, or of their parts where no window holds the whole turn.
    """

    token_ids: tuple[int, ...]
    turns: tuple[Span, ...]


class _TurnPart(NamedTuple):
    """The tokens of a turn with its separator, or of a part of one that no window holds."""

    token_ids: Sequence[int]
    speaker: str
    turn: int


def cut_windows(
    token_ids: Sequence[int],
    start: tuple[int, ...],
    separator_id: int,
    limit: int,
    speaker_of: Callable[[Sequence[int]], str] = lambda turn: UNKNOWN,
) -> list[Window]:
    """Windows of at most `limit` tokens over turns that each end in the separator.

    Every window begins with `start` and holds whole turns: as many of the last turns as fit into
    OVERLAP of it, then new ones. A turn that no window can hold is read in overlapping parts.
    `speaker_of` names the speaker of a turn by its token ids.
    """
    room = limit - len(start)
    parts = _turn_parts(token_ids, separator_id, room, speaker_of)
    windows: list[Window] = []
    first, after_last = 0, 0  # the parts of the current window
    while after_last < len(parts):
        size = sum(len(part.token_ids) for part in parts[first:after_last])
        while after_last < len(parts) and size + len(parts[after_last].token_ids) <= room:
            size += len(parts[after_last].token_ids)
            after_last += 1
        windows.append(_window(start, parts[first:after_last]))
        first = _next_first(parts, first, after_last, room)
    return windows


def _window(start: tuple[int, ...], parts: Sequence[_TurnPart]) -> Window:
    token_ids = list(start)
    turns: list[Span] = []
    for part in parts:
        end = len(token_ids) + len(part.token_ids)
        turns.append(Span(len(token_ids), end, part.speaker, part.turn))
        token_ids += part.token_ids
    return Window(tuple(token_ids), tuple(turns))


def _next_first(parts: Sequence[_TurnPart], first: int, after_last: int, room: int) -> int:
    if after_last == len(parts):
        return after_last
    left = min(round(OVERLAP * room), room - len(parts[after_last].token_ids))
    next_first = after_last
    while next_first - 1 > first and len(parts[next_first - 1].token_ids) <= left:
        next_first -= 1
        left -= len(parts[next_first].token_ids)
    return next_first


def _turn_parts(
    token_ids: Sequence[int],
    separator_id: int,
    room: int,
    speaker_of: Callable[[Sequence[int]], str],
) -> list[_TurnPart]:
    ends = [end for end, token in enumerate(token_ids, start=1) if token == separator_id]
    parts: list[_TurnPart] = []
    for number, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        turn = token_ids[start:end]
        speaker = speaker_of(turn)
        parts += [_TurnPart(ids, speaker, number) for ids in _overlapping(turn, room)]
    return parts


def _overlapping(turn: Sequence[int], room: int) -> list[Sequence[int]]:
    if len(turn) <= room:
        return [turn]
    step = room - round(OVERLAP * room)
    starts = range(0, len(turn) - room + step, step)
    return [turn[start : start + room] for start in starts]


def cut_spans(window: Window, limit: int) -> list[Span]:
    """The window's turns; one of more than `limit` tokens in the fewest parts, of even lengths."""
    spans: list[Span] = []
    for start, end, speaker, turn in window.turns:
        parts = math.ceil((end - start) / limit)
        bounds = [start + (end - start) * part // parts for part in range(parts + 1)]
        spans += [Span(first, last, speaker, turn) for first, last in itertools.pairwise(bounds)]
    return spans


def counting(speakers: Sequence[str], reads: Reads, turns: Sequence[int] = ()) -> list[int]:
    """The indices of the spans or turns, by their speakers, that count for a rule.

    Where nobody's are judged, all but a SILENT speaker's count, and these too if there are no
    others: a text under another speaker's name is not allowed unread. `turns` are the turns'
    numbers; by default each item is a turn.
    """
    everything = list(range(len(speakers)))
    spoken = [index for index in everything if speakers[index] != SILENT]
    counted = judged_of(speakers, reads) or spoken or everything
    if reads not in LAST_OF.values():
        return counted
    numbers = turns or everything
    last = max(numbers[index] for index in counted)  # in any order
    return [index for index in counted if numbers[index] == last]


def judged_of(speakers: Sequence[str], reads: Reads) -> list[int]:
    """The indices of the speakers whom a rule that reads `reads` judges; UNKNOWN is judged too."""
    judged = (*SPEAKERS[reads], UNKNOWN)
    return [index for index, speaker in enumerate(speakers) if speaker in judged]


def select_counting_turns(windows: Sequence[Window], reads: Reads) -> list[Window]:
    """The windows of one conversation that have turns which count for a rule, with these alone."""
    turns = list(itertools.chain.from_iterable(window.turns for window in windows))
    speakers, numbers = [turn.speaker for turn in turns], [turn.turn for turn in turns]
    counted = {numbers[index] for index in counting(speakers, reads, numbers)}
    selected: list[Window] = []
    for window in windows:
        spans = tuple(turn for turn in window.turns if turn.turn in counted)
        if spans:
            selected.append(Window(window.token_ids, spans))
    return selected
