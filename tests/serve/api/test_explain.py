"""A violation names the turn that carries it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.api.app import create_app
from serve.api.input.limits import MAX_TURNS
from serve.api.observe.audit import AuditLog
from serve.client import GuardClient
from tests.serve.client.censor import Censor
from tests.serve.serving import serving

pytestmark = pytest.mark.slow


def asked(client: httpx.Client, *contents: str, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content} for content in contents]
    return client.post("/v1/check", json={"messages": messages} | body)


@pytest.mark.parametrize("turn", [0, 1, 4])
def test_a_violated_rule_names_its_turn_and_no_other_rule_does(
    censored: httpx.Client, turn: int
) -> None:
    contents = ["hello"] * 5
    contents[turn] = "forbidden"
    answer = asked(censored, *contents, explain=True).json()
    assert answer["verdict"] == "violation"
    (explanation,) = answer["explanations"].values()
    assert answer["explanations"].keys() == {"words"} and explanation["turn"] == turn
    assert explanation["p_after"] > 0.9
    assert ("p_before" in explanation) == (turn > 0)
    assert explanation.get("p_before", 0.0) < 0.1


def test_only_violated_rules_are_asked_again(censored: httpx.Client, censor: Censor) -> None:
    assert asked(censored, "hello", "good day", explain=True).json()["explanations"] == {}
    assert len(censor.conversations) == 1
    assert "explanations" not in asked(censored, "hello", "forbidden").json()
    assert len(censor.conversations) == 2
    refused = asked(censored, *["a"] * (MAX_TURNS + 1), explain=True)
    assert refused.status_code == 422 and "can be explained" in refused.text
    assert len(censor.conversations) == 2


def test_the_checks_of_an_explanation_are_counted_as_no_answers(tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    with serving(create_app(Censor(), observers=[AuditLog(log)])) as client:
        asked(client, "hello", "forbidden", "hello", explain=True)
        metrics = client.get("/metrics").text
    purposes = [json.loads(line)["purpose"] for line in log.read_text().splitlines()]
    assert purposes == ["answer", "explanation", "explanation"]
    assert 'guard_verdicts_total{rule="words",verdict="violation"} 1.0' in metrics
    assert 'guard_verdicts_total{rule="words",verdict="allow"} 0.0' in metrics
    assert 'guard_checks_total{rule_set="",tenant="",verdict="violation"} 1.0' in metrics


def test_what_could_not_be_judged_has_no_explanation_and_a_verdict_stands_without(
    censored: httpx.Client,
) -> None:
    answer = asked(censored, "hello", "cannot be judged", "forbidden", explain=True).json()
    assert answer["verdict"] == "unjudged" and answer["explanations"] == {}
    failed = asked(censored, "hello", "breaks", "forbidden", explain=True).json()
    assert failed["verdict"] == "violation" and "explanations" not in failed


def test_explanations_that_take_too_long_leave_a_client_its_verdict(
    censored: httpx.Client, censor: Censor, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = censor.step

    def step_once() -> None:
        if len(censor.conversations) == 1:
            step()
        else:
            time.sleep(0.01)  # what explains is never answered

    monkeypatch.setattr(censor, "step", step_once)
    monkeypatch.setattr("serve.api.formats.check.EXPLAINING_SHARE", 0.1)
    messages = [{"role": "user", "content": text} for text in ("hello", "forbidden")]
    with httpx.Client(trust_env=False) as own:
        guard = GuardClient(str(censored.base_url), deadline_s=20, http_client=own)
        answer = guard.check(messages, explain=True)
    assert answer.verdict == "violation" and not answer.explanations
    assert len(censor.conversations) == 2


def test_after_a_turn_that_could_not_be_judged_there_is_no_probability_before(
    censored: httpx.Client,
) -> None:
    image = {"role": "user", "content": [{"type": "image_url"}]}
    said = [{"role": "user", "content": text} for text in ("hello", "forbidden")]
    body = {"messages": [said[0], image, said[1]], "explain": True}
    explanation = censored.post("/v1/check", json=body).json()["explanations"]["words"]
    assert explanation["turn"] == 2 and explanation["p_after"] > 0.9
    assert "p_before" not in explanation
