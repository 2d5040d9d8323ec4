"""Which verdicts flip under tricks in the judged words, which change no label.

Every tricked example is put to the served weights of one seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from data.generator.exchange import count_tokens
from data.generator.tricks import TRICKS, tricks_for
from eval.answers import Answer
from eval.trial import Trial
from guard.conversation.example import Example, Message
from guard.files.yaml_file import Strict
from guard.rule import SPEAKERS, Rule

TRICKED = 32  # examples to which each trick is applied
CONTEXT_SHARE = 0.9  # of the context may be used, because the count of tokens is an estimate


class TrickFlips(Strict):
    """Of `n` tricked examples: verdicts that flip, right before and right after."""

    n: int
    flips: int
    right_before: int
    right_after: int


Robustness = dict[str, dict[str, TrickFlips]]  # by method and by the trick's name


@dataclass(frozen=True)
class Perturbation:
    """A test example with a trick: the trial's example number `index`."""

    index: int
    trick: str
    example: Example


def robustness(
    trial: Trial,
    perturbed: Sequence[Perturbation],
    plain_answers: Mapping[str, Sequence[Answer]],
    perturbed_answers: Mapping[str, Sequence[Answer]],
) -> Robustness:
    """The figures of each method, answers in order. A missing answer is wrong, and no flip."""
    figures: Robustness = {}
    for method in trial.methods:
        counts = {trick: Counter[str]() for trick in TRICKS}
        for perturbation, answer in zip(perturbed, perturbed_answers[method], strict=True):
            before = plain_answers[method][perturbation.index].violates
            label = bool(perturbation.example.label)
            count = counts[perturbation.trick]
            count["n"] += 1
            count["flips"] += answer.violates not in (before, None)
            count["right_before"] += before == label
            count["right_after"] += answer.violates == label
        figures[method] = {}
        for trick, count in counts.items():
            fields = {name: count[name] for name in TrickFlips.model_fields}
            figures[method][trick] = TrickFlips(**fields)
    return figures


def perturbations(trial: Trial) -> list[Perturbation]:
    """The judged words under each trick, the same at every call, injections those held out."""
    usable = [
        index
        for index, example in enumerate(trial.examples)
        if not example.meta.get("trick") and _fits(trial, example.messages)
    ]
    chosen = random.Random(0).sample(usable, min(TRICKED, len(usable)))
    tricked = []
    for name in tricks_for(trial.rule, TRICKS):
        for index in chosen:
            example = trial.examples[index]
            rng = random.Random(f"{name}/{example.id}")
            messages = _rewritten(example, trial.rule, name, rng)
            if messages != example.messages:
                written = replace(example, id=f"{example.id}/{name}", messages=messages)
                tricked.append(Perturbation(index, name, written))
    return tricked


def _rewritten(example: Example, rule: Rule, trick: str, rng: random.Random) -> tuple[Message, ...]:
    messages = []
    for message in example.messages:
        if message.role in SPEAKERS[rule.reads]:
            message = replace(message, content=TRICKS[trick](message.content, rng, "unseen"))
        messages.append(message)
    return tuple(messages)


def _fits(trial: Trial, messages: Sequence[Message]) -> bool:
    """Whether the context holds the messages spelt letter by letter, in any script."""
    contents = [message.content for message in messages]
    tokens = sum(max(count_tokens(content), len(content.encode()) // 5) for content in contents)
    return tokens < CONTEXT_SHARE * trial.recipe.context_tokens / 4
