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
from data.generator.phrasebook import Act, Corpus, Phrasebook, Pool, Speaker, cores_of, turns_of
from guard.errors import GuardError, choose_from

BookCheck = Callable[[Corpus, Path], None]
MARKS = frozenset("#^<>")


def _blocks(book: Phrasebook) -> Iterator[tuple[str, Sequence[str]]]:
    """Every block of lines after its key in the file; an act's are its cores."""
    cores = {name: act.cores for name, act in book.acts.items()}
    kinds = {"slots": book.slots, "parts": book.parts, "lines": book.lines, "acts": cores}
    for kind, blocks in kinds.items():
        for name, lines in blocks.items():
            yield f"{kind}.{name}", lines


def refuse_unknown(problem: str, names: Iterable[str], valid: Iterable[str], path: Path) -> None:
    """Raise GuardError at the first of `names` that is not `valid`."""
    valid_names = list(valid)
    for name in names:
        if name not in valid_names:
            remedy = choose_from(name, valid_names)
            raise GuardError(problem, where=path, got=name, remedy=remedy)


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
    refuse_unknown("unknown domain", corpus.book.domains, corpus.background.domains, path)


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
        refuse_unknown(f"acts.{name} names an unknown part", named, corpus.book.parts, path)


def contexts_exist(corpus: Corpus, path: Path) -> None:
    """Every context that an act names is a key of `lines`, or an act of another speaker."""
    acts = corpus.book.acts
    for name, act in acts.items():
        partners = [key for key, partner in acts.items() if partner.speaker != act.speaker]
        contexts = [*corpus.book.lines, *partners]
        refuse_unknown(f"acts.{name} names unknown lines", act.context, contexts, path)


def supplied_slots_exist(corpus: Corpus, path: Path) -> None:
    """Every slot whose values an act repeats is there."""
    for name, act in corpus.book.acts.items():
        problem = f"acts.{name}.supplied names an unknown slot"
        refuse_unknown(problem, act.supplied, corpus.book.slots, path)


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
    """Every block of `lines` has one that can be held out."""
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
    if corpus.rule.depends_on_context and not corpus.book.domains:
        raise GuardError(
            "the book of a rule that says `depends_on_context` needs `domains`",
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
