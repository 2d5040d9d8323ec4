"""The phrases of one rule and of everyday talk, and which of them training may see.

Training has its own cores, other speakers' `lines` and values of long slots, chosen by hash; the
rest is held out for the `unseen` strata. Some held-out cores are the validation split's, the others
the test split's. What says nothing about a rule stands in all strata: `parts` (openings, softeners,
closings, padding), short slots, and all of the background.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from pydantic import AfterValidator

from data.generator import grammar
from data.generator.words import Lines
from guard.files.yaml_file import Strict
from guard.rule import Judged, Rule

HELD_OUT_CORES = 3  # one core in three is never seen in training
HELD_OUT_VALUES = 4  # nor is one slot value in four
# Shorter slots (weekdays, a dose) are closed classes: holding some out would only make them rare.
LONG_SLOT = 8
# One in three of the cores held out is the validation split's: thresholds must not be set on what
# training has seen alone.
RESERVED = 3

# The pools: for training, for the validation split's unseen stratum, for the test split's.
Pool = Literal["seen", "reserved", "unseen"]
STRATA = {"seen": "seen", "reserved": "unseen", "unseen": "unseen"}
Speaker = Literal["user", "assistant", "tool"]
Stance = Literal["does", "declines", "informs", "quotes", "supposes", "asks", "resembles"]


def _refuse_repeats(lines: tuple[str, ...]) -> tuple[str, ...]:
    if not lines or len(set(lines)) != len(lines):
        raise ValueError("the block is empty or repeats a line")
    return lines


DistinctLines = Annotated[Lines, AfterValidator(_refuse_repeats)]


class Act(Strict):
    """What one speaker does in one utterance, and what is said before and after.

    The label follows from `speaker` and `stance`: only the judged speaker *doing* what the rule
    forbids violates it.
    """

    speaker: Speaker
    stance: Stance
    # What comes first, for an assistant's or a tool's act: names of `lines`, or of a user's acts.
    before: tuple[str, ...] = ()
    # What is answered: names of `lines`, to a user's act also of an assistant's acts.
    after: tuple[str, ...] = ()
    supplied: tuple[str, ...] = ()  # slots whose values the act repeats from the line before it
    opening: str
    softener: str
    closing: str
    cores: DistinctLines

    @property
    def context(self) -> tuple[str, ...]:
        """What others may say around this act; a name listed twice is twice as frequent."""
        return self.before or self.after

    @property
    def context_speaker(self) -> Speaker:
        if self.before:
            return "user"
        return "assistant"

    @property
    def padding(self) -> str:
        if self.speaker == "assistant":
            return "padding"
        return f"padding_{self.speaker}"

    def violates(self, judged: Judged) -> bool:
        return self.stance == "does" and judged in (self.speaker, "conversation")

    def follows(self, core: str, line: str) -> bool:
        """Whether `line` holds every value that `core` repeats, alternatives chosen in both."""
        slots = grammar.slot_names(core)
        repeated = {slot for slot in slots if slot.partition(".")[0] in self.supplied}
        return repeated <= grammar.slot_names(line)


class Phrasebook(Strict):
    """The phrases of one rule.

    `domains` are the background domains that surround the rule, all where there are none. Where the
    rule does not depend on context, its conversations turn to other domains too, and to what other
    rules are about. A book that `borrows` lends its acts to such conversations as distractors.
    """

    rule: str
    domains: tuple[str, ...] = ()
    borrows: bool = True
    slots: dict[str, DistinctLines]
    parts: dict[str, DistinctLines]
    lines: dict[str, DistinctLines]
    acts: dict[str, Act]

    def shared(self, name: str, partner_name: str) -> tuple[str, ...]:
        """What the speaker who does not perform `name` can say around either act.

        That is what both acts name as their context, or the partner itself, if it is the other
        speaker's and the act `name` lists it.
        """
        act, partner = self.acts[name], self.acts[partner_name]
        if act.speaker == partner.speaker:
            return tuple(line for line in act.context if line in partner.context)
        if partner_name in act.context:
            return (partner_name,)
        return ()


class Background(Strict):
    """Everyday exchanges, by domain: turns that are separated by ">>", the user's first."""

    slots: dict[str, DistinctLines]
    transitions: Lines
    thanks: Lines
    systems: Lines
    domains: dict[str, Lines]


@dataclass(frozen=True)
class Corpus:
    """All phrases of one rule's conversations; `borrowed` are other books, for distractors."""

    rule: Rule
    book: Phrasebook
    borrowed: tuple[Phrasebook, ...]
    background: Background

    def acts(self, *, violating: bool) -> list[str]:
        acts = self.book.acts.items()
        return [name for name, act in acts if act.violates(self.rule.judged) == violating]


def held_out(lines: tuple[str, ...], every: int) -> tuple[str, ...]:
    """One line in `every`, chosen by hash: the same lines in whatever order they come."""
    return tuple(sorted(lines, key=line_id)[::every])


@functools.cache
def pool_of(lines: tuple[str, ...], pool: Pool, every: int = HELD_OUT_CORES) -> tuple[str, ...]:
    """The lines of one pool, in file order; validation and test share the held-out lines."""
    held = set(held_out(lines, every))
    if pool == "seen":
        return tuple(line for line in lines if line not in held)
    return tuple(line for line in lines if line in held)


@functools.cache
def cores_of(cores: tuple[str, ...], pool: Pool) -> tuple[str, ...]:
    """An act's cores of one pool, in file order; no two pools have one in common."""
    held = held_out(cores, HELD_OUT_CORES)
    reserved = set(held[::RESERVED])
    by_pool = {"seen": set(cores) - set(held), "reserved": reserved, "unseen": set(held) - reserved}
    return tuple(core for core in cores if core in by_pool[pool])


def slot_pool(slots: dict[str, Lines], pool: Pool) -> dict[str, tuple[str, ...]]:
    """Every slot's values for one pool; short slots are shared."""
    values_of = dict(slots)
    for name, values in slots.items():
        if len(values) >= LONG_SLOT:
            values_of[name] = pool_of(values, pool, HELD_OUT_VALUES)
    return values_of


def turns_of(line: str, speaker: Speaker) -> list[tuple[Speaker, str]]:
    """The turns of a line: one by `speaker`, or several as "user: … >> tool: …"."""
    if ">>" not in line:
        return [(speaker, line)]
    parts = [part.strip().partition(": ") for part in line.split(">>")]
    return [(cast(Speaker, name), text) for name, _, text in parts]


def line_id(line: str) -> str:
    """A short name for a core or a phrasing that follows from its text alone."""
    return hashlib.sha256(line.encode()).hexdigest()[:10]
