"""The phrase books on disk, `phrases/*.yaml`, and the books of excerpts, `phrases/excerpts/*.yaml`.

A book is checked as it is read: GuardError names the first line or key that is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from data.generator import grammar
from data.generator.excerpts import HOLE, ExcerptBook, right
from data.generator.phrasebook import (
    Act,
    Background,
    Corpus,
    Phrasebook,
    Pool,
    Speaker,
    cores_of,
    turns_of,
)
from data.generator.registers import EXCERPT_REGISTERS
from guard.errors import GuardError
from guard.files.yaml_file import load
from guard.home import yaml_files
from guard.rule import RULES, Rule

PHRASES = Path(__file__).parent / "phrases"
EXCERPTS = PHRASES / "excerpts"
BACKGROUND = "background"
MARKS = "#^<>"  # of digits, verbs and pronouns; they only work inside a slot's value


def phrase_files() -> list[Path]:
    """Every file of phrases: a rule's data hold acts of others."""
    return [*sorted(PHRASES.glob("*.yaml")), *sorted(EXCERPTS.glob("*.yaml"))]


def rules_with_phrases(rules: Path = RULES) -> list[Path]:
    """The files of the rules that the offline generator can write data for."""
    return [path for path in yaml_files(rules) if (PHRASES / path.name).is_file()]


def load_background(phrases: Path = PHRASES) -> Background:
    path = phrases / f"{BACKGROUND}.yaml"
    background = load(path, Background)
    blocks = {**background.slots, **background.domains}
    blocks |= {"systems": background.systems, "thanks": background.thanks}
    for name, lines in blocks.items():
        _check_lines(background.slots, lines, f"{path}: {name}", marks="")
    return background


def load_phrasebook(rule: Rule, background: Background, phrases: Path = PHRASES) -> Phrasebook:
    path = phrases / f"{rule.id}.yaml"
    if not path.is_file():
        problem = f"the offline generator has no phrases for the rule '{rule.id}'"
        remedy = f"Bring your own examples, `make data RULE={rule.id} DATA=FILE` or `data: FILE` "
        remedy += f"in recipes/rules/{rule.id}.yaml, or write the phrases after the model of the "
        remedy += "other files there"
        raise GuardError(problem, where=path, remedy=remedy)
    book = load(path, Phrasebook)
    book = book.model_copy(update={"slots": {**background.slots, **book.slots}})
    _check_book(Corpus(rule, book, (), background), path)
    return book


def load_corpus(rule: Rule, neighbours: Sequence[Rule]) -> Corpus:
    """The rule's phrases, the books that its `neighbours` lend, and everyday talk."""
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
    _check_excerpts(rule.id, book, path)
    return book


def _check_book(corpus: Corpus, path: Path) -> None:
    book = corpus.book
    _check_rule(book.rule, corpus.rule.id, path)
    grammar.refuse_unknown("unknown domain", book.domains, corpus.background.domains, path)
    _check_templates(book, path)
    for name, act in book.acts.items():
        _check_names(book, name, act, path)
        _check_speakers(book, name, act, path)
        _refuse_few(act.cores, f"{path}: acts.{name}")
    for name, lines in book.lines.items():
        if len(lines) < 2:
            problem = f"lines.{name} has too few lines to hold one out"
            raise GuardError(problem, where=path, got=len(lines), remedy="Write at least two")
    _check_answers(book, path)
    if corpus.rule.depends_on_context and not book.domains:
        problem = "the book of a rule that says `depends_on_context` needs `domains`"
        remedy = f"Known: {', '.join(corpus.background.domains)}"
        raise GuardError(problem, where=path, remedy=remedy)
    _check_partners(corpus, path)
    _check_places(corpus, path)


def _check_rule(rule_of_book: str, rule: str, path: Path) -> None:
    if rule_of_book != rule:
        problem, remedy = "rule differs from the file's name", f"Write `rule: {rule}`"
        raise GuardError(problem, where=path, got=rule_of_book, remedy=remedy)


def _check_templates(book: Phrasebook, path: Path) -> None:
    """Every line is a template of the grammar. `>>` separates turns of `lines`."""
    for name, values in book.slots.items():
        _check_lines(book.slots, values, f"{path}: slots.{name}", marks="")
    for name, lines in book.parts.items():
        _check_lines(book.slots, lines, f"{path}: parts.{name}")
    for name, lines in book.lines.items():
        turns = [line.replace(">>", "") for line in lines]
        _check_lines(book.slots, turns, f"{path}: lines.{name}")
    for name, act in book.acts.items():
        _check_lines(book.slots, act.cores, f"{path}: acts.{name}")


def _check_lines(
    slots: dict[str, tuple[str, ...]], lines: Iterable[str], where: str, marks: str = MARKS
) -> None:
    """The lines are templates whose slots exist, without `marks`."""
    for line in lines:
        grammar.check(line, slots, where=where)
        marked = set(marks) & set(line)
        if marked:
            problem, remedy = "marks that only work inside a slot's value", "Move them into a slot"
            raise GuardError(problem, where=where, got=f"{marked} in {line}", remedy=remedy)


def _check_names(book: Phrasebook, name: str, act: Act, path: Path) -> None:
    """What an act names is there; a context is a key of `lines`, or another speaker's act."""
    parts = (act.opening, act.softener, act.closing, act.padding)
    grammar.refuse_unknown(f"acts.{name} names an unknown part", parts, book.parts, path)
    partners = [key for key, partner in book.acts.items() if partner.speaker != act.speaker]
    contexts = [*book.lines, *partners]
    grammar.refuse_unknown(f"acts.{name} names unknown lines", act.context, contexts, path)
    problem = f"acts.{name}.supplied names an unknown slot"
    grammar.refuse_unknown(problem, act.supplied, book.slots, path)


