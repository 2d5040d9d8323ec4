"""The offline generator: a rule's phrases -> labelled conversations.

The label of a conversation follows from its target's act alone (`Act.violates`); what else two
conversations of a group share is documented in `data/generator/writer.py`, what is sampled about
them in `data/generator/dimensions.py`.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tqdm import tqdm

from data.generator.dimensions import sample_dimensions
from data.generator.excerpts import SHARE, ExcerptBook, ExcerptWriter
from data.generator.phrasebook import Corpus, Pool
from data.generator.writer import Writer
from data.splits import near_duplicates
from guard.conversation.example import Example, Split
from guard.errors import GuardError

REWRITES = 10  # how often a conversation that came out too close to another is worded anew


@dataclass(frozen=True)
class Counts:
    """How many examples to write per split; validation and test are half `seen`, half `unseen`."""

    train: int = 2400
    validation: int = 400
    test: int = 400

    def inputs(self) -> list[int]:
        """All that the data depend on besides the rule, its phrases and the seed."""
        return [self.train, self.validation, self.test]


# What writes a group under a key, and its key; other words follow from another key.
GroupPlan = tuple[Callable[[str], list[Example]], str]


def generate(
    corpus: Corpus, counts: Counts, seed: int, excerpts: ExcerptBook | None = None
) -> list[Example]:
    """Groups of two examples, one of each label, in a stable order. The same seed writes the same
    text. Where there are `excerpts`, one group in SHARE of every split and stratum is one.

    A group that comes out too close to an earlier one is written anew, so no near duplicates
    remain. Raises GuardError if the phrases are too few for that many examples.
    """
    plans = list(_plans(corpus, counts, seed, excerpts))
    progress = tqdm(plans, desc=f"writing {corpus.rule.id}", unit=" pairs", leave=False)
    examples: list[Example] = []
    for write, key in progress:
        examples += write(key)
    for attempt in range(1, REWRITES + 1):
        clashing = _clashing_groups(examples)
        if not clashing:
            return examples
        for number in clashing:
            write, key = plans[number]
            examples[2 * number : 2 * number + 2] = write(f"{key}~{attempt}")
    if clashing := _clashing_groups(examples):
        after = f"still near duplicates after {REWRITES} attempts"
        where = f"data/generator/phrases/{corpus.rule.id}.yaml"
        remedy = "Ask for fewer examples, or add cores and slot values"
        raise GuardError(f"{len(clashing)} conversations are {after}", where=where, remedy=remedy)
    return examples


def _clashing_groups(examples: list[Example]) -> list[int]:
    return sorted({pair.second // 2 for pair in near_duplicates(examples)})


def _plans(
    corpus: Corpus, counts: Counts, seed: int, excerpts: ExcerptBook | None
) -> Iterator[GroupPlan]:
    parts: tuple[tuple[Split, Pool, int], ...] = (
        ("train", "seen", counts.train),
        ("validation", "seen", counts.validation // 2),
        ("validation", "reserved", counts.validation // 2),
        ("test", "seen", counts.test // 2),
        ("test", "unseen", counts.test // 2),
    )
    for split, pool, count in parts:
        name = f"{corpus.rule.id}/{seed}/{split}/{pool}"
        groups = count // 2
        excerpt_plans: list[GroupPlan] = []
        if excerpts is not None:
            excerpt_writer = ExcerptWriter(corpus, excerpts, pool)
            names = itertools.cycle(excerpts.excerpts)  # equally many groups of each
            for number, excerpt in zip(range(groups // SHARE), names, strict=False):
                write = functools.partial(excerpt_writer.group, excerpt, split)
                excerpt_plans.append((write, f"{name}/excerpt/{number}"))
        writer = Writer(corpus, pool)
        conversations = groups - len(excerpt_plans)
        sampled = sample_dimensions(corpus, conversations, random.Random(name))
        for number, dimensions in enumerate(sampled):
            yield functools.partial(writer.group, dimensions, split), f"{name}/{number}"
        yield from excerpt_plans
