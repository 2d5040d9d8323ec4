"""A format of the user's own, from a folder outside the checkout."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from httpx import Client

from guard.errors import GuardError
from serve.api.access import FEEDBACK
from serve.api.app import create_app
from serve.api.formats.table import RESERVED, all_formats, wire_formats
from tests.serve.serving import serving
from tests.serve.toy_engine import LOGITS, ToyEngine

OWN = '''
"""A chat under another key."""

import json

from fastapi import APIRouter, Request

from serve.api.access import Caller
from serve.api.formats.conversation import ChatMessages, NoHiddenWords, from_chat
from serve.api.input.strict_json import StrictRoute
from serve.api.service import CheckService, Question
from serve.api.wire_format import ASKED, RULE, ExampleRequest, WireFormat

router = APIRouter(route_class=StrictRoute)

class Asked(NoHiddenWords):
    chat: ChatMessages
    rule: str

@router.post("/mine")
async def mine(body: Asked, request: Request) -> bool:
    question = Question(Caller.of(request).catalogue.selected([body.rule]))
    messages = [from_chat(body.chat)]
    ((_, decision),) = await CheckService.of(request).judge_each(request, messages, question)
    return decision.ruling.value == "allow"

FORMAT = WireFormat(
    router,
    lambda status, message, code: {"mine": message, "code": code},
    lambda text: ["allow" if json.loads(text) else "violation"],
    (ExampleRequest("/mine", {"chat": [ASKED], "rule": RULE}, ("chat",)),),
)
'''


def test_an_own_format_is_answered_and_says_errors_in_its_own_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    own = all_formats(tmp_path)["mine"]
    monkeypatch.setitem(wire_formats(), "mine", own)

    def ask(client: Client, **changed: object) -> httpx.Response:
        chat = [{"role": "user", "content": "Hi"}]
        return client.post("/mine", json={"chat": chat, "rule": "fine"} | changed)

    with serving(create_app(ToyEngine(LOGITS))) as client:  # type: ignore[arg-type]
        assert own.reading(ask(client).text) == ["allow"]
        assert own.reading(ask(client, rule="flagged").text) == ["violation"]
        unknown = ask(client, rule="none")
        malformed = ask(client, chat=[])
        crashed = ask(client, chat=[{"role": "user", "content": "breaks"}])
        monkeypatch.setattr("serve.api.formats.conversation.turns", lambda *_: 1 / 0)
        broken = ask(client)
    for response, status, said in (
        (crashed, 503, "the engine failed; the server's log says why"),
        (unknown, 404, "not served: none"),
        (malformed, 422, "chat: List should have at least 1 item"),
        (broken, 500, "the server failed"),
    ):
        assert response.status_code == status
        assert response.json().keys() == {"mine", "code"} and said in response.json()["mine"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("check", OWN, "the name or a path of another one"),
        ("mine", OWN.replace('"/mine"', '"/{rule}/api/v1/text/chat"'), "the name or a path"),
        ("mine", OWN.replace('"/mine"', '"/health"'), "server's own"),
        ("mine", OWN.replace('"/mine"', '"/v1/feedback"'), "server's own"),
        ("mine", "def", "cannot be imported: SyntaxError"),
        ("mine", "FORMAT = 5", "has no FORMAT"),
    ],
)
def test_a_file_that_is_no_format_or_takes_another_s_place_is_refused(
    tmp_path: Path, name: str, content: str, problem: str
) -> None:
    (tmp_path / f"{name}.py").write_text(content)
    with pytest.raises(GuardError, match=problem):
        all_formats(tmp_path)


def test_the_server_s_own_paths_are_reserved() -> None:
    app = create_app(ToyEngine())  # type: ignore[arg-type]
    own = {route.path for one in wire_formats().values() for route in one.router.routes}  # type: ignore[attr-defined]
    own.add(FEEDBACK)
    firsts = {route.path.split("/")[1] for route in app.routes if route.path not in own}  # type: ignore[attr-defined]
    assert firsts == set(RESERVED)
