"""What a guesser reaches without understanding: by length, by turns, by words.

Knows nothing of how the examples were made.

*Surface words* are the better of a multinomial naive Bayes and a logistic regression over word 1-
and 2-grams, there or not, trained on the training split, with and without the speaker as part of
the word. A score near theirs says nothing about understanding. The bag of words of the quality
table (`eval/bag_of_words`) is another and stronger baseline.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.naive_bayes import MultinomialNB

from data.splits import text_of
from guard.conversation.example import Example
from guard.prompt.text import visible

Bag = Callable[[Example], list[str]]
_WORD = re.compile(r"(?:[^\W\d]|')+|\d+")  # letters of any script


def count_words(example: Example) -> int:
    """The words of all turns."""
    return len(text_of(example).split())


def auroc_from_surface(examples: Sequence[Example]) -> dict[str, Any]:
    """The AUROC on the test split.

    `length`, `turns`, and `words` by stratum where training repeats any words.
    """
    train = [example for example in examples if example.split == "train"]
    test = [example for example in examples if example.split == "test"]
    aurocs: dict[str, dict[str, float]] = defaultdict(dict)
    for name, bag in BAGS.items():
        for method, stratum, auroc in _bag_of_words(bag, train, test):
            aurocs[stratum][f"{name}_{method}"] = auroc
    for by_method in aurocs.values():
        by_method["best"] = max(by_method.values())
    return {
        "length": _auroc(test, [count_words(example) for example in test]),
        "turns": _auroc(test, [len(example.messages) for example in test]),
        "words": dict(aurocs),
    }


def _bag_of_words(
    bag: Bag, train: Sequence[Example], test: Sequence[Example]
) -> list[tuple[str, str, float]]:
    """The AUROC of each method on each stratum of the test split.

    Empty where no word occurs in two training rows.
    """
    rows_with: Counter[str] = Counter()
    for example in train:
        rows_with.update(set(bag(example)))
    vocabulary = sorted(gram for gram, rows in rows_with.items() if rows > 1)
    if not vocabulary:
        return []
    vectorizer = CountVectorizer(analyzer=bag, vocabulary=vocabulary, binary=True)
    features = vectorizer.transform(train)
    models = {
        "naive_bayes": MultinomialNB(),
        "logistic_regression": LogisticRegression(C=0.1, max_iter=1000),
    }
    aurocs = []
    for method, model in models.items():
        model.fit(features, [example.label for example in train])
        for stratum, part in _by_stratum(test).items():
            p_violation = model.predict_proba(vectorizer.transform(part))[:, 1]
            aurocs.append((method, stratum, _auroc(part, p_violation)))
    return aurocs


def _by_stratum(examples: Sequence[Example]) -> dict[str, list[Example]]:
    """The examples of each stratum, in the order of their names."""
    strata: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        strata[str(example.meta.get("stratum"))].append(example)
    return dict(sorted(strata.items()))


def _auroc(examples: Sequence[Example], scores: Sequence[float]) -> float:
    return round(float(roc_auc_score([example.label for example in examples], scores)), 3)


def _grams(text: str) -> list[str]:
    words = _WORD.findall(text.lower())
    return words + [f"{first} {second}" for first, second in itertools.pairwise(words)]


def _bag(example: Example) -> list[str]:
    grams: list[str] = []
    for message in example.messages:
        grams += _grams(visible(message.content))
    return grams


def _bag_by_speaker(example: Example) -> list[str]:
    grams: list[str] = []
    for message in example.messages:
        grams += [f"{message.role}:{gram}" for gram in _grams(visible(message.content))]
    return grams


BAGS: dict[str, Bag] = {"words": _bag, "words_by_speaker": _bag_by_speaker}
