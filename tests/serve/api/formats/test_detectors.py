"""The FMS Detectors API over HTTP, with the requests that its clients are known to send."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from httpx import Client

from guard.conversation.example import Message
from tests.serve.guarded import CONVERSATION
from tests.serve.serving import MESSAGES, Serve
from tests.serve.toy_engine import LOGITS, ToyEngine

FLAGGED, FINE = {"detector-id": "flagged"}, {"detector-id": "fine"}
DETECTION = {
    "detection": "violation",
    "detection_type": "flagged",
    "detector_id": "flagged",
    "score": pytest.approx(1 / (1 + math.e)),
    "metadata": {
        **{"threshold": 0.25, "confident": False},
        **{"version": "0123456789abcdef", "by": "alora"},
    },
}
CONTENTS = "/api/v1/text/contents"
BODIES: dict[str, dict[str, Any]] = {
    "contents": {"contents": ["Hi"]},
    "chat": {"messages": MESSAGES, "tools": []},
    "generation": {"prompt": "Why?", "generated_text": "Because."},
    "context/doc": {"content": "At 9.", "context_type": "docs", "context": ["From 9."]},
}


def test_each_text_has_its_own_list_with_the_place_of_what_was_found(client: Client) -> None:
    body = {"contents": ["Grüße", "Hi"], "detector_params": {"threshold": 0.9}}
    response = client.post(CONTENTS, json=body, headers=FLAGGED)
    assert response.json() == [
        [{"start": 0, "end": 5, "text": "Grüße", **DETECTION}],
        [{"start": 0, "end": 2, "text": "Hi", **DETECTION}],
    ]
    # However probable, what is no violation is no detection.
    assert client.post(CONTENTS, json=body, headers=FINE).json() == [[], []]


def test_each_other_kind_is_judged_as_the_conversation_that_it_is_and_has_one_list(
    engine: ToyEngine, client: Client
) -> None:
    for kind, conversation in (
        ("chat", CONVERSATION),
        ("generation", (Message("user", "Why?"), Message("assistant", "Because."))),
        ("context/doc", (Message("tool", "From 9."), Message("assistant", "At 9."))),
    ):
        path = f"/api/v1/text/{kind}"
        assert client.post(path, json=BODIES[kind], headers=FLAGGED).json() == [DETECTION]
        assert engine.conversations[-1] == conversation
        assert client.post(path, json=BODIES[kind], headers=FINE).json() == []


@pytest.mark.parametrize("kind", BODIES)
def test_a_client_that_sends_no_header_names_the_rule_in_the_url(client: Client, kind: str) -> None:
    path = f"/api/v1/text/{kind}"
    for url in (f"/flagged{path}", f"{path}?detector_id=flagged"):
        response = client.post(url, json=BODIES[kind])
        assert response.status_code == 200 and "flagged" in response.text
    unnamed = client.post(path, json=BODIES[kind])
    assert (unnamed.status_code, unnamed.json()["code"]) == (422, 422)
    assert "the header detector-id" in unnamed.json()["message"]
    unknown = client.post(f"/nothing{path}", json=BODIES[kind])
    message = "rules: not served: nothing; GET /v1/rules lists them"
    assert unknown.status_code == 404
    assert unknown.json() == {"code": 404, "message": message, "reason": "request_refused"}


def test_the_unjudged_is_no_empty_list(client: Client) -> None:
    for kind, body, why in (
        ("contents", {"contents": ["Hi", "\n"]}, "text 2 of 2: "),
        ("generation", {"prompt": "cannot be judged", "generated_text": ""}, "1 of 1 rules"),
        ("context/doc", BODIES["context/doc"] | {"context_type": "url"}, "not fetched from a URL"),
    ):
        response = client.post(f"/api/v1/text/{kind}", json=body, headers=FINE)
        assert (response.status_code, response.json()["code"]) == (422, 422)
        message = response.json()["message"]
        assert message.startswith("could not be judged: ") and why in message


def test_two_different_names_of_a_detector_are_refused(client: Client) -> None:
    path, query = f"/fine{CONTENTS}", "detector_id=flagged"
    twice = f"{CONTENTS}?{query}?{query}"  # a client appends it to a URL that has it
    for url, headers, status in (
        (path, FLAGGED, 422),
        (f"{path}?{query}", {}, 422),
        (f"{path}?detector_id=fine", FINE, 200),
        (twice, FLAGGED, 200),
        (f"{CONTENTS}?{query}", FINE, 422),
        (f"{CONTENTS}?{query}&detector_id=fine", {}, 422),
    ):
        response = client.post(url, json=BODIES["contents"], headers=headers)
        assert response.status_code == status, url


def test_the_weights_of_a_detection_are_those_that_answered(serve: Serve) -> None:
    engine = ToyEngine(LOGITS)
    client = serve(engine)
    # The engine has new weights, and the catalogue does not know yet.
    renewed = vars(engine.rules["flagged"]) | {"version": "fedcba9876543210"}
    engine.rules["flagged"] = SimpleNamespace(**renewed)
    (detection,) = client.post("/flagged/api/v1/text/chat", json=BODIES["chat"]).json()
    assert detection["metadata"]["version"] == "fedcba9876543210"
