"""What an encoder reads of a conversation, in training, evaluation and serving alike. Knows nothing
of models, only of a tokenizer.

    User: … [SEP] Assistant: … [SEP] …       one labelled turn after another, without any rule

A rule's head reads the mean state of each turn, in the light of all that stands around it, and a
conversation's logit is that of its highest turn: one violation anywhere is a violation (`spans`). A
longer conversation than the encoder has positions is read in windows. No turn that fits a window is
ever cut, each is whole in at least one; and a window begins with the last turns of the one before
it, so that an answer is read with its question (`windows`).

Text is tokenised as the decoder's is (`decoder.py`): it can hold neither [CLS] nor [SEP], so no
text can end its own turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer

from guard.example import Message
from guard.layout import fingerprint
from guard.prompt.decoder import SAMPLE, PromptBuilder
from guard.recipe import Recipe

START, SEPARATOR = "[CLS]", "[SEP]"
# Of a window, the share of tokens that it may begin with of the window before it.
OVERLAP = 0.25

Window = tuple[int, ...]


class EncoderPromptBuilder(PromptBuilder):
    """Builds an encoder's prompts: the conversation alone, and no suffix for any rule.

    `token_ids` of a prompt are the turns, each with the separator that ends it; `windows` makes of
    them what the encoder reads. There are no verdict tokens: `yes_id` and `no_id` are not set.
    """

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
        """SHA-256 over a fixed conversation's token ids and its windows."""
        ids = self.prefix_ids(SAMPLE * 3)
        small = windows(ids, (self.start_id,), self.separator_id, limit=32)
        return fingerprint([ids, small, self.start_id, self.window_tokens])

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

    def windows(self, token_ids: Sequence[int]) -> list[Window]:
        """What the encoder reads of a prompt's `token_ids`, one or several windows."""
        return windows(token_ids, (self.start_id,), self.separator_id, self.window_tokens)

    def spans(self, window: Window) -> list[tuple[int, int]]:
        """First token and end of each turn in a window, separators included."""
        return spans(window, self.separator_id)


def windows(token_ids: Sequence[int], start: Window, separator_id: int, limit: int) -> list[Window]:
    """Windows of at most `limit` tokens over turns that each end in the separator.

    Every window begins with `start` and holds whole turns. The next one begins with as many of
    the last turns as fit into OVERLAP of it, then goes on with those that no window has had yet. A
    turn that no window can hold is read in overlapping parts.
    """
    room = limit - len(start)
    turns = _turns(token_ids, separator_id, room)
    read: list[Window] = []
    first, last = 0, 0  # of the window, and behind it
    while last < len(turns):
        size = sum(map(len, turns[first:last]))
        while last < len(turns) and size + len(turns[last]) <= room:
            size += len(turns[last])
            last += 1
        tokens = list(start)
        for turn in turns[first:last]:
            tokens += turn
        read.append(tuple(tokens))
        first = _overlap(turns, first, last, room)
    return read


def _overlap(turns: Sequence[Sequence[int]], first: int, last: int, room: int) -> int:
    """The first turn of the next window: of those before `last` as many as are repeated."""
    if last == len(turns):
        return last
    left = min(round(OVERLAP * room), room - len(turns[last]))
    start = last
    while start - 1 > first and len(turns[start - 1]) <= left:
        start -= 1
        left -= len(turns[start])
    return start


def _turns(token_ids: Sequence[int], separator_id: int, room: int) -> list[list[int]]:
    """The turns with their separators; one of more than `room` tokens as parts that overlap."""
    turns: list[list[int]] = []
    turn: list[int] = []
    for token in token_ids:
        turn.append(token)
        if token == separator_id:
            turns += _parts(turn, room)
            turn = []
    return turns


def _parts(turn: list[int], room: int) -> list[list[int]]:
    if len(turn) <= room:
        return [turn]
    step = room - round(OVERLAP * room)
    starts = range(0, len(turn) - room + step, step)
    return [turn[start : start + room] for start in starts]


def spans(window: Window, separator_id: int) -> list[tuple[int, int]]:
    """First token and end of each turn behind the start token; the last may be a turn's part."""
    bounds: list[tuple[int, int]] = []
    start = 1
    for index in range(1, len(window)):
        if window[index] == separator_id or index == len(window) - 1:
            bounds.append((start, index + 1))
            start = index + 1
    return bounds
