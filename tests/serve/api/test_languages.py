"""A conversation in a language that a rule has not seen: never a confident verdict over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from httpx import Client

from guard.conversation.example import Message
from guard.coverage import ConversationForm, Coverage, packed_words
from guard.verdict import Calibration
from serve.client.answers import CheckAnswer
from serve.engine import OpenCheck
from serve.policy.rule_set import RuleSet
from tests.serve.client.censor import Censor
from tests.serve.serving import Serve

ENGLISH = "Please ask the doctor what should be done about it."
GERMAN = "Bitte fragen Sie deswegen heute noch Ihren Arzt."
ANYTHING: dict[str, Any] = {
    **{"turns": 9, "characters": 999, "longest_turns": {"user": 999}, "speakers": ("user",)},
    **{"unknown_share": 9.0, "words": packed_words([]), "letters": ""},
    **{"sure_logit": 0.0, "sure_logit_long": 0.0},
}
CALIBRATIONS = {
    "words": Calibration(coverage=Coverage(**ANYTHING, languages=("en",))),
    "fine": Calibration(coverage=Coverage(**ANYTHING)),
}
STRICT = replace(RuleSet.any_of(("words", "fine")), name="strict", unseen_language="unjudged")


class EnglishCensor(Censor):
    """Its rule "words" was validated on English rows, "fine" on rows of any language."""

    def open_check(self, messages: Sequence[Message], *asked: Any, **options: Any) -> OpenCheck:
        opened = super().open_check(messages, *asked, **options)
        calibrations = {**opened.calibrations, **CALIBRATIONS}
        return replace(opened, calibrations=calibrations, form=ConversationForm(messages))


@pytest.fixture
def client(serve: Serve) -> Client:
    return serve(EnglishCensor(), rule_sets={"strict": STRICT})


def checked(client: Client, *contents: str, **body: Any) -> Any:
    messages = [{"role": "user", "content": content} for content in contents]
    response = client.post("/v1/check", json={"messages": messages} | body)
    return response.raise_for_status().json()


def test_a_verdict_on_an_unseen_language_is_not_confident_and_says_why(client: Client) -> None:
    for said in (GERMAN, f"{GERMAN} forbidden"):
        words, fine = checked(client, said, rules=["words", "fine"])["results"]
        assert (words["confident"], words["code"]) == (False, "unseen_language")
        assert fine["confident"] and "code" not in fine
        results = CheckAnswer.of(checked(client, said)).results
        assert (results["words"].code, results["fine"].code) == ("unseen_language", "")
    (words,) = checked(client, ENGLISH, rules=["words"])["results"]
    assert words["confident"] and "code" not in words


def test_a_rule_set_may_take_no_verdict_on_an_unseen_language(client: Client) -> None:
    for said in (GERMAN, f"{GERMAN} forbidden"):
        answer = checked(client, said, rule_set="strict")
        assert (answer["verdict"], answer["decided_by"]) == ("unjudged", ["words"])
        assert [entry["code"] for entry in answer["unjudged"]] == ["unseen_language"]
    assert checked(client, ENGLISH, rule_set="strict")["verdict"] == "allow"


def test_a_policy_beside_the_set_does_not_switch_that_off_nor_does_it_in_a_stream(
    client: Client,
) -> None:
    stated = {"rule_set": "strict", "policies": ["Never promise a date"]}
    answer = checked(client, GERMAN, **stated)
    assert (answer["verdict"], answer["decided_by"]) == ("unjudged", ["words"])
    opening = {"messages": [{"role": "user", "content": ENGLISH}]} | stated
    lines = (opening, {"append": GERMAN}, {"end": True})
    response = client.post("/v1/check/stream", content="\n".join(map(json.dumps, lines)))
    judgement = json.loads(response.text.splitlines()[-1])["judgement"]
    assert (judgement["verdict"], judgement["decided_by"]) == ("unjudged", ["words"])
