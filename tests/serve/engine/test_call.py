"""What the engine reads, and what it answers: prompts, outcomes, checks, codes."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path

import pytest
from pytest import MonkeyPatch
from starlette.exceptions import HTTPException

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.home import ROOT
from guard.verdict import Calibration
from serve.api.errors import Unjudged
from serve.engine import Call, Check, GuardEngine, OpenCheck, Refusal, Score
from serve.engine.backend import BackendRequest, EngineOutput
from serve.engine.call import InFlight, Recipient
from serve.engine.codes import CODES, STATUS_CODES, code_of, code_of_status
from serve.engine.prompts import Prompts, Unanswerable
from serve.engine.refusals import CallerGone, Overloaded, TooLate
from serve.engine.score import joined
from tests.serve.cards import prompts, recipe
from tests.serve.engine.shared import long_conversation
from tests.serve.engine.toy import ToyBackend
from tests.serve.guarded import CONVERSATION, adapter_folders

ALLOW, VIOLATION = Calibration().verdict("a", -5.0), Calibration().verdict("c", 5.0)
REFUSED = {name: Refusal(name, "no", "nan") for name in ("b", "d")}


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_no_number_is_a_refusal(logit: float) -> None:
    asked = Call([None])
    recipients = (Recipient(0, "rule 'a'"),)
    asked.waiting["1"] = InFlight(asked, recipients, BackendRequest([], [1]), 1, 0.0)
    asked.settle(EngineOutput("1", logit, 0, 10), [logit])
    assert asked.done and isinstance(asked.results()[0], Refusal)


def test_what_the_backend_refuses_is_internal_and_what_a_conversation_is_is_not() -> None:
    call = Call([None, None])
    in_flight = InFlight(call, (Recipient(0, "rule 'a'"),), BackendRequest([], [1]), 1, 0.0)
    in_flight.refuse("runs/tiny/a: no such file", "weights_unavailable")
    call.refuse(1, "rule 'b'", "the prompt does not fit the context", "too_long")
    assert [(outcome.subject, outcome.is_internal) for outcome in call.results()] == [
        ("rule 'a'", True),
        ("rule 'b'", False),
    ]


def test_what_no_rule_reads_is_one_reason_for_all_rules() -> None:
    rules = tuple(f"rule {number}" for number in range(100))
    call = Call([Score(-5.0, 0, 10, 1.0)] * len(rules))
    calibrations = dict.fromkeys(rules, Calibration(threshold=0.25, uncertainty_band=(0.2, 0.3)))
    unread = ("message 0 has an image", "message 1 has a sound")
    refused = OpenCheck(rules, calibrations, call, unread=unread).result().refused
    assert list(refused) == list(rules)
    assert refused["rule 0"].why == "message 0 has an image, which no rule reads"
    assert all(refusal is refused["rule 0"] for refusal in refused.values())


def test_checks_by_different_rules_are_one_in_the_order_of_the_rules() -> None:
    first = Check((ALLOW,), {"d": REFUSED["d"]}, 3, 2, 7.0, {"a": "12"}, {"a": 1.0})
    second = Check((VIOLATION,), {"b": REFUSED["b"]}, 30, 20, 5.0, {"c": "34"}, {"c": 2.0})
    check = joined(("d", "c", "b", "a"), (first, second))
    assert [verdict.rule for verdict in check.verdicts] == ["c", "a"]
    assert list(check.refused) == ["d", "b"]
    assert (check.cached_tokens, check.computed_tokens, check.wall_ms) == (33, 22, 7.0)
    assert check.versions == {"a": "12", "c": "34"} and check.latencies_ms == {"a": 1.0, "c": 2.0}


def test_every_code_is_documented_once_in_its_order_and_given_somewhere() -> None:
    page = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## Why there is no verdict\n(.*?)\n## ", page, re.DOTALL)
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)[1:] == list(CODES)
    given = set(STATUS_CODES.values()) | {code_of_status(400), code_of(asyncio.CancelledError())}
    sources = [path for path in Path(ROOT / "serve").rglob("*.py") if path.name != "codes.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    given |= {code for code in CODES if f'"{code}"' in text}
    assert given == set(CODES)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TooLate("late"), "too_late"),
        (Overloaded("full"), "overloaded"),
        (CallerGone("gone"), "caller_gone"),
        (asyncio.CancelledError(), "caller_gone"),
        (Unanswerable("long", "too_long", remedy="Shorten it"), "too_long"),
        (Unjudged("an image", "unread_content"), "unread_content"),
        (HTTPException(413), "too_long"),
        (HTTPException(401), "request_refused"),
        (GuardError("broken"), "engine_failed"),
        (SystemExit(2), "engine_failed"),  # whose own `code` is none of ours
    ],
)
def test_an_error_has_its_own_code_or_that_of_its_status(error: BaseException, code: str) -> None:
    assert code_of(error) == code


CONTEXT = 2048
Tokenised = list[tuple[Message, int]]


@pytest.fixture
def seen(monkeypatch: MonkeyPatch) -> Tokenised:
    """The messages that are tokenised from now on, and how many tokens each has."""
    seen: Tokenised = []
    turn_ids = prompts().turn_ids

    def counted(message: Message) -> list[int]:
        ids = turn_ids(message)
        seen.append((message, len(ids)))
        return ids

    monkeypatch.setattr(prompts(), "turn_ids", counted)
    return seen


def test_a_conversation_is_tokenised_once(seen: Tokenised, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("serve.engine.adapter.prompt_builder", lambda _: prompts())
    engine = GuardEngine(recipe(), adapter_folders(), start_backend=lambda *_: ToyBackend())
    assert len(engine.check(CONVERSATION).verdicts) == 4
    assert [message for message, _ in seen] == list(CONVERSATION)


@pytest.mark.parametrize(
    ("messages", "got", "most_tokens", "most_messages"),
    [
        ([Message("user", "x" * 100_000)], "100,000 characters", 0, 0),  # no context holds it
        ([Message("user", "\u4f60" * 30_000)], r"more than [\d,]+ tokens", 4 * CONTEXT, 9),
        ([Message("user", "\u00e9 " * 20)] * 500, "more than 2,048 tokens", 1.05 * CONTEXT, 125),
    ],
)
def test_what_does_not_fit_is_refused_before_all_of_it_is_tokenised(
    seen: Tokenised, messages: list[Message], got: str, most_tokens: float, most_messages: int
) -> None:
    with pytest.raises(GuardError, match=f"does not fit the context.*{got}"):
        Prompts(prompts(), CONTEXT).prefix(messages)
    assert len(seen) <= most_messages and sum(tokens for _, tokens in seen) <= most_tokens


def test_the_longest_conversation_that_fits_is_judged() -> None:
    fitting = Prompts(prompts(), CONTEXT)
    fixed = len(prompts().build(long_conversation(1), "Be nice.").token_ids) - 1
    for more in (0, 1):
        messages = long_conversation(CONTEXT - 1 - fixed + more)
        assert fitting.prefix(messages) == prompts().prefix_ids(messages)
    fitting.check_length(CONTEXT - 1)  # and the verdict
    with pytest.raises(GuardError, match=r"does not fit the context.*2,049 tokens"):
        fitting.check_length(CONTEXT)
