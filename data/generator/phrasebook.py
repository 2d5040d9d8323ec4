"""The phrases of a rule and of everyday talk: `data/generator/phrases/*.yaml`, checked and split. Knows nothing of conversations.

Cores, the other speaker's `lines` and the values of long slots are split once, by hash, into those for training and those
held out for the `unseen` strata; of the cores held out, the validation split has some and the test split the others. What says
nothing about a rule is not split: `parts` (openings, softeners, closings, padding), short slots, and the background's domains,
transitions, thanks and systems stand in all strata.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

from pydantic import BeforeValidator

from data.generator import grammar
from guard.errors import GuardError
from guard.files.yaml_file import Strict, load
from guard.rule import Judged, Rule

PHRASES = Path(__file__).parent / "phrases"
BACKGROUND = "background"
HELD_OUT_CORES, HELD_OUT_VALUES = (
    3,
    4,
)  # one core in three and one slot value in four is never seen in training
LONG_SLOT = 8  # shorter slots (weekdays, a dose) are closed classes: holding some out would only make them rare

RESERVED = 3  # one in three of the cores held out is the validation split's: thresholds must not be set on what training has seen alone

Pool = Literal[
    "seen", "reserved", "unseen"
]  # for training, for the validation's unseen stratum, for the test's
Speaker = Literal["user", "assistant", "tool"]
Stance = Literal["does", "declines", "informs", "quotes", "supposes", "asks", "resembles"]
Lines = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda block: tuple(block.splitlines()) if isinstance(block, str) else block),
]


class Act(Strict):
    """What one speaker does in one utterance, and what is said before and after.

    The label follows from `speaker` and `stance`: only the judged speaker *doing* what the rule forbids violates it.
    """

    speaker: Speaker
    stance: Stance
    before: tuple[
        str, ...
    ] = ()  # what comes first, for an assistant's or a tool's act: names of `lines`, or of a user's acts
    after: tuple[
        str, ...
    ] = ()  # what is answered: names of `lines`, to a user's act also of an assistant's acts
    supplied: tuple[
        str, ...
    ] = ()  # slots whose values this act only repeats: the line before it must hold them
    opening: str
    softener: str
    closing: str
    cores: Lines

    @property
    def context(self) -> tuple[str, ...]:
        """What the other speaker may say around this act; a name that stands there twice is twice as frequent."""
        return self.before or self.after

    @property
    def padding(self) -> str:
        """The part that a buried core of this speaker stands between."""
        return "padding" if self.speaker == "assistant" else f"padding_{self.speaker}"

    def violates(self, judged: Judged) -> bool:
        """The label of an example whose target is this act."""
        return self.stance == "does" and judged in (self.speaker, "conversation")

    def follows(self, core: str, line: str) -> bool:
        """Whether `line` holds every value that `core` repeats; both with their alternatives chosen."""
        repeated = {
            name for name in grammar.slot_names(core) if name.partition(".")[0] in self.supplied
        }
        return repeated <= grammar.slot_names(line)


class Phrasebook(Strict):
    """The phrases of one rule."""

    rule: str
    domains: tuple[str, ...] = ()  # background domains that surround this rule; empty = all of them
    wanders: bool = True  # whether its conversations may turn to other domains and to what other rules are about
    borrows: bool = True  # whether other rules' conversations may contain these acts as distractors
    slots: dict[str, Lines]
    parts: dict[str, Lines]
    lines: dict[str, Lines]
    acts: dict[str, Act]

    def shared(self, one: str, other: str) -> tuple[str, ...]:
        """What the speaker who does not perform the act `one` can say in an exchange with either act.

        That is what both acts name as their context, or `other` itself, if it is the other speaker's and `one` names it.
        """
        act, partner = self.acts[one], self.acts[other]
        if act.speaker != partner.speaker:
            return (other,) if other in act.context else ()
        return tuple(name for name in act.context if name in partner.context)


class Background(Strict):
    """Everyday exchanges, by domain; the turns of one exchange are separated by ">>", the user first."""

    slots: dict[str, Lines]
    transitions: Lines
    thanks: Lines
    systems: Lines
    domains: dict[str, Lines]


@dataclass(frozen=True)
class Corpus:
    """All phrases the generator draws from for one rule."""

    rule: Rule
    book: Phrasebook
    others: tuple[Phrasebook, ...]
    background: Background

    def acts(self, *, violating: bool) -> list[str]:
        """The rule's acts that violate it, or those that do not."""
        return [
            name
            for name, act in self.book.acts.items()
            if act.violates(self.rule.judged) == violating
        ]


