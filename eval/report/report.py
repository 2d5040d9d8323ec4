"""All rules of one model in one report: `report.json`, `report.md`, `report.png`. Knows nothing of how a rule was evaluated.

The report is a function of the evaluations alone: the same evaluations give the same bytes, and nothing is written when nothing changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from data.generator.tricks import TRICKS
from eval.evaluation import CONTENDERS, Contender, Evaluation, MethodQuality, Stratum, mean_over
from eval.metrics import MeanDifference, bootstrap_mean_difference, standard_deviation
from eval.report.picture import draw
from eval.words import UNNAMED
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict
from guard.method import METHODS

LEARNT = 0.7  # AUROC of the better adapter, from which on a rule counts as learnt
NAMES: dict[Contender, str] = {"judge": "judge", "lora": "LoRA", "alora": "aLoRA"}


class MeanQuality(Strict):
    """A method's metrics, averaged over rules; `accuracy_sd` is the spread over seeds of that mean."""

    accuracy: float
    accuracy_sd: float | None
    f1: float
    auroc: float | None
    auprc: float | None
    recall_at_fpr1: float | None
    ece: float | None
    ece_floor: float | None


@dataclass(frozen=True)
class Report:
    """The evaluations of one model, in the order of their rules' names; `left_out` says which rules are not in it and why."""

    evaluations: tuple[Evaluation, ...]
    left_out: tuple[str, ...] = ()

    @property
    def caption(self) -> str:
        """What every table and picture must carry."""
        model, commits, hardware = (
            _distinct(getattr(each, name) for each in self.evaluations)
            for name in ("model", "commit", "hardware")
        )
        seeds = sorted({seed for each in self.evaluations for seed in each.seeds})
        return f"model {model}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}, commit {commits}, {hardware}"

    @property
    def versions(self) -> dict[str, str]:
        """Versions by package; more than one where the rules were evaluated with different ones."""
        names = dict.fromkeys(name for each in self.evaluations for name in each.versions)
        return {
            name: _distinct(
                each.versions[name] for each in self.evaluations if name in each.versions
            )
            for name in names
        }

    def mean(self, method: Contender) -> MeanQuality:
        """One method over all rules."""
        qualities = [each.methods[method] for each in self.evaluations]
        same_seeds = len({tuple(quality.seeds) for quality in qualities}) == 1
        by_seed = (
            [
                fmean(quality.seeds[seed].accuracy for quality in qualities)
                for seed in qualities[0].seeds
            ]
            if same_seeds
            else []
        )
        return MeanQuality(
            accuracy=fmean(quality.accuracy for quality in qualities),
            accuracy_sd=standard_deviation(by_seed),
            f1=fmean(quality.f1 for quality in qualities),
            auroc=mean_over([quality.auroc for quality in qualities]),
            auprc=mean_over([quality.auprc for quality in qualities]),
            recall_at_fpr1=mean_over([quality.recall_at_fpr1 for quality in qualities]),
            ece=mean_over([quality.ece for quality in qualities]),
            ece_floor=mean_over([quality.ece_floor for quality in qualities]),
        )

    @cached_property
    def difference(self) -> MeanDifference:
        """Mean accuracy of aLoRA minus that of LoRA."""
        return bootstrap_mean_difference([each.differences for each in self.evaluations])

    @cached_property
    def learnt(self) -> tuple[Evaluation, ...]:
        """The rules that an adapter has learnt at all: on the others two methods are alike because neither knows anything."""
        return tuple(
            each
            for each in self.evaluations
            if max(each.methods[method].auroc or 0 for method in METHODS) >= LEARNT
        )

    @cached_property
    def learnt_difference(self) -> MeanDifference | None:
        """The same over the rules that are learnt; None where there is none."""
        return (
            bootstrap_mean_difference([each.differences for each in self.learnt])
            if self.learnt
            else None
        )

    def beats_judge(self) -> list[str]:
        """The rules on which both adapters' intervals lie above the judge's."""
        return [
            each.rule
            for each in self.evaluations
            if all(
                each.methods[method].accuracy_ci95[0] > each.methods["judge"].accuracy_ci95[1]
                for method in METHODS
            )
        ]

    def as_json(self) -> str:
        """`report.json`."""
        difference, learnt = self.difference, self.learnt_difference
        content: dict[str, Any] = {
            "commit": _distinct(each.commit for each in self.evaluations),
            "hardware": _distinct(each.hardware for each in self.evaluations),
            "versions": self.versions,
            "model": _distinct(each.model for each in self.evaluations),
            "seeds": sorted({seed for each in self.evaluations for seed in each.seeds}),
            "left_out": list(self.left_out),
            "rules": {
                each.rule: each.model_dump(
                    mode="json",
                    exclude={"rule", "model", "alora_minus_lora", "groups", "hardware", "versions"},
                )
                for each in self.evaluations
            },
            "mean": {
                "rules": len(self.evaluations),
                "methods": {
                    method: self.mean(method).model_dump(mode="json") for method in CONTENDERS
                },
                "alora_minus_lora": {
                    "accuracy": difference.mean,
                    "accuracy_ci95": list(difference.ci95),
                },
                "alora_minus_lora_where_learnt": learnt
                and {
                    "rules": len(self.learnt),
                    "accuracy": learnt.mean,
                    "accuracy_ci95": list(learnt.ci95),
                },
                "both_adapters_beat_the_judge_on": self.beats_judge(),
            },
        }
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    def as_markdown(self) -> str:
        """`report.md`, which is also what the terminal shows."""
        found = f"aLoRA - LoRA: {_points(self.difference)} (paired bootstrap over seeds and groups of examples)"
        if self.learnt_difference and len(self.learnt) < len(self.evaluations):
            found += f"; on those that an adapter has learnt ({len(self.learnt)} of {len(self.evaluations)}) "
            found += _points(self.learnt_difference)
        parts = [
            f"# Quality: {_distinct(each.model for each in self.evaluations)}",
            _table(QUALITY_HEAD, self._quality_rows()),
            f"{found}. Both adapters beat the judge, intervals apart, on {len(self.beats_judge())} of {len(self.evaluations)} rules.",
        ]
        parts += ["## At the threshold", _table(THRESHOLD_HEAD, self._threshold_rows())]
        if strata := self._strata_rows():
            parts += ["## Strata", _table(STRATA_HEAD, strata)]
        parts += [
            "## Tricks",
            _table(TRICKS_HEAD, self._trick_rows()),
            "## Length and place",
            _table(PLACES_HEAD, self._place_rows()),
        ]
        parts += [
            "## Served engine against PEFT",
            _table(AGREEMENT_HEAD, self._agreement_rows()),
            "## Notes",
            "\n".join(self._notes()),
        ]
        return "\n\n".join(parts) + "\n"

    def _quality_rows(self) -> list[list[str]]:
        rows = []
        for each in self.evaluations:
            for method in CONTENDERS:
                quality = each.methods[method]
                rows.append(
                    [
                        f"{each.rule} ({each.n_violating} of {each.n_test})"
                        if method == CONTENDERS[0]
                        else "",
                        NAMES[method],
                        _accuracy(quality, quality.accuracy_sd),
                        *_others(quality),
                        f"{each.mcnemar_p:.3g}" if method == CONTENDERS[-1] else "",
                    ]
                )
            if each.words_auroc:
                floor = ", ".join(
                    f"{auroc:.3f}" + f" {stratum}" * (stratum != UNNAMED)
                    for stratum, auroc in each.words_auroc.items()
                )
                rows.append(["", "words alone", "", "", floor, "", "", "", ""])
        if len(self.evaluations) > 1:
            for method in CONTENDERS:
                mean = self.mean(method)
                spread = f" ± {100 * mean.accuracy_sd:.1f}" if mean.accuracy_sd is not None else ""
                name = "**mean**" if method == CONTENDERS[0] else ""
                rows.append(
                    [name, NAMES[method], f"{100 * mean.accuracy:.1f}{spread}", *_others(mean), ""]
                )
        return rows

    def _threshold_rows(self) -> list[list[str]]:
        return [
            [
                each.rule,
                NAMES[method],
                "" if each.max_fpr is None else f"{100 * each.max_fpr:g}",
                _rate(quality.false_positive_rate, quality.false_positive_rate_ci95),
                _rate(quality.recall, quality.recall_ci95),
                _rate(quality.confident),
                _rate(quality.accuracy_where_confident),
            ]
            for each in self.evaluations
            for method in METHODS
            for quality in [each.methods[method]]
        ]

    def _strata_rows(self) -> list[list[str]]:
        rows = []
        for each in self.evaluations:
            for name, stratum in each.methods["judge"].strata.items():
                strata = [each.methods[method].strata[name] for method in CONTENDERS]
                aurocs = [*(one.auroc for one in strata), each.words_auroc.get(name)]
                eces = [_ece(each.methods[method].strata[name]) for method in METHODS]
                rows.append(
                    [
                        each.rule,
                        name,
                        str(stratum.n),
                        *map(_accuracy, strata),
                        *map(_three_digits, aurocs),
                        *eces,
                    ]
                )
        return rows

    def _trick_rows(self) -> list[list[str]]:
        """All rules together: a rule by itself has too few variants."""
        rows = []
        for name in TRICKS:
            row, n = [name.replace("_", " ")], 0
            for method in METHODS:
                each = [
                    evaluation.robustness.tricks[method][name] for evaluation in self.evaluations
                ]
                n = sum(one.n for one in each)
                row += [
                    _share(sum(getattr(one, count) for one in each), n)
                    for count in ("turned", "right_before", "right_after")
                ]
            rows.append([row[0], str(n), *row[1:]])
        return rows

    def _place_rows(self) -> list[list[str]]:
        """All rules together."""
        right: dict[tuple[int, str], dict[str, list[int]]] = {}
        for evaluation in self.evaluations:
            for method in METHODS:
                for cell in evaluation.robustness.surrounded[method]:
                    counts = right.setdefault((cell.tokens, cell.place), {}).setdefault(
                        method, [0, 0]
                    )
                    counts[0] += cell.right
                    counts[1] += cell.n
        return [
            [
                f"{tokens:,}",
                place,
                str(by_method[METHODS[0]][1]),
                *(_share(*by_method[method]) for method in METHODS),
            ]
            for (tokens, place), by_method in right.items()
        ]

    def _agreement_rows(self) -> list[list[str]]:
        return [
            [
                each.rule,
                NAMES[method],
                str(agreement.prompts),
                f"{agreement.max_difference:.2g}",
                f"{agreement.mean_difference:.2g}",
                str(agreement.label_flips),
                f"{agreement.tolerance:g}",
                str(each.refusals[method]),
            ]
            for each in self.evaluations
            for method, agreement in each.agreement.items()
        ]

    def _notes(self) -> list[str]:
        spread = " and ± the standard deviation over seeds" if self._several_seeds else ""
        seeds = ", ".join(
            str(seed) for seed in sorted({each.mcnemar_seed for each in self.evaluations})
        )
        notes = [
            f"- Accuracy in percent with its 95 % interval (bootstrap over seeds and groups, at least as wide as Wilson's){spread}; "
            f"(violating of all) test examples after each rule; McNemar's exact p compares LoRA and aLoRA of seed {seeds}. "
            "It takes examples as independent, although test examples come in pairs that differ in one turn."
        ]
        tricked = ", ".join(sorted({str(each.robustness.seed) for each in self.evaluations}))
        notes.append(
            "- Hard benign: allowed rows that look like a violation; 100 - accuracy is their false-positive rate. Tricks on the judged "
            f"words, and places amid allowed conversations (of generated rows that allow it): in percent, over all rules, seed {tricked}."
        )
        notes.append(
            "- At the threshold: in percent, with 95 % intervals as for accuracy. The threshold, and with it the largest rate that a rule "
            "states, is chosen on the validation split; confident: outside the band of doubt, beyond which at most 5 % were wrong there."
        )
        notes.append(
            "- ECE: expected calibration error of the probability; in brackets, what perfect ones would have had on as many examples."
        )
        if 0 < len(self.learnt) < len(self.evaluations):
            notes.append(
                f"- Learnt: the better adapter has an AUROC of {LEARNT} or more on these test rows; the choice is not independent of them."
            )
        notes.append(
            "- All figures of adapters are those of the served engine. Differences from PEFT are in the verdict's logit, in nats."
        )
        if any(each.words_auroc for each in self.evaluations):
            notes.append(
                "- Words alone: the best bag-of-words classifier on the same data; an AUROC near it shows no understanding."
            )
        judges: dict[str, list[str]] = {}
        for each in self.evaluations:
            judges.setdefault(_judge_note(each), []).append(each.rule)
        notes += [f"- {', '.join(rules)}: {note}" for note, rules in judges.items()]
        for each in self.evaluations:
            if each.limit:
                notes.append(
                    f"- {each.rule}: **only {each.limit} of the test examples** (`--limit`)."
                )
            if refused := {
                NAMES[method]: count for method, count in each.refusals.items() if count
            }:
                notes.append(f"- {each.rule}: refused by the engine, counted as wrong: {refused}.")
            beyond = sum(agreement.beyond_tolerance for agreement in each.agreement.values())
            if beyond:
                notes.append(
                    f"- {each.rule}: {beyond} logits differ from PEFT's beyond the tolerance, without changing a label."
                )
        notes += [f"- Left out: {what}" for what in self.left_out]
        notes.append(
            f"- {self.caption}; {', '.join(f'{name} {version}' for name, version in self.versions.items())}."
        )
        return notes

    @property
    def _several_seeds(self) -> bool:
        return any(len(each.seeds) > 1 for each in self.evaluations)


