"""All rules in one report, of one base or of several side by side: `report.json`, `report.md`,
`report.png`. Knows nothing of how a rule was evaluated.

The report is a function of the evaluations alone: the same evaluations give the same bytes, and
nothing is written when nothing changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.contender import is_baseline, label_of
from eval.evaluation import Evaluation
from eval.metrics import MeanDifference, bootstrap_mean_difference, standard_deviation
from eval.quality import mean_metrics
from eval.report import tables
from eval.report.notes import LEARNT, notes
from eval.report.origin import distinct, distinct_versions
from eval.report.picture import draw
from eval.report.tables import MeanQuality
from guard.files.atomic import atomic_write


@dataclass(frozen=True)
class Report:
    """The evaluations, all of the same contenders, in the order of their rules' names; `left_out`
    says which rules are not in it and why.
    """

    evaluations: tuple[Evaluation, ...]
    left_out: tuple[str, ...] = ()

    @property
    def contenders(self) -> list[str]:
        """The baselines, then the methods."""
        return list(self.evaluations[0].methods)

    @property
    def trained(self) -> list[str]:
        """The methods."""
        return self.evaluations[0].trained

    @property
    def caption(self) -> str:
        """What every table and picture must carry."""
        model, commits, hardware = (self._all_of(name) for name in ("model", "commit", "hardware"))
        bases = "models" if "," in model else "model"
        plural = "s" if len(self.seeds) > 1 else ""
        seeds = ", ".join(map(str, self.seeds))
        return f"{bases} {model}, seed{plural} {seeds}, commit {commits}, {hardware}"

    @property
    def seeds(self) -> list[int]:
        """Every seed of any rule, in order."""
        seeds: set[int] = set()
        for evaluation in self.evaluations:
            seeds |= set(evaluation.seeds)
        return sorted(seeds)

    @property
    def versions(self) -> dict[str, str]:
        """Versions by package; more than one where the rules were evaluated with different ones."""
        return distinct_versions(evaluation.versions for evaluation in self.evaluations)

    def mean(self, contender: str) -> MeanQuality:
        """One contender over all rules."""
        qualities = [evaluation.methods[contender] for evaluation in self.evaluations]
        by_seed = []
        if len({tuple(quality.seeds) for quality in qualities}) == 1:
            for seed in qualities[0].seeds:
                by_seed.append(fmean(quality.seeds[seed].accuracy for quality in qualities))
        return MeanQuality(
            accuracy=fmean(quality.accuracy for quality in qualities),
            accuracy_sd=standard_deviation(by_seed),
            metrics=mean_metrics([quality.metrics for quality in qualities]),
        )

    @cached_property
    def differences(self) -> dict[str, MeanDifference]:
        """Mean accuracy of a later method minus that of an earlier one, by name."""
        return _mean_differences(self.evaluations)

    @cached_property
    def learnt(self) -> tuple[Evaluation, ...]:
        """The rules that a method has learnt at all: on the others methods are alike because none
        knows anything.
        """
        return tuple(
            evaluation for evaluation in self.evaluations if _best_auroc(evaluation) >= LEARNT
        )

    @cached_property
    def learnt_differences(self) -> dict[str, MeanDifference]:
        """The same over the rules that are learnt; none where there is no such rule."""
        return _mean_differences(self.learnt)

    def beats(self, baseline: str, methods: Sequence[str]) -> list[str]:
        """The rules on which each of the methods has its accuracy interval above the baseline's."""
        rules: list[str] = []
        for evaluation in self.evaluations:
            highest = evaluation.methods[baseline].accuracy_ci95[1]
            if all(evaluation.methods[name].accuracy_ci95[0] > highest for name in methods):
                rules.append(evaluation.rule)
        return rules

    def as_json(self) -> str:
        """`report.json`."""
        content: dict[str, Any] = {
            "commit": self._all_of("commit"),
            "hardware": self._all_of("hardware"),
            "versions": self.versions,
            "model": self._all_of("model"),
            "seeds": self.seeds,
            "left_out": list(self.left_out),
            "rules": {evaluation.rule: _rule_json(evaluation) for evaluation in self.evaluations},
            "mean": self._mean_json(),
        }
        return json.dumps(_with_flat_metrics(content), indent=2, ensure_ascii=False) + "\n"

    def _mean_json(self) -> dict[str, Any]:
        methods = {name: self.mean(name).model_dump(mode="json") for name in self.contenders}
        learnt = {"rules": len(self.learnt), **_differences_json(self.learnt_differences)}
        return {
            "rules": len(self.evaluations),
            "methods": methods,
            "differences": _differences_json(self.differences),
            "differences_where_learnt": learnt if self.learnt else None,
            "all_methods_beat": {
                baseline: self.beats(baseline, self.trained) for baseline in self._baselines
            },
        }

    def as_markdown(self) -> str:
        """`report.md`, which is also what the terminal shows."""
        strata = tables.strata_table(self)
        parts = [
            f"# Quality: {self._all_of('model')}",
            tables.quality_table(self),
            "\n\n".join(self._findings()),
            "## At the threshold",
            tables.threshold_table(self),
            *(["## Strata", strata] if strata else []),
            "## Verdict flips under perturbation",
            tables.trick_table(self),
            "## Served engine against PEFT",
            tables.agreement_table(self),
            "## Notes",
            "\n".join([*notes(self.evaluations, self.learnt, self.left_out), self._origin()]),
        ]
        return "\n\n".join(parts) + "\n"

    @property
    def _baselines(self) -> list[str]:
        """Those that the table has: where nobody judges, the bag of words alone."""
        return [name for name in self.contenders if is_baseline(name)]

    def _findings(self) -> list[str]:
        """The methods against each other, and against the baselines."""
        sentences = [self._difference_sentence(name) for name in self.differences]
        for baseline in self._baselines:
            counts: list[str] = []
            for method in self.trained:
                counts.append(f"{label_of(method)} on {len(self.beats(baseline, [method]))}")
            sentences.append(
                f"More accurate than the {label_of(baseline)}, intervals apart: "
                f"{', '.join(counts)} of {len(self.evaluations)} rules."
            )
        return sentences

    def _difference_sentence(self, name: str) -> str:
        pair = self.evaluations[0].differences[name]
        labels = f"{label_of(pair.minuend)} - {label_of(pair.subtrahend)}"
        method = "paired bootstrap over seeds and groups of examples"
        sentence = f"{labels}: {_points(self.differences[name])} ({method})"
        if self.learnt and len(self.learnt) < len(self.evaluations):
            share = f"{len(self.learnt)} of {len(self.evaluations)}"
            points = _points(self.learnt_differences[name])
            sentence += f"; on those that a method has learnt ({share}) {points}"
        return f"{sentence}."

    def _origin(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"- {self.caption}; {versions}."

    def _all_of(self, name: str) -> str:
        return distinct(getattr(evaluation, name) for evaluation in self.evaluations)


def write_report(report: Report, path: Path) -> None:
    """Write `path` (report.json) and the .md and .png beside it; a file that would not change is
    left alone. The JSON is the last of them: once it says what is current, the others are.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = path.with_suffix(".png")
    if not (_has(path, report.as_json()) and picture.is_file()):
        means = {contender: report.mean(contender).accuracy for contender in report.contenders}
        draw(report.evaluations, means, report.caption, picture)
    _write(path.with_suffix(".md"), report.as_markdown())
    _write(path, report.as_json())


def _mean_differences(evaluations: Sequence[Evaluation]) -> dict[str, MeanDifference]:
    """Over the rules, of the pairs of methods that every rule compares."""
    if not evaluations:
        return {}
    shared = set.intersection(*(set(evaluation.differences) for evaluation in evaluations))
    differences = {}
    for name in evaluations[0].differences:
        if name not in shared:
            continue
        outcomes = [evaluation.outcomes(name) for evaluation in evaluations]
        differences[name] = bootstrap_mean_difference(outcomes)
    return differences


def _best_auroc(evaluation: Evaluation) -> float:
    return max(evaluation.methods[name].metrics["auroc"] or 0 for name in evaluation.trained)


def _rule_json(evaluation: Evaluation) -> dict[str, Any]:
    left_out = {"rule", "model", "groups", "right", "hardware", "versions"}
    return evaluation.model_dump(mode="json", exclude=left_out)


def _differences_json(differences: dict[str, MeanDifference]) -> dict[str, Any]:
    return {
        name: {"accuracy": difference.mean, "accuracy_ci95": list(difference.ci95)}
        for name, difference in differences.items()
    }


def _with_flat_metrics(content: Any) -> Any:
    """The metrics of every set of answers beside its accuracy, where readers look for them."""
    if not isinstance(content, dict):
        return content
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if key == "metrics":
            flat |= value
        else:
            flat[key] = _with_flat_metrics(value)
    return flat


def _points(difference: MeanDifference) -> str:
    low, high = (100 * edge for edge in difference.ci95)
    mean = 100 * difference.mean
    return f"{mean:+.1f} points of mean accuracy, 95 % [{low:+.1f}, {high:+.1f}]"


def _has(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def _write(path: Path, text: str) -> None:
    if not _has(path, text):
        with atomic_write(path) as part:
            part.write_text(text, encoding="utf-8")
