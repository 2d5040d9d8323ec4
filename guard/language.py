"""How likely a text is in each language, by py3langid: naive Bayes over the bytes of its letters.

Knows nothing of rules.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from guard.prompt.text import visible

FEWEST_BYTES = 30  # of letters in UTF-8, 10 of Chinese: in a shorter text a name may decide
NO_LETTERS = re.compile(r"[\x00-@\[-`{-\x7f]+")  # of ASCII: they say nothing of a language

Probabilities = Mapping[str, float]  # by ISO 639's code of the language


def language_of(text: str) -> Probabilities | None:
    """None where the text is too short to tell. A millisecond is enough for 3,000 characters."""
    if not text.isascii():
        text = visible(text)
    words = NO_LETTERS.sub(" ", text).encode("utf-8", "ignore")
    if len(words) - words.count(b" ") < FEWEST_BYTES:
        return None
    return dict(identifier().rank(words))


@functools.cache
def identifier() -> LanguageIdentifier:
    """The model of 140 languages, which takes half a second to load."""
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
