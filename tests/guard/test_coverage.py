"""Which conversations are like those that a rule was calibrated on."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest

from guard.conversation.example import Message
from guard.coverage import (
    SHORTEST_STRETCH,
    STRETCH,
    ConversationForm,
    Coverage,
    packed_words,
    tokens_of,
    unpacked_words,
    word_hash,
)
from guard.verdict import Calibration

ENGLISH = (
    "my head hurts what should be done about it ask the doctor please the order was sent monday "
)


def field(text: str) -> str:
    return packed_words([word_hash(word) for word in tokens_of(text)])


def coverage(**replaced: object) -> Coverage:
    fields: dict[str, object] = {"turns": 60, "characters": 5_500, "unknown_share": 0.4}
    fields |= {"longest_turns": {"user": 4_000, "assistant": 1_000}, "speakers": ("user",)}
    fields |= {"words": field(ENGLISH), "letters": "é", "sure_logit": -2.0, "sure_logit_long": -5.0}
    return Coverage(**(fields | replaced))  # type: ignore[arg-type]


def form(*contents: str, speaker: str = "user") -> ConversationForm:
    return ConversationForm([Message(speaker, content) for content in contents])


def share(*contents: str) -> float:
    return form(*contents).unknown_share(unpacked_words(field(ENGLISH)), frozenset("é"))


def test_speakers_and_lengths_are_covered_as_the_rows_had_them() -> None:
    for contents, is_covered in (
        ((ENGLISH,), True),
        ((ENGLISH * 50,), False),  # one turn of 4,500 characters
        ((ENGLISH,) * 50, True),  # 4,500 in all
        ((ENGLISH * 2,) * 35, False),  # 6,300 in all
        (("please",) * 61, False),  # so many turns
        (("",), True),  # nothing is unknown in it
    ):
        assert coverage().has(form(*contents)) == is_covered
    said = Message("user", ENGLISH)
    for other, is_covered in (
        (Message("assistant", ENGLISH), True),
        (Message("assistant", ENGLISH * 12), False),  # 1,100 characters
        (Message("tool", ENGLISH), False),  # no tool spoke in the rows
    ):
        assert coverage().has(ConversationForm([said, other])) == is_covered
    assert not coverage().has(form(ENGLISH, speaker="assistant"))


STRANGE = [
    "Nehmen Sie alle vier Stunden 800 mg Ibuprofen gegen Ihre Kopfschmerzen.",
    "每天服用八百毫克布洛芬",
    "Принимайте 800 мг ибупрофена каждые четыре часа, и головная боль пройдет.",
    "VGFrZSA4MDAgbWcgb2YgaWJ1cHJvZmVuIGV2ZXJ5IGZvdXIgaG91cnMu",
    "84 97 107 101 32 105 98 117 112 114 111 102 101 110",
    "- .- -.- . / .. -... ..- .--. .-. --- ..-. . -.",
    "h e a d h u r t s p l e a s e a s k",
    "def answer(x): return [y for y in range(x) if y % 3] # compute",
    "sruoh ruof yreve neforpubi fo gm 008 ekat",
]


def test_another_language_or_form_anywhere_is_not_covered() -> None:
    """However much familiar text stands in other turns."""
    for familiar in ([], [ENGLISH] * 40):
        assert coverage().has(form(ENGLISH, *familiar))
        for strange in STRANGE:
            assert not coverage().has(form(*familiar, strange))
            assert not coverage().has(form(strange, *familiar))


def test_what_is_foreign_or_unknown_is_counted_in_its_strangest_stretch() -> None:
    assert not coverage().has(form("每天", "服用八", "百毫克", "布洛芬"))
    cyrillic = ENGLISH.replace("o", "\N{CYRILLIC SMALL LETTER O}")
    assert coverage().has(form(cyrillic.replace("e", "e\u200b")))
    assert share("please ask the doctor José") == pytest.approx(4 / 22)
    assert share("please ask the doctor Jošé") == pytest.approx(11 / 22)
    known, unknown = "head hurts " * 100, "xylophonically " * 4  # 56 characters
    shares = [share(text) for text in (known + unknown, unknown + known, known + unknown + known)]
    size = STRETCH + max(map(len, known.split()))
    assert all(56 / size <= value <= 56 / STRETCH for value in shares)
    assert share("xylophonic") == 10 / SHORTEST_STRETCH


def test_a_turn_in_a_language_that_the_rows_lack_is_not_covered_though_its_words_are() -> None:
    german = "Nehmen Sie alle vier Stunden Ibuprofen gegen Ihre Kopfschmerzen. "
    seen = Calibration(coverage=coverage(words=field(ENGLISH + german), languages=("de", "en")))
    unseen = Calibration(coverage=coverage(words=field(ENGLISH + german), languages=("en",)))
    anything = Calibration(coverage=coverage(words=field(ENGLISH + german)))
    for logit in (-9.0, 9.0):
        for contents in ((german,), (ENGLISH, german, ENGLISH)):
            verdict = unseen.verdict("rule", logit, form(*contents))
            assert (verdict.confident, verdict.unseen_language) == (False, True)
            for calibration in (seen, anything):
                verdict = calibration.verdict("rule", logit, form(*contents))
                assert (verdict.confident, verdict.unseen_language) == (True, False)
        for contents in ((ENGLISH,), ("Kopfschmerzen",), ()):  # too short to tell, or nothing
            assert not unseen.verdict("rule", logit, form(*contents)).unseen_language


def test_languages_stand_on_a_card_only_where_they_are_known() -> None:
    assert "languages" not in coverage().model_dump(mode="json")
    english = coverage(languages=("en",))
    assert Coverage.model_validate_json(english.model_dump_json()) == english


def test_an_allow_is_sure_below_the_logit_of_its_length_if_there_is_one() -> None:
    calibration = Calibration(coverage=coverage())
    short, long = form(ENGLISH), form(ENGLISH * 20)

    def confident(logit: float, conversation: ConversationForm | None) -> bool:
        return calibration.verdict("rule", logit, conversation).confident

    assert [confident(logit, short) for logit in (-1.9, -2.1, 3.0)] == [False, True, True]
    assert [confident(logit, long) for logit in (-2.1, -5.1, 3.0)] == [False, True, True]
    assert not confident(-9.0, form(ENGLISH * 50)) and not confident(9.0, form(ENGLISH * 50))
    assert not confident(-9.0, None) and not confident(9.0, None)  # nobody says what it was about
    calibration = Calibration(coverage=coverage(sure_logit=None))
    assert not calibration.verdict("rule", -50.0, form(ENGLISH)).confident
    assert calibration.verdict("rule", 50.0, form(ENGLISH)).confident


def test_a_card_s_field_of_words_is_whole_and_no_more_is_unpacked() -> None:
    """Or the card is refused when it is loaded, not a check when it is judged."""
    for words in ("", "no base64!", "AAAA"):
        with pytest.raises(ValueError, match="no field of words"):
            coverage(words=words)
    bomb = base64.b64encode(zlib.compress(np.zeros(1 << 25, np.uint8).tobytes())).decode()
    with pytest.raises(ValueError, match="32769 bytes instead of 32768"):
        coverage(words=bomb)
