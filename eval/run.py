"""Evaluate rules: test examples -> served engine and judge -> metrics -> one report. Knows nothing of training or of serving's insides."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from eval.agreement import Agreement, agreement
from eval.answer import Answer
from eval.evaluation import Evaluation, JudgeRecord, evaluate, load_evaluation
from eval.judge.answer import JudgeRow
from eval.judge.endpoint import EndpointJudge
from eval.judge.settings import judge_from
from eval.report.report import Report, write_report
from eval.robustness import Robustness, Variant, robustness, trial_of, variants
from eval.served import OpenPredictor, Served, answering_code, open_engine, score_missing
from eval.trial import Trial, load_trial
from guard.errors import GuardError, exits_cleanly
from guard.layout import ROOT, Runs, fingerprint, is_current, mark_current
from guard.method import METHODS
from guard.provenance import Provenance, provenance
from guard.recipe import Recipe, load_recipe
from guard.rule import RULES, rule_names

# What turns answers into figures, besides the code that makes the answers.
CODE = (
    *sorted((ROOT / "eval").rglob("*.py")),
    *(
        ROOT / name
        for name in ("guard/verdict.py", "data/generator/tricks.py", "data/generator/exchange.py")
    ),
)


def run(
    selection: str,
    recipe: Recipe,
    *,
    runs: Runs | None = None,
    rules: Path = RULES,
    seeds: Sequence[int] | None = None,
    limit: int | None = None,
    force: bool = False,
    judge: EndpointJudge | None = None,
    open_predictor: OpenPredictor = open_engine,
) -> Report:
    """Evaluate the selected rules where their inputs changed, and write the report of every rule that is current.

    Without a `judge` the base model itself judges, zero-shot. Raises GuardError for bad inputs before an engine starts; of `all` rules,
    those with bad inputs are left out, and the report says why, as long as one remains.
    """
    runs, base_revision = runs or Runs(), recipe.base_revision
    names = rule_names(selection, rules)
    trials: list[Trial] = []
    left_out: list[str] = []
    for name in names:
        try:
            trials.append(
                load_trial(runs, recipe, base_revision, name, seeds=seeds, limit=limit, rules=rules)
            )
        except GuardError as error:
            if selection != "all":
                raise
            left_out.append(f"{name}: {error}")
    if not trials:
        remedy = f"Run `make data RULE=all` and `make train RULE=all MODEL={recipe.name}`"
        raise GuardError(
            "no rule can be evaluated", where=runs.root, got="; ".join(left_out), remedy=remedy
        )
    outdated = [trial for trial in trials if force or not _is_evaluated(trial, judge)]

    served = [Served(trial, with_base=judge is None) for trial in outdated]
    found = [variants(trial) for trial in outdated]
    varied = [
        Served(trial_of(trial, each), with_base=False)
        for trial, each in zip(outdated, found, strict=True)
    ]
    for each in (*served, *varied) if force else ():
        each.forget()
    score_missing([*served, *varied], recipe, open_predictor)
    agreements = [_agreement(each) for each in served]  # before a judge is paid
    origin = provenance()
    for plain, changed, asked, agreed in zip(served, varied, found, agreements, strict=True):
        robust = _robustness(plain, changed, asked)
        _evaluate(plain, agreed, robust, judge, runs, origin).save(plain.trial.folder)
        mark_current(plain.trial.folder, _inputs(plain.trial, judge))

    evaluations = [load_evaluation(trial.folder) for trial in trials]
    others, no_longer = _other_rules(runs, recipe, base_revision, judge, rules, selected=names)
    left_out += [why for trial in trials for why in trial.left_out]
    report = Report(
        tuple(sorted([*evaluations, *others], key=lambda each: each.rule)), (*left_out, *no_longer)
    )
    write_report(report, runs.report)
    return report


def _inputs(trial: Trial, judge: EndpointJudge | None) -> str:
    """Fingerprint of everything an evaluation depends on."""
    return fingerprint(
        trial.inputs, judge.identity if judge else "base model", answering_code(), *CODE
    )


def _is_evaluated(trial: Trial, judge: EndpointJudge | None) -> bool:
    """Whether a readable evaluation is kept that still holds."""
    if not is_current(trial.folder, _inputs(trial, judge)):
        return False
    try:
        load_evaluation(trial.folder)
    except GuardError:  # torn or deleted: it is made again from the kept answers
        return False
    return True


def _agreement(served: Served) -> dict[str, Agreement]:
    """The engine against PEFT, by method."""
    trial = served.trial
    return {
        method: agreement(
            [(adapter, served.rows(adapter)) for adapter in trial.by_seed(method).values()],
            trial.recipe.dtype,
        )
        for method in METHODS
    }


def _robustness(plain: Served, changed: Served, found: Sequence[Variant]) -> Robustness:
    """The adapters of the seed that is served, on the trial's examples and on their variants."""
    (seed,) = changed.trial.seeds
    of_plain, of_changed = (
        {method: served.answers(served.trial.by_seed(method)[seed]) for method in METHODS}
        for served in (plain, changed)
    )
    return robustness(plain.trial, found, of_plain, of_changed)


