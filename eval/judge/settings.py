"""The LLM judge that the environment describes in its JUDGE_… variables (guard/endpoint/settings.py)."""

from __future__ import annotations

from collections.abc import Mapping

from eval.judge.endpoint import EndpointJudge
from guard.endpoint.settings import endpoint_settings


def judge_from(environment: Mapping[str, str]) -> EndpointJudge | None:
    """The judge; None where nothing describes one. Raises GuardError on half a description or a bad value."""
    settings = endpoint_settings(environment, "judge", "to judge with the base model")
    return EndpointJudge(**settings) if settings else None
