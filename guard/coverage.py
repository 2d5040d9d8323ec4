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

Numbers = npt.NDArray[np.intp]

# A word has a letter; a long number is one too, as it may be text in disguise.
WORD = re.compile(r"[0-9]{7,}|[0-9]*[^\W0-9_][^\W_]*")
WORD_BITS = 16  # of a word's hash
STRETCH = 100  # characters in words, in which unknown ones are counted
SHORTEST_STRETCH = 40  # a shorter turn counts as one of so many


class ConversationForm:
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
        sums = np.zeros(len(words.hashes) + 1, np.intp)
        np.cumsum(words.characters * ~known[words.hashes], out=sums[1:])
        shares = (sums[words.ends] - sums[words.starts]) / words.stretch_characters
        return float(shares.max())

    @cached_property
    def _words(self) -> _Words:
        words: list[str] = []
        turns: list[int] = []  # of each turn the number of its first word
        for message in self._messages:
            turns.append(len(words))
            words += words_of(message.content)
        characters = np.array([len(word) for word in words], np.intp)
        starts, ends, sizes = _stretches(characters, turns)
        hashes = np.array([word_hash(word) for word in words], np.intp)
        return _Words(hashes, characters, starts, ends, np.maximum(sizes, SHORTEST_STRETCH))


class _Words(NamedTuple):
    """`hashes` and `characters` [words]; `starts`, `ends`, `stretch_characters` [stretches]: the
    first word of each, the one behind its last, and its size.
    """

    hashes: Numbers
    characters: Numbers
    starts: Numbers
    ends: Numbers
    stretch_characters: Numbers


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

    def has(self, form: ConversationForm) -> bool:
        """Whether a conversation is like the validation rows."""
        if form.characters > self.characters or self._sure_allow(form) is None:
            return False
        return form.unknown_share(self._known) <= self.unknown_share

    def is_sure_allow(self, form: ConversationForm, logit: float) -> bool:
        """Whether an "allow" with this logit, in nats, is sure."""
        sure = self._sure_allow(form)
        return sure is not None and logit < sure.logit

    def _sure_allow(self, form: ConversationForm) -> SureAllow | None:
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
    """The words of a text in lower case: as a reader sees it, but for what is encoded in ASCII, so
    that a text in base64 is not covered because of what it says.
    """
    if not text.isascii():
        text = visible(text)
    return WORD.findall(text.lower())


def word_hash(word: str) -> int:
    """The number of a word in a field of known ones."""
    return zlib.crc32(word.encode()) & ((1 << WORD_BITS) - 1)


def _stretches(characters: Numbers, turns: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
    """The first word of each stretch, the one behind its last, and its characters, where words have
    so many `characters` and `turns` are the numbers of the turns' first words.

    A stretch is the shortest that ends in a word and has STRETCH characters; none crosses a turn's
    end. A turn with fewer is one stretch.
    """
    sums = np.cumsum(characters)
    words = np.arange(len(characters))
    turn_of_word = np.searchsorted(turns, words, side="right") - 1
    first_of_turn = np.asarray(turns, np.intp)[turn_of_word]
    starts = np.maximum(np.searchsorted(sums, sums - STRETCH, side="right"), first_of_turn)
    sizes = sums - (sums - characters)[starts]
    ends_turn = np.append(turn_of_word[1:] != turn_of_word[:-1], True)[: len(words)]
    chosen = (sizes >= STRETCH) | (ends_turn & (starts == first_of_turn))
    return starts[chosen], words[chosen] + 1, sizes[chosen]
