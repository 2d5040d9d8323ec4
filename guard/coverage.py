"""Which conversations a rule's validation rows covered, and below which logit an "allow" is sure.

A verdict is `confident` only on a conversation like those rows:

- it has no more turns and characters, and of each speaker no longer turn, than such rows had, and
every speaker who is in all of them;
- no stretch of it has a larger share of unknown text, of no word in a training row, than 95 in 100
validation rows have anywhere: another language, code, or what is encoded is not covered;
- no turn is in a language that the rows do not have, as far as its letters tell;
- an "allow" has a logit below those of the violating validation rows, where a turn is long of those
with a long turn.
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

from guard.conversation.example import LONG_TURN, Message
from guard.files.yaml_file import Strict
from guard.language import Probabilities, language_of
from guard.prompt.text import visible

Numbers = npt.NDArray[np.intp]
Field8 = npt.NDArray[np.uint8]

TOKEN = re.compile(r"[^\W\d_]+|\S")  # a word, or any other sign by itself
WORD_BITS = 18  # of a word's hash
STRETCH = 100  # characters without spaces, in which unknown ones are counted
SHORTEST_STRETCH = 20  # a shorter turn counts as one of so many
# As how many an unknown letter counts: a few signs of another script are a sentence.
UNKNOWN_LETTER = 8
# A turn is in an unseen language where the seen ones have less probability together.
LEAST_SEEN = 0.05


class ConversationForm:
    """What coverage asks of a conversation, computed once for all rules."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        self.turns = len(messages)
        self.characters = sum(len(message.content) for message in messages)
        self.longest_turns: dict[str, int] = {}  # by speaker, in characters
        for message in sorted(messages, key=lambda message: len(message.content)):
            self.longest_turns[message.role] = len(message.content)

    @property
    def has_long_turn(self) -> bool:
        return max(self.longest_turns.values(), default=0) > LONG_TURN

    def unknown_share(self, words: Field8, letters: frozenset[str]) -> float:
        """The largest share of a stretch in no known word; letters beyond `letters` count more."""
        tokens = self._tokens
        if not len(tokens.hashes):
            return 0.0
        is_known = (words[tokens.hashes >> 3] >> (7 - (tokens.hashes & 7)) & 1) * tokens.is_word
        unknown = tokens.characters * (1 - is_known)
        for index, token in tokens.beyond_ascii:
            foreign = [sign for sign in token if sign.isalpha() and not sign.isascii()]
            unknown[index] += (UNKNOWN_LETTER - 1) * sum(sign not in letters for sign in foreign)
        sums = np.zeros(len(unknown) + 1, np.intp)
        np.cumsum(unknown, out=sums[1:])
        shares = (sums[tokens.ends] - sums[tokens.starts]) / tokens.stretch_characters
        return float(shares.max())

    @cached_property
    def languages(self) -> list[Probabilities]:
        """Of each turn that is long enough to tell."""
        told = (language_of(message.content) for message in self._messages)
        return [probabilities for probabilities in told if probabilities is not None]

    def is_unseen(self, languages: Sequence[str]) -> bool:
        """Whether a turn is in none of these languages."""
        for probabilities in self.languages:
            if sum(probabilities.get(language, 0.0) for language in languages) < LEAST_SEEN:
                return True
        return False

    @cached_property
    def _tokens(self) -> _Tokens:
        tokens: list[str] = []
        turns: list[int] = []  # of each turn the number of its first token
        for message in self._messages:
            turns.append(len(tokens))
            tokens += tokens_of(message.content)
        characters = np.array([len(token) for token in tokens], np.intp)
        starts, ends, sizes = _stretches(characters, turns)
        return _Tokens(
            hashes=np.array([word_hash(token) for token in tokens], np.intp),
            is_word=np.array([is_word(token) for token in tokens], np.intp),
            characters=characters,
            beyond_ascii=[(i, token) for i, token in enumerate(tokens) if not token.isascii()],
            starts=starts,
            ends=ends,
            stretch_characters=np.maximum(sizes, SHORTEST_STRETCH),
        )


class _Tokens(NamedTuple):
    """Arrays over tokens, and over stretches as `_stretches` gives them."""

    hashes: Numbers
    is_word: Numbers
    characters: Numbers
    beyond_ascii: list[tuple[int, str]]  # with their numbers
    starts: Numbers
    ends: Numbers
    stretch_characters: Numbers


