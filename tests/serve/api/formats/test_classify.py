"""The classifier over HTTP, by the bytes that vLLM's semantic router sends and the checks that it
makes of an answer (its `http_classify` backend, read at commit 3d48f8c9; it was not run).
"""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from httpx import Client

from guard.conversation.example import Message
from guard.verdict import Verdict
from serve.api.formats.classify import violation_score
from tests.serve.api.tenants import HEADERS, LOGITS, RULE_SETS, shop_and_bank
from tests.serve.serving import Serve
from tests.serve.toy_engine import NeverAllows, ToyEngine

LABELS = {"violation", "allow"}  # of the mapping that the router is given


def router_risk(client: Client, path: str, text: bytes = b"Hi", key: str = "") -> np.float32:
    """What the router compares with its threshold, in its own precision."""
    headers = {"content-type": "application/json", "accept": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    response = client.post(path, content=b'{"inputs":"%s"}' % text, headers=headers)
    assert response.status_code == 200, response.text
    scores: dict[str, Any] = {}
    for entry in response.json():
        scores[entry["label"]] = np.float32(entry["score"])
    assert scores.keys() == LABELS and len(response.json()) == len(LABELS)
    assert all(0 <= score <= 1 for score in scores.values())
    assert abs(sum(scores.values()) - 1) <= 0.02
    return scores["violation"]


def test_a_half_is_the_threshold_of_a_rule_s_card(engine: ToyEngine, client: Client) -> None:
    assert router_risk(client, "/flagged/classify") == pytest.approx(0.5246, abs=1e-4)
    assert router_risk(client, "/fine/classify") == pytest.approx(0.2887, abs=1e-4)
    assert router_risk(client, "/classify") == router_risk(client, "/flagged/classify")
    router_risk(client, "/classify", rb"a \u003cb\u003e \u0026 c")  # as Go escapes it
    assert engine.conversations[-1] == (Message("user", "a <b> & c"),)


@pytest.mark.parametrize("threshold", [0, 1e-9, 0.1, 0.25, 0.5, 0.97, 1])
@pytest.mark.parametrize("p", [0, 1e-12, 0.1, 0.25, 0.5, 0.97, 0.999, 1])
def test_a_score_is_a_half_or_more_exactly_where_the_rule_is_violated(
    p: float, threshold: float
) -> None:
    verdict = Verdict("rule", 0.0, p, threshold)
    score = violation_score(verdict)
    assert 0 <= score <= 1 and (score >= 0.5) is verdict.violates
    if threshold == 0.5:
        assert score == pytest.approx(p)


def test_a_tenant_s_key_is_put_to_its_own_rules(serve: Serve) -> None:
    client = serve(ToyEngine(LOGITS), rule_sets=RULE_SETS, tenants=shop_and_bank())
    assert router_risk(client, "/classify", key="shop's key") < 0.5
    assert router_risk(client, "/classify", key="bank's key") >= 0.5
    other = client.post("/flagged/classify", json={"inputs": "Hi"}, headers=HEADERS["shop"])
    assert other.status_code == 404


def test_without_a_verdict_there_are_no_labels_and_a_violation_needs_no_other_rule(
    serve: Serve,
) -> None:
    client = serve(NeverAllows())
    assert router_risk(client, "/classify") >= 0.5
    for path, text in (("/refused/classify", "Hi"), ("/always/classify", " ")):
        response: httpx.Response = client.post(path, json={"inputs": text})
        assert response.status_code == 422 and {"error", "code"} == response.json().keys()
    for body in ({}, {"inputs": ["Hi"]}, {"inputs": "Hi", "parameters": {"top_k": 1}}):
        assert client.post("/classify", json=body).status_code == 422