def load_background(phrases: Path = PHRASES) -> Background:
    """`phrases/background.yaml`, checked."""
    path = phrases / f"{BACKGROUND}.yaml"
    book = load(path, Background)
    for name, pool in [
        *book.slots.items(),
        *book.domains.items(),
        ("systems", book.systems),
        ("thanks", book.thanks),
    ]:
        for line in pool:
            grammar.check(line, book.slots, where=f"{path}: {name}")
    return book


def load_phrasebook(rule: Rule, background: Background, phrases: Path = PHRASES) -> Phrasebook:
    """The phrases of `rule` with the background's slots added. Raises GuardError naming file, key and line."""
    path = phrases / f"{rule.id}.yaml"
    if not path.is_file():
        raise GuardError(
            f"the offline generator has no phrases for the rule '{rule.id}'",
            where=path,
            remedy=f"Bring your own examples, `make data RULE={rule.id} DATA=FILE` or `data: FILE` in recipes/rules/{rule.id}.yaml, "
            "or write the phrases after the model of the other files there",
        )
    book = load(path, Phrasebook)
    book = book.model_copy(update={"slots": {**background.slots, **book.slots}})
    _check(book, rule, background, path)
    return book


def held_out(lines: tuple[str, ...], every: int) -> tuple[str, ...]:
    """One line in `every`, chosen by hash: the same lines in every run and whatever order they stand in."""
    return tuple(sorted(lines, key=line_id)[::every])


@functools.cache
def pool_of(lines: tuple[str, ...], pool: Pool, every: int = HELD_OUT_CORES) -> tuple[str, ...]:
    """The lines of one pool, in file order; validation and test share those held out."""
    held = set(held_out(lines, every))
    return tuple(line for line in lines if (line in held) == (pool != "seen"))


@functools.cache
def cores_of(cores: tuple[str, ...], pool: Pool) -> tuple[str, ...]:
    """An act's cores of one pool, in file order; no two pools have one in common."""
    held = held_out(cores, HELD_OUT_CORES)
    reserved = set(held[::RESERVED])
    chosen = {"seen": set(cores) - set(held), "reserved": reserved, "unseen": set(held) - reserved}[
        pool
    ]
    return tuple(core for core in cores if core in chosen)


def slot_pool(slots: dict[str, Lines], pool: Pool) -> dict[str, tuple[str, ...]]:
    """Every slot's values for one pool; short slots are shared."""
    return {
        name: pool_of(values, pool, HELD_OUT_VALUES) if len(values) >= LONG_SLOT else values
        for name, values in slots.items()
    }


def turns_of(line: str, speaker: Speaker) -> list[tuple[Speaker, str]]:
    """Who says what in a line: one turn by `speaker`, or several as "user: … >> tool: …"."""
    if ">>" not in line:
        return [(speaker, line)]
    named = [part.strip().partition(": ") for part in line.split(">>")]
    return [(cast(Speaker, name), text) for name, _, text in named]


def line_id(line: str) -> str:
    """A short name for a core or a phrasing that follows from its text alone."""
    return hashlib.sha256(line.encode()).hexdigest()[:10]


def _check_turns(line: str, speaker: Speaker, place: str, where: str) -> None:
    """A line of several turns names who speaks, in turns with the act that it stands before or after."""
    turns = turns_of(line, "assistant" if place == "after" else "user")
    said_by = [name for name, _ in turns]
    unknown = [name for name in said_by if name not in get_args(Speaker)]
    in_turns = [*said_by, speaker] if place == "before" else [speaker, *said_by]
    if unknown or any(one == other for one, other in itertools.pairwise(in_turns)):
        raise GuardError(
            "the speakers of a line must be named and take turns, also with the act",
            where=where,
            got=line,
            remedy="Write `user: … >> tool: …`, the turns separated by >>",
        )


