"""All rules in one report: `report.json`, `report.md`.

The report is a function of the evaluations alone: the same evaluations give the same bytes, and
nothing is written when nothing changed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.answers import label_of
from eval.evaluation import Evaluation
from eval.judge.answer import JudgeRecord
from eval.metrics import Difference, bootstrap_mean_difference, standard_deviation
from eval.quality import mean_metrics
from eval.report import tables
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict


class MeanQuality(Strict):
    """A contender's figures, averaged over rules; `accuracy_sd` is that mean's over seeds."""

    accuracy: float
    accuracy_sd: float | None
    metrics: dict[str, float | None]


@dataclass(frozen=True)
class Report:
    """Evaluations of the same contenders, by rule; `left_out` says which are not in it and why."""

    evaluations: tuple[Evaluation, ...]
    left_out: tuple[str, ...] = ()

    @property
    def contenders(self) -> list[str]:
        return list(self.evaluations[0].methods)

    @property
    def trained(self) -> list[str]:
        return self.evaluations[0].trained

    @property
    def seeds(self) -> tuple[int, ...]:
        seeds = itertools.chain.from_iterable(it.seeds for it in self.evaluations)
        return tuple(sorted(set(seeds)))

    @property
    def versions(self) -> dict[str, str]:
        return distinct_versions(evaluation.versions for evaluation in self.evaluations)

    @property
    def origin(self) -> str:
        model, commits, hardware = map(self._all_of, ("model", "commit", "hardware"))
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        seeds = ", ".join(map(str, self.seeds))
        return f"on {model}, seed {seeds}, commit {commits}, {hardware}; {versions}"

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
    def differences(self) -> dict[tuple[str, str], Difference]:
        """A later method's mean accuracy minus an earlier one's, if every rule compares them."""
        differences = {}
        for earlier, later in itertools.combinations(self.trained, 2):
            by_rule = [evaluation.difference(later, earlier) for evaluation in self.evaluations]
            compared = [outcomes for outcomes in by_rule if outcomes is not None]
            if len(compared) == len(by_rule):
                differences[later, earlier] = bootstrap_mean_difference(compared)
        return differences

    def as_json(self) -> str:
        left_out = {"rule", "model", "groups", "right", "hardware", "versions"}
        rules = {
            evaluation.rule: evaluation.model_dump(mode="json", exclude=left_out)
            for evaluation in self.evaluations
        }
        methods = {name: self.mean(name).model_dump(mode="json") for name in self.contenders}
        differences = {
            f"{later}_minus_{earlier}": {"accuracy": it.mean, "accuracy_ci95": list(it.ci95)}
            for (later, earlier), it in self.differences.items()
        }
        content: dict[str, Any] = {
            "commit": self._all_of("commit"),
            "hardware": self._all_of("hardware"),
            "versions": self.versions,
            "model": self._all_of("model"),
            "seeds": list(self.seeds),
            "left_out": list(self.left_out),
            "rules": rules,
            "mean": {
                "rules": len(self.evaluations),
                "methods": methods,
                "differences": differences,
            },
        }
        return json.dumps(_with_flat_metrics(content), indent=2, ensure_ascii=False) + "\n"

    def as_markdown(self) -> str:
        strata, composed = tables.strata_table(self), tables.composition_table(self)
        parts = [
            f"# Quality: {self._all_of('model')}",
            tables.quality_table(self),
            "\n\n".join(self._findings()),
            "## At the threshold",
            tables.threshold_table(self),
            *(["## Composed rules", composed] if composed else []),
            *(["## Strata", strata] if strata else []),
            "## Served engine against PEFT",
            tables.agreement_table(self),
            "## Notes",
            "\n".join([*notes(self.evaluations, self.left_out), f"- Measured {self.origin}."]),
        ]
        return "\n\n".join(parts) + "\n"

    def _findings(self) -> list[str]:
        sentences: list[str] = []
        for (later, earlier), difference in self.differences.items():
            low, high = (100 * edge for edge in difference.ci95)
            sentences.append(
                f"{label_of(later)} - {label_of(earlier)}: {100 * difference.mean:+.1f} points of "
                f"mean accuracy, 95 % [{low:+.1f}, {high:+.1f}] (paired bootstrap over seeds and "
                "groups of examples)."
            )
        return sentences

    def _all_of(self, name: str) -> str:
        return distinct(getattr(evaluation, name) for evaluation in self.evaluations)


def write_report(report: Report, path: Path) -> None:
    """Write `path` (report.json) after the .md beside it; what would not change is left alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, text in ((path.with_suffix(".md"), report.as_markdown()), (path, report.as_json())):
        if not (file.is_file() and file.read_text(encoding="utf-8") == text):
            with atomic_write(file) as part:
                part.write_text(text, encoding="utf-8")


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


