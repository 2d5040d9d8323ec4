"""The bag-of-words baseline: what can be had without a model. `python -m eval.bag_of_words` prints
its table alone.

TF-IDF with logistic regression. Which text it reads, which n-grams it counts and how strongly it is
regularised is chosen by the AUROC on the validation split; probability and threshold come from
there too. Knows nothing of engines, and until everything is chosen nothing of
the test split.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np
from scipy.sparse import csr_matrix, hstack
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_curve
from tqdm import tqdm

from data.ingest import Splitting, ingest
from data.rows import read_rows
from eval import metrics
from eval.answer import Answer
from eval.markdown import accuracy_cell, markdown_table, metric_cells, metric_labels
from eval.quality import MethodQuality, Stratum, method_quality
from guard.arguments import whole_number
from guard.errors import GuardError, exits_cleanly
from guard.example import SPLITS, Example, Split, read_examples
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict
from guard.layout import Runs
from guard.machine.provenance import provenance
from guard.own_rows import for_calibration
from guard.prompt.text import visible
from guard.rule import Judged, Rule, load_rule, rule_names
from guard.verdict import Calibration

# C of the logistic regression, the inverse of its regularisation.
STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0)
WORD = r"(?u)\w+"
LARGEST_TEMPERATURE = 50.0  # as calibration's: logits that mean nothing still have an order


class BagVariant(Strict):
    """What was chosen, and the AUROC on the validation split that it was chosen by."""

    view: str
    ngrams: str
    c: float
    validation_auroc: float

    def __str__(self) -> str:
        return f"{self.view}, {self.ngrams}, C = {self.c:g}"


class NgramCounter(Protocol):
    """What `Block` needs of a vectoriser: counts of n-grams, [texts, n-grams]."""

    def fit_transform(self, texts: Sequence[str]) -> csr_matrix:
        """Learn the n-grams of the training texts and count them."""
        ...

    def transform(self, texts: Sequence[str]) -> csr_matrix:
        """Count the n-grams learnt."""
        ...


class CharacterCounts:
    """Character 2- to 5-grams within words, those at a word's edges padded with a space.

    The same counts as CountVectorizer(analyzer="char_wb") makes, but each distinct word is taken
    apart once.
    """

    def __init__(self) -> None:
        self._grams = CountVectorizer(analyzer="char_wb", ngram_range=(2, 5))

    def fit_transform(self, texts: Sequence[str]) -> csr_matrix:
        """Learn the n-grams of the training texts and count them, [texts, n-grams]."""
        counts, words = _counted_words(texts)
        return counts @ self._grams.fit_transform(words)

    def transform(self, texts: Sequence[str]) -> csr_matrix:
        """Count the n-grams learnt, [texts, n-grams], also in words that training does not have."""
        if not any(text.split() for text in texts):
            return csr_matrix((len(texts), len(self._grams.vocabulary_)))
        counts, words = _counted_words(texts)
        return counts @ self._grams.transform(words)


def _counted_words(texts: Sequence[str]) -> tuple[csr_matrix, np.ndarray]:
    """How often each word stands in each text, [texts, words], and the words."""
    words = CountVectorizer(token_pattern=r"\S+")
    return words.fit_transform(texts), words.get_feature_names_out()


def _word_counts(longest: int) -> CountVectorizer:
    return CountVectorizer(token_pattern=WORD, ngram_range=(1, longest))


# Which words of a conversation are read. The judged speaker's, of a rule on the whole conversation,
# are all.
VIEWS: dict[str, Callable[[Example, Judged], list[str]]] = {
    "whole conversation": lambda example, judged: [m.content for m in example.messages],
    "judged speaker": lambda example, judged: [
        m.content for m in example.messages if judged in (m.role, "conversation")
    ],
    "last turn": lambda example, judged: [example.messages[-1].content],
}
BLOCKS: dict[str, Callable[[], NgramCounter]] = {
    "words 1-2": lambda: _word_counts(2),
    "words 1-3": lambda: _word_counts(3),
    "characters 2-5": CharacterCounts,
}
NGRAMS: dict[str, tuple[str, ...]] = {  # by name: the blocks that stand side by side
    "words 1-2": ("words 1-2",),
    "words 1-3": ("words 1-3",),
    "words 1-2 and characters 2-5": ("words 1-2", "characters 2-5"),
}


class Block:
    """TF-IDF of one kind of n-gram, rows of length 1.

    Those of a single training text are dropped, unless all are.
    """

    def __init__(self, name: str, training: Sequence[str]) -> None:
        self._counts = BLOCKS[name]()
        counts = csr_matrix(self._counts.fit_transform(training))
        texts_with = np.bincount(counts.indices, minlength=counts.shape[1])
        self._kept = np.flatnonzero(texts_with >= min(2, texts_with.max()))
        self._weights = TfidfTransformer(sublinear_tf=True)
        self.training = self._weights.fit_transform(counts[:, self._kept])

    def transform(self, texts: Sequence[str]) -> csr_matrix:
        """[texts, n-grams], as sparse float64."""
        return self._weights.transform(csr_matrix(self._counts.transform(texts))[:, self._kept])


@dataclass(frozen=True)
class BagOfWords:
    """A fitted baseline: the chosen variant, its features and weights, how its logits are read."""

    variant: BagVariant
    judged: Judged
    blocks: tuple[Block, ...]
    model: LogisticRegression
    calibration: Calibration

    def answers(self, examples: Sequence[Example]) -> list[Answer]:
        """One per example, in order, with logit (nats) and calibrated probability; it states no
        confidence.
        """
        answers = []
        for logit in self.logits(examples):
            p_violation = self.calibration.p_violation(logit)
            answers.append(Answer(p_violation >= self.calibration.threshold, logit, p_violation))
        return answers

    def logits(self, examples: Sequence[Example]) -> list[float]:
        """In nats, uncalibrated, one per example, in order."""
        texts = [text_of(example, self.variant.view, self.judged) for example in examples]
        features = hstack([block.transform(texts) for block in self.blocks]).tocsr()
        logits: list[float] = self.model.decision_function(features).tolist()
        return logits


def fit_bag_of_words(
    train: Sequence[Example],
    validation: Sequence[Example],
    judged: Judged,
    max_fpr: float | None = None,
) -> BagOfWords:
    """The best variant on the validation split, the first of equals, trained on the training split.

    Raises GuardError where a split lacks rows of a label, or the training rows have no words that
    differ.
    """
    for split, rows in (("training", train), ("validation", validation)):
        _refuse_one_label(split, rows)
    labels = np.array([example.label for example in validation])
    best: tuple[BagVariant, tuple[Block, ...], LogisticRegression, np.ndarray] | None = None
    for variant, blocks, model, logits in _candidates(train, validation, judged):
        if best is None or variant.validation_auroc > best[0].validation_auroc:
            best = variant, blocks, copy.deepcopy(model), logits
    if best is None:
        raise GuardError(
            "the training rows have no words that differ",
            remedy="Run `make data` for this rule, or check the rows",
        )
    calibrated_on, of_rows = for_calibration(
        best[3].tolist(),
        labels.tolist(),
        [example.is_generated for example in validation],
        max_fpr,
    )
    calibration = _calibration(np.array(calibrated_on), np.array(of_rows), max_fpr)
    return BagOfWords(best[0], judged, best[1], best[2], calibration)


def text_of(example: Example, view: str, judged: Judged) -> str:
    """What the baseline reads of an example, without what hides text."""
    return "\n".join(visible(content) for content in VIEWS[view](example, judged))


def _candidates(
    train: Sequence[Example], validation: Sequence[Example], judged: Judged
) -> Iterator[tuple[BagVariant, tuple[Block, ...], LogisticRegression, np.ndarray]]:
    """Every variant, with its blocks, its model (which the next one changes) and its validation
    logits.
    """
    train_labels = [example.label for example in train]
    labels = [example.label for example in validation]
    for view, training, held_out in _views(train, validation, judged):
        blocks = {name: Block(name, training) for name in BLOCKS}
        transformed = {name: block.transform(held_out) for name, block in blocks.items()}
        for ngrams, names in NGRAMS.items():
            features = hstack([blocks[name].training for name in names]).tocsr()
            held_out_features = hstack([transformed[name] for name in names]).tocsr()
            model = LogisticRegression(max_iter=1000, warm_start=True)
            for c in STRENGTHS:
                model.set_params(C=c).fit(features, train_labels)
                logits = model.decision_function(held_out_features)
                auroc = metrics.auroc(labels, logits) or 0.0
                variant = BagVariant(view=view, ngrams=ngrams, c=c, validation_auroc=auroc)
                yield variant, tuple(blocks[name] for name in names), model, logits


def _views(
    train: Sequence[Example], validation: Sequence[Example], judged: Judged
) -> Iterator[tuple[str, list[str], list[str]]]:
    """The views whose training texts have words that differ, none twice: name, training and
    validation texts.
    """
    seen: list[list[str]] = []
    for view in VIEWS:
        training = [text_of(example, view, judged) for example in train]
        has_words = len({tuple(re.findall(WORD, text.lower())) for text in training}) > 1
        if has_words and training not in seen:
            seen.append(training)
            yield view, training, [text_of(example, view, judged) for example in validation]


def _refuse_one_label(split: str, rows: Sequence[Example]) -> None:
    if len({example.label for example in rows}) < 2:
        raise GuardError(
            f"the {split} rows have one label: nothing to fit the bag-of-words baseline on",
            got=f"{len(rows)} rows",
            remedy="Run `make data` for this rule",
        )


def _calibration(logits: np.ndarray, labels: np.ndarray, max_fpr: float | None) -> Calibration:
    """Platt's (1999) scaling, and a threshold by the rule that an adapter's follows.

    That is the lowest with at most `max_fpr` of the allowed rows above it; without one, of those
    within one standard error of the best balanced accuracy the nearest to p = 0.5. Unlike
    `train/calibration/calibrate.py` it fits the labels themselves, cuts for `max_fpr` at a row's
    logit instead of between two, and refuses no split for having few allowed rows.
    """
    platt = LogisticRegression(C=1e4).fit(logits[:, None], labels)
    slope = max(float(platt.coef_[0, 0]), 1 / LARGEST_TEMPERATURE)
    bias = float(platt.intercept_[0])
    probability = Calibration(temperature=1 / slope, bias=bias)
    if max_fpr is None:
        cut = _balanced_cut(logits, labels, neutral=-bias / slope)
    else:
        cut = _cut_at_fpr(logits, labels, max_fpr)
    threshold = probability.p_violation(cut)
    return Calibration(temperature=1 / slope, bias=bias, threshold=threshold)


def _balanced_cut(logits: np.ndarray, labels: np.ndarray, neutral: float) -> float:
    """The midpoint between two validation logits, or `neutral`, that decides best and is nearest to
    neutral.
    """
    distinct = np.unique(logits)
    cuts = np.append((distinct[1:] + distinct[:-1]) / 2, neutral)
    violating, allowed = logits[labels == 1], logits[labels == 0]
    recall = (violating[:, None] >= cuts).mean(axis=0)
    specificity = (allowed[:, None] < cuts).mean(axis=0)
    balanced_accuracy = (recall + specificity) / 2
    variance = _variance(recall, len(violating)) + _variance(specificity, len(allowed))
    standard_errors = np.sqrt(variance) / 2
    best = balanced_accuracy.argmax()
    is_good = balanced_accuracy >= balanced_accuracy[best] - standard_errors[best] - 1e-12
    good = cuts[is_good]
    return float(good[np.abs(good - neutral).argmin()])


def _variance(rates: np.ndarray, rows: int) -> np.ndarray:
    """Of shares of so many rows: of few that are all right, the next may be wrong."""
    plausible = (rates * rows + 1) / (rows + 2)
    return plausible * (1 - plausible) / rows


def _cut_at_fpr(logits: np.ndarray, labels: np.ndarray, max_fpr: float) -> float:
    """The lowest validation logit at and above which at most `max_fpr` of the allowed stand."""
    false_positive_rate, _, lowest_flagged = roc_curve(labels, logits, drop_intermediate=False)
    last = int(np.flatnonzero(false_positive_rate <= max_fpr)[-1])
    if last == 0:
        return float(logits.max() + 1.0)
    return float(lowest_flagged[last])


@dataclass(frozen=True)
class RuleData:
    """One rule's examples by split, and what is judged of them."""

    name: str
    judged: Judged
    max_fpr: float | None
    splits: Mapping[Split, Sequence[Example]]


