"""What a rule's phrase book must keep to, one function a requirement.

Knows nothing of how a book is read or used.

A check takes a corpus of one rule's book and the background, and the path that errors name; it
raises GuardError at the first line or key that is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from guard.rule import Rule

BookCheck = Callable[[Corpus, Path], None]
MARKS = frozenset("#^<>")


def _blocks(book: Phrasebook) -> Iterator[tuple[str, Sequence[str]]]:
    """Every block of lines after its key in the file; an act's are its cores."""
    cores = {name: act.cores for name, act in book.acts.items()}
    kinds = {"slots": book.slots, "parts": book.parts, "lines": book.lines, "acts": cores}
    for kind, blocks in kinds.items():
        for name, lines in blocks.items():
            yield f"{kind}.{name}", lines


def _refuse_unknown(problem: str, names: Iterable[str], known: Iterable[str], path: Path) -> None:
    """Raises GuardError at the first of `names` that is not `known`."""
    valid = list(known)
    for name in names:
        if name not in valid:
            raise GuardError(problem, where=path, got=name, remedy=choose_from(name, valid))


def book_is_the_rules(corpus: Corpus, path: Path) -> None:
    """The file's name and its `rule` agree."""
    if corpus.book.rule != corpus.rule.id:
        raise GuardError(
            "rule differs from the file's name",
            where=path,
            got=corpus.book.rule,
            remedy=f"Write `rule: {corpus.rule.id}`",
        )


def domains_exist(corpus: Corpus, path: Path) -> None:
    """Every domain is one of the background's."""
    _refuse_unknown("unknown domain", corpus.book.domains, corpus.background.domains, path)


def blocks_hold_distinct_lines(corpus: Corpus, path: Path) -> None:
    """No block is empty or repeats a line."""
    for key, lines in _blocks(corpus.book):
        if not lines or len(set(lines)) != len(lines):
            raise GuardError(
                f"{key} is empty or repeats a line",
                where=path,
                remedy="Each line once, at least one",
            )


def templates_parse(corpus: Corpus, path: Path) -> None:
    """Every line is a template of the grammar, and its slots exist."""
    for key, lines in _blocks(corpus.book):
        for line in lines:
            grammar.check(line, corpus.book.slots, where=f"{path}: {key}")


def marks_stand_in_slots(corpus: Corpus, path: Path) -> None:
    """Verbs, pronouns and digits are marked inside slots' values only.

    `>>` separates turns of `lines`.
    """
    for key, lines in _blocks(corpus.book):
        kind = key.partition(".")[0]
        if kind == "slots":
            continue
        for line in lines:
            text = line
            if kind == "lines":
                text = line.replace(">>", "")
            marks = MARKS & set(text)
            if marks:
                raise GuardError(
                    "marks that only work inside a slot's value",
                    where=f"{path}: {key}",
                    got=f"{set(marks)} in {line}",
                    remedy="Move the words with the mark into a slot",
                )


def parts_exist(corpus: Corpus, path: Path) -> None:
    """Every part that an act names is there."""
    for name, act in corpus.book.acts.items():
        named = (act.opening, act.softener, act.closing, act.padding)
        _refuse_unknown(f"acts.{name} names an unknown part", named, corpus.book.parts, path)


def contexts_exist(corpus: Corpus, path: Path) -> None:
    """What an act names as its context are `lines`, or acts of the other speakers."""
    acts = corpus.book.acts
    for name, act in acts.items():
        partners = [key for key, partner in acts.items() if partner.speaker != act.speaker]
        contexts = [*corpus.book.lines, *partners]
        _refuse_unknown(f"acts.{name} names unknown lines", act.context, contexts, path)


def supplied_slots_exist(corpus: Corpus, path: Path) -> None:
    """Every slot whose values an act repeats is there."""
    for name, act in corpus.book.acts.items():
        problem = f"acts.{name}.supplied names an unknown slot"
        _refuse_unknown(problem, act.supplied, corpus.book.slots, path)