class Coverage(Strict):
    """What a rule's validation rows covered.

    `longest_turns` are characters by speaker; `speakers` are in every row. `words` are the hashes
    of the training rows' words, a compressed bit field in base64, and `letters` those beyond ASCII.
    An "allow" is sure below `sure_logit`, with a long turn below `sure_logit_long`; None: never.
    `languages` are those of the rows; None, as on cards of before or of short rows: all.
    """

    turns: int
    characters: int
    longest_turns: dict[str, int]
    speakers: tuple[str, ...]
    unknown_share: float
    words: str
    letters: str
    sure_logit: float | None = Field(allow_inf_nan=False)
    sure_logit_long: float | None = Field(allow_inf_nan=False)
    # Left out of the card where it is None, so that a card of before keeps its version.
    languages: tuple[str, ...] | None = Field(default=None, exclude_if=lambda it: it is None)

    def is_unseen_language(self, form: ConversationForm) -> bool:
        return self.languages is not None and form.is_unseen(self.languages)

    def has(self, form: ConversationForm) -> bool:
        """Whether a conversation is like the validation rows; words, which take a while, last."""
        if form.turns > self.turns or form.characters > self.characters:
            return False
        if not form.longest_turns.keys() >= set(self.speakers):
            return False
        lengths = form.longest_turns.items()
        if any(longest > self.longest_turns.get(speaker, -1) for speaker, longest in lengths):
            return False
        if self.is_unseen_language(form):
            return False
        return form.unknown_share(self._known_words, self._known_letters) <= self.unknown_share

    def is_sure_allow(self, form: ConversationForm, logit: float) -> bool:
        sure = self.sure_logit_long if form.has_long_turn else self.sure_logit
        return sure is not None and logit < sure

    @field_validator("words")
    @classmethod
    def _is_a_field(cls, words: str) -> str:
        unpacked_words(words)
        return words

    @cached_property
    def _known_words(self) -> Field8:
        return unpacked_words(self.words)

    @cached_property
    def _known_letters(self) -> frozenset[str]:
        return frozenset(self.letters)


def packed_words(hashes: Sequence[int]) -> str:
    is_word = np.zeros(1 << WORD_BITS, bool)
    is_word[list(hashes)] = True
    return base64.b64encode(zlib.compress(np.packbits(is_word).tobytes(), 9)).decode()


def unpacked_words(words: str) -> Field8:
    """The field [2^WORD_BITS / 8] that a card holds."""
    size = (1 << WORD_BITS) // 8
    try:
        packed = zlib.decompressobj().decompress(base64.b64decode(words, validate=True), size + 1)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"no field of words: {error}") from error
    if len(packed) != size:
        raise ValueError(f"no field of words: it has {len(packed)} bytes instead of {size}")
    return np.frombuffer(packed, np.uint8)


def tokens_of(text: str) -> list[str]:
    """The words and signs of a text in lower case, as a reader sees it; encoded ASCII stays."""
    if not text.isascii():
        text = visible(text)
    return TOKEN.findall(text.lower())


def is_word(token: str) -> bool:
    """Whether a token may be a known word: one letter is rather spelled."""
    return len(token) > 1


def word_hash(word: str) -> int:
    return zlib.crc32(word.encode()) & ((1 << WORD_BITS) - 1)


def _stretches(characters: Numbers, turns: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
    """The first token of each stretch, the one behind its last, and its characters, of turns that
    begin with these tokens. A stretch is the shortest that ends in a token and has STRETCH
    characters, or a whole shorter turn.
    """
    sums = np.cumsum(characters)
    tokens = np.arange(len(characters))
    turn_of_token = np.searchsorted(turns, tokens, side="right") - 1
    first_of_turn = np.asarray(turns, np.intp)[turn_of_token]
    starts = np.maximum(np.searchsorted(sums, sums - STRETCH, side="right"), first_of_turn)
    sizes = sums - (sums - characters)[starts]
    ends_turn = np.append(turn_of_token[1:] != turn_of_token[:-1], True)[: len(tokens)]
    chosen = (sizes >= STRETCH) | (ends_turn & (starts == first_of_turn))
    return starts[chosen], tokens[chosen] + 1, sizes[chosen]
