"""One rule's evaluations on several bases as one, whose contenders carry the name of their base.

Knows nothing of how they came about.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from eval.contender import BAG_OF_WORDS, JUDGE, is_baseline, on_base
from eval.evaluation import Evaluation, differences_of
from eval.quality import MethodQuality
from eval.report.origin import distinct, distinct_versions
from eval.robustness import Robustness
from guard.errors import GuardError

Value = TypeVar("Value")


def side_by_side(evaluations: Sequence[Evaluation]) -> Evaluation:
    """All contenders on the same test examples. The bag of words, which reads no base, stands there
    once, and so does a judge behind an endpoint.

    One evaluation is returned as it is. Raises GuardError where they are of different examples.
    """
    first = evaluations[0]
    if len(evaluations) == 1:
        return first
    for evaluation in evaluations[1:]:
        _require_the_same_examples(first, evaluation)
    right = _together(evaluations, lambda it: it.right)
    return first.model_copy(
        update={
            "model": ", ".join(it.model for it in evaluations),
            "seeds": _seeds(it.seeds for it in evaluations),
            "methods": _baselines_first(_together(evaluations, lambda it: it.methods)),
            "refusals": _together(evaluations, lambda it: it.refusals),
            "judges": _together(evaluations, lambda it: it.judges),
            "agreement": _together(evaluations, lambda it: it.agreement),
            "robustness": Robustness(
                seeds=_seeds(it.robustness.seeds for it in evaluations),
                tricks=_together(evaluations, lambda it: it.robustness.tricks),
            ),
            "differences": differences_of(right),
            "right": right,
            "commit": distinct(it.commit for it in evaluations),
            "hardware": distinct(it.hardware for it in evaluations),
            "versions": distinct_versions(it.versions for it in evaluations),
        }
    )


def _together(
    evaluations: Sequence[Evaluation], by_contender: Callable[[Evaluation], Mapping[str, Value]]
) -> dict[str, Value]:
    """What each evaluation holds by contender, under the contenders' names in the joint table."""
    together: dict[str, Value] = {}
    for evaluation in evaluations:
        for name, value in by_contender(evaluation).items():
            together[_joint_name(evaluation, name)] = value
    return together


def _joint_name(evaluation: Evaluation, name: str) -> str:
    if name == BAG_OF_WORDS:
        return name
    if name == JUDGE and name in evaluation.judges and evaluation.judges[name].endpoint:
        return name
    return on_base(evaluation.model, name)


def _baselines_first(methods: Mapping[str, MethodQuality]) -> dict[str, MethodQuality]:
    """The judges, the bag of words, then the methods, each in the order of the bases."""

    def rank(name: str) -> int:
        if name == BAG_OF_WORDS:
            return 1
        return 0 if is_baseline(name) else 2

    return {name: methods[name] for name in sorted(methods, key=rank)}


def _seeds(of_each: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Every seed of any evaluation, in order."""
    return tuple(sorted(set(itertools.chain.from_iterable(of_each))))


def _require_the_same_examples(first: Evaluation, second: Evaluation) -> None:
    if (second.limit, second.groups) != (first.limit, first.groups):
        raise GuardError(
            f"evaluated on other test examples than {first.model}",
            where=f"{second.rule} on {second.model}",
            got=f"{second.n_test} examples, not {first.n_test}",
            remedy=f"Run `make eval RULE={first.rule} MODEL={first.model},{second.model}`",
        )