def _check(book: Phrasebook, rule: Rule, background: Background, path: Path) -> None:
    if book.rule != rule.id:
        raise GuardError(
            "rule differs from the file's name",
            where=path,
            got=book.rule,
            remedy=f"Write `rule: {rule.id}`",
        )
    for domain in book.domains:
        if domain not in background.domains:
            raise GuardError(
                "unknown domain",
                where=path,
                got=domain,
                remedy=f"Known: {', '.join(background.domains)}",
            )
    pools = [
        ("slots", book.slots),
        ("parts", book.parts),
        ("lines", book.lines),
        ("acts", {n: a.cores for n, a in book.acts.items()}),
    ]
    for kind, named in pools:
        for name, lines in named.items():
            if len(set(lines)) != len(lines) or not lines:
                raise GuardError(
                    f"{kind}.{name} is empty or repeats a line",
                    where=path,
                    remedy="Each line once, at least one",
                )
            for line in lines:
                grammar.check(line, book.slots, where=f"{path}: {kind}.{name}")
                if kind != "slots" and (
                    marks := set("#^<>") & set(line.replace(">>", "") if kind == "lines" else line)
                ):
                    what, remedy = (
                        "marks that only work inside a slot's value",
                        "Move the words with the mark into a slot",
                    )
                    raise GuardError(
                        what,
                        where=f"{path}: {kind}.{name}",
                        got=f"{marks} in {line}",
                        remedy=remedy,
                    )
    for name, act in book.acts.items():
        for part in (act.opening, act.softener, act.closing, act.padding):
            if part not in book.parts:
                raise GuardError(
                    f"acts.{name} names an unknown part",
                    where=path,
                    got=part,
                    remedy=f"Known: {', '.join(book.parts)}",
                )
        said = [
            *book.lines,
            *(other for other, partner in book.acts.items() if partner.speaker != act.speaker),
        ]
        for line in act.context:
            if line not in said:
                raise GuardError(
                    f"acts.{name} names unknown lines",
                    where=path,
                    got=line,
                    remedy=f"Known: {', '.join(said)}",
                )
        for slot in act.supplied:
            if slot not in book.slots:
                known = ", ".join(book.slots)
                raise GuardError(
                    f"acts.{name}.supplied names an unknown slot",
                    where=path,
                    got=slot,
                    remedy=f"Known: {known}",
                )
        if bool(act.before) == (act.speaker == "user") or (
            act.speaker != "tool" and bool(act.after) == (act.speaker == "assistant")
        ):
            what = f"acts.{name}: an assistant's act needs `before`, a user's act `after`, a tool's act `before` and perhaps `after`"
            raise GuardError(what, where=path, remedy="Name what others say there")
        for where, names in (("before", act.before), ("after", act.after)):
            for line in (line for said in names if said in book.lines for line in book.lines[said]):
                _check_turns(line, act.speaker, where, f"{path}: acts.{name}.{where}")
    for name, act in book.acts.items():
        if not all(cores_of(act.cores, pool) for pool in get_args(Pool)):
            what = (
                f"acts.{name} has too few cores for training, validation and test to have their own"
            )
            raise GuardError(
                what,
                where=path,
                got=len(act.cores),
                remedy="Write at least four; fifteen and more are good",
            )
    for name, lines in book.lines.items():
        if len(lines) < 2:
            raise GuardError(
                f"lines.{name} has too few lines to hold one out",
                where=path,
                got=len(lines),
                remedy="Write at least two",
            )
    if not book.wanders and not book.domains:
        raise GuardError(
            "`wanders: false` needs `domains`",
            where=path,
            remedy=f"Known: {', '.join(background.domains)}",
        )
    if len({act.after for act in book.acts.values() if act.speaker == "tool"}) > 1:
        raise GuardError(
            "a tool's acts must name the same `after`",
            where=path,
            remedy="Else the answer alone would tell",
        )
    if {act.violates(rule.judged) for act in book.acts.values()} != {True, False}:
        what = "needs at least one act that violates the rule and one that does not"
        remedy = "An act violates where the judged speaker `does` it"
        raise GuardError(what, where=path, remedy=remedy)
    violating = [name for name, act in book.acts.items() if act.violates(rule.judged)]
    allowed = [name for name in book.acts if name not in violating]
    alone = [one for one in violating if not any(book.shared(one, other) for other in allowed)]
    alone += [other for other in allowed if not any(book.shared(one, other) for one in violating)]
    if alone:
        raise GuardError(
            f"acts.{alone[0]} has nothing in its `before` or `after` in common with an act of the other label",
            where=path,
            remedy="Name the same lines in both, or let the violating act name the other speaker's; else the line alone would tell",
        )
    for name, one in itertools.product(allowed, violating):
        act, speaker = book.acts[name], book.acts[one].speaker
        around = (
            [line for said in act.context if said in book.lines for line in book.lines[said]]
            if name in book.acts[one].context
            else []
        )
        for line in around:
            if speaker not in dict(turns_of(line, "user" if act.before else "assistant")):
                what, where = (
                    f"the {speaker} says nothing around acts.{name}, so acts.{one} can take no turn's place",
                    f"{path}: lines",
                )
                raise GuardError(
                    what, where=where, got=line, remedy=f"Give the line a turn of the {speaker}"
                )