def acts_name_their_side(corpus: Corpus, path: Path) -> None:
    """A user's act is answered, an assistant's and a tool's act have something before them."""
    for name, act in corpus.book.acts.items():
        needs_before = act.speaker != "user"
        is_answered = act.speaker == "tool" or bool(act.after) != (act.speaker == "assistant")
        if bool(act.before) != needs_before or not is_answered:
            raise GuardError(
                f"acts.{name}: an assistant's act needs `before`, a user's act `after`, a tool's "
                "act `before` and perhaps `after`",
                where=path,
                remedy="Name what others say there",
            )


def speakers_take_turns(corpus: Corpus, path: Path) -> None:
    """A line of several turns names its speakers; none comes twice in a row, the act included."""
    for name, act in corpus.book.acts.items():
        for line in _named_lines(corpus.book, act.before):
            speakers = [speaker for speaker, _ in turns_of(line, "user")]
            _refuse_repeats([*speakers, act.speaker], line, f"{path}: acts.{name}.before")
        for line in _named_lines(corpus.book, act.after):
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


def every_pool_has_cores(corpus: Corpus, path: Path) -> None:
    """Training, validation and test have cores of their own for every act."""
    for name, act in corpus.book.acts.items():
        if not all(cores_of(act.cores, pool) for pool in get_args(Pool)):
            raise GuardError(
                f"acts.{name} has too few cores for training, validation and test to have their "
                "own",
                where=path,
                got=len(act.cores),
                remedy="Write at least four; fifteen and more are good",
            )


def every_block_can_be_split(corpus: Corpus, path: Path) -> None:
    """Of every block of `lines` one can be held out."""
    for name, lines in corpus.book.lines.items():
        if len(lines) < 2:
            raise GuardError(
                f"lines.{name} has too few lines to hold one out",
                where=path,
                got=len(lines),
                remedy="Write at least two",
            )


def confined_books_name_domains(corpus: Corpus, path: Path) -> None:
    """A book whose conversations keep to their domains says which those are."""
    if not corpus.book.wanders and not corpus.book.domains:
        raise GuardError(
            "`wanders: false` needs `domains`",
            where=path,
            remedy=f"Known: {', '.join(corpus.background.domains)}",
        )


def tools_acts_are_answered_alike(corpus: Corpus, path: Path) -> None:
    """The answer to a tool's act does not tell which act it was."""
    answers = {act.after for act in corpus.book.acts.values() if act.speaker == "tool"}
    if len(answers) > 1:
        raise GuardError(
            "a tool's acts must name the same `after`",
            where=path,
            remedy="Else the answer alone would tell",
        )


def both_labels_have_acts(corpus: Corpus, path: Path) -> None:
    """Some act violates the rule, and some act does not."""
    if not corpus.acts(violating=True) or not corpus.acts(violating=False):
        raise GuardError(
            "needs at least one act that violates the rule and one that does not",
            where=path,
            remedy="An act violates where the judged speaker `does` it",
        )


def acts_have_partners(corpus: Corpus, path: Path) -> None:
    """Every act shares a context with one of the other label."""
    violating, allowed = corpus.acts(violating=True), corpus.acts(violating=False)
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


def violating_acts_find_a_turn(corpus: Corpus, path: Path) -> None:
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


BOOK_CHECKS: tuple[BookCheck, ...] = (
    book_is_the_rules,
    domains_exist,
    blocks_hold_distinct_lines,
    templates_parse,
    marks_stand_in_slots,
    parts_exist,
    contexts_exist,
    supplied_slots_exist,
    acts_name_their_side,
    speakers_take_turns,
    every_pool_has_cores,
    every_block_can_be_split,
    confined_books_name_domains,
    tools_acts_are_answered_alike,
    both_labels_have_acts,
    acts_have_partners,
    violating_acts_find_a_turn,
)


