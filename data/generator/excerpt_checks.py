"""What a rule's book of excerpts must keep to.

Knows nothing of how a book is read or used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from data.generator import grammar
from data.generator.book_checks import refuse_unknown
from data.generator.excerpts import HOLE, RIGHT_OR_WRONG, WRONG, Excerpt, ExcerptBook
from data.generator.phrasebook import HELD_OUT_VALUES, LONG_SLOT, Pool, cores_of, slot_pool
from data.generator.registers import EXCERPT_REGISTERS
from guard.errors import GuardError
from guard.rule import Rule


def check_excerpts(rule: Rule, book: ExcerptBook, path: Path) -> None:
    """Check a book of excerpts. Raises GuardError at the first thing that is wrong."""
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
        refuse_unknown(problem, choices, EXCERPT_REGISTERS, path)


def _check_either(book: ExcerptBook, excerpt: Excerpt, where: str) -> None:
    """It stands alone, and each of its lines says, whatever is drawn, something that can be wrong:
    what is right stands in every layout, and what is wrong in none.
    """
    if excerpt.does or excerpt.allowed:
        remedy = "Make it a form of its own"
        raise GuardError(
            "`either` cannot stand beside `does` or `allowed`", where=where, remedy=remedy
        )
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
