"""Which verdicts flip under tricks in the judged words, which change no label.

Every tricked example is put to the served weights of one seed. Knows nothing of how they answer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from data.generator.exchange import count_tokens
from data.generator.tricks import TRICKS, tricks_for
from eval.answer import Answer
from eval.trial import Trial
from guard.conversation.example import Example, Message
from guard.files.yaml_file import Strict
from guard.rule import SPEAKERS, Rule

TRICKED = 32  # examples to which each trick is applied
CONTEXT_SHARE = 0.9  # of the context may be used, because the count of tokens is an estimate


class TrickFlips(Strict):
    """`n` examples without and with a trick: how many verdicts flip, and how many are right before
    and after.
    """

    n: int
    flips: int
    right_before: int
    right_after: int


class Robustness(Strict):
    """The figures by method and by the trick's name."""

    seeds: tuple[int, ...]  # seeds of the weights that were asked
    tricks: dict[str, dict[str, TrickFlips]]


@dataclass(frozen=True)
class Perturbation:
    """A test example with a trick: the trial's example number `index`."""

    index: int
    trick: str
    example: Example


def perturbed_trial(trial: Trial, perturbed: Sequence[Perturbation]) -> Trial:
    """The trial in which the weights that are served answer the perturbations."""
    return trial.of_rows([perturbation.example for perturbation in perturbed], "robustness")


def robustness(
    trial: Trial,
    perturbed: Sequence[Perturbation],
    plain_answers: Mapping[str, Sequence[Answer]],
    perturbed_answers: Mapping[str, Sequence[Answer]],
) -> Robustness:
    """The figures from each method's answers to the trial's examples and to the perturbations, both
    in order.

    A missing answer counts as wrong.
    """
    tricks: dict[str, dict[str, TrickFlips]] = {}
    for method in trial.methods:
        by_trick: dict[str, list[tuple[Perturbation, Answer]]] = {}
        for pair in zip(perturbed, perturbed_answers[method], strict=True):
            by_trick.setdefault(pair[0].trick, []).append(pair)
        plain = plain_answers[method]
        tricks[method] = {name: _trick_flips(by_trick.get(name, []), plain) for name in TRICKS}
    return Robustness(seeds=(trial.served_seed,), tricks=tricks)


def _trick_flips(
    pairs: Sequence[tuple[Perturbation, Answer]], plain: Sequence[Answer]
) -> TrickFlips:
    labels = [bool(perturbation.example.label) for perturbation, _ in pairs]
    before = [plain[perturbation.index].violates for perturbation, _ in pairs]
    after = [answer.violates for _, answer in pairs]
    flips = [old != new for old, new in zip(before, after, strict=True) if new is not None]
    return TrickFlips(
        n=len(pairs),
        flips=sum(flips),
        right_before=_equal(before, labels),
        right_after=_equal(after, labels),
    )


def _equal(violates: Sequence[bool | None], labels: Sequence[bool]) -> int:
    return sum(verdict == label for verdict, label in zip(violates, labels, strict=True))


def perturbations(trial: Trial) -> list[Perturbation]:
    """Examples in which each trick rewrites the judged speaker's words, the same at every call.
    Prompt injections that address the judge are those held out of training.
    """
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
    """Whether the context holds the messages spelt letter by letter, four times as long."""
    return _tokens(messages) < CONTEXT_SHARE * trial.recipe.context_tokens / 4


def _tokens(messages: Sequence[Message]) -> int:
    """The estimated number of tokens, in any script."""
    contents = [message.content for message in messages]
    return sum(max(count_tokens(content), len(content.encode()) // 5) for content in contents)
