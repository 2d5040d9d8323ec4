"""The report's notes: what its figures are, how they were had, what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eval.contender import label_of
from eval.evaluation import Evaluation
from eval.judge.answer import JudgeRecord

NOTES = (
    "- Accuracy in percent with its 95 % interval (bootstrap over seeds and groups, at least as "
    "wide as Wilson's), with several seeds ± its standard deviation over them; (violating of all) "
    "test examples after each rule.",
    "- Intervals of AUROCs: bootstrap over seeds and groups; the difference to the bag of words is "
    "paired, bold where its interval excludes 0. An AUROC of 1 has no width: no pair of rows was "
    "in the wrong order.",
    "- FPR on hard negatives: those are allowed rows that look like a violation, and 100 - "
    "accuracy is their false-positive rate. Verdict flips under perturbation of the judged words "
    "(instruction: judge-directed prompt injection): in percent, over all rules, of the weights "
    "that are served.",
    "- At the threshold: in percent, with 95 % intervals as for accuracy. The threshold, and with "
    "it the largest rate that a rule states, is chosen on the validation split; confident: outside "
    "the uncertainty band, beyond which at most 5 % were wrong there, on a conversation like the "
    'validation rows; an "allow" only where hardly any of their violations has such a logit.',
    "- ECE: expected calibration error of the probability; chance alone makes some of it, on 400 "
    "examples of a perfect one about 0.04.",
    "- All figures of methods are those of the served engine. Differences from PEFT are in the "
    "verdict's logit, in nats.",
    "- Bag of words: TF-IDF with logistic regression, no model; text, n-grams and strength are "
    "chosen on the validation split. An AUROC near it shows no understanding.",
)
WITHOUT_JUDGE = "without a judge: an encoder answers no rule that it was not trained for."


def notes(evaluations: Sequence[Evaluation], left_out: Sequence[str]) -> list[str]:
    """Every note, as items of a Markdown list."""
    by_note: dict[str, list[str]] = {}  # the rules that share a note
    for evaluation in evaluations:
        for note in _about_rule(evaluation):
            by_note.setdefault(note, []).append(evaluation.rule)
    about_rules = [f"- {', '.join(rules)}: {note}" for note, rules in by_note.items()]
    return [*NOTES, *about_rules, *(f"- Left out: {reason}" for reason in left_out)]


def _about_rule(evaluation: Evaluation) -> Iterator[str]:
    """What there is to say of one rule's baselines, and what is amiss with its figures."""
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