def _evaluate(
    served: Served,
    agreed: dict[str, Agreement],
    robust: Robustness,
    judge: EndpointJudge | None,
    runs: Runs,
    origin: Provenance,
) -> Evaluation:
    trial = served.trial
    if judge is None:
        judged, record = (
            served.answers(None),
            JudgeRecord(name=f"base model {trial.recipe.name}, zero-shot"),
        )
    else:
        rows = judge.ask(trial.rule, trial.examples, runs.root / "judge" / f"{trial.rule.id}.jsonl")
        judged, record = [Answer(row.violates) for row in rows], _record(judge, rows)
    adapters: Mapping[str, Mapping[int, list[Answer]]] = {
        method: {seed: served.answers(adapter) for seed, adapter in trial.by_seed(method).items()}
        for method in METHODS
    }
    return evaluate(
        trial,
        judged,
        adapters,
        judge=record,
        judge_is_served=judge is None,
        agreement=agreed,
        robustness=robust,
        provenance=origin,
    )


def _record(judge: EndpointJudge, rows: list[JudgeRow]) -> JudgeRecord:
    answers = [row for row in rows if not row.refused]
    p50, p95 = (
        np.percentile([row.latency_ms for row in answers], [50, 95]).tolist()
        if answers
        else (None, None)
    )
    usages = [
        (row.prompt_tokens, row.completion_tokens)
        for row in answers
        if row.prompt_tokens is not None and row.completion_tokens is not None
    ]
    prompt_tokens, completion_tokens = (
        sum(prompt for prompt, _ in usages),
        sum(completion for _, completion in usages),
    )
    return JudgeRecord(
        name=judge.model,
        endpoint=judge.base_url,
        unparseable=sum(row.violates is None for row in answers),
        refused=len(rows) - len(answers),
        prompt_tokens=prompt_tokens if usages else None,
        completion_tokens=completion_tokens if usages else None,
        without_usage=len(answers) - len(usages),
        latency_p50_ms=p50,
        latency_p95_ms=p95,
        cost_usd=judge.cost_usd(prompt_tokens, completion_tokens) if usages else None,
    )


def _other_rules(
    runs: Runs,
    recipe: Recipe,
    base_revision: str,
    judge: EndpointJudge | None,
    rules: Path,
    *,
    selected: Sequence[str],
) -> tuple[list[Evaluation], list[str]]:
    """Earlier evaluations of this model that still hold, and for each that does not, why."""
    current, left_out = [], []
    for path in sorted((runs.root / recipe.name).glob("*/eval/stage.json")):
        name = path.parent.parent.name
        if name in selected:
            continue
        try:
            earlier = load_evaluation(path.parent)
            trial = load_trial(
                runs,
                recipe,
                base_revision,
                name,
                seeds=earlier.seeds,
                limit=earlier.limit,
                rules=rules,
            )
        except GuardError as error:
            left_out.append(f"{name}: {error}")
            continue
        if is_current(path.parent, _inputs(trial, judge)):
            current.append(earlier)
        else:
            left_out.append(
                f"{name}: its data, adapters or judge changed since; run `make eval RULE={name}`"
            )
    return current, left_out


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.run",
        description="Quality table: LLM judge, LoRA and aLoRA on the same test examples. Writes runs/report.{json,md,png}.",
        epilog="The judge is an OpenAI-compatible endpoint if JUDGE_BASE_URL and JUDGE_MODEL are set (also: JUDGE_API_KEY, JUDGE_OPTIONS, "
        "JUDGE_CONCURRENCY, JUDGE_TIMEOUT_S, JUDGE_PRICE_IN, JUDGE_PRICE_OUT; see guard/endpoint/settings.py), otherwise the base model, "
        "zero-shot.",
    )
    parser.add_argument(
        "--rule", required=True, help="a rule's name, several separated by commas, or all"
    )
    parser.add_argument(
        "--model", default="tiny", help="a recipe in recipes/models (default: tiny)"
    )
    parser.add_argument(
        "--seeds",
        type=_seeds,
        help="for example 0,1,2 (default: every seed with two current adapters)",
    )
    parser.add_argument(
        "--limit",
        type=_positive,
        help="only this many test examples of each rule, drawn evenly; the report says so",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="ask the engine again even where nothing changed; paid judge's answers are kept",
    )
    return parser


@exits_cleanly
def main() -> None:
    """The command line."""
    arguments = _parser().parse_args()
    report = run(
        arguments.rule,
        load_recipe(arguments.model),
        seeds=arguments.seeds,
        limit=arguments.limit,
        force=arguments.force,
        judge=judge_from(os.environ),
    )
    print(report.as_markdown())
    print(
        f"written: {', '.join(str(Runs().report.with_suffix(suffix)) for suffix in ('.json', '.md', '.png'))}"
    )


if __name__ == "__main__":
    main()
