"""Which conversations a rule's validation rows covered, and below which logit an "allow" is sure.

A verdict is `confident` only on a conversation like those rows, in length and in words:

- its characters, and those of its longest turn, are no more than such rows had (`lengths`);
- no stretch of it has more unknown words, those of no training row, than 99 in 100 validation rows
  have anywhere: so other languages, code, encoded text and other subjects are not covered;
- an "allow" has a logit below that of every violating validation row with a turn of its length.

Knows nothing of models or files.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator

from guard.conversation.example import Message
from guard.files.yaml_file import Strict
from guard.prompt.text import visible

# A word has a letter; a long number is one too, as it may be text in disguise.
WORD = re.compile(r"[0-9]{7,}|[0-9]*[^\W0-9_][^\W_]*")
WORD_BITS = 16  # of a word's hash
STRETCH = 100  # characters in words, in which unknown ones are counted
SHORTEST_STRETCH = 40  # a shorter turn counts as one of so many


class Form:
    """What coverage asks of a conversation, computed once for all rules."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        lengths = [len(message.content) for message in messages]
        self.characters = sum(lengths)
        self.longest_turn = max(lengths, default=0)

    def unknown_share(self, known: npt.NDArray[np.bool_]) -> float:
        """The largest share of a stretch's characters in words whose hashes are not `known`."""
        words = self._words
        if not len(words.hashes):
            return 0.0
        unknown = np.where(known[words.hashes], 0, words.characters)
        sums = np.concatenate([[0], np.cumsum(unknown)])
        shares = (sums[words.ends] - sums[words.starts]) / words.stretch_characters
        return float(shares.max())

    @cached_property
    def _words(self) -> _Words:
        """The words of all turns, and the stretches, none of which crosses a turn's end."""
        hashes: list[int] = []
        characters: list[int] = []
        starts: list[npt.NDArray[np.intp]] = []
        ends: list[npt.NDArray[np.intp]] = []
        for message in self._messages:
            words = words_of(message.content)
            first = len(hashes)
            hashes += map(word_hash, words)
            characters += map(len, words)
            turn_starts, turn_ends = _stretches([len(word) for word in words])
            starts.append(turn_starts + first)
            ends.append(turn_ends + first)
        all_starts, all_ends = np.concatenate(starts), np.concatenate(ends)
        sums = np.concatenate([[0], np.cumsum(characters)])
        sizes = np.maximum(sums[all_ends] - sums[all_starts], SHORTEST_STRETCH)
        return _Words(np.array(hashes, np.intp), np.array(characters), all_starts, all_ends, sizes)


class _Words(NamedTuple):
    """`hashes` and `characters` [words]; `starts`, `ends`, `stretch_characters` [stretches]: the
    first word of each, the one behind its last, and its size.
    """

    hashes: npt.NDArray[np.intp]
    characters: npt.NDArray[np.intp]
    starts: npt.NDArray[np.intp]
    ends: npt.NDArray[np.intp]
    stretch_characters: npt.NDArray[np.intp]


class SureAllow(Strict):
    """On conversations with no turn of more than `turn_characters`, an "allow" with a logit in nats
    below `logit` is sure.
    """

    turn_characters: int
    logit: float = Field(allow_inf_nan=False)


class Coverage(Strict):
    """What a rule's validation rows covered.

    `words` are the hashes of the training rows' words, a compressed bit field in base64. `lengths`
    ascend; a longer turn is not covered.
    """

    characters: int
    unknown_share: float
    words: str
    lengths: tuple[SureAllow, ...]

    def has(self, form: Form) -> bool:
        """Whether a conversation is like the validation rows."""
        if form.characters > self.characters or self._sure_allow(form) is None:
            return False
        return form.unknown_share(self._known) <= self.unknown_share

    def is_sure_allow(self, form: Form, logit: float) -> bool:
        """Whether an "allow" with this logit, in nats, is sure."""
        sure = self._sure_allow(form)
        return sure is not None and logit < sure.logit

    def _sure_allow(self, form: Form) -> SureAllow | None:
        for sure in self.lengths:
            if form.longest_turn <= sure.turn_characters:
                return sure
        return None

    @field_validator("words")
    @classmethod
    def _is_a_field(cls, words: str) -> str:
        unpacked_words(words)
        return words

    @cached_property
    def _known(self) -> npt.NDArray[np.bool_]:
        return unpacked_words(self.words)


def packed_words(known: npt.NDArray[np.bool_]) -> str:
    """The field [2^WORD_BITS] of known words' hashes as a card holds it."""
    return base64.b64encode(zlib.compress(np.packbits(known).tobytes(), 9)).decode()


def unpacked_words(words: str) -> npt.NDArray[np.bool_]:
    """The field that a card holds. Raises ValueError where it holds none."""
    size = (1 << WORD_BITS) // 8
    try:
        packed = zlib.decompressobj().decompress(base64.b64decode(words, validate=True), size + 1)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"no field of words: {error}") from error
    if len(packed) != size:
        raise ValueError(f"no field of words: it has {len(packed)} bytes instead of {size}")
    return np.unpackbits(np.frombuffer(packed, np.uint8)).astype(bool)


def words_of(text: str) -> list[str]:
    """The words of a text as a reader sees it, in lower case."""
    return WORD.findall(visible(text).lower())


def word_hash(word: str) -> int:
    """The number of a word in a field of known ones."""
    return zlib.crc32(word.encode()) & ((1 << WORD_BITS) - 1)


def _stretches(
    characters: Sequence[int],
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The first word, and the one behind the last, of each stretch of a turn with words of so many
    characters: the shortest that end in each word and have STRETCH; all words if they are fewer.
    """
    ends = np.cumsum(characters)
    if not len(characters) or ends[-1] < STRETCH:
        whole = [0] if len(characters) else []
        return np.array(whole, np.intp), np.array([len(characters)] * len(whole), np.intp)
    last_words = np.flatnonzero(ends >= STRETCH)
    starts = np.searchsorted(ends, ends[last_words] - STRETCH, side="right")
    return starts.astype(np.intp), last_words + 1
