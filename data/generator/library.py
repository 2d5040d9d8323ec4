"""The phrase books on disk, read and checked: `data/generator/phrases/*.yaml`, and excerpts in
`phrases/excerpts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data.generator import grammar
from data.generator.book_checks import check_book, check_excerpts
from data.generator.excerpts import ExcerptBook
from data.generator.phrasebook import Background, Corpus, Phrasebook
from guard.errors import GuardError
from guard.files.yaml_file import load
from guard.home import yaml_files
from guard.rule import RULES, Rule

PHRASES = Path(__file__).parent / "phrases"
EXCERPTS = PHRASES / "excerpts"
BACKGROUND = "background"


def rules_with_phrases(rules: Path = RULES) -> list[Path]:
    """The files of the rules that the offline generator can write data for."""
    return [path for path in yaml_files(rules) if (PHRASES / path.name).is_file()]


def load_background(phrases: Path = PHRASES) -> Background:
    """`phrases/background.yaml`. Raises GuardError for a line that is no template."""
    path = phrases / f"{BACKGROUND}.yaml"
    background = load(path, Background)
    blocks = {
        **background.slots,
        **background.domains,
        "systems": background.systems,
        "thanks": background.thanks,
    }
    for name, lines in blocks.items():
        for line in lines:
            grammar.check(line, background.slots, where=f"{path}: {name}")
    return background


def load_phrasebook(rule: Rule, background: Background, phrases: Path = PHRASES) -> Phrasebook:
    """The phrases of `rule` with the background's slots added. Raises GuardError."""
    path = phrases / f"{rule.id}.yaml"
    if not path.is_file():
        raise GuardError(
            f"the offline generator has no phrases for the rule '{rule.id}'",
            where=path,
            remedy=f"Bring your own examples, `make data RULE={rule.id} DATA=FILE` or `data: FILE` "
            f"in recipes/rules/{rule.id}.yaml, or write the phrases after the model of the other "
            "files there",
        )
    book = load(path, Phrasebook)
    book = book.model_copy(update={"slots": {**background.slots, **book.slots}})
    check_book(Corpus(rule, book, (), background), path)
    return book


def load_corpus(rule: Rule, neighbours: Sequence[Rule]) -> Corpus:
    """The rule's phrases, those of its `neighbours` that lend theirs, and everyday talk."""
    background = load_background()
    lenders = [neighbour for neighbour in neighbours if neighbour.id != rule.id]
    books = [load_phrasebook(neighbour, background) for neighbour in lenders]
    borrowed = tuple(book for book in books if book.borrows)
    return Corpus(rule, load_phrasebook(rule, background), borrowed, background)


def load_excerpts(rule: Rule, folder: Path = EXCERPTS) -> ExcerptBook | None:
    """The excerpts of `rule` with the background's slots added, None where it has none."""
    path = folder / f"{rule.id}.yaml"
    if not path.is_file():
        return None
    book = load(path, ExcerptBook)
    book = book.model_copy(update={"slots": {**load_background().slots, **book.slots}})
    check_excerpts(rule.id, book, path)
    return book


def phrase_files() -> list[Path]:
    """Every file of phrases: a rule's data hold acts of others."""
    return [*sorted(PHRASES.glob("*.yaml")), *sorted(EXCERPTS.glob("*.yaml"))]
