"""Keeping the splits apart: groups, near duplicates, and the split of data that came without one.

Two conversations are near duplicates when the Jaccard similarity of their word 3-shingles (lower
case, every digit the same, two boundary marks at each end; Broder, 1997) is at least
NEAR_DUPLICATE: in 40 words two were replaced. In a script without spaces every character counts as
a word. All pairs are compared; shingles are hashed into four million buckets. System turns are
often the same in every row: conversations are as similar as what is said after them, and no more
than their whole texts.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from guard.conversation.example import SPLITS, Example, Split
from guard.errors import GuardError
from guard.prompt.text import visible

NEAR_DUPLICATE = 0.7
SHARES: dict[Split, float] = {"train": 0.7, "validation": 0.1, "test": 0.2}
BLOCK = 512  # examples that are compared with all others at once
NAMED = 5  # offending rows or pairs that an error spells out
# Scripts without spaces between words: Thai and Lao, Myanmar, Khmer, Tai and Javanese, kana and
# bopomofo, Han.
UNSPACED = (
    "\u0e01-\u0eff\u1000-\u109f\u1780-\u17d3\u1950-\u19df\u1a20-\u1aaf\ua980-\ua9ff\uaa60-\uaadf"
    "\u3005-\u3007\u3041-\u3096\u3099-\u312f\u31a0-\u31bf\u31f0-\u31ff\uff66-\uff9f"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")


@dataclass(frozen=True)
class NearDuplicate:
    """Two examples of different groups, by their indices, and how similar their texts are."""

    first: int
    second: int
    similarity: float


def shingles(text: str) -> list[str]:
    words = ["^", "^", *_WORD.findall(re.sub(r"\d", "0", text.lower())), "$", "$"]
    return [" ".join(words[start : start + 3]) for start in range(len(words) - 2)]


def text_of(example: Example, without_role: str = "") -> str:
    messages = [message for message in example.messages if message.role != without_role]
    return "\n".join(visible(message.content) for message in messages)


def near_duplicates(
    examples: Sequence[Example], threshold: float = NEAR_DUPLICATE
) -> Iterator[NearDuplicate]:
    """Pairs of different groups that are as similar as `threshold` or more, by `second`."""
    import numpy as np  # with scikit-learn it takes a second, which no `--help` needs

    if not examples:
        return
    spoken_texts = [text_of(example, without_role="system") for example in examples]
    full_texts = [text_of(example) for example in examples]
    rows = _shingle_rows(spoken_texts)
    # Only compared for few pairs: if all rows share a long system turn, their product has no zeros.
    full_rows = rows if full_texts == spoken_texts else _shingle_rows(full_texts)
    sizes, full_sizes = _sizes(rows), _sizes(full_rows)
    columns = rows.T.tocsc()
    for start in range(0, len(examples), BLOCK):
        shared = (rows[start : start + BLOCK] @ columns[:, : start + BLOCK]).tocoo()
        seconds = shared.row + start
        similarity = shared.data / (sizes[seconds] + sizes[shared.col] - shared.data)
        close = (similarity >= threshold) & (shared.col < seconds)
        firsts, seconds, similarity = shared.col[close], seconds[close], similarity[close]
        if full_rows is not rows and len(firsts):
            shared_full = _sizes(full_rows[firsts].multiply(full_rows[seconds]))
            union = full_sizes[firsts] + full_sizes[seconds] - shared_full
            similarity = np.minimum(similarity, shared_full / union)
        for index in np.flatnonzero(similarity >= threshold):
            first, second = int(firsts[index]), int(seconds[index])
            if examples[first].group != examples[second].group:
                yield NearDuplicate(first, second, float(similarity[index]))


def _sizes(rows: Any) -> Any:
    import numpy as np

    return np.asarray(rows.sum(axis=1)).ravel()


def _shingle_rows(texts: Sequence[str]) -> Any:
    import numpy as np
    from sklearn.feature_extraction.text import HashingVectorizer

    buckets = {"n_features": 2**22, "alternate_sign": False, "norm": None, "dtype": np.float32}
    return HashingVectorizer(analyzer=shingles, binary=True, **buckets).transform(texts)


def refuse_leaks(examples: Sequence[Example]) -> None:
    """Raise GuardError if a group straddles splits, or near duplicates stand in two of them."""
    refuse_straddling(examples)
    pairs = [pair for pair in near_duplicates(examples) if not _is_of_one_split(examples, pair)]
    if not pairs:
        return
    named = []
    for pair in pairs[:NAMED]:
        rows = (examples[pair.first], examples[pair.second])
        places = [f"{row.id} ({row.split})" for row in rows]
        named.append(f"{' and '.join(places)}: {pair.similarity:.2f}")
    problem = f"{len(pairs)} near duplicates across splits (similarity {NEAR_DUPLICATE} or more)"
    remedy = "Remove one of each pair, or say SPLITS=new"
    raise GuardError(problem, got="; ".join(named), remedy=remedy)


def refuse_straddling(examples: Sequence[Example]) -> None:
    splits_of: dict[str, set[Split]] = defaultdict(set)
    for example in examples:
        splits_of[example.group].add(example.split)
    straddling = [group for group, splits in splits_of.items() if len(splits) > 1]
    if straddling:
        problem = f"{len(straddling)} groups have rows in more than one split"
        remedy = "Rows that share a context must share a split: correct the columns, or say "
        remedy += "SPLITS=new"
        raise GuardError(problem, got=", ".join(straddling[:NAMED]), remedy=remedy)


def refuse_copies(generated: Sequence[Example], own_rows: Sequence[Example], source: str) -> None:
    """Raise GuardError for rows of your own that are generated ones, nearly so, or named as one."""
    names = {example.id for example in generated} | {example.group for example in generated}
    copies: list[str] = []
    for example in own_rows:
        if {example.id, example.group} & names:
            copies.append(f"{example.id} (the id or group of a generated row)")
    all_examples = [*generated, *own_rows]
    for pair in near_duplicates(all_examples):
        if pair.first < len(generated) <= pair.second:
            first, second = all_examples[pair.first], all_examples[pair.second]
            copies.append(f"{second.id} (like {first.id}: {pair.similarity:.2f})")
    if copies:
        got = "; ".join(copies[:NAMED])
        if len(copies) > NAMED:
            got += f" and {len(copies) - NAMED} more"
        problem = "some of your rows are generated ones, or nearly so"
        remedy = "Remove these rows of yours; SPLITS= does not help here"
        raise GuardError(problem, where=source, got=got, remedy=remedy)


def assign(
    examples: Sequence[Example], seed: int, shares: Mapping[Split, float] = SHARES
) -> list[Example]:
    """A grouped, stratified, seeded split.

    Near duplicates become one group, under the name of one of them, so that none straddles and they
    count as one in intervals. Groups are assigned in random order, large ones first, each to the
    split that lacks most of the group's labels.
    """
    leaders = _leaders(examples, near_duplicates(examples))
    members: dict[int, list[int]] = defaultdict(list)
    for index, leader in enumerate(leaders):
        members[leader].append(index)
    groups = list(members.values())
    random.Random(seed).shuffle(groups)
    groups.sort(key=len, reverse=True)  # while every split still has room for large groups
    totals = Counter(example.label for example in examples)
    filled: dict[Split, Counter[int]] = {split: Counter() for split in shares}
    split_of: dict[int, Split] = {}
    for group in groups:
        counts = Counter(examples[index].label for index in group)
        lacks: dict[Split, float] = {}
        for split, share in shares.items():
            lacks[split] = _lack(counts, share, totals, filled[split])
        neediest = max(lacks, key=lacks.__getitem__)
        filled[neediest].update(counts)
        split_of |= dict.fromkeys(group, neediest)
    named = _named_by_leader(examples, leaders)
    return [replace(example, split=split_of[index]) for index, example in enumerate(named)]


def group_near_duplicates(examples: Sequence[Example]) -> list[Example]:
    """The examples, near duplicates of a split in one group; of two splits they stay leaks."""
    inside = [pair for pair in near_duplicates(examples) if _is_of_one_split(examples, pair)]
    return _named_by_leader(examples, _leaders(examples, inside))


def _is_of_one_split(examples: Sequence[Example], pair: NearDuplicate) -> bool:
    return examples[pair.first].split == examples[pair.second].split


def _named_by_leader(examples: Sequence[Example], leaders: Sequence[int]) -> list[Example]:
    named = []
    for example, leader in zip(examples, leaders, strict=True):
        named.append(replace(example, group=examples[leader].group))
    return named


def _leaders(examples: Sequence[Example], pairs: Iterable[NearDuplicate]) -> list[int]:
    """For each example the index of its cluster's leader. Clusters join groups by `pairs`."""
    leaders = list(range(len(examples)))

    def leader(index: int) -> int:
        while leaders[index] != index:
            leaders[index] = leaders[leaders[index]]
            index = leaders[index]
        return index

    first_of: dict[str, int] = {}
    for index, example in enumerate(examples):
        leaders[leader(index)] = leader(first_of.setdefault(example.group, index))
    for pair in pairs:
        leaders[leader(pair.second)] = leader(pair.first)
    return [leader(index) for index in range(len(examples))]


def _lack(
    counts: Mapping[int, int], share: float, totals: Mapping[int, int], filled: Mapping[int, int]
) -> float:
    """How much of a group's labels a split of this `share` still lacks, relative to that share."""
    lack = 0.0
    for label in sorted(totals):
        lack += counts[label] * (share - filled[label] / totals[label]) / share
    return lack


def labels_scarce(examples: Sequence[Example], fewest: int) -> list[str]:
    counts = Counter((example.split, example.label) for example in examples)
    scarce: list[str] = []
    for split, label in itertools.product(SPLITS, (0, 1)):
        count = counts[split, label]
        if count < fewest:
            number = "no row" if count == 0 else f"{count} of {fewest} rows"
            scarce.append(f"{split} has {number} with label {label}")
    return scarce
