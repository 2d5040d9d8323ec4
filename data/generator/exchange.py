"""One exchange: a user's utterance and the answer to it, written from one pool of phrases.

A caller that keeps an exchange passes its `lines` as `taken` to the next ones, so that nothing is
said twice.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import NamedTuple

from data.generator import grammar
from data.generator.dimensions import Severity
from data.generator.phrasebook import (
    Act,
    Corpus,
    Phrasebook,
    Pool,
    Speaker,
    cores_of,
    line_id,
    pool_of,
    slot_pool,
    turns_of,
)

PADDING = 3  # sentences around a buried core


@dataclass(frozen=True)
class Turn:
    """One utterance before it is tidied: roles and words, no capitals."""

    role: str
    text: str
    source: str  # the act, the lines or the domain that it comes from
    line: str  # the template, or an act's core, that it was written from
    core: str = ""  # the name of the core, if an act was performed
    phrasing: str = ""  # the name of the core's wording, with the sentences around it

    @property
    def act(self) -> str | None:
        """The act performed, as `rule/act`."""
        return self.core.rpartition("/")[0] or None


class Surroundings(NamedTuple):
    """The turns before and after an act."""

    before: tuple[Turn, ...]
    after: tuple[Turn, ...]


@dataclass(frozen=True)
class Exchange:
    """A user's utterance and the answer, or several; the turn `act_index` performs the act."""

    turns: tuple[Turn, ...]
    topic: str
    act_index: int = 0

    @property
    def tokens(self) -> int:
        return sum(count_tokens(turn.text) for turn in self.turns)

    @property
    def lines(self) -> set[str]:
        return {turn.line for turn in self.turns}

    @property
    def act_turn(self) -> Turn:
        return self.turns[self.act_index]

    def surroundings(self, index: int) -> Surroundings:
        return Surroundings(self.turns[:index], self.turns[index + 1 :])


@dataclass(frozen=True)
class Scene:
    """What one exchange is written with; `taken` are lines that are used up."""

    book: Phrasebook
    bindings: grammar.Bindings
    taken: Set[str]
    rng: random.Random

    def free(self, lines: Iterable[str]) -> list[str]:
        return [line for line in lines if line not in self.taken]

    def shuffled(self, lines: Iterable[str]) -> list[str]:
        free = self.free(lines)
        return self.rng.sample(free, len(free))

    def part(self, name: str) -> str:
        return grammar.resolve(self.rng.choice(self.book.parts[name]), self.rng)

    def turns(self, line: str, speaker: Speaker, source: str, template: str) -> tuple[Turn, ...]:
        turns = turns_of(line, speaker)
        return tuple(Turn(role, self.bindings.fill(text), source, template) for role, text in turns)

    def performed(
        self, name: str, core: str, wording: str, severity: Severity, terse: bool
    ) -> Turn:
        """The turn that performs the act `name`, `terse` without opening and closing."""
        act = self.book.acts[name]
        phrasing = " ".join(self._sentences(act, wording, severity, terse))
        identity = f"{self.book.rule}/{name}"
        return Turn(
            act.speaker,
            self.bindings.fill(phrasing),
            name,
            core,
            core=f"{identity}/{line_id(core)}",
            phrasing=f"{identity}/{line_id(phrasing)}",
        )

    def _sentences(self, act: Act, wording: str, severity: Severity, terse: bool) -> list[str]:
        """Opening, softener, core, closing; other sentences stand around a buried core."""
        sentence = wording
        if severity == "hedged":
            sentence = f"{self.part(act.softener)} {wording}"
        before, after = [], []
        if not terse and severity != "hedged" and self.rng.random() < 0.5:
            before = [self.part(act.opening)]
        if not terse and self.rng.random() < 0.4:
            after = [self.part(act.closing)]
        if severity == "buried":
            lines = self.rng.sample(self.book.parts[act.padding], PADDING)
            padding = [stopped(grammar.resolve(line, self.rng)) for line in lines]
            cut = self.rng.randint(1, PADDING - 1)
            before = before + padding[:cut]
            after = padding[cut:] + after
        return [*before, stopped(sentence), *after]


def count_tokens(text: str) -> int:
    """Estimated tokens of a turn with its role label, a little more for rare words."""
    return round(1.06 * len(re.findall(r"[A-Za-z]+|\d{1,3}|[^\w\s]", text))) + 3