@dataclass(frozen=True)
class MeasuredBag:
    """A rule's baseline on its test split, and the seconds it took."""

    variant: BagVariant
    quality: MethodQuality
    seconds: float


def measure(rule: RuleData) -> MeasuredBag:
    """Fit the baseline of one rule and measure it on the test split."""
    started = time.perf_counter()
    fitted = fit_bag_of_words(
        rule.splits["train"], rule.splits["validation"], rule.judged, rule.max_fpr
    )
    test = rule.splits["test"]
    quality = method_quality(test, {0: fitted.answers(test)}, name_seeds=False)
    return MeasuredBag(fitted.variant, quality, round(time.perf_counter() - started, 1))


def read_splits(folder: Path) -> dict[Split, list[Example]]:
    """The examples in a rule's data folder. Raises GuardError naming a file that is missing."""
    splits: dict[Split, list[Example]] = {}
    for split in SPLITS:
        path = folder / f"{split}.jsonl"
        if not path.is_file():
            remedy = f"Run `make data RULE={folder.name}`"
            raise GuardError(f"no {split}.jsonl", where=folder, remedy=remedy)
        splits[split] = read_examples(path)
    return splits


def _own_data(path: Path, seed: int, splitting: Splitting, judged: Judged | None) -> RuleData:
    """A folder of splits, or a file of labelled rows that `make data` could read.

    Raises GuardError on bad rows.
    """
    if path.is_dir():
        splits = read_splits(path)
        rows = [*splits["train"], *splits["validation"], *splits["test"]]
    else:
        rows = ingest(read_rows(str(path)), str(path), _stand_in(path), seed, splitting).examples
        splits = {}
        for split in SPLITS:
            splits[split] = [row for row in rows if row.split == split]
    return RuleData(path.name.partition(".")[0], judged or _last_speaker(rows), None, splits)


