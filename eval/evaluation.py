"""The result for one rule: judge, LoRA and aLoRA on the same test examples. Knows nothing of how the answers were obtained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, get_args

import numpy as np

from data.generator.dimensions import Difficulty
from eval import metrics
from eval.agreement import Agreement
from eval.answer import Answer
from eval.robustness import Robustness
from eval.trial import Trial
from guard.errors import GuardError
from guard.example import Example
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict, validate
from guard.provenance import Provenance
from guard.verdict import expected_calibration_error

Contender = Literal["judge", "lora", "alora"]
CONTENDERS: tuple[Contender, ...] = ("judge", "lora", "alora")


HARD_BENIGN = "hard benign"
LOOKS_LIKE = (
    "quotes",
    "supposes",
    "resembles",
    "asks",
    "does",
)  # `meta.stance` of allowed rows that come close to a violation


class Stratum(Strict):
    """Accuracy, AUROC and calibration on the examples of one stratum, means over seeds.

    Hard benign: 1 - accuracy is the false-positive rate.
    """

    n: int
    accuracy: float
    accuracy_ci95: tuple[float, float]
    auroc: float | None
    ece: float | None
    ece_floor: float | None


class Quality(Strict):
    """How good one set of answers is. Metrics that need a logit or a probability are None for a method that gives a bare yes or no.

    `answered` of `n` examples got a usable answer; the others count as wrong in accuracy and F1 and are left out of the rest.
    """

    n: int
    answered: int
    accuracy: float
    accuracy_ci95: tuple[float, float]
    f1: float
    auroc: float | None
    auprc: float | None
    recall_at_fpr1: float | None
    ece: float | None
    ece_floor: float | None  # what perfect probabilities would have had on as many examples
    false_positive_rate: float | None  # flagged of the allowed, at the adapter's own threshold
    recall: float | None  # flagged of the violating
    confident: float | None  # share of the answers outside the band of doubt
    accuracy_where_confident: float | None


class MethodQuality(Quality):
    """Means over seeds, and each seed by itself. `answered` is that of the worst seed; `metrics.accuracy_interval` says what the
    intervals can show. A single seed's is Wilson's.
    """

    accuracy_sd: float | None
    false_positive_rate_ci95: tuple[float, float] | None
    recall_ci95: tuple[float, float] | None
    strata: dict[str, Stratum]
    seeds: dict[str, Quality]


class JudgeRecord(Strict):
    """Who judged, and what it took; `endpoint` is None where the base model judged.

    Unparseable answers, and conversations that the endpoint refused, count as wrong. Tokens and cost are those of the answers whose
    tokens the endpoint told; `without_usage` counts the others.
    """

    name: str
    endpoint: str | None = None
    unparseable: int = 0
    refused: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    without_usage: int = 0
    latency_p50_ms: float | None = None
    latency_p95_ms: float | None = None
    cost_usd: float | None = None


class Evaluation(Strict):
    """Everything the report says about one rule, and what it takes to put rules together."""

    rule: str
    title: str
    model: str
    n_test: int
    n_violating: int
    limit: int | None
    seeds: tuple[int, ...]
    methods: dict[Contender, MethodQuality]
    max_fpr: float | None  # the rule's
    words_auroc: dict[
        str, float
    ]  # what words alone reach, by stratum: a score near it is worth nothing
    refusals: dict[Contender, int]  # by the served engine, over all seeds
    judge: JudgeRecord
    agreement: dict[str, Agreement]
    robustness: Robustness
    mcnemar_seed: int  # 0, the adapters that are served, or else the first one
    mcnemar_p: float  # LoRA against aLoRA on that seed
    mcnemar_p_by_seed: dict[str, float]
    alora_minus_lora: tuple[tuple[int, ...], ...]  # per seed and example: -1, 0 or 1
    groups: tuple[int, ...]  # per example
    commit: str
    hardware: str
    versions: dict[str, str]

    @property
    def differences(self) -> metrics.Outcomes:
        """aLoRA minus LoRA, ready for the bootstrap."""
        return metrics.Outcomes(
            np.array(self.alora_minus_lora, dtype=np.int8), np.array(self.groups, dtype=np.int64)
        )

    def save(self, folder: Path) -> None:
        """Write `evaluation.json`, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / "evaluation.json") as part:
            part.write_text(
                json.dumps(self.model_dump(mode="json"), ensure_ascii=False) + "\n",
                encoding="utf-8",
            )


