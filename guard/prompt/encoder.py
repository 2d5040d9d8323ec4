"""What an encoder reads of a conversation, in training, evaluation and serving alike. Knows nothing
of models, only of a tokenizer.

    User: … [SEP] Assistant: … [SEP] …       one labelled turn after another, without any rule

A rule's head reads the mean state of each turn of whom the rule judges, of a long turn that of each
of its parts, in the light of all that stands around it, and a conversation's logit is that of the
highest: one violation anywhere is a violation, and a sentence is not lost in the mean of a long
turn (`EncoderPromptBuilder.spans`, `counting`).

A longer conversation than the encoder has positions is read in windows. No turn that fits a window
is ever cut, each is whole in at least one; and a window begins with the last turns of the one
before it, so that an answer is read with its question (`windows`).

Text is tokenised as the decoder's is (`decoder.py`): it can hold neither [CLS] nor [SEP], so no
text can end its own turn. Whose turn one is says the label that it begins with, before it is cut:
no text at the beginning of a part can pass for a label.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, get_args

from tokenizers import Tokenizer

from guard.errors import GuardError
from guard.example import Message
from guard.layout import fingerprint
from guard.prompt.decoder import ROLE_LABELS, SAMPLE, PromptBuilder
from guard.recipe import Recipe
from guard.rule import LAST_OF, SPEAKERS, Judged, Reads

START, SEPARATOR = "[CLS]", "[SEP]"
# Of a window, the share of tokens that it may begin with of the window before it.
OVERLAP = 0.25
# Of a turn, the most whose mean state is one span: a sentence or two.
SPAN_TOKENS = 24
UNKNOWN = ""  # the speaker of a turn that begins with no label
SILENT = "nobody"  # the speaker of a turn that is a label and nothing else


class Span(NamedTuple):
    """The tokens of a window from `start` to before `end`, all of one turn, whose `speaker` is a
    role, UNKNOWN or SILENT. `turn`: which of the conversation's, from 0.
    """

    start: int
    end: int
    speaker: str
    turn: int


@dataclass(frozen=True)
class Window:
    """What an encoder reads at once, and where in it turns stand, or parts of one that no window
    holds: those that count for a rule.
    """

    token_ids: tuple[int, ...]
    turns: tuple[Span, ...]


class EncoderPromptBuilder(PromptBuilder):
    """Builds an encoder's prompts: the conversation alone, and no suffix for any rule.

    `token_ids` of a prompt are the turns, each with the separator that ends it; `windows` makes of
    them what the encoder reads, `spans` what a head does. There are no verdict tokens: `yes_id` and
    `no_id` are not set.
    """

    verdict_tokens = 0

    def __init__(self, tokenizer: Tokenizer, window_tokens: int) -> None:
        self._set_tokenizer(tokenizer)
        self.max_tokens = None
        self.window_tokens = window_tokens
        self.start_id = self._control(START)
        self.separator_id = self._control(SEPARATOR)

    @classmethod
    def of(cls, recipe: Recipe) -> EncoderPromptBuilder:
        """For the recipe's base. Raises GuardError where it has no tokenizer, or not its tokens."""
        assert recipe.window_tokens is not None  # every encoder's recipe has them
        tokenizer = cls._tokenizer_of(recipe.base_path, recipe.commit)
        return cls(tokenizer, recipe.window_tokens)

    @cached_property
    def hash(self) -> str:
        """SHA-256 over a fixed conversation's token ids, its windows, their spans, and which count.

        Raises GuardError where the tokenizer writes two speakers' labels alike.
        """
        ids = self.prefix_ids(SAMPLE * 3)
        small = windows(
            ids, (self.start_id,), self.separator_id, limit=32, speaker_of=self._speaker
        )
        read = []
        for window in small:
            cut = [(start, end, speaker) for start, end, speaker, _ in spans(window, limit=5)]
            read.append([window.token_ids, cut])
        cutting = [self.start_id, self.window_tokens, OVERLAP, SPAN_TOKENS]
        speakers = {judged: SPEAKERS[judged] for judged in get_args(Judged)}
        return fingerprint([ids, read, cutting, speakers, SILENT])

    def prefix_ids(self, messages: Sequence[Message]) -> list[int]:
        """The turns, each ended by the separator."""
        ids: list[int] = []
        for message in messages:
            ids += [*self.turn_ids(message), self.separator_id]
        return ids

    def turn_ids(self, message: Message) -> list[int]:
        """One message as one labelled turn, without the separator that ends it."""
        return self._labelled(message)

    def suffix_ids(self, rule_text: str) -> list[int]:
        """Nothing: a rule is what its head has learned."""
        return []

    def invocation(self, rule_text: str) -> tuple[int, ...]:
        """Nothing: an encoder's adapter acts on every token."""
        return ()

    def windows(self, token_ids: Sequence[int], reads: Reads) -> list[Window]:
        """What the encoder reads of a prompt's `token_ids` for a rule that reads `reads`.

        One or several windows, each with a turn that counts, and of its turns those.
        """
        read = windows(
            token_ids, (self.start_id,), self.separator_id, self.window_tokens, self._speaker
        )
        return _counting_turns(read, reads)

    def opening(self, token_ids: Sequence[int], reads: Reads) -> list[int]:
        """The turns before the first one that counts for a rule that reads `reads`; none if that
        is the first, or if nobody whom it judges speaks.
        """
        start = 0
        for end, token in enumerate(token_ids, start=1):
            if token == self.separator_id:
                if self._speaker(token_ids[start:end]) in (*SPEAKERS[reads], UNKNOWN):
                    return list(token_ids[:start])
                start = end
        return []

    def spans(self, window: Window) -> list[Span]:
        """What a head reads the mean state of: the window's turns, a long one in parts."""
        return spans(window, SPAN_TOKENS)

    @cached_property
    def _labels(self) -> dict[tuple[int, ...], str]:
        """The role of each label's token ids."""
        labels = {tuple(self._text_ids(label)): role for role, label in ROLE_LABELS.items()}
        if len(labels) < len(ROLE_LABELS):
            raise GuardError(
                "the tokenizer writes the labels of two speakers alike",
                got=", ".join(ROLE_LABELS.values()),
                remedy="Use another base: a rule reads the turns of whom it judges",
            )
        return labels

    @cached_property
    def _empty_turns(self) -> frozenset[tuple[int, ...]]:
        """The token ids of turns that say nothing, without the separator: for some tokenizers more
        than the label, as the blank behind it is a token too.
        """
        return frozenset(tuple(self.turn_ids(Message(role, ""))) for role in ROLE_LABELS)

    def _speaker(self, turn: Sequence[int]) -> str:
        """Whose turn this is, its separator included, as a role."""
        for label, role in self._labels.items():
            if tuple(turn[: len(label)]) == label:
                return SILENT if tuple(turn[:-1]) in self._empty_turns else role
        return UNKNOWN