def _stand_in(path: Path) -> Rule:
    """What reading rows takes of a rule: the file's name up to two underscores."""
    name = path.name.partition(".")[0].partition("__")[0]
    text = "The rule that the rows are labelled for."
    return Rule(
        id=name, title=text, policy=text, judged="conversation", violates=(text,), allows=(text,)
    )


def _last_speaker(rows: Sequence[Example]) -> Judged:
    """Who says the last turn of most rows; the whole conversation where that is nobody who can be
    judged.
    """
    speakers = [row.messages[-1].role for row in rows]
    most = max(sorted(set(speakers)), key=speakers.count)
    return next((judged for judged in get_args(Judged) if judged == most), "conversation")


def _table(measured: Mapping[str, MeasuredBag]) -> str:
    """A row for each rule, and one for each of its strata where there are several."""
    rows = []
    for rule, result in measured.items():
        rows.append([rule, *_cells(result.quality), str(result.variant)])
        if len(result.quality.strata) > 1:
            for name, stratum in result.quality.strata.items():
                rows.append([f"- {name}", *_cells(stratum), ""])
    return markdown_table(
        ["rule", "rows", "accuracy", *metric_labels("quality"), "chosen on validation"], rows
    )


def _cells(quality: MethodQuality | Stratum) -> list[str]:
    accuracy = accuracy_cell(quality.accuracy, quality.accuracy_ci95)
    return [str(quality.n), accuracy, *metric_cells(quality.metrics)]


