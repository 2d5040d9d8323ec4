"""The phrase books of all shipped rules, read once for all tests of a process. Tests only."""

from __future__ import annotations

import functools

from data.generator.library import BACKGROUND, PHRASES, load_background, load_phrasebook
from data.generator.phrasebook import Corpus, Phrasebook
from guard.rule import load_rule

RULES_WITH_PHRASES = sorted(path.stem for path in PHRASES.glob("*.yaml") if path.stem != BACKGROUND)


background = functools.cache(load_background)


@functools.cache
def phrasebook(name: str) -> Phrasebook:
    """The rule's."""
    return load_phrasebook(load_rule(name), background())


@functools.cache
def corpus_of(name: str, neighbours: tuple[str, ...] = tuple(RULES_WITH_PHRASES)) -> Corpus:
    """What `load_corpus` gives, from books that are read once."""
    books = [phrasebook(neighbour) for neighbour in neighbours if neighbour != name]
    lent = tuple(book for book in books if book.borrows)
    return Corpus(load_rule(name), phrasebook(name), lent, background())
