"""What a data set is made of, in numbers: `manifest.json`.

Knows nothing of how the examples were made.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.long_turns import LONG_TURN_KEY
from data.splits import NEAR_DUPLICATE, across_splits
from guard.conversation.example import SPLITS, Example
from guard.files.atomic import atomic_write

COUNTED = ("act", "stance", "severity", "position", "domain", "user_register", "assistant_register")
DEBATED = ("dimension", "value")  # of rows that an endpoint wrote
FEW_TEST_ROWS = 100
CLOSE = 0.2  # similarity from which pairs across splits are looked at


def describe(examples: Sequence[Example]) -> dict[str, Any]:
    """What the examples of one rule are made of, JSON-able.

    The manifest without where they came from.
    """
    from data.surface import auroc_from_surface, count_words  # scikit-learn takes a second

    written_once = [example for example in examples if LONG_TURN_KEY not in example.meta]

    words: dict[str, Any] = {}
    turns: dict[str, Any] = {}
    for label in (0, 1):
        part = [example for example in examples if example.label == label]
        words[str(label)] = _spread([count_words(example) for example in part])
        turns[str(label)] = _spread([len(example.messages) for example in part])
    ngrams: dict[str, Any] = {}
    for split in SPLITS:
        ngrams[split] = _distinct([example for example in examples if example.split == split])
    return {
        "counts": _counts(examples),
        "dimensions": _dimensions(examples),
        "words": words,
        "turns": turns,
        "distinct_ngrams": ngrams,
        "phrasings_per_act": _phrasings(examples),
        "duplicates": _duplicates(examples),
        "auroc_from_surface": auroc_from_surface(written_once),
    }


def save(folder: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest.json`, whole or not at all."""
    with atomic_write(folder / "manifest.json") as part:
        part.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: Path) -> dict[str, Any]:
    """The manifest of the data set in `folder`; empty where there is none."""
    path = folder / "manifest.json"
    if not path.is_file():
        return {}
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return manifest


def table(rule: str, manifest: dict[str, Any]) -> str:
    """The manifest in a few lines for the terminal."""
    return "\n".join(
        [
            f"{rule}: {manifest['source']}, seed {manifest['seed']}",
            *_count_lines(manifest),
            *_size_lines(manifest),
            *_debate_lines(manifest),
            *_diversity_lines(manifest),
        ]
    )


def _count_lines(manifest: dict[str, Any]) -> Iterator[str]:
    """Rows and violations by split and stratum, and what surface words reach on the test split."""
    yield f"  {'split':<12}{'stratum':<9}{'rows':>6}{'violate':>9}{'surface words':>14}"
    baselines = manifest["auroc_from_surface"]["words"]
    for row in manifest["counts"]:
        shown = ""
        if row["split"] == "test" and row["stratum"] in baselines:
            shown = f"{baselines[row['stratum']]['best']:.2f} AUROC"
        counts = f"{row['rows']:>6}{row['violating']:>9}"
        yield f"  {row['split']:<12}{row['stratum']:<9}{counts}{shown:>14}"
    if manifest["dropped"]:
        yield (
            f"  {manifest['dropped']} rows dropped: their group or nearly their text is in a later "
            "split (SPLITS=clean)"
        )


def _size_lines(manifest: dict[str, Any]) -> Iterator[str]:
    words = manifest["words"]
    yield (
        f"  words per conversation: {words['1']['median']:.0f} median if violating, "
        f"{words['0']['median']:.0f} if not"
    )
    tested = sum(row["rows"] for row in manifest["counts"] if row["split"] == "test")
    if tested < FEW_TEST_ROWS:
        margin = 98 / math.sqrt(tested)  # 1.96 standard errors of a share of one half, in points
        yield (
            f"  few rows: on {tested} test rows an accuracy is uncertain by up to {margin:.0f} "
            "points either way (95 %)"
        )


def _debate_lines(manifest: dict[str, Any]) -> Iterator[str]:
    """What became of the cases that an endpoint wrote, and what they cost.

    Nothing for other data.
    """
    debate = manifest.get("debate")
    if not debate:
        return
    cost = ""
    if debate["cost_usd"] is not None:
        cost = f", {debate['cost_usd']:.2f} USD"
    yield f"  {debate['calls']:,} answers, {debate['malformed']} not in form{cost}"
    for outcome, count in debate["outcomes"].items():
        yield f"  {count:>6} {outcome}"
    accepted = manifest["dimensions"].get("dimension", {})
    shown = ", ".join(f"{name} {count}" for name, count in accepted.items())
    yield f"  accepted by dimension: {shown or 'none'}"


