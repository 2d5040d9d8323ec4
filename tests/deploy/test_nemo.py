"""The configurations of deploy/nemo in NeMo Guardrails itself, between a user and a model.

What its rails see, and what the user gets where there is no verdict.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serve.api.app import create_app
from tests.deploy.clients import DEPLOY, addressed, output
from tests.deploy.model_server import model_app
from tests.serve.serving import serving
from tests.serve.word_engine import WordEngine

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("nemo_chat.py")
CONFIGURATIONS = ("rails", "conversation")
NOBODY = "http://127.0.0.1:1"
REFUSED = "I'm sorry, I can't respond to that."
FAILED = "I'm sorry, an internal error has occurred."
REST = "Rest well, and drink a lot of water, every day, as long as it hurts."
BAD = "Take ibuprofen with water every four hours, as long as it hurts you at all."
UNJUDGED = "This cannot be judged by any rule at all, and goes on for some words."
BREAKING = "This breaks the engine, and goes on for a few words more than that one."
EARLIER = [("user", "Hello."), ("assistant", "Hi.")]


@dataclass
class Chats:
    """Conversations, their outcomes, and what the engine was asked in all of them together."""

    folder: Path
    cases: list[dict[str, Any]] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    judged: list[list[tuple[str, str]]] = field(default_factory=list)

    def add(self, config: str, text: str, **streaming: Any) -> None:
        """A user's message after EARLIER, or with `streamed` a reply that comes word by word."""
        said = [{"role": role, "content": content} for role, content in EARLIER]
        messages = [*said, {"role": "user", "content": text}]
        case = {"config": str(self.folder / config), "messages": messages}
        self.cases.append(case | streaming)

    def outcome(self, config: str, text: str, **streaming: Any) -> str:
        """What the user gets."""
        for case, outcome in zip(self.cases, self.outcomes, strict=True):
            found = (Path(case["config"]).name, case["messages"][-1]["content"])
            if found == (config, text) and streaming.items() <= case.items():
                return outcome
        raise AssertionError((config, text, streaming))


@contextmanager
def configured(folder: Path) -> Iterator[WordEngine]:
    """The configurations under `folder` with addresses of this machine; `gone` has no server."""
    engine, model = WordEngine(), model_app()
    with serving(create_app(engine)) as server, serving(model) as upstream:  # type: ignore[arg-type]
        guard, behind = (str(client.base_url).rstrip("/") for client in (server, upstream))
        for name in CONFIGURATIONS:
            for copy, address in ((name, guard), (f"{name}-gone", NOBODY)):
                shutil.copytree(DEPLOY / "nemo" / name, folder / copy)
                path = folder / copy / "config.yml"
                addresses = {"http://localhost:8000": address, "http://localhost:8080": behind}
                path.write_text(addressed(path.read_text(encoding="utf-8"), addresses))
        yield engine


def unlike(text: str) -> str:
    """A request for a reply of this text that itself holds no word that an engine knows."""
    for word in ("ibuprofen", "cannot", "breaks"):
        text = text.replace(word, f"{word[:3]}~{word[3:]}")
    return f"Say: {text}"


def is_failure(outcome: str) -> bool:
    """A model that fails raises in NeMo, an action that fails is told the user."""
    return outcome == FAILED or outcome.startswith("raised LLMCallException")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Chats:
    """All conversations of this file, which one process holds."""
    chats = Chats(tmp_path_factory.mktemp("nemo"))
    for config in CONFIGURATIONS:
        for text in ("Who lives at 5 Elm Street?", UNJUDGED, BREAKING):
            chats.add(config, text)
        for reply in (REST, BAD, UNJUDGED, BREAKING):
            chats.add(config, unlike(reply))
        chats.add(f"{config}-gone", unlike(REST))
        for is_parallel in (False, True):
            for reply in (REST, BAD, UNJUDGED, BREAKING):
                way = {"is_parallel": is_parallel, "is_given_first": False}
                chats.add(config, "Well?", streamed=reply, **way)
    chats.add("rails", "Well?", streamed=BAD, is_parallel=False, is_given_first=True)
    with configured(chats.folder) as engine:
        chats.outcomes = json.loads(output("python", str(PROGRAM), given=json.dumps(chats.cases)))
        for messages in engine.conversations:
            chats.judged.append([(message.role, message.content) for message in messages])
    return chats


@pytest.mark.parametrize("config", CONFIGURATIONS)
def test_what_is_allowed_passes_and_a_violation_is_refused(chats: Chats, config: str) -> None:
    """And a server that is gone lets nothing pass."""
    assert chats.outcome(config, unlike(REST)) == REST
    assert chats.outcome(config, "Who lives at 5 Elm Street?") == REFUSED
    assert chats.outcome(config, unlike(BAD)) == REFUSED
    assert is_failure(chats.outcome(f"{config}-gone", unlike(REST)))


def test_rails_see_a_message_and_its_reply_and_actions_the_conversation(chats: Chats) -> None:
    asked, replied = ("user", unlike(REST)), ("assistant", REST)
    assert [asked] in chats.judged and [asked, replied] in chats.judged
    assert chats.judged.count([*EARLIER, asked]) == 1
    assert chats.judged.count([*EARLIER, asked, replied]) == 1


@pytest.mark.parametrize("config", CONFIGURATIONS)
@pytest.mark.parametrize("text", [UNJUDGED, BREAKING, unlike(UNJUDGED), unlike(BREAKING)])
def test_what_has_no_verdict_is_never_the_reply(chats: Chats, config: str, text: str) -> None:
    assert is_failure(chats.outcome(config, text))


@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_streamed_reply_is_given_out_as_it_is_checked(chats: Chats, is_parallel: bool) -> None:
    def got(reply: str) -> str:
        return chats.outcome("rails", "Well?", streamed=reply, is_parallel=is_parallel)

    assert got(REST).strip() == REST
    assert "guardrails_violation" in got(BAD) and "ibuprofen" not in got(BAD)
    for reply in (UNJUDGED, BREAKING):
        assert "rail_execution_failure" in got(reply) and reply[:8] not in got(reply)


@pytest.mark.parametrize("reply", [REST, BAD, UNJUDGED, BREAKING])
def test_the_actions_refuse_streams_that_nemo_shows_in_part(chats: Chats, reply: str) -> None:
    got = chats.outcome("conversation", "Well?", streamed=reply)
    assert "rail_execution_failure" in got and reply[:8] not in got


def test_by_nemo_s_default_a_stream_is_given_out_before_it_is_checked(chats: Chats) -> None:
    got = chats.outcome("rails", "Well?", streamed=BAD, is_given_first=True)
    assert "ibuprofen" in got and "guardrails_violation" in got
