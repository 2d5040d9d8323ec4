"""One exchange: a user's utterance and the answer to it, written from one pool of phrases.

Knows nothing of the conversation around it. Whoever keeps an exchange passes its `lines` as `taken` to the next ones, so
that nothing is said twice.
"""

from __future__ import annotations

import random
import re
from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

from data.generator import grammar
from data.generator.dimensions import Severity
from data.generator.phrasebook import (
    Act,
    Corpus,
    Lines,
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
    phrasing: str = ""  # the name of the core's wording, with what stands around it

    @property
    def act(self) -> str | None:
        """The act performed, as `rule/act`."""
        return self.core.rpartition("/")[0] or None


class Around(NamedTuple):
    """What others say before and after an act."""

    before: tuple[Turn, ...]
    after: tuple[Turn, ...]


@dataclass(frozen=True)
class Exchange:
    """A user's utterance and the answer to it, or several such; the user speaks first. `place`: of the turn that performs the act."""

    turns: tuple[Turn, ...]
    topic: str
    place: int = 0

    @property
    def tokens(self) -> int:
        """Estimated length."""
        return sum(count_tokens(turn.text) for turn in self.turns)

    @property
    def lines(self) -> set[str]:
        """The templates it was written from."""
        return {turn.line for turn in self.turns}

    @property
    def own(self) -> Turn:
        """The turn that performs the act."""
        return self.turns[self.place]

    @property
    def around(self) -> Around:
        """What stands before and after the act."""
        return Around(self.turns[: self.place], self.turns[self.place + 1 :])


def count_tokens(text: str) -> int:
    """Estimated tokens of one turn with its role label: words, punctuation and digits, and a little for rare words."""
    return round(1.06 * len(re.findall(r"[A-Za-z]+|\d{1,3}|[^\w\s]", text))) + 3


class Exchanges:
    """Writes the exchanges of one rule, of the other rules and of everyday talk, from one pool of phrases."""

    def __init__(self, corpus: Corpus, pool: Pool) -> None:
        self.corpus, self.pool = corpus, pool
        self._slots = {
            book.rule: slot_pool(book.slots, pool) for book in (corpus.book, *corpus.others)
        }
        self._everyday_slots = slot_pool(corpus.background.slots, pool)

    def values(self, rule: str, slot: str) -> tuple[str, ...]:
        """The values of one slot in this pool."""
        return self._slots[rule][slot]

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
        around: Around | None = None,
    ) -> Exchange | None:
        """The act `name` with what others say before and after it; None if every line that fits is taken.

        That is `around`, or a line of `context`, or of the act's own context. Exchanges with one `key` share their slot values.
        """
        act = book.acts[name]
        bindings = grammar.Bindings(self._slots[book.rule], key)
        said = rng.choice(context or act.context)
        for core in _shuffled(self._free(cores_of(act.cores, self.pool), taken), rng):
            wording = grammar.resolve(core, rng)
            others = around or self._around(book, said, act, wording, bindings, taken, rng)
            if others is not None:
                own = self._performed(
                    book, name, core, wording, severity, bindings, rng, terse=terse
                )
                return Exchange((*others.before, own, *others.after), book.rule, len(others.before))
        return None

    def everyday(
        self, domain: str, most: int, key: str, rng: random.Random, taken: Set[str] = frozenset()
    ) -> list[Exchange]:
        """Up to `most` exchanges about one domain."""
        free = [line for line in self.corpus.background.domains[domain] if line not in taken]
        chosen = rng.sample(free, min(most, len(free)))
        return [
            self._plain(line, domain, f"{key}/{domain}/{number}", rng)
            for number, line in enumerate(chosen)
        ]

    def thanks(self, key: str, rng: random.Random, taken: Set[str] = frozenset()) -> list[Exchange]:
        """A word of thanks and the answer to it; none if all are taken."""
        free = [line for line in self.corpus.background.thanks if line not in taken]
        return [self._plain(rng.choice(free), "thanks", key, rng)] if free else []

    def system(self, key: str, rng: random.Random) -> str:
        """A system message."""
        line = grammar.resolve(rng.choice(self.corpus.background.systems), rng)
        return grammar.Bindings(self._everyday_slots, key).fill(line)

    def _free(self, lines: Lines, taken: Set[str]) -> list[str]:
        return [line for line in lines if line not in taken]

    def _around(
        self,
        book: Phrasebook,
        said: str,
        act: Act,
        wording: str,
        bindings: grammar.Bindings,
        taken: Set[str],
        rng: random.Random,
    ) -> Around | None:
        """What others say around `act`: one of the lines `said` that holds what `wording` repeats, or the act `said`."""
        lines = (
            pool_of(book.lines[said], self.pool)
            if said in book.lines
            else cores_of(book.acts[said].cores, self.pool)
        )
        for line in _shuffled(self._free(lines, taken), rng):
            resolved = grammar.resolve(line, rng)
            if act.follows(wording, resolved):
                turns: tuple[Turn, ...]
                if said in book.acts:
                    turns = (
                        self._performed(
                            book, said, line, resolved, "plain", bindings, rng, terse=True
                        ),
                    )
                else:
                    turns = _turns(
                        resolved, "user" if act.before else "assistant", bindings, said, line
                    )
                if act.before and act.after:
                    answer = self._answer(book, rng.choice(act.after), bindings, taken, rng)
                    return Around(turns, answer) if answer else None
                return Around(turns, ()) if act.before else Around((), turns)
        return None

    def _answer(
        self,
        book: Phrasebook,
        said: str,
        bindings: grammar.Bindings,
        taken: Set[str],
        rng: random.Random,
    ) -> tuple[Turn, ...]:
        """What is said after an act that has had its context before it; nothing if all of that is taken."""
        free = self._free(pool_of(book.lines[said], self.pool), taken)
        line = rng.choice(free) if free else ""
        return _turns(grammar.resolve(line, rng), "assistant", bindings, said, line) if line else ()

    def _performed(
        self,
        book: Phrasebook,
        name: str,
        core: str,
        wording: str,
        severity: Severity,
        bindings: grammar.Bindings,
        rng: random.Random,
        *,
        terse: bool,
    ) -> Turn:
        act = book.acts[name]
        phrasing = " ".join(self._sentences(book, act, wording, severity, rng, terse=terse))
        identity = f"{book.rule}/{name}"
        return Turn(
            act.speaker,
            bindings.fill(phrasing),
            name,
            core,
            core=f"{identity}/{line_id(core)}",
            phrasing=f"{identity}/{line_id(phrasing)}",
        )

    def _sentences(
        self,
        book: Phrasebook,
        act: Act,
        wording: str,
        severity: Severity,
        rng: random.Random,
        *,
        terse: bool,
    ) -> list[str]:
        """Opening, softener, core, closing; a buried core stands between sentences that have nothing to do with it."""

        def part(name: str) -> str:
            return grammar.resolve(rng.choice(book.parts[name]), rng)

        sentence = f"{part(act.softener)} {wording}" if severity == "hedged" else wording
        before = (
            [part(act.opening)] if not terse and severity != "hedged" and rng.random() < 0.5 else []
        )
        after = [part(act.closing)] if not terse and rng.random() < 0.4 else []
        if severity == "buried":
            padding = [
                grammar.resolve(line, rng) for line in rng.sample(book.parts[act.padding], PADDING)
            ]
            cut = rng.randint(1, PADDING - 1)
            before, after = (
                before + [_stop(line) for line in padding[:cut]],
                [_stop(line) for line in padding[cut:]] + after,
            )
        return [*before, _stop(sentence), *after]

    def _plain(self, line: str, topic: str, key: str, rng: random.Random) -> Exchange:
        bindings = grammar.Bindings(self._everyday_slots, key)
        texts = [bindings.fill(part) for part in grammar.resolve(line, rng).split(">>")]
        roles = ("user", "assistant")
        return Exchange(
            tuple(Turn(roles[number % 2], text, topic, line) for number, text in enumerate(texts)),
            topic,
        )


def _turns(
    line: str, speaker: Speaker, bindings: grammar.Bindings, source: str, template: str
) -> tuple[Turn, ...]:
    return tuple(
        Turn(role, bindings.fill(text), source, template) for role, text in turns_of(line, speaker)
    )


def _shuffled(lines: list[str], rng: random.Random) -> list[str]:
    return rng.sample(lines, len(lines))


def _stop(sentence: str) -> str:
    return sentence if sentence.rstrip().endswith((".", "?", "!")) else sentence + "."