def _check_speakers(book: Phrasebook, name: str, act: Act, path: Path) -> None:
    needs_before = act.speaker != "user"
    is_answered = act.speaker == "tool" or bool(act.after) != (act.speaker == "assistant")
    if bool(act.before) != needs_before or not is_answered:
        problem = f"acts.{name}: an assistant's act needs `before`, a user's act `after`, a tool's "
        problem += "act `before` and perhaps `after`"
        raise GuardError(problem, where=path, remedy="Name what others say there")
    for line in _named_lines(book, act.before):
        speakers = [speaker for speaker, _ in turns_of(line, "user")]
        _refuse_repeats([*speakers, act.speaker], line, f"{path}: acts.{name}.before")
    for line in _named_lines(book, act.after):
        speakers = [speaker for speaker, _ in turns_of(line, "assistant")]
        _refuse_repeats([act.speaker, *speakers], line, f"{path}: acts.{name}.after")


def _named_lines(book: Phrasebook, names: Iterable[str]) -> Iterator[str]:
    """The lines of the blocks that `names` name; the names of acts have none."""
    for name in names:
        yield from book.lines.get(name, ())


def _refuse_repeats(speakers: Sequence[Speaker], line: str, where: str) -> None:
    has_unknown = not set(speakers) <= set(get_args(Speaker))
    if has_unknown or any(first == second for first, second in itertools.pairwise(speakers)):
        problem = "the speakers of a line must be named and take turns, also with the act"
        remedy = "Write `user: … >> tool: …`, the turns separated by >>"
        raise GuardError(problem, where=where, got=line, remedy=remedy)


def _refuse_few(lines: tuple[str, ...], where: str) -> None:
    if not all(cores_of(lines, pool) for pool in get_args(Pool)):
        problem = "too few lines for training, validation and test to have their own"
        remedy = "Write at least four; fifteen and more are good"
        raise GuardError(problem, where=where, got=len(lines), remedy=remedy)


def _check_answers(book: Phrasebook, path: Path) -> None:
    answers = {act.after for act in book.acts.values() if act.speaker == "tool"}
    if len(answers) > 1:
        problem, remedy = "a tool's acts must name the same `after`", "Else the answer would tell"
        raise GuardError(problem, where=path, remedy=remedy)


def _check_partners(corpus: Corpus, path: Path) -> None:
    """Both labels have acts, and every act shares a context with an act of the other label."""
    violating, allowed = corpus.acts(violating=True), corpus.acts(violating=False)
    if not violating or not allowed:
        problem = "needs at least one act that violates the rule and one that does not"
        remedy = "An act violates where the judged speaker `does` it"
        raise GuardError(problem, where=path, remedy=remedy)
    pairs = [pair for pair in itertools.product(violating, allowed) if corpus.book.shared(*pair)]
    partnered = set(itertools.chain.from_iterable(pairs))
    for name in [*violating, *allowed]:
        if name not in partnered:
            problem = f"acts.{name} has nothing in its `before` or `after` in common with an act "
            problem += "of the other label"
            remedy = "Name the same lines in both, or let the violating act name the other "
            remedy += "speaker's; else the line alone would tell"
            raise GuardError(problem, where=path, remedy=remedy)


def _check_places(corpus: Corpus, path: Path) -> None:
    """A violating act that names an allowed one takes the place of a turn of its speaker there."""
    book = corpus.book
    pairs = itertools.product(corpus.acts(violating=False), corpus.acts(violating=True))
    for allowed, violating in pairs:
        if allowed not in book.acts[violating].context:
            continue
        act, speaker = book.acts[allowed], book.acts[violating].speaker
        for line in _named_lines(book, act.context):
            if speaker not in dict(turns_of(line, act.context_speaker)):
                problem = f"the {speaker} says nothing around acts.{allowed}, so acts.{violating} "
                problem += "can take no turn's place"
                remedy = f"Give the line a turn of the {speaker}"
                raise GuardError(problem, where=f"{path}: lines", got=line, remedy=remedy)


def _check_excerpts(rule: str, book: ExcerptBook, path: Path) -> None:
    """What a form of `either` needs besides is held by tests/data/generator/test_excerpts.py."""
    _check_rule(book.rule, rule, path)
    for name, values in book.slots.items():
        _check_lines(book.slots, values, f"{path}: slots.{name}", marks="")
    for name, excerpt in book.excerpts.items():
        where = f"{path}: excerpts.{name}"
        _check_lines(book.slots, excerpt.layouts, f"{where}.layouts", marks="#")
        for layout in excerpt.layouts:
            if layout.count(HOLE) != 1:
                problem = f"a layout has one hole, {HOLE}"
                remedy = "Put it where a pair's rows differ"
                raise GuardError(problem, where=f"{where}.layouts", got=layout, remedy=remedy)
        for label in (0, 1):
            fillings = excerpt.fillings(label)
            _check_lines(book.slots, map(right, fillings), f"{where}, of label {label}", marks="#")
            _refuse_few(fillings, f"{where}, of label {label}")
        for speaker, choices in excerpt.registers.items():
            problem = f"excerpts.{name}.registers.{speaker} names an unknown register"
            grammar.refuse_unknown(problem, choices, EXCERPT_REGISTERS, path)
