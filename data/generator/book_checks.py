"""What a rule's phrase book and its book of excerpts must keep to.

A check takes a book, with the path that errors name, and raises GuardError at the first line or key
that is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from data.generator import grammar
from data.generator.excerpts import HOLE, RIGHT_OR_WRONG, WRONG, Excerpt, ExcerptBook
from data.generator.phrasebook import (
    HELD_OUT_VALUES,
    LONG_SLOT,
    Act,
    Corpus,
    Phrasebook,
    Pool,
    Speaker,
    cores_of,
    slot_pool,
    turns_of,
)
from data.generator.registers import EXCERPT_REGISTERS
from guard.errors import GuardError, choose_from

MARKS = "#^<>"  # of digits, verbs and pronouns; they only work inside a slot's value


def check_book(corpus: Corpus, path: Path) -> None:
    """Check the phrase book of `corpus`, which needs no borrowed books."""
    _check_rule(corpus.book.rule, corpus.rule.id, path)
    problem = "unknown domain"
    _refuse_unknown(problem, corpus.book.domains, corpus.background.domains, path)
    _check_templates(corpus.book, path)
    _check_names(corpus.book, path)
    _check_speakers(corpus.book, path)
    _check_pools(corpus.book, path)
    _check_tools(corpus.book, path)
    if corpus.rule.depends_on_context and not corpus.book.domains:
        raise GuardError(
            "the book of a rule that says `depends_on_context` needs `domains`",
            where=path,
            remedy=f"Known: {', '.join(corpus.background.domains)}",
        )
    _check_partners(corpus, path)
    _check_places(corpus, path)


def _check_rule(rule_of_book: str, rule: str, path: Path) -> None:
    if rule_of_book != rule:
        remedy = f"Write `rule: {rule}`"
        raise GuardError(
            "rule differs from the file's name", where=path, got=rule_of_book, remedy=remedy
        )


def _refuse_unknown(problem: str, names: Iterable[str], valid: Iterable[str], path: Path) -> None:
    """Raise GuardError at the first of `names` that is not `valid`."""
    valid_names = list(valid)
    for name in names:
        if name not in valid_names:
            remedy = choose_from(name, valid_names)
            raise GuardError(problem, where=path, got=name, remedy=remedy)


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
            raise GuardError(
                "marks that only work inside a slot's value",
                where=where,
                got=f"{marked} in {line}",
                remedy="Move the words with the mark into a slot",
            )


def _check_names(book: Phrasebook, path: Path) -> None:
    """Every part, context and supplied slot that an act names is there. A context is a key of
    `lines`, or an act of another speaker.
    """
    for name, act in book.acts.items():
        parts = (act.opening, act.softener, act.closing, act.padding)
        _refuse_unknown(f"acts.{name} names an unknown part", parts, book.parts, path)
        partners = [key for key, partner in book.acts.items() if partner.speaker != act.speaker]
        contexts = [*book.lines, *partners]
        _refuse_unknown(f"acts.{name} names unknown lines", act.context, contexts, path)
        problem = f"acts.{name}.supplied names an unknown slot"
        _refuse_unknown(problem, act.supplied, book.slots, path)


def _check_speakers(book: Phrasebook, path: Path) -> None:
    """Acts have something before or after them, and speakers take turns there."""
    for name, act in book.acts.items():
        needs_before = act.speaker != "user"
        is_answered = act.speaker == "tool" or bool(act.after) != (act.speaker == "assistant")
        if bool(act.before) != needs_before or not is_answered:
            raise GuardError(
                f"acts.{name}: an assistant's act needs `before`, a user's act `after`, a tool's "
                "act `before` and perhaps `after`",
                where=path,
                remedy="Name what others say there",
            )
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
        raise GuardError(
            "the speakers of a line must be named and take turns, also with the act",
            where=where,
            got=line,
            remedy="Write `user: … >> tool: …`, the turns separated by >>",
        )


def _check_pools(book: Phrasebook, path: Path) -> None:
    """Training, validation and test have cores of their own, and a line can be held out."""
    for name, act in book.acts.items():
        _refuse_few(act.cores, f"{path}: acts.{name}")
    for name, lines in book.lines.items():
        if len(lines) < 2:
            problem = f"lines.{name} has too few lines to hold one out"
            raise GuardError(problem, where=path, got=len(lines), remedy="Write at least two")


def _refuse_few(lines: tuple[str, ...], where: str) -> None:
    if not all(cores_of(lines, pool) for pool in get_args(Pool)):
        raise GuardError(
            "too few lines for training, validation and test to have their own",
            where=where,
            got=len(lines),
            remedy="Write at least four; fifteen and more are good",
        )


def _check_tools(book: Phrasebook, path: Path) -> None:
    answers = {act.after for act in book.acts.values() if act.speaker == "tool"}
    if len(answers) > 1:
        raise GuardError(
            "a tool's acts must name the same `after`",
            where=path,
            remedy="Else the answer alone would tell",
        )


def _check_partners(corpus: Corpus, path: Path) -> None:
    """Both labels have acts, and every act shares a context with an act of the other label."""
    violating, allowed = corpus.acts(violating=True), corpus.acts(violating=False)
    if not violating or not allowed:
        raise GuardError(
            "needs at least one act that violates the rule and one that does not",
            where=path,
            remedy="An act violates where the judged speaker `does` it",
        )
    pairs = [pair for pair in itertools.product(violating, allowed) if corpus.book.shared(*pair)]
    partnered = set(itertools.chain.from_iterable(pairs))
    for name in [*violating, *allowed]:
        if name not in partnered:
            raise GuardError(
                f"acts.{name} has nothing in its `before` or `after` in common with an act of the "
                "other label",
                where=path,
                remedy="Name the same lines in both, or let the violating act name the other "
                "speaker's; else the line alone would tell",
            )


def _check_places(corpus: Corpus, path: Path) -> None:
    """A violating act that names an allowed one finds a turn of its speaker there."""
    acts = corpus.book.acts
    for allowed, violating in itertools.product(
        corpus.acts(violating=False), corpus.acts(violating=True)
    ):
        if allowed in acts[violating].context:
            _refuse_silence(corpus.book, acts[allowed], (allowed, violating), path)


def _refuse_silence(book: Phrasebook, act: Act, names: tuple[str, str], path: Path) -> None:
    """Raise GuardError if the violating act's speaker is silent around the allowed `act`."""
    allowed, violating = names
    speaker = book.acts[violating].speaker
    for line in _named_lines(book, act.context):
        if speaker not in dict(turns_of(line, act.context_speaker)):
            raise GuardError(
                f"the {speaker} says nothing around acts.{allowed}, so acts.{violating} can take "
                "no turn's place",
                where=f"{path}: lines",
                got=line,
                remedy=f"Give the line a turn of the {speaker}",
            )