def load_evaluation(folder: Path) -> Evaluation:
    """The evaluation kept in `folder`. Raises GuardError where it is missing, torn, or has a wrong key, which is named."""
    path, remedy = folder / "evaluation.json", f"Run `make eval RULE={folder.parent.name}`"
    if not path.is_file():
        raise GuardError("no such file", where=path, remedy=remedy)
    try:
        return validate(json.loads(path.read_bytes()), Evaluation, where=path)
    except ValueError as error:
        raise GuardError(f"not valid JSON: {error}", where=path, remedy=remedy) from error
    except GuardError as error:
        raise GuardError(error.what, where=path, remedy=remedy) from error


def evaluate(
    trial: Trial,
    judged: Sequence[Answer],
    served: Mapping[str, Mapping[int, Sequence[Answer]]],
    *,
    judge: JudgeRecord,
    judge_is_served: bool,
    agreement: dict[str, Agreement],
    robustness: Robustness,
    provenance: Provenance,
) -> Evaluation:
    """Measure everybody's answers, each in the order of the trial's examples; `served` holds the adapters' by method and seed."""
    labels = np.array([example.label for example in trial.examples])
    correct = {
        method: {seed: _decisions(labels, answers) == labels for seed, answers in by_seed.items()}
        for method, by_seed in served.items()
    }
    p_by_seed = {
        str(seed): metrics.mcnemar_exact_p(correct["lora"][seed], correct["alora"][seed])
        for seed in trial.seeds
    }
    difference = [
        correct["alora"][seed].astype(int) - correct["lora"][seed].astype(int)
        for seed in trial.seeds
    ]
    groups = _groups(trial.examples)
    return Evaluation(
        rule=trial.rule.id,
        title=trial.rule.title,
        model=trial.recipe.name,
        n_test=len(trial.examples),
        n_violating=int(labels.sum()),
        limit=trial.limit,
        seeds=trial.seeds,
        methods={
            "judge": _method_quality(trial.examples, {0: judged}, name_seeds=False),
            "lora": _method_quality(trial.examples, served["lora"]),
            "alora": _method_quality(trial.examples, served["alora"]),
        },
        max_fpr=trial.rule.max_fpr,
        words_auroc=dict(trial.words_auroc),
        refusals={
            "judge": _unanswered([judged]) if judge_is_served else 0,
            "lora": _unanswered(served["lora"].values()),
            "alora": _unanswered(served["alora"].values()),
        },
        judge=judge,
        agreement=agreement,
        robustness=robustness,
        mcnemar_seed=trial.served_seed,
        mcnemar_p=p_by_seed[str(trial.served_seed)],
        mcnemar_p_by_seed=p_by_seed,
        alora_minus_lora=tuple(tuple(row.tolist()) for row in difference),
        groups=tuple(groups.tolist()),
        **provenance,
    )


