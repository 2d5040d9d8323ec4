"""Keeping the splits apart: groups, exact and near duplicates, and the split of data that came without one.

Knows nothing of rules or of where the examples come from.

Two conversations are near duplicates when the Jaccard similarity of their word 3-shingles (lower case, every digit the
same, two boundary marks at each end; Broder, 1997) is at least NEAR_DUPLICATE. In a script that is written without spaces
every character counts as a word. All pairs are compared, none is estimated from samples; shingles are hashed into four
million buckets, so two different ones rarely count as one. In a conversation of 40 words, 0.7 means that two words were
replaced.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import HashingVectorizer

from guard.errors import GuardError
from guard.example import SPLITS, Example, Split
from guard.text import visible

NEAR_DUPLICATE = 0.7
SHARES: dict[Split, float] = {"train": 0.7, "validation": 0.1, "test": 0.2}
NAMED = 5  # how many offending pairs an error spells out
# Scripts without spaces between words: Thai and Lao, Myanmar, Khmer, Tai and Javanese, kana and bopomofo, Han.
UNSPACED = (
    "\u0e01-\u0eff\u1000-\u109f\u1780-\u17d3\u1950-\u19df\u1a20-\u1aaf\ua980-\ua9ff\uaa60-\uaadf"
    "\u3005-\u3007\u3041-\u3096\u3099-\u312f\u31a0-\u31bf\u31f0-\u31ff\uff66-\uff9f"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")


@dataclass(frozen=True)
class Pair:
    """Two examples of different groups and the Jaccard similarity of their texts."""

    first: int
    second: int
    similarity: float


def shingles(text: str) -> list[str]:
    """The word 3-shingles of a text."""
    words = ["^", "^", *_WORD.findall(re.sub(r"\d", "0", text.lower())), "$", "$"]
    return [" ".join(words[start : start + 3]) for start in range(len(words) - 2)]


def text_of(example: Example) -> str:
    """What is compared: every turn's content, without the roles."""
    return "\n".join(visible(message.content) for message in example.messages)


def near_duplicates(
    examples: Sequence[Example], threshold: float = NEAR_DUPLICATE
) -> Iterator[Pair]:
    """Pairs of examples of different groups whose similarity is at least `threshold`, in order of `second`."""
    if not examples:
        return
    vectorizer = HashingVectorizer(
        analyzer=shingles,
        binary=True,
        norm=None,
        alternate_sign=False,
        n_features=2**22,
        dtype=np.float32,
    )
    rows: csr_matrix = vectorizer.transform([text_of(example) for example in examples])
    sizes = np.asarray(rows.sum(axis=1)).ravel()
    columns = rows.T.tocsc()
    for start in range(0, len(examples), 512):
        shared = (rows[start : start + 512] @ columns[:, : start + 512]).tocoo()
        seconds = shared.row + start
        similarity = shared.data / (sizes[seconds] + sizes[shared.col] - shared.data)
        for index in np.flatnonzero((similarity >= threshold) & (shared.col < seconds)):
            first, second = int(shared.col[index]), int(seconds[index])
            if examples[first].group != examples[second].group:
                yield Pair(first, second, float(similarity[index]))


def refuse_leaks(examples: Sequence[Example]) -> None:
    """Raise GuardError if a group straddles splits, or an exact or near duplicate stands in two of them."""
    refuse_straddling(examples)
    pairs = list(across_splits(examples))
    if pairs:
        named = "; ".join(
            f"{examples[pair.first].id} ({examples[pair.first].split}) and {examples[pair.second].id} ({examples[pair.second].split}): "
            f"{pair.similarity:.2f}"
            for pair in pairs[:NAMED]
        )
        raise GuardError(
            f"{len(pairs)} near duplicates across splits (similarity {NEAR_DUPLICATE} or more)",
            got=named,
            remedy="Remove one of each pair, or say SPLITS=clean or SPLITS=new",
        )


def refuse_straddling(examples: Sequence[Example]) -> None:
    """Raise GuardError if a group has rows in more than one split."""
    splits_of: dict[str, set[Split]] = defaultdict(set)
    for example in examples:
        splits_of[example.group].add(example.split)
    straddling = [group for group, splits in splits_of.items() if len(splits) > 1]
    if straddling:
        raise GuardError(
            f"{len(straddling)} groups have rows in more than one split",
            got=", ".join(straddling[:NAMED]),
            remedy="Rows that share a context must share a split: correct the columns, or say SPLITS=clean or SPLITS=new",
        )


def across_splits(examples: Sequence[Example]) -> Iterator[Pair]:
    """Near duplicates that stand in different splits."""
    return (
        pair
        for pair in near_duplicates(examples)
        if examples[pair.first].split != examples[pair.second].split
    )


def drop_leaks(examples: Sequence[Example]) -> list[Example]:
    """Without the rows that share a group or nearly their text with a later split: the test stays whole, training gives way."""
    last: dict[str, int] = defaultdict(int)
    for example in examples:
        last[example.group] = max(last[example.group], SPLITS.index(example.split))
    whole = [example for example in examples if SPLITS.index(example.split) == last[example.group]]
    dropped = {
        min(pair.first, pair.second, key=lambda index: SPLITS.index(whole[index].split))
        for pair in across_splits(whole)
    }
    return [example for index, example in enumerate(whole) if index not in dropped]


def assign(
    examples: Sequence[Example], seed: int, shares: dict[Split, float] = SHARES
) -> list[Example]:
    """A grouped, stratified, seeded split. Near duplicates become one group, so that none straddles and they count as one in intervals.

    A merged group has the name of one of its own: whoever wants to know whether groups straddle splits that were given asks before.
    Groups are dealt out in random order, each to the split that lacks most of the group's labels.
    """
    leader = list(range(len(examples)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    first_of: dict[str, int] = {}
    for index, example in enumerate(examples):
        leader[find(index)] = find(first_of.setdefault(example.group, index))
    for pair in near_duplicates(examples):
        leader[find(pair.second)] = find(pair.first)
    members: dict[int, list[int]] = defaultdict(list)
    for index in range(len(examples)):
        members[find(index)].append(index)

    groups = list(members.values())
    random.Random(seed).shuffle(groups)
    groups.sort(
        key=len, reverse=True
    )  # large groups first, while every split still has room for them
    total = [sum(example.label == label for example in examples) for label in (0, 1)]
    filled: dict[tuple[Split, int], int] = defaultdict(int)
    split_of: dict[int, Split] = {}
    for group in groups:
        counts = [sum(examples[index].label == label for index in group) for label in (0, 1)]

        def lack(split: Split, counts: list[int] = counts) -> float:
            return sum(
                counts[label]
                * (shares[split] - filled[split, label] / total[label])
                / shares[split]
                for label in (0, 1)
                if total[label]
            )

        best = max(shares, key=lack)
        for label in (0, 1):
            filled[best, label] += counts[label]
        split_of |= dict.fromkeys(group, best)
    merged = {index: f"{examples[find(index)].group}" for index in range(len(examples))}
    return [
        replace(example, split=split_of[index], group=merged[index])
        for index, example in enumerate(examples)
    ]


def labels_missing(examples: Sequence[Example]) -> list[str]:
    """Which labels are missing in which split, in words."""
    present = {(example.split, example.label) for example in examples}
    return [
        f"{split} has no row with label {label}"
        for split, label in itertools.product(SPLITS, (0, 1))
        if (split, label) not in present
    ]
