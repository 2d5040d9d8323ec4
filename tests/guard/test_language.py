"""Which language a text is in, where it is long enough to tell."""

from __future__ import annotations

from guard.language import language_of

ENGLISH = "Please ask your doctor before you take this."
TEXTS = {
    ENGLISH: "en",
    "Bitte fragen Sie vorher Ihre Ärztin oder Ihren Arzt.": "de",
    "请在服药之前咨询您的医生": "zh",
    ENGLISH.replace("o", "\N{CYRILLIC SMALL LETTER O}"): "en",  # as a reader sees it
    f"{ENGLISH} \ud800 800 mg, 4 x 200 = 800": "en",
    "": None,
    "Bo Berg, Elm Street": None,
    "12345 67890 " * 9: None,
}


def test_a_sentence_is_likeliest_in_its_language_and_names_and_numbers_tell_none() -> None:
    for text, language in TEXTS.items():
        probabilities = language_of(text)
        assert (probabilities and max(probabilities, key=probabilities.__getitem__)) == language