def check_excerpts(rule: str, book: ExcerptBook, path: Path) -> None:
    """Check a book of excerpts of `rule`."""
    _check_rule(book.rule, rule, path)
    for name, values in book.slots.items():
        _check_lines(book.slots, values, f"{path}: slots.{name}", marks="")
    for name, excerpt in book.excerpts.items():
        _check_excerpt(book, excerpt, f"{path}: excerpts.{name}")
        for speaker, choices in excerpt.registers.items():
            problem = f"excerpts.{name}.registers.{speaker} names an unknown register"
            _refuse_unknown(problem, choices, EXCERPT_REGISTERS, path)
    _check_held_out_alike(book, path)


def _check_excerpt(book: ExcerptBook, excerpt: Excerpt, where: str) -> None:
    """One form: its lines are templates, each layout has one hole, each pool has fillings."""
    fillings = {"does": excerpt.does, "allowed": excerpt.allowed}
    if excerpt.either:
        fillings = {"either": excerpt.either}
        _check_either(book, excerpt, where)
    _check_lines(book.slots, excerpt.layouts, f"{where}.layouts", marks="#")
    for key, lines in fillings.items():
        _check_lines(book.slots, map(_as_allowed, lines), f"{where}.{key}", marks="#")
        _refuse_few(lines, f"{where}.{key}")
    for layout in excerpt.layouts:
        if layout.count(HOLE) != 1:
            raise GuardError(
                f"a layout has one hole, {HOLE}",
                where=f"{where}.layouts",
                got=layout,
                remedy="Put it where the rows of a pair differ",
            )