def quality(labels: Sequence[int], answers: Sequence[Answer]) -> Quality:
    """One set of answers against the labels."""
    truth = np.array(labels)
    decisions = _decisions(truth, answers)
    accuracy = float((decisions == truth).mean())
    ranked_labels, logits = _ranked(labels, answers)
    ece, ece_floor = _calibration(labels, answers)
    return Quality(
        n=len(answers),
        answered=sum(answer.violates is not None for answer in answers),
        accuracy=accuracy,
        accuracy_ci95=metrics.wilson_interval(accuracy, len(answers)),
        f1=metrics.f1(truth, decisions),
        auroc=metrics.auroc(ranked_labels, logits),
        auprc=metrics.auprc(ranked_labels, logits),
        recall_at_fpr1=metrics.recall_at_fpr(ranked_labels, logits),
        ece=ece,
        ece_floor=ece_floor,
        false_positive_rate=_flagged(truth, decisions, 0),
        recall=_flagged(truth, decisions, 1),
        confident=_share([answer.confident for answer in answers if answer.confident is not None]),
        accuracy_where_confident=_share(
            [
                right
                for right, answer in zip(decisions == truth, answers, strict=True)
                if answer.confident
            ]
        ),
    )


def _calibration(
    labels: Sequence[int], answers: Sequence[Answer]
) -> tuple[float | None, float | None]:
    """The expected calibration error, and what perfect probabilities would have had; of the answers that have a probability.

    None where the labels are all the same: rows that were chosen by their label say nothing about a probability.
    """
    if len(set(labels)) < 2:
        return None, None
    probable = [
        (label, answer.p_violation)
        for label, answer in zip(labels, answers, strict=True)
        if answer.p_violation is not None
    ]
    p = [each for _, each in probable]
    return expected_calibration_error(
        [label for label, _ in probable], p
    ), metrics.calibration_floor(p)


def _flagged(truth: np.ndarray, decisions: np.ndarray, label: int) -> float | None:
    """The share that is flagged of the examples with this label; None where there is none."""
    return float(decisions[truth == label].mean()) if (truth == label).any() else None


def _share(hits: Sequence[bool]) -> float | None:
    """The share that is true; None of nothing."""
    return sum(map(bool, hits)) / len(hits) if hits else None


def mean_over(values: Sequence[float | None]) -> float | None:
    """The mean, None as soon as one value is missing: a mean over some would compare unlike things."""
    present = [value for value in values if value is not None]
    return fmean(present) if present and len(present) == len(values) else None


def _method_quality(
    examples: Sequence[Example], by_seed: Mapping[int, Sequence[Answer]], *, name_seeds: bool = True
) -> MethodQuality:
    labels = [example.label for example in examples]
    each = {str(seed): quality(labels, answers) for seed, answers in by_seed.items()}
    accuracies = [one.accuracy for one in each.values()]
    accuracy = fmean(accuracies)
    return MethodQuality(
        n=len(examples),
        answered=min(one.answered for one in each.values()),
        accuracy=accuracy,
        accuracy_ci95=metrics.accuracy_interval(outcomes(examples, by_seed)),
        accuracy_sd=metrics.standard_deviation(accuracies),
        false_positive_rate=mean_over([one.false_positive_rate for one in each.values()]),
        false_positive_rate_ci95=_flagged_interval(examples, by_seed, 0),
        recall=mean_over([one.recall for one in each.values()]),
        recall_ci95=_flagged_interval(examples, by_seed, 1),
        confident=mean_over([one.confident for one in each.values()]),
        accuracy_where_confident=mean_over([one.accuracy_where_confident for one in each.values()]),
        f1=fmean(one.f1 for one in each.values()),
        auroc=mean_over([one.auroc for one in each.values()]),
        auprc=mean_over([one.auprc for one in each.values()]),
        recall_at_fpr1=mean_over([one.recall_at_fpr1 for one in each.values()]),
        ece=mean_over([one.ece for one in each.values()]),
        ece_floor=mean_over([one.ece_floor for one in each.values()]),
        strata=_strata(examples, by_seed),
        seeds=each if name_seeds else {},
    )


def _flagged_interval(
    examples: Sequence[Example], by_seed: Mapping[int, Sequence[Answer]], label: int
) -> tuple[float, float] | None:
    """95 % interval of the share that is flagged of the examples with this label; None where there is none."""
    right = outcomes(examples, by_seed)
    chosen = np.array([example.label == label for example in examples])
    if not chosen.any():
        return None
    low, high = metrics.accuracy_interval(
        metrics.Outcomes(right.values[:, chosen], right.groups[chosen])
    )
    return (low, high) if label else (1 - high, 1 - low)