NOTES = Path(__file__).with_name("notes.md").read_text(encoding="utf-8").splitlines()
WITHOUT_JUDGE = "without a judge: an encoder answers no rule that it was not trained for."


def notes(evaluations: Sequence[Evaluation], left_out: Sequence[str]) -> list[str]:
    by_note: dict[str, list[str]] = {}  # the rules that share a note
    for evaluation in evaluations:
        for note in _about_rule(evaluation):
            by_note.setdefault(note, []).append(evaluation.rule)
    about_rules = [f"- {', '.join(rules)}: {note}" for note, rules in by_note.items()]
    return [*NOTES, *about_rules, *(f"- Left out: {reason}" for reason in left_out)]


def _about_rule(evaluation: Evaluation) -> Iterator[str]:
    yield f"bag of words of {evaluation.bag_of_words}."
    for judge in evaluation.judges.values():
        yield _judge_note(judge, evaluation.n_test)
    if not evaluation.judges:
        yield WITHOUT_JUDGE
    refused = {label_of(name): count for name, count in evaluation.refusals.items() if count}
    if refused:
        yield f"refused by the engine, counted as wrong: {refused}."
    beyond = sum(agreement.beyond_tolerance for agreement in evaluation.agreement.values())
    if beyond:
        difference = "differ from PEFT's beyond the tolerance"
        yield f"{beyond} logits {difference}, without changing a label."


def _judge_note(judge: JudgeRecord, n_test: int) -> str:
    parts = [f"judged by {judge.name} through the served engine"]
    if judge.endpoint:
        parts = [f"judged by {judge.name} at {judge.endpoint}"]
    if judge.latency_p50_ms is not None and judge.latency_p95_ms is not None:
        p50, p95 = judge.latency_p50_ms, judge.latency_p95_ms
        parts.append(f"latency p50 {p50:.0f} ms, p95 {p95:.0f} ms")
    if judge.prompt_tokens is not None and judge.completion_tokens is not None:
        tokens = f"{judge.prompt_tokens:,} prompt and {judge.completion_tokens:,} completion"
        parts.append(f"{tokens} tokens")
    if judge.cost_usd is not None:
        parts.append(f"cost {judge.cost_usd:.4f} USD")
    if judge.without_usage:
        parts.append(f"tokens and cost unknown for {judge.without_usage} answers")
    if judge.refused:
        count = f"{judge.refused} of {n_test} conversations"
        parts.append(f"{count} refused by the endpoint, counted as wrong")
    if judge.unparseable:
        count = f"{judge.unparseable} of {n_test} answers"
        parts.append(f"{count} neither yes nor no, counted as wrong")
    return "; ".join(parts) + "."


def distinct(values: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(values))


def distinct_versions(evaluated_with: Iterable[Mapping[str, str]]) -> dict[str, str]:
    by_package: dict[str, list[str]] = {}
    for versions in evaluated_with:
        for package, version in versions.items():
            by_package.setdefault(package, []).append(version)
    return {package: distinct(versions) for package, versions in by_package.items()}
