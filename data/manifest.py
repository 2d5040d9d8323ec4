"""What a data set is made of, in numbers: `manifest.json`. Knows nothing of how the examples were made.

The *keyword floor* is what words alone give away: a multinomial naive Bayes and a logistic regression over word 1- and
2-grams, trained on the training split, with and without the speaker as part of the word. A score near the floor says
nothing about understanding.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.naive_bayes import MultinomialNB

from data.splits import NEAR_DUPLICATE, near_duplicates, text_of
from guard.example import SPLITS, Example
from guard.files.atomic import atomic_write
from guard.text import visible

COUNTED = ("act", "stance", "severity", "position", "domain", "user_register", "assistant_register")
DEBATED = ("dimension", "value")  # of rows that an endpoint wrote
FEW_TEST_ROWS = 100


def describe(examples: Sequence[Example]) -> dict[str, Any]:
    """What the examples of one rule are made of, JSON-able: the manifest without where they came from."""
    return {
        "counts": _counts(examples),
        "dimensions": {
            name: dict(Counter(str(e.meta[name]) for e in examples if name in e.meta).most_common())
            for name in (
                *COUNTED,
                *(DEBATED if any(e.meta.get("stratum") == "debated" for e in examples) else ()),
            )
            if any(name in e.meta for e in examples)
        },
        "words": {
            str(label): _spread([_words(e) for e in examples if e.label == label])
            for label in (0, 1)
        },
        "turns": {
            str(label): _spread([len(e.messages) for e in examples if e.label == label])
            for label in (0, 1)
        },
        "distinct_ngrams": {
            split: _distinct([e for e in examples if e.split == split]) for split in SPLITS
        },
        "phrasings_per_act": _phrasings(examples),
        "duplicates": _duplicates(examples),
        "auroc_from_surface": _surface(examples),
    }


def save(folder: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest.json`, whole or not at all."""
    with atomic_write(folder / "manifest.json") as part:
        part.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: Path) -> dict[str, Any]:
    """The manifest of the data set in `folder`; empty where there is none."""
    path = folder / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def table(rule: str, manifest: dict[str, Any]) -> str:
    """The manifest in a few lines for the terminal."""
    lines = [
        f"{rule}: {manifest['source']}, seed {manifest['seed']}",
        f"  {'split':<12}{'stratum':<9}{'rows':>6}{'violate':>9}{'words only':>12}",
    ]
    for row in manifest["counts"]:
        floor = (
            manifest["auroc_from_surface"]["words"].get(row["stratum"])
            if row["split"] == "test"
            else None
        )
        shown = f"{floor['best']:.2f} AUROC" if floor else ""
        lines.append(
            f"  {row['split']:<12}{row['stratum']:<9}{row['rows']:>6}{row['violating']:>9}{shown:>12}"
        )
    if manifest["dropped"]:
        lines.append(
            f"  {manifest['dropped']} rows dropped: their group or nearly their text is in a later split (SPLITS=clean)"
        )
    words = manifest["words"]
    lines.append(
        f"  words per conversation: {words['1']['median']:.0f} median if violating, {words['0']['median']:.0f} if not"
    )
    tested = sum(row["rows"] for row in manifest["counts"] if row["split"] == "test")
    if tested < FEW_TEST_ROWS:
        margin = 98 / math.sqrt(tested)  # 1.96 standard errors of a share of one half, in points
        lines.append(
            f"  few rows: on {tested} test rows an accuracy is uncertain by up to {margin:.0f} points either way (95 %)"
        )
    if debate := manifest.get("debate"):
        cost = f", {debate['cost_usd']:.2f} USD" if debate["cost_usd"] is not None else ""
        lines.append(f"  {debate['calls']:,} answers, {debate['malformed']} not in form{cost}")
        lines += [f"  {count:>6} {outcome}" for outcome, count in debate["outcomes"].items()]
        kept = ", ".join(
            f"{name} {count}" for name, count in manifest["dimensions"].get("dimension", {}).items()
        )
        lines.append(f"  accepted by dimension: {kept or 'none'}")
    if manifest["phrasings_per_act"]:
        fewest = min(act["train"] for act in manifest["phrasings_per_act"].values())
        lines.append(f"  distinct phrasings in training: {fewest} for the rarest act")
    diversity = ", ".join(
        f"{100 * manifest['distinct_ngrams']['train'][f'distinct_{n}']:.0f} %" for n in (1, 2, 3)
    )
    lines.append(f"  different words, pairs and triples of words in training: {diversity} of all")
    near = manifest["duplicates"]
    lines.append(
        f"  near duplicates across splits (similarity {near['refused_from']} or more): 0.0 %, any would be refused; "
        f"closest pair: {near['highest_similarity_across_splits']:.2f}"
    )
    return "\n".join(lines)