def write_report(report: Report, path: Path) -> None:
    """Write `path` (report.json) and the .md and .png beside it; a file that would not change is left alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = path.with_suffix(".png")
    if _write(path, report.as_json()) or not picture.is_file():
        draw(
            report.evaluations,
            {method: report.mean(method).accuracy for method in CONTENDERS},
            report.caption,
            picture,
        )
    _write(path.with_suffix(".md"), report.as_markdown())


QUALITY_HEAD = [
    "rule",
    "method",
    "accuracy",
    "F1",
    "AUROC",
    "AUPRC",
    "recall at 1 % FPR",
    "ECE (if perfect)",
    "McNemar p",
]
THRESHOLD_HEAD = [
    "rule",
    "method",
    "largest FPR stated",
    "false-positive rate",
    "recall",
    "confident",
    "accuracy where sure",
]
STRATA_HEAD = [
    *("rule", "stratum", "n"),
    *(f"{NAMES[method]} accuracy" for method in CONTENDERS),
    *(f"{name} AUROC" for name in (*NAMES.values(), "words alone")),
    *(f"{NAMES[method]} ECE (if perfect)" for method in METHODS),
]
TRICKED = ("verdicts turned", "right before", "right after")
TRICKS_HEAD = ["trick", "n", *(f"{NAMES[method]} {what}" for method in METHODS for what in TRICKED)]
PLACES_HEAD = ["tokens around", "place", "n", *(f"{NAMES[method]} right" for method in METHODS)]
AGREEMENT_HEAD = [
    "rule",
    "method",
    "prompts",
    "max difference",
    "mean difference",
    "label flips",
    "tolerance",
    "refused",
]


def _judge_note(each: Evaluation) -> str:
    judge = each.judge
    note = f"judged by {judge.name} " + (
        f"at {judge.endpoint}" if judge.endpoint else "through the served engine"
    )
    if judge.latency_p50_ms is not None and judge.latency_p95_ms is not None:
        note += f"; latency p50 {judge.latency_p50_ms:.0f} ms, p95 {judge.latency_p95_ms:.0f} ms"
    if judge.prompt_tokens is not None and judge.completion_tokens is not None:
        note += (
            f"; {judge.prompt_tokens:,} prompt and {judge.completion_tokens:,} completion tokens"
        )
    if judge.cost_usd is not None:
        note += f"; cost {judge.cost_usd:.4f} USD"
    if judge.without_usage:
        note += f"; tokens and cost unknown for {judge.without_usage} answers"
    if judge.refused:
        note += f"; {judge.refused} of {each.n_test} conversations refused by the endpoint, counted as wrong"
    if judge.unparseable:
        note += (
            f"; {judge.unparseable} of {each.n_test} answers neither yes nor no, counted as wrong"
        )
    return note + "."


def _accuracy(quality: Any, sd: float | None = None) -> str:
    low, high = quality.accuracy_ci95
    spread = f" ± {100 * sd:.1f}" if sd is not None else ""
    return f"{100 * quality.accuracy:.1f}{spread} [{100 * low:.1f}, {100 * high:.1f}]"


def _rate(value: float | None, ci95: tuple[float, float] | None = None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f}" + (f" [{100 * ci95[0]:.1f}, {100 * ci95[1]:.1f}]" if ci95 else "")


def _share(count: int, of: int) -> str:
    return f"{100 * count / of:.1f}" if of else "-"


def _others(quality: MethodQuality | MeanQuality) -> list[str]:
    values = (quality.f1, quality.auroc, quality.auprc, quality.recall_at_fpr1)
    return [*map(_three_digits, values), _ece(quality)]


def _ece(quality: MethodQuality | MeanQuality | Stratum) -> str:
    return _three_digits(quality.ece) + (
        f" ({quality.ece_floor:.3f})" if quality.ece_floor is not None else ""
    )


def _points(difference: MeanDifference) -> str:
    low, high = difference.ci95
    return f"{100 * difference.mean:+.1f} points of mean accuracy, 95 % [{100 * low:+.1f}, {100 * high:+.1f}]"


def _three_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose source is aligned too."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [
        [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        for row in [head, *rows]
    ]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _distinct(values: Iterable[str]) -> str:
    """One value where all agree, else each once."""
    return " / ".join(dict.fromkeys(values))


def _write(path: Path, text: str) -> bool:
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8")
    return True