def _check_either(book: ExcerptBook, excerpt: Excerpt, where: str) -> None:
    """`either` stands alone. Every phrasing of its lines names a slot that can be wrong. Every
    layout says the right value of that slot, and no layout says the wrong one.
    """
    if excerpt.does or excerpt.allowed:
        problem = "`either` cannot stand beside `does` or `allowed`"
        raise GuardError(problem, where=where, remedy="Make it a form of its own")
    for line in excerpt.either:
        if not RIGHT_OR_WRONG.search(grammar.without_choices(line)):
            raise GuardError(
                "a line says nothing that can be wrong, or not always",
                where=f"{where}.either",
                got=line,
                remedy="Put {slot.?}, outside of brackets, where layouts say {slot}",
            )
        for slot in RIGHT_OR_WRONG.findall(line):
            _check_values(book, slot, f"{where}.either")
            for layout in excerpt.layouts:
                _check_asked(book, slot, layout, f"{where}.layouts")


def _check_asked(book: ExcerptBook, slot: str, layout: str, where: str) -> None:
    """The layout has the right value of a slot of `either`, and not the wrong one."""
    reached_slots = grammar.reached(layout, book.slots)
    if slot not in reached_slots:
        remedy = f"Put {{{slot}}} into it, or take {{{slot}.?}} out of `either`"
        raise GuardError(f"a layout does not say '{slot}'", where=where, got=layout, remedy=remedy)
    if slot + WRONG in reached_slots:
        problem = f"a layout has the number of the wrong '{slot}'"
        remedy = f"Take another number than {WRONG}"
        raise GuardError(problem, where=where, got=layout, remedy=remedy)


def _check_values(book: ExcerptBook, slot: str, where: str) -> None:
    """Every pool has so many values of a slot, each once, that the wrong one is not the right one.

    A slot that the book does not know is refused elsewhere.
    """
    fewest = int(WRONG.removeprefix("."))
    for pool in get_args(Pool):
        values = slot_pool(book.slots, pool).get(slot)
        if values is not None and len(set(values)) < fewest:
            raise GuardError(
                f"too few values of the slot '{slot}' for one to be wrong",
                where=where,
                got=f"{len(set(values))} for {pool} rows",
                remedy=f"Write {fewest} to {LONG_SLOT - 1}, or {fewest * HELD_OUT_VALUES} and more",
            )


def _check_held_out_alike(book: ExcerptBook, path: Path) -> None:
    """A line of two blocks is held out in both or in neither."""
    pools: dict[str, Pool] = {}
    for name, excerpt in book.excerpts.items():
        blocks = (excerpt.does, excerpt.allowed, excerpt.either)
        for lines, pool in itertools.product(blocks, get_args(Pool)):
            for line in cores_of(lines, pool):
                if pools.setdefault(_as_allowed(line), pool) != pool:
                    raise GuardError(
                        "a line is held out in one block and not in another",
                        where=f"{path}: excerpts.{name}",
                        got=line,
                        remedy="Write it once, or reword one of the two",
                    )


def _as_allowed(line: str) -> str:
    """A line of `either` in the allowed row: `{slot.?}` is `{slot}`."""
    return RIGHT_OR_WRONG.sub(r"{\1}", line)