def check_excerpts(rule: Rule, book: ExcerptBook, path: Path) -> None:
    """What a book of excerpts must keep to. Raises GuardError at the first thing that is wrong."""
    if book.rule != rule.id:
        raise GuardError(
            "rule differs from the file's name",
            where=path,
            got=book.rule,
            remedy=f"Write `rule: {rule.id}`",
        )
    for name, values in book.slots.items():
        for value in values:
            grammar.check(value, book.slots, where=f"{path}: slots.{name}")
    for name, excerpt in book.excerpts.items():
        _check_excerpt(book, excerpt, path, name)
    _check_pools(book, path)


def _check_excerpt(book: ExcerptBook, excerpt: Excerpt, path: Path, name: str) -> None:
    """One form: its lines are templates, each layout has one hole, each pool has fillings."""
    where = f"{path}: excerpts.{name}"
    fillings: tuple[str, ...] = ("does", "allowed")
    if excerpt.either:
        fillings = ("either",)
        _check_either(book, excerpt, where)
    for key in ("layouts", *fillings):
        lines = getattr(excerpt, key)
        if key == "either":
            lines = tuple(_rightly(line) for line in lines)
        _check_lines(book, lines, f"{where}.{key}")
    for layout in excerpt.layouts:
        if layout.count(HOLE) != 1:
            raise GuardError(
                f"a layout has one hole, {HOLE}",
                where=f"{where}.layouts",
                got=layout,
                remedy="Put it where the rows of a pair differ",
            )
    for key in fillings:
        lines = getattr(excerpt, key)
        if not all(cores_of(lines, pool) for pool in get_args(Pool)):
            raise GuardError(
                "too few lines for training, validation and test to have their own",
                where=f"{where}.{key}",
                got=len(lines),
                remedy="Write at least four; fifteen and more are good",
            )
    for speaker, choices in excerpt.registers.items():
        problem = f"excerpts.{name}.registers.{speaker} names an unknown register"
        _refuse_unknown(problem, choices, EXCERPT_REGISTERS, path)


def _check_either(book: ExcerptBook, excerpt: Excerpt, where: str) -> None:
    """It stands alone, and each of its lines says, whatever is drawn, something that can be wrong:
    what is right stands in every layout, and what is wrong in none.
    """
    if excerpt.does or excerpt.allowed:
        remedy = "Make it a form of its own"
        raise GuardError("`either` stands beside `does` or `allowed`", where=where, remedy=remedy)
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
    there = grammar.reached(layout, book.slots)
    if slot not in there:
        remedy = f"Put {{{slot}}} into it, or take {{{slot}.?}} out of `either`"
        raise GuardError(f"a layout does not say '{slot}'", where=where, got=layout, remedy=remedy)
    if slot + WRONG in there:
        raise GuardError(
            f"a layout has the number of the wrong '{slot}'",
            where=where,
            got=layout,
            remedy=f"Take another number than {WRONG}",
        )


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


def _check_pools(book: ExcerptBook, path: Path) -> None:
    """A line of two blocks is held out in both or in neither."""
    pools: dict[str, Pool] = {}
    for name, excerpt in book.excerpts.items():
        for lines in (excerpt.does, excerpt.allowed, excerpt.either):
            for pool in get_args(Pool):
                for line in cores_of(lines, pool):
                    if pools.setdefault(_rightly(line), pool) != pool:
                        raise GuardError(
                            "a line is held out in one block and not in another",
                            where=f"{path}: excerpts.{name}",
                            got=line,
                            remedy="Write it once, or reword one of the two",
                        )


def _rightly(line: str) -> str:
    """A line of `either` as the allowed row has it."""
    return RIGHT_OR_WRONG.sub(r"{\1}", line)


def _check_lines(book: ExcerptBook, lines: Sequence[str], where: str) -> None:
    """A block is not empty and repeats nothing, and its lines are templates."""
    if not lines or len(set(lines)) != len(lines):
        raise GuardError(
            "a block is empty or repeats a line", where=where, remedy="Each line once, at least one"
        )
    for line in lines:
        grammar.check(line, book.slots, where=where)
        if "#" in line:
            raise GuardError(
                "a digit's mark outside a slot's value",
                where=where,
                got=line,
                remedy="Move the words with the mark into a slot",
            )
