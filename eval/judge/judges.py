"""The judges that methods are measured against."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from eval.judge.answer import Judgement, JudgeRecord
from eval.judge.endpoint import EndpointJudge
from eval.served import Served
from guard.endpoint import endpoint_settings
from guard.recipe import Recipe


class Judge(Protocol):
    """What evaluation needs of a judge. `is_served`: whether the served engine's bare base has to
    answer for it. `identity`, JSON-able: what its answers depend on besides the rule and the
    conversation.
    """

    is_served: ClassVar[bool]

    @property
    def identity(self) -> Any: ...

    def judge(self, served: Served, folder: Path) -> Judgement | None:
        """One answer per test example, in order, or None if nobody judges. `folder`: where paid
        answers are kept.
        """
        ...


class BareBase:
    """The bare base model itself, zero-shot, through the engine that serves the methods."""

    is_served: ClassVar[bool] = True
    identity = "base model"

    def judge(self, served: Served, folder: Path) -> Judgement:
        """Its answers, uncalibrated: yes where yes is the likelier token."""
        name = f"base model {served.trial.recipe.name}, zero-shot"
        return Judgement(served.answers(None), JudgeRecord(name=name))


class NoJudge:
    """Nobody: an encoder has no answer to a rule that it was not trained for."""

    is_served: ClassVar[bool] = False
    identity = "none"

    def judge(self, served: Served, folder: Path) -> None:
        return None


def judge_on(recipe: Recipe, judge: Judge | None) -> Judge:
    judge = judge or BareBase()
    if isinstance(judge, BareBase) and recipe.kind == "encoder":
        return NoJudge()
    return judge


def judge_from(environment: Mapping[str, str]) -> Judge:
    """The endpoint of the JUDGE_… variables, else the base. Raises GuardError on half of them."""
    settings = endpoint_settings(environment, "judge", "to judge with the base model")
    if not settings:
        return BareBase()
    return EndpointJudge(**settings)
