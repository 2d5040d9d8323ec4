"""The report's notes: what its figures are, how they were had, what is missing.

Knows nothing of tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eval.contender import label_of
from eval.evaluation import Evaluation
from eval.judge.record import JudgeRecord

LEARNT = 0.7  # AUROC of the best method, from which on a rule counts as learnt

ABOUT_RANKING = (
    "- Intervals of AUROCs: bootstrap over seeds and groups; the difference to the bag of words is "
    "paired, bold where its interval excludes 0. An AUROC of 1 has no width: no pair of rows was "
    "in the wrong order."
)
ABOUT_TRICKS = (
    "- FPR on hard negatives: those are allowed rows that look like a violation, and 100 - "
    "accuracy is their false-positive rate. Verdict flips under perturbation of the judged words "
    "(instruction: judge-directed prompt injection): in percent, over all rules, seed {seeds}."
)
ABOUT_THRESHOLDS = (
    "- At the threshold: in percent, with 95 % intervals as for accuracy. The threshold, and with "
    "it the largest rate that a rule states, is chosen on the validation split; confident: outside "
    "the uncertainty band, beyond which at most 5 % were wrong there, on a conversation like the "
    'validation rows; an "allow" only where hardly any of their violations has such a logit.'
)
ABOUT_CALIBRATION = (
    "- ECE: expected calibration error of the probability; expected ECE: what it would be under "
    "perfect calibration on as many examples."
)
ABOUT_ENGINE = (
    "- All figures of methods are those of the served engine. Differences from PEFT are in the "
    "verdict's logit, in nats."
)
WITHOUT_JUDGE = "without a judge: an encoder answers no rule that it was not trained for."
ABOUT_WORDS = (
    "- Bag of words: TF-IDF with logistic regression, no model; text, n-grams and strength are "
    "chosen on the validation split. An AUROC near it shows no understanding."
)


def notes(
    evaluations: Sequence[Evaluation], learnt: Sequence[Evaluation], left_out: Sequence[str]
) -> list[str]:
    """Every note, as items of a Markdown list."""
    tricked: set[int] = set()
    for evaluation in evaluations:
        tricked |= set(evaluation.robustness.seeds)
    lines = [
        _about_accuracy(evaluations),
        ABOUT_RANKING,
        ABOUT_TRICKS.format(seeds=", ".join(map(str, sorted(tricked)))),
        ABOUT_THRESHOLDS,
        ABOUT_CALIBRATION,
    ]
    if 0 < len(learnt) < len(evaluations):
        lines.append(
            f"- Learnt: the best method has an AUROC of {LEARNT} or more on these test rows; the "
            "choice is not independent of them."
        )
    lines += [ABOUT_ENGINE, ABOUT_WORDS]
    lines += _about_bags(evaluations)
    lines += _about_judges(evaluations)
    for evaluation in evaluations:
        lines += _about_rule(evaluation)
    return [*lines, *(f"- Left out: {reason}" for reason in left_out)]


def _about_accuracy(evaluations: Sequence[Evaluation]) -> str:
    several_seeds = any(len(evaluation.seeds) > 1 for evaluation in evaluations)
    spread = " and ± the standard deviation over seeds" if several_seeds else ""
    note = (
        "- Accuracy in percent with its 95 % interval (bootstrap over seeds and groups, at least "
        f"as wide as Wilson's){spread}; (violating of all) test examples after each rule."
    )
    seeds: set[int] = set()
    for evaluation in evaluations:
        seeds |= {difference.mcnemar_seed for difference in evaluation.differences.values()}
    if not seeds:
        return note
    return (
        f"{note} McNemar's exact p compares {_compared(evaluations[0])} of seed "
        f"{', '.join(map(str, sorted(seeds)))}. It takes examples as independent, also those of "
        "one group, as generated ones are that differ in one turn."
    )


def _compared(evaluation: Evaluation) -> str:
    """What the column of p values compares."""
    labels = [label_of(method) for method in evaluation.trained]
    if len(labels) == 2:
        return " and ".join(labels)
    return "each method with the one above it"


def _about_bags(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """The rules by the bag of words that was chosen for them."""
    rules: dict[str, list[str]] = {}
    for evaluation in evaluations:
        rules.setdefault(str(evaluation.bag_of_words), []).append(evaluation.rule)
    for variant, names in rules.items():
        yield f"- {', '.join(names)}: bag of words of {variant}."


def _about_judges(evaluations: Sequence[Evaluation]) -> Iterator[str]:
    """The rules by what there is to say of their judge."""
    rules: dict[str, list[str]] = {}
    for evaluation in evaluations:
        for judge in evaluation.judges.values():
            rules.setdefault(_judge_note(judge, evaluation.n_test), []).append(evaluation.rule)
        if not evaluation.judges:
            rules.setdefault(WITHOUT_JUDGE, []).append(evaluation.rule)
    for note, names in rules.items():
        yield f"- {', '.join(names)}: {note}"


def _about_rule(evaluation: Evaluation) -> Iterator[str]:
    """What is amiss with one rule's figures."""
    rule = evaluation.rule
    if evaluation.limit:
        yield f"- {rule}: **only {evaluation.limit} of the test examples** (`--limit`)."
    refused = {label_of(name): count for name, count in evaluation.refusals.items() if count}
    if refused:
        yield f"- {rule}: refused by the engine, counted as wrong: {refused}."
    beyond = sum(agreement.beyond_tolerance for agreement in evaluation.agreement.values())
    if beyond:
        difference = "differ from PEFT's beyond the tolerance"
        yield f"- {rule}: {beyond} logits {difference}, without changing a label."


def _judge_note(judge: JudgeRecord, n_test: int) -> str:
    way = f"at {judge.endpoint}" if judge.endpoint else "through the served engine"
    parts = [f"judged by {judge.name} {way}"]
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
