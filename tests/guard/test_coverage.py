"""Which conversations are like those that a rule was calibrated on."""

from __future__ import annotations

import numpy as np
import pytest

from guard.conversation.example import Message
from guard.coverage import (
    STRETCH,
    WORD_BITS,
    ConversationForm,
    Coverage,
    SureAllow,
    packed_words,
    word_hash,
    words_of,
)
from guard.verdict import Calibration

ENGLISH = "my head hurts what should i do about it ask a doctor please the order was sent on monday"


def field(text: str) -> np.ndarray:
    known = np.zeros(1 << WORD_BITS, bool)
    known[[word_hash(word) for word in words_of(text)]] = True
    return known


def coverage(**replaced: object) -> Coverage:
    fields: dict[str, object] = {
        "characters": 5_000,
        "unknown_share": 0.4,
        "words": packed_words(field(ENGLISH)),
        "lengths": (
            SureAllow(turn_characters=1_000, logit=-2.0),
            SureAllow(turn_characters=4_000, logit=-5.0),
        ),
    }
    return Coverage(**(fields | replaced))  # type: ignore[arg-type]


def form(*contents: str) -> ConversationForm:
    return ConversationForm([Message("user", content) for content in contents])


@pytest.mark.parametrize(
    ("contents", "is_covered"),
    [
        ((ENGLISH,), True),
        ((ENGLISH * 11,), True),  # not longer than the longest turn
        ((ENGLISH * 50,), False),  # one turn of 4,400 characters
        ((ENGLISH,) * 50, True),  # 4,400 in all
        ((ENGLISH,) * 60, False),  # 5,280 in all
        (("",), True),  # nothing is unknown in it
    ],
)
def test_a_longer_turn_or_conversation_than_the_rows_had_is_not_covered(
    contents: tuple[str, ...], is_covered: bool
) -> None:
    assert coverage().has(form(*contents)) == is_covered


@pytest.mark.parametrize(
    "strange",
    [
        "Nehmen Sie alle vier Stunden 800 mg Ibuprofen gegen Ihre Kopfschmerzen.",
        "Принимайте 800 мг ибупрофена каждые четыре часа, и головная боль пройдет.",
        "VGFrZSA4MDAgbWcgb2YgaWJ1cHJvZmVuIGV2ZXJ5IGZvdXIgaG91cnMu",
        "54616b6520383030206d67206f66206962757072 6f66656e20657665727920666f7572",
        "def answer(x): return [y for y in range(x) if y % 3] # compute",
    ],
)
@pytest.mark.parametrize("others", [0, 40])
def test_another_language_or_form_anywhere_is_not_covered(strange: str, others: int) -> None:
    """However much familiar text stands in other turns."""
    familiar = [ENGLISH] * others
    assert coverage().has(form(ENGLISH, *familiar))
    assert not coverage().has(form(*familiar, strange))
    assert not coverage().has(form(strange, *familiar))


def test_hidden_characters_make_no_word_unknown() -> None:
    cyrillic = ENGLISH.replace("o", "\N{CYRILLIC SMALL LETTER O}")
    assert coverage().has(form(cyrillic.replace("e", "e\u200b")))


def test_the_share_of_unknown_words_is_that_of_the_strangest_stretch() -> None:
    known, unknown = "head hurts " * 100, "xylophonically " * 4  # 56 characters
    shares = [
        form(text).unknown_share(field(ENGLISH))
        for text in (known + unknown, unknown + known, known + unknown + known)
    ]
    size = STRETCH + max(map(len, known.split()))
    assert all(56 / size <= share <= 56 / STRETCH for share in shares)
    assert form("xylophonically").unknown_share(field(ENGLISH)) == 14 / 40


def test_an_allow_is_sure_below_the_logit_of_its_length() -> None:
    calibration = Calibration(coverage=coverage())
    short, long = form(ENGLISH), form(ENGLISH * 20)

    def confident(logit: float, conversation: ConversationForm | None) -> bool:
        return calibration.verdict("rule", logit, conversation).confident

    assert [confident(logit, short) for logit in (-1.9, -2.1, 3.0)] == [False, True, True]
    assert [confident(logit, long) for logit in (-2.1, -5.1, 3.0)] == [False, True, True]
    assert not confident(-9.0, form(ENGLISH * 50)) and not confident(9.0, form(ENGLISH * 50))
    assert confident(-1.9, None)  # nobody says what it was about


def test_without_lengths_nothing_is_covered() -> None:
    assert not coverage(lengths=()).has(form(ENGLISH))


@pytest.mark.parametrize(
    "words",
    ["", "no base64!", "AAAA", packed_words(field("")[:1_000]), packed_words(field("")) * 2],
)
def test_a_card_s_field_of_words_is_whole(words: str) -> None:
    """Or the card is refused when it is loaded, not a check when it is judged."""
    with pytest.raises(ValueError, match="no field of words"):
        coverage(words=words)


def test_a_field_of_words_that_unpacks_to_more_is_not_unpacked() -> None:
    bomb = packed_words(np.zeros(1 << 28, bool))
    with pytest.raises(ValueError, match="8193 bytes instead of 8192"):
        coverage(words=bomb)