def _counts(examples: Sequence[Example]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    for example in examples:
        rows[example.split, str(example.meta.get("stratum"))].append(example.label)
    ordered = sorted(rows.items(), key=lambda item: ([*SPLITS].index(item[0][0]), item[0][1]))  # type: ignore[arg-type]
    return [
        {"split": split, "stratum": stratum, "rows": len(labels), "violating": sum(labels)}
        for (split, stratum), labels in ordered
    ]


def _words(example: Example) -> int:
    return len(text_of(example).split())


def _spread(values: Sequence[int]) -> dict[str, float]:
    return {
        "mean": round(statistics.fmean(values), 1),
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def _distinct(examples: Sequence[Example]) -> dict[str, float]:
    """Distinct-n (Li et al., 2016): different n-grams over all n-grams, in all utterances of the split."""
    shares = {}
    for n in (1, 2, 3):
        grams: Counter[tuple[str, ...]] = Counter()
        for example in examples:
            for message in example.messages:
                words = message.content.lower().split()
                grams.update(zip(*(words[shift:] for shift in range(n)), strict=False))
        shares[f"distinct_{n}"] = round(len(grams) / max(1, grams.total()), 4)
    return shares


def _phrasings(examples: Sequence[Example]) -> dict[str, dict[str, int]]:
    """Distinct phrasings and cores per act of the rule, in training and in the held-out stratum; only generated rows have any."""
    found: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for example in examples:
        if example.meta.get("stratum") == "real":
            continue
        stratum = (
            "unseen"
            if (example.split, example.meta.get("stratum")) == ("test", "unseen")
            else example.split
        )
        for kind in ("phrasings", "cores"):
            for name in example.meta.get(kind, ()):
                rule, act, identity = name.split("/")
                if rule == example.rule:
                    found[act, kind, stratum].add(identity)
    return {
        act: {
            "train": len(found[act, "phrasings", "train"]),
            "unseen": len(found[act, "phrasings", "unseen"]),
            "cores_train": len(found[act, "cores", "train"]),
            "cores_unseen": len(found[act, "cores", "unseen"]),
        }
        for act in sorted({act for act, _, _ in found})
    }


def _duplicates(examples: Sequence[Example]) -> dict[str, Any]:
    """How close the splits come to each other: the highest similarity across splits, and pairs above three thresholds."""
    found = [
        pair.similarity
        for pair in near_duplicates(examples, 0.2)
        if examples[pair.first].split != examples[pair.second].split
    ]
    return {
        "refused_from": NEAR_DUPLICATE,
        "highest_similarity_across_splits": round(max(found, default=0.0), 3),
        "pairs_across_splits": {
            str(threshold): sum(one >= threshold for one in found)
            for threshold in (0.3, 0.5, NEAR_DUPLICATE)
        },
    }


def _surface(examples: Sequence[Example]) -> dict[str, Any]:
    """AUROC that a guesser reaches without understanding: by length, by turns, by words where training repeats any."""
    train = [e for e in examples if e.split == "train"]
    test = [e for e in examples if e.split == "test"]
    labels = [e.label for e in test]
    floors: dict[str, dict[str, float]] = defaultdict(dict)
    for features, text in (("words", _bag), ("words_by_speaker", _bag_by_speaker)):
        rows_with = Counter(gram for example in train for gram in set(text(example)))
        repeated = sorted(gram for gram, rows in rows_with.items() if rows > 1)
        if not repeated:
            continue
        vectorizer = CountVectorizer(analyzer=text, vocabulary=repeated, binary=True)
        known = vectorizer.transform(train)
        for method, model in (
            ("naive_bayes", MultinomialNB()),
            ("logistic_regression", LogisticRegression(C=0.1, max_iter=1000)),
        ):
            model.fit(known, [e.label for e in train])
            for stratum in sorted({str(e.meta.get("stratum")) for e in test}):
                part = [e for e in test if str(e.meta.get("stratum")) == stratum]
                p_violation = model.predict_proba(vectorizer.transform(part))[:, 1]
                floors[stratum][f"{features}_{method}"] = round(
                    float(roc_auc_score([e.label for e in part], p_violation)), 3
                )
    for stratum in floors:
        floors[stratum]["best"] = max(floors[stratum].values())
    return {
        "length": round(float(roc_auc_score(labels, [_words(e) for e in test])), 3),
        "turns": round(float(roc_auc_score(labels, [len(e.messages) for e in test])), 3),
        "words": dict(floors),
    }


def _grams(text: str) -> list[str]:
    words = re.findall(r"(?:[^\W\d]|')+|\d+", text.lower())  # letters of any script
    return words + [f"{one} {two}" for one, two in itertools.pairwise(words)]


def _bag(example: Example) -> list[str]:
    return [gram for message in example.messages for gram in _grams(visible(message.content))]


def _bag_by_speaker(example: Example) -> list[str]:
    return [
        f"{message.role}:{gram}"
        for message in example.messages
        for gram in _grams(visible(message.content))
    ]
