"""Policies in words about the topics of conversations, with the labels that follow from them.

Two conversations come under two policies, of which each breaks one. So only reading both tells a
label. Knows nothing of models or files.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from data.reader.topics import SMALL_TALK, Family, Labelled, LabelledTurn, words

SPLIT_OF = {0: "test", 1: "validation"}  # by a topic's hash, of HASHES
HASHES = 7
TRIES = 30
SMALLEST = 12  # topics of a family some of which are held out


@dataclass(frozen=True)
class Unit:
    """Conversations under policies: `labels` [conversations][policies], 1 where one is broken."""

    conversations: tuple[tuple[LabelledTurn, ...], ...]
    policies: tuple[str, ...]
    labels: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PairScene:
    """What two conversations say within a scope: `mine` the one, `theirs` the other alone."""

    scope: str
    mine: Sequence[str]
    theirs: Sequence[str]
    elsewhere: Sequence[str]
    has_small_talk: bool
    is_complete: bool

    def flipped(self) -> PairScene:
        return replace(self, mine=self.theirs, theirs=self.mine)


def split_of(family: Family, topic: str) -> str:
    """The split whose policies name the topic; of a small family all are training's."""
    if len(family.phrases) < SMALLEST:
        return "train"
    digest = hashlib.sha256(f"{family.name}/{topic}".encode()).digest()
    return SPLIT_OF.get(digest[0] % HASHES, "train")


class Composer:
    """Writes units about the topics of one family."""

    def __init__(self, family: Family, rng: random.Random) -> None:
        self._family = family
        self._rng = rng
        self._topics: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
        for topic in family.phrases:
            self._topics[split_of(family, topic)].append(topic)

    def unit(self, rows: Sequence[Labelled], split: str) -> Unit | None:
        """Two of the rows under policies about the split's topics, if any tells them apart."""
        if not rows:
            return None
        pool = self._topics[split]
        first = self._rng.choice(rows)
        for _ in range(TRIES):
            pair = (first, self._rng.choice(rows))
            scope = self._rng.choice(("any", "any", "last"))
            present = [_present(row, scope) for row in pair]
            looked_for = pair[0].looked_for & pair[1].looked_for
            known = [topic for topic in pool if topic in looked_for]
            mine = [topic for topic in known if topic in present[0] - present[1]]
            if mine:
                break
        else:
            return None
        scene = PairScene(
            scope,
            mine,
            theirs=[topic for topic in known if topic in present[1] - present[0]],
            elsewhere=[topic for topic in known if topic not in present[0] | present[1]],
            has_small_talk=any(map(_has_small_talk, pair)),
            is_complete=self._family.is_complete
            and all(topics - {SMALL_TALK} <= set(pool) for topics in present),
        )
        broken = (self._broken(scene), self._broken(scene.flipped()) or self._demanded(scene))
        policies: list[str] = []
        labels: tuple[list[int], list[int]] = ([], [])
        for breaking, text in enumerate(broken):
            if text is not None:
                policies.append(text)
                labels[breaking].append(1)
                labels[1 - breaking].append(0)
        return Unit(tuple(row.turns for row in pair), tuple(policies), tuple(map(tuple, labels)))

    def _broken(self, scene: PairScene) -> str | None:
        """A policy that is broken where `mine` is said, and kept where `theirs` is."""
        if not scene.mine:
            return None
        kind = self._rng.random()
        if scene.is_complete and scene.theirs and kind < 0.4:
            topics = [*scene.theirs, *self._some(scene.elsewhere, (0, 1, 2, 4))]
            self._rng.shuffle(topics)
            return self._only(topics, scene)
        if kind < 0.5:
            return self._demanded(scene.flipped())
        topics = [self._rng.choice(scene.mine), *self._some(scene.elsewhere, (0, 0, 1, 2, 3))]
        self._rng.shuffle(topics)
        allowed: list[str] = []
        if self._rng.random() < 0.35:
            rest = [topic for topic in scene.elsewhere if topic not in topics]
            allowed = self._some(scene.theirs or rest, (1, 2))
        return self._forbidden(topics, allowed, scene)

    def _forbidden(self, topics: Sequence[str], allowed: Sequence[str], scene: PairScene) -> str:
        filled = self._filled(scene)
        filled["listed"] = self._listed(topics, "or")
        text = self._said("forbidden", filled, scene)
        if allowed:
            exceptions = self._listed(allowed, "and")
            filled |= {
                "exceptions": exceptions,
                "Exceptions": exceptions[:1].upper() + exceptions[1:],
            }
            text += self._rng.choice(words()["but"]).format(**filled)
        return text

    def _only(self, topics: Sequence[str], scene: PairScene) -> str:
        filled = self._filled(scene)
        filled["listed"] = self._listed(topics, "and")
        filled["either"] = self._listed(topics, "or")
        text = self._said("only", filled, scene)
        if scene.has_small_talk or self._rng.random() < 0.3:
            text += self._rng.choice(words()["small_talk"])
        return text

    def _demanded(self, scene: PairScene) -> str | None:
        """A policy that demands what `mine` says."""
        if not scene.mine:
            return None
        filled: dict[str, str] = {}
        filled["do"], filled["does"] = self._rng.choice(self._family.does)
        filled["listed"] = self._listed([self._rng.choice(scene.mine)], "or")
        filled["who"] = self._rng.choice(words()["who"])
        return self._said("demanded", filled, scene)

    def _filled(self, scene: PairScene) -> dict[str, str]:
        who = self._rng.choice(words()["who"])
        do, does = self._rng.choice(self._family.does)
        return {"who": who, "do": do, "does": does}

    def _said(self, kind: str, filled: dict[str, str], scene: PairScene) -> str:
        filled["when"] = self._rng.choice(words()["scopes"][scene.scope])
        return str(self._rng.choice(words()[kind]).format(**filled))

    def _some(self, topics: Sequence[str], sizes: Sequence[int]) -> list[str]:
        return self._rng.sample(list(topics), min(len(topics), self._rng.choice(sizes)))

    def _listed(self, topics: Sequence[str], conjunction: str) -> str:
        phrases = [self._rng.choice(self._family.phrases[topic]) for topic in topics]
        if len(phrases) == 1:
            return phrases[0]
        return f"{', '.join(phrases[:-1])} {conjunction} {phrases[-1]}"


def _has_small_talk(row: Labelled) -> bool:
    return any(SMALL_TALK in turn.topics for turn in row.turns)


def _present(row: Labelled, scope: str) -> frozenset[str]:
    said = [turn.topics for turn in row.turns if turn.role == "user"]
    if scope == "last":
        said = said[-1:]
    return frozenset[str]().union(*said)