def _diversity_lines(manifest: dict[str, Any]) -> Iterator[str]:
    if manifest["phrasings_per_act"]:
        fewest = min(act["train"] for act in manifest["phrasings_per_act"].values())
        yield f"  distinct phrasings in training: {fewest} for the rarest act"
    shares = manifest["distinct_ngrams"]["train"]
    diversity = ", ".join(f"{100 * shares[f'distinct_{n}']:.0f} %" for n in (1, 2, 3))
    yield f"  different words, pairs and triples of words in training: {diversity} of all"
    near = manifest["duplicates"]
    yield (
        f"  near duplicates across splits (similarity {near['refused_from']} or more): 0.0 %, any "
        f"would be refused; closest pair: {near['highest_similarity_across_splits']:.2f}"
    )


def _counts(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Rows and violations by split and stratum, in the splits' order."""
    labels: dict[tuple[int, str], list[int]] = defaultdict(list)
    for example in examples:
        stratum = str(example.meta.get("stratum"))
        labels[SPLITS.index(example.split), stratum].append(example.label)
    counts = []
    for split, stratum in sorted(labels):
        part = labels[split, stratum]
        counts.append(
            {
                "split": SPLITS[split],
                "stratum": stratum,
                "rows": len(part),
                "violating": sum(part),
            }
        )
    return counts


def _dimensions(examples: Sequence[Example]) -> dict[str, dict[str, int]]:
    """How often each value of each sampled dimension occurs, the most frequent first."""
    names: tuple[str, ...] = COUNTED
    if any(example.meta.get("stratum") == "debated" for example in examples):
        names += DEBATED
    dimensions = {}
    for name in names:
        values = Counter(str(e.meta[name]) for e in examples if name in e.meta)
        if values:
            dimensions[name] = dict(values.most_common())
    return dimensions


def _spread(values: Sequence[int]) -> dict[str, float]:
    return {
        "mean": round(statistics.fmean(values), 1),
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def _distinct(examples: Sequence[Example]) -> dict[str, float]:
    """Distinct-n (Li et al., 2016).

    Different n-grams over all n-grams, in all utterances of the split.
    """
    utterances = []
    for example in examples:
        utterances += [message.content.lower().split() for message in example.messages]
    shares = {}
    for n in (1, 2, 3):
        grams: Counter[tuple[str, ...]] = Counter()
        for words in utterances:
            grams.update(_ngrams(words, n))
        shares[f"distinct_{n}"] = round(len(grams) / max(1, grams.total()), 4)
    return shares


def _ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Every `n` neighbouring words."""
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]


def _phrasings(examples: Sequence[Example]) -> dict[str, dict[str, int]]:
    """Distinct phrasings and cores per act, in training and in the test's unseen stratum.

    Only generated rows have any.
    """
    names: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for example in examples:
        stratum = example.meta.get("stratum")
        if stratum == "real":
            continue
        part: str = example.split
        if (part, stratum) == ("test", "unseen"):
            part = "unseen"
        for kind in ("phrasings", "cores"):
            for act, identity in _named(example, kind):
                names[act, kind, part].add(identity)
    acts = sorted({act for act, _, _ in names})
    return {
        act: {
            "train": len(names[act, "phrasings", "train"]),
            "unseen": len(names[act, "phrasings", "unseen"]),
            "cores_train": len(names[act, "cores", "train"]),
            "cores_unseen": len(names[act, "cores", "unseen"]),
        }
        for act in acts
    }


def _named(example: Example, kind: str) -> Iterator[tuple[str, str]]:
    """The acts of the example's own rule, each with the name of its core or phrasing."""
    for name in example.meta.get(kind, ()):
        rule, act, identity = name.split("/")
        if rule == example.rule:
            yield act, identity


def _duplicates(examples: Sequence[Example]) -> dict[str, Any]:
    """How close the splits come to each other.

    The highest similarity, and pairs above three thresholds.
    """
    similarities = [pair.similarity for pair in across_splits(examples, CLOSE)]
    pairs = {}
    for threshold in (0.3, 0.5, NEAR_DUPLICATE):
        pairs[str(threshold)] = sum(similarity >= threshold for similarity in similarities)
    return {
        "refused_from": NEAR_DUPLICATE,
        "highest_similarity_across_splits": round(max(similarities, default=0.0), 3),
        "pairs_across_splits": pairs,
    }