def _strata(
    examples: Sequence[Example], by_seed: Mapping[int, Sequence[Answer]]
) -> dict[str, Stratum]:
    """Quality on the examples of each stratum that any of them belongs to."""
    strata: dict[str, Stratum] = {}
    memberships = [_strata_of(example) for example in examples]
    for name in sorted({name for names in memberships for name in names}, key=_place):
        chosen = [index for index, names in enumerate(memberships) if name in names]
        part = [examples[index] for index in chosen]
        answers_by_seed = {
            seed: [answers[index] for index in chosen] for seed, answers in by_seed.items()
        }
        right = outcomes(part, answers_by_seed)
        calibration = [
            _calibration([example.label for example in part], answers)
            for answers in answers_by_seed.values()
        ]
        strata[name] = Stratum(
            n=len(chosen),
            accuracy=float(right.values.mean()),
            accuracy_ci95=metrics.accuracy_interval(right),
            auroc=mean_over(
                [
                    _auroc([example.label for example in part], answers)
                    for answers in answers_by_seed.values()
                ]
            ),
            ece=mean_over([ece for ece, _ in calibration]),
            ece_floor=mean_over([floor for _, floor in calibration]),
        )
    return strata


def _strata_of(example: Example) -> list[str]:
    """`meta.stratum` (were the phrasings in training?), `meta.difficulty`, and whether an allowed row looks like a violation."""
    named = [str(example.meta[kind]) for kind in ("stratum", "difficulty") if kind in example.meta]
    return named + [HARD_BENIGN] * (example.label == 0 and example.meta.get("stance") in LOOKS_LIKE)


def _place(stratum: str) -> tuple[int, str]:
    """Strata in the order of a report: those with names of their own first, then from easy to hard."""
    known = (*get_args(Difficulty), HARD_BENIGN)
    return (known.index(stratum) + 1, "") if stratum in known else (0, stratum)


def _ranked(labels: Sequence[int], answers: Sequence[Answer]) -> tuple[list[int], list[float]]:
    """Label and logit of every example that has a logit."""
    ranked = [
        (label, answer.logit)
        for label, answer in zip(labels, answers, strict=True)
        if answer.logit is not None
    ]
    return [label for label, _ in ranked], [logit for _, logit in ranked]


def _auroc(labels: Sequence[int], answers: Sequence[Answer]) -> float | None:
    return metrics.auroc(*_ranked(labels, answers))


def outcomes(
    examples: Sequence[Example], by_seed: Mapping[int, Sequence[Answer]]
) -> metrics.Outcomes:
    """Right or wrong by seed and example. No answer counts as wrong."""
    right = [
        [
            answer.violates == bool(example.label)
            for answer, example in zip(answers, examples, strict=True)
        ]
        for answers in by_seed.values()
    ]
    return metrics.Outcomes(np.array(right, dtype=np.int8), _groups(examples))


def _groups(examples: Sequence[Example]) -> np.ndarray:
    """The examples' groups, numbered from 0 in the order in which they come."""
    number_of_group = {
        group: number
        for number, group in enumerate(dict.fromkeys(example.group for example in examples))
    }
    return np.array([number_of_group[example.group] for example in examples], dtype=np.int64)


def _decisions(labels: np.ndarray, answers: Sequence[Answer]) -> np.ndarray:
    """0 or 1 per example; where there is no usable answer, the wrong one."""
    return np.array(
        [
            1 - label if answer.violates is None else int(answer.violates)
            for label, answer in zip(labels, answers, strict=True)
        ]
    )


def _unanswered(by_seed: Iterable[Sequence[Answer]]) -> int:
    return sum(answer.violates is None for answers in by_seed for answer in answers)