def _as_json(measured: Mapping[str, MeasuredBag], seed: int) -> str:
    rules: dict[str, Any] = {}
    for name, result in measured.items():
        rules[name] = {
            "variant": result.variant.model_dump(),
            "seconds": result.seconds,
            **result.quality.model_dump(mode="json", exclude={"seeds", "accuracy_sd"}),
        }
    content = {
        "what": "the bag-of-words baseline on the test split, chosen on validation",
        **provenance(),
        "seed": seed,
        "rules": rules,
    }
    return json.dumps(content, indent=1) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bag_of_words",
        description="The bag-of-words baseline alone, from what make data wrote. Needs no model.",
    )
    parser.add_argument(
        "--rule", default="all", help="a rule's name, several separated by commas, or all (default)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        help="instead of rules: folders with train, validation and test.jsonl, or files of "
        "labelled rows as for make data",
    )
    parser.add_argument(
        "--splits",
        choices=get_args(Splitting),
        default="keep",
        help="the splits of files, as for make data (default: keep)",
    )
    parser.add_argument(
        "--judged",
        choices=get_args(Judged),
        help="whose turns are judged in --data (default: those of who speaks last in most rows)",
    )
    parser.add_argument("--seed", type=whole_number, default=0, help="of new splits (default 0)")
    parser.add_argument(
        "--runs", type=Path, default=Runs().root, help="where make data wrote (default runs/)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def _selected(arguments: argparse.Namespace) -> Iterator[RuleData]:
    if arguments.data:
        for path in arguments.data:
            yield _own_data(path, arguments.seed, arguments.splits, arguments.judged)
        return
    for name in rule_names(arguments.rule):
        rule = load_rule(name)
        splits = read_splits(Runs(arguments.runs).data(name))
        yield RuleData(name, rule.judged, rule.max_fpr, splits)


@exits_cleanly
def main() -> None:
    """The command line."""
    arguments = _parser().parse_args()
    measured: dict[str, MeasuredBag] = {}
    for rule in tqdm(_selected(arguments), desc="bag of words", unit="rule"):
        measured[rule.name] = measure(rule)
    print(_table(measured))
    if arguments.json:
        with atomic_write(arguments.json) as part:
            part.write_text(_as_json(measured, arguments.seed), encoding="utf-8")
        print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