def counting(speakers: Sequence[str], reads: Reads, turns: Sequence[int] = ()) -> list[int]:
    """Which of what these speakers say counts for a rule that reads `reads`: their indices.

    Where none is judged, everything counts but what a SILENT one says, unless all are: a text that
    is handed on under another speaker's name is not allowed unread. `turns`: the turn that each
    stands in; by default each is one.
    """
    everything = list(range(len(speakers)))
    spoken = [index for index in everything if speakers[index] != SILENT]
    counted = judged_of(speakers, reads) or spoken or everything
    if reads not in LAST_OF.values():
        return counted
    numbers = turns or everything
    last = max(numbers[index] for index in counted)
    return [index for index in counted if numbers[index] == last]


def judged_of(speakers: Sequence[str], reads: Reads) -> list[int]:
    """Which of these a rule judges that reads `reads`: what they say, and an UNKNOWN one."""
    indices: list[int] = []
    for index, speaker in enumerate(speakers):
        if speaker in SPEAKERS[reads] or speaker == UNKNOWN:
            indices.append(index)
    return indices


def _counting_turns(read: Sequence[Window], reads: Reads) -> list[Window]:
    """The windows of one conversation with the turns that count, without those that have none."""
    places: list[tuple[int, Span]] = []  # of each turn: its window's index, and where it stands
    for index, window in enumerate(read):
        places += [(index, turn) for turn in window.turns]
    counted: list[list[Span]] = [[] for _ in read]
    speakers, numbers = [turn.speaker for _, turn in places], [turn.turn for _, turn in places]
    for number in counting(speakers, reads, numbers):
        index, turn = places[number]
        counted[index].append(turn)
    return [
        Window(window.token_ids, tuple(turns))
        for window, turns in zip(read, counted, strict=True)
        if turns
    ]