class Exchanges:
    """Writes exchanges of one rule, of other rules and of everyday talk, from one pool."""

    def __init__(self, corpus: Corpus, pool: Pool) -> None:
        self.corpus, self.pool = corpus, pool
        self._slots = {
            book.rule: slot_pool(book.slots, pool) for book in (corpus.book, *corpus.borrowed)
        }
        self._everyday_slots = slot_pool(corpus.background.slots, pool)

    def act(
        self,
        book: Phrasebook,
        name: str,
        severity: Severity,
        key: str,
        rng: random.Random,
        *,
        taken: Set[str] = frozenset(),
        terse: bool = False,
        context: tuple[str, ...] = (),
        around: Surroundings | None = None,
    ) -> Exchange | None:
        """The act `name` with what others say before and after it: `around`, or a line of
        `context` or of the act's own; None if every line that fits is taken. Exchanges with one
        `key` share their slot values.
        """
        act = book.acts[name]
        scene = Scene(book, grammar.Bindings(self._slots[book.rule], key), taken, rng)
        context_name = rng.choice(context or act.context)
        for core in scene.shuffled(cores_of(act.cores, self.pool)):
            wording = grammar.resolve(core, rng)
            surroundings = around or self._surroundings(scene, context_name, act, wording)
            if surroundings is not None:
                before, after = surroundings
                act_turn = scene.performed(name, core, wording, severity, terse)
                return Exchange((*before, act_turn, *after), book.rule, len(before))
        return None

    def everyday(
        self, domain: str, most: int, key: str, rng: random.Random, taken: Set[str] = frozenset()
    ) -> list[Exchange]:
        free = [line for line in self.corpus.background.domains[domain] if line not in taken]
        exchanges = []
        for number, line in enumerate(rng.sample(free, min(most, len(free)))):
            exchanges.append(self._plain(line, domain, f"{key}/{domain}/{number}", rng))
        return exchanges

    def thanks(self, key: str, rng: random.Random, taken: Set[str] = frozenset()) -> list[Exchange]:
        free = [line for line in self.corpus.background.thanks if line not in taken]
        if not free:
            return []
        return [self._plain(rng.choice(free), "thanks", key, rng)]

    def system(self, key: str, rng: random.Random) -> str:
        line = grammar.resolve(rng.choice(self.corpus.background.systems), rng)
        return grammar.Bindings(self._everyday_slots, key).fill(line)

    def _surroundings(self, scene: Scene, name: str, act: Act, wording: str) -> Surroundings | None:
        """What is said around `act`: a line of `name` with what `wording` repeats, or an act."""
        book = scene.book
        if name in book.lines:
            lines = pool_of(book.lines[name], self.pool)
        else:
            lines = cores_of(book.acts[name].cores, self.pool)
        for line in scene.shuffled(lines):
            resolved = grammar.resolve(line, scene.rng)
            if act.follows(wording, resolved):
                if name in book.acts:
                    turns: tuple[Turn, ...] = (
                        scene.performed(name, line, resolved, "plain", terse=True),
                    )
                else:
                    turns = scene.turns(resolved, act.context_speaker, name, line)
                return self._with_answer(scene, act, turns)
        return None

    def _with_answer(self, scene: Scene, act: Act, turns: tuple[Turn, ...]) -> Surroundings | None:
        """`turns` before the act or after it, or both; None if every answer is taken."""
        if not act.before:
            return Surroundings((), turns)
        if not act.after:
            return Surroundings(turns, ())
        name = scene.rng.choice(act.after)
        free = scene.free(pool_of(scene.book.lines[name], self.pool))
        if not free:
            return None
        line = scene.rng.choice(free)
        answer = grammar.resolve(line, scene.rng)
        return Surroundings(turns, scene.turns(answer, "assistant", name, line))

    def _plain(self, line: str, topic: str, key: str, rng: random.Random) -> Exchange:
        bindings = grammar.Bindings(self._everyday_slots, key)
        turns = []
        for number, part in enumerate(grammar.resolve(line, rng).split(">>")):
            role = ("user", "assistant")[number % 2]
            turns.append(Turn(role, bindings.fill(part), topic, line))
        return Exchange(tuple(turns), topic)


def stopped(sentence: str) -> str:
    return sentence if sentence.rstrip().endswith((".", "?", "!")) else f"{sentence}."
