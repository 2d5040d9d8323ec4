"""One rule's evaluations on several bases as one, whose contenders carry the name of their base."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from eval.answers import BAG_OF_WORDS, JUDGE, is_baseline, on_base
from eval.evaluation import Evaluation
from eval.quality import MethodQuality
from guard.errors import GuardError

Value = TypeVar("Value")


def side_by_side(evaluations: Sequence[Evaluation]) -> Evaluation:
    """All contenders on the same test examples. The bag of words, which reads no base, stands there
    once, and so does a judge behind an endpoint. One evaluation is returned as it is. Raises
    GuardError where they are of different examples.
    """
    first = evaluations[0]
    if len(evaluations) == 1:
        return first
    for evaluation in evaluations[1:]:
        _require_the_same_examples(first, evaluation)
    return first.model_copy(
        update={
            "model": ", ".join(it.model for it in evaluations),
            "seeds": all_seeds(it.seeds for it in evaluations),
            "methods": _baselines_first(_together(evaluations, lambda it: it.methods)),
            "refusals": _together(evaluations, lambda it: it.refusals),
            "judges": _together(evaluations, lambda it: it.judges),
            "agreement": _together(evaluations, lambda it: it.agreement),
            "robustness": _together(evaluations, lambda it: it.robustness),
            "right": _together(evaluations, lambda it: it.right),
            "commit": distinct(it.commit for it in evaluations),
            "hardware": distinct(it.hardware for it in evaluations),
            "versions": distinct_versions(it.versions for it in evaluations),
        }
    )


def _together(
    evaluations: Sequence[Evaluation], by_contender: Callable[[Evaluation], Mapping[str, Value]]
) -> dict[str, Value]:
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

    def rank(name: str) -> tuple[bool, bool]:
        return not is_baseline(name), name == BAG_OF_WORDS

    return {name: methods[name] for name in sorted(methods, key=rank)}


def all_seeds(of_each: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sorted(set(itertools.chain.from_iterable(of_each))))


def distinct(values: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(values))


def distinct_versions(evaluated_with: Iterable[Mapping[str, str]]) -> dict[str, str]:
    by_package: dict[str, list[str]] = {}
    for versions in evaluated_with:
        for package, version in versions.items():
            by_package.setdefault(package, []).append(version)
    return {package: distinct(versions) for package, versions in by_package.items()}


def _require_the_same_examples(first: Evaluation, second: Evaluation) -> None:
    if second.groups != first.groups:
        raise GuardError(
            f"evaluated on other test examples than {first.model}",
            where=f"{second.rule} on {second.model}",
            got=f"{second.n_test} examples, not {first.n_test}",
            remedy=f"Run `make eval RULE={first.rule} MODEL={first.model},{second.model}`",
        )