@dataclass(frozen=True)
class _TurnPart:
    """The tokens of a turn with its separator, or of a part of one that no window holds."""

    token_ids: Sequence[int]
    speaker: str
    turn: int


def _nobody(turn: Sequence[int]) -> str:
    return UNKNOWN


def windows(
    token_ids: Sequence[int],
    start: tuple[int, ...],
    separator_id: int,
    limit: int,
    speaker_of: Callable[[Sequence[int]], str] = _nobody,
) -> list[Window]:
    """Windows of at most `limit` tokens over turns that each end in the separator.

    Every window begins with `start` and holds whole turns. The next one begins with as many of
    the last turns as fit into OVERLAP of it, then goes on with those that no window has had yet. A
    turn that no window can hold is read in overlapping parts. `speaker_of` says whose a whole
    turn's token ids are.
    """
    room = limit - len(start)
    turns = _turns(token_ids, separator_id, room, speaker_of)
    read: list[Window] = []
    first, last = 0, 0  # of the window, and behind it
    while last < len(turns):
        size = sum(len(turn.token_ids) for turn in turns[first:last])
        while last < len(turns) and size + len(turns[last].token_ids) <= room:
            size += len(turns[last].token_ids)
            last += 1
        read.append(_window(start, turns[first:last]))
        first = _overlap(turns, first, last, room)
    return read


def _window(start: tuple[int, ...], turns: Sequence[_TurnPart]) -> Window:
    tokens = list(start)
    places: list[Span] = []
    for turn in turns:
        end = len(tokens) + len(turn.token_ids)
        places.append(Span(len(tokens), end, turn.speaker, turn.turn))
        tokens += turn.token_ids
    return Window(tuple(tokens), tuple(places))


def _overlap(turns: Sequence[_TurnPart], first: int, last: int, room: int) -> int:
    """The first turn of the next window: of those before `last` as many as are repeated."""
    if last == len(turns):
        return last
    left = min(round(OVERLAP * room), room - len(turns[last].token_ids))
    start = last
    while start - 1 > first and len(turns[start - 1].token_ids) <= left:
        start -= 1
        left -= len(turns[start].token_ids)
    return start


def _turns(
    token_ids: Sequence[int],
    separator_id: int,
    room: int,
    speaker_of: Callable[[Sequence[int]], str],
) -> list[_TurnPart]:
    """The turns with their separators; one of more than `room` tokens as parts that overlap."""
    turns: list[_TurnPart] = []
    number = 0
    turn: list[int] = []
    for token in token_ids:
        turn.append(token)
        if token == separator_id:
            speaker = speaker_of(turn)
            turns += [_TurnPart(part, speaker, number) for part in _parts(turn, room)]
            number += 1
            turn = []
    return turns


def _parts(turn: list[int], room: int) -> list[list[int]]:
    if len(turn) <= room:
        return [turn]
    step = room - round(OVERLAP * room)
    starts = range(0, len(turn) - room + step, step)
    return [turn[start : start + room] for start in starts]


def spans(window: Window, limit: int) -> list[Span]:
    """The window's turns: one of at most `limit` tokens, its separator included, as it is, a longer
    one in as few parts as can be, of even lengths.
    """
    cut: list[Span] = []
    for start, end, speaker, turn in window.turns:
        parts = math.ceil((end - start) / limit)
        bounds = [start + (end - start) * part // parts for part in range(parts + 1)]
        cut += [Span(first, last, speaker, turn) for first, last in itertools.pairwise(bounds)]
    return cut
