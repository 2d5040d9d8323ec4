"""The offline generator: a rule's phrases -> labelled conversations. Knows nothing of files, models or tokenizers.

The label of a conversation follows from its target's act alone (`Act.violates`); what else two conversations of a group
share is told in `data/generator/writer.py`, what is sampled about them in `data/generator/dimensions.py`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from data.generator.dimensions import Dimensions, sample_dimensions
from data.generator.phrasebook import Corpus, Pool, load_background, load_phrasebook
from data.generator.writer import Writer
from data.splits import near_duplicates
from guard.errors import GuardError
from guard.example import Example, Split
from guard.rule import Rule

REWRITES = 10  # how often a conversation that came out too close to another is worded anew


@dataclass(frozen=True)
class Counts:
    """How many examples to write per split; validation and test are half `seen`, half `unseen`."""

    train: int = 2400
    validation: int = 400
    test: int = 400


def load_corpus(rule: Rule, others: Sequence[Rule]) -> Corpus:
    """The rule's own phrases, those of `others` as distractors, and everyday talk."""
    background = load_background()
    books = tuple(
        book
        for other in others
        if other.id != rule.id and (book := load_phrasebook(other, background)).borrows
    )
    return Corpus(rule, load_phrasebook(rule, background), books, background)


def generate(corpus: Corpus, counts: Counts, seed: int) -> list[Example]:
    """Groups of two examples (one of each label), in a stable order; the same seed writes the same text.

    A group that comes out too close to an earlier one is written anew, so no near duplicates remain, within splits or
    across. Raises GuardError if the phrases are too few for that many examples.
    """
    jobs = list(_jobs(corpus, counts, seed))
    groups = [
        job.write(0)
        for job in tqdm(jobs, desc=f"writing {corpus.rule.id}", unit=" pairs", leave=False)
    ]
    for attempt in itertools.count(1):
        examples = [example for group in groups for example in group]
        clashing = sorted({pair.second // 2 for pair in near_duplicates(examples)})
        if not clashing:
            break
        if attempt > REWRITES:
            raise GuardError(
                f"{len(clashing)} conversations are still near duplicates after {REWRITES} attempts",
                where=f"data/generator/phrases/{corpus.rule.id}.yaml",
                remedy="Ask for fewer examples, or add cores and slot values",
            )
        for number in clashing:
            groups[number] = jobs[number].write(attempt)
    return examples


@dataclass(frozen=True)
class Job:
    """One group to write."""

    writer: Writer
    dimensions: Dimensions
    split: Split
    key: str

    def write(self, attempt: int) -> list[Example]:
        """The group, worded differently in every attempt."""
        return self.writer.group(
            self.dimensions, self.split, f"{self.key}~{attempt}" if attempt else self.key
        )


def _jobs(corpus: Corpus, counts: Counts, seed: int) -> Iterator[Job]:
    parts: tuple[tuple[Split, Pool, int], ...] = (
        ("train", "seen", counts.train),
        ("validation", "seen", counts.validation // 2),
        ("validation", "reserved", counts.validation // 2),
        ("test", "seen", counts.test // 2),
        ("test", "unseen", counts.test // 2),
    )
    for split, pool, examples in parts:
        writer = Writer(corpus, pool)
        name = f"{corpus.rule.id}/{seed}/{split}/{pool}"
        for number, dimensions in enumerate(
            sample_dimensions(corpus, examples // 2, random.Random(name))
        ):
            yield Job(writer, dimensions, split, f"{name}/{number}")
