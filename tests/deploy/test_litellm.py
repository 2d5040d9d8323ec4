"""deploy/litellm/config.yaml in LiteLLM's own proxy, between a caller and a model.

What happens there to a violation, to what cannot be judged (422), to a server that is overloaded or
broken (503), and to one that is gone: docs/gateways.md says which of LiteLLM's settings let it
pass.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI

from guard.conversation.example import Message
from serve.api.app import create_app
from serve.policy.rule_set import RuleSet
from serve.tenants.key_ring import key_hash
from serve.tenants.tenant_file import load_tenants
from tests.deploy.clients import DEPLOY, addressed, environment, program
from tests.deploy.model_server import model_app
from tests.serve.serving import serving
from tests.serve.word_engine import WORDS, WordEngine

pytestmark = pytest.mark.slow

CONFIG = DEPLOY / "litellm" / "config.yaml"
RULES_AS_MODELS = DEPLOY / "litellm" / "rules_as_models.yaml"
NOBODY = "http://127.0.0.1:1"
KEY = "the shop's key"
REST = "Say: Rest well, and drink a lot of water, every day, as long as it hurts."
# What a request asks the model for: each fault is in the reply alone, and long enough to stream.
BAD_REPLY = "Say: Take ibu~profen with water every four hours, as long as it hurts you at all."
UNJUDGED_REPLY = "Say: This can~not be judged by any rule at all, and goes on for a few words more."
BREAKING_REPLY = "Say: This brea~ks the engine, and goes on for a few words more than that one."
VIOLATING = ("Is ibuprofen good?", BAD_REPLY)
OPEN = ("not-on-error", "open")  # no setting lets a violation pass
UNJUDGED, BREAKING = "This cannot be judged.", "This breaks the engine."
START_S = 600.0
ATTEMPTS = 3  # to start it on a port that nobody has taken meanwhile
GUARDRAILS = ("centurion", "centurion-moderation")


@contextmanager
def litellm_proxy(config: Path) -> Iterator[httpx.Client]:
    """A client of a proxy with this configuration, which ends with the block."""
    key = f"sk-{secrets.token_hex(32)}"  # without one it does not start
    headers, log = {"authorization": f"Bearer {key}"}, config.with_suffix(".log")
    for _ in range(ATTEMPTS):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]  # whoever listens there first has it
        command = [program("litellm"), "--config", config, "--host", "127.0.0.1"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--port", str(port)],
                cwd=config.parent,
                env=environment(LITELLM_MASTER_KEY=key),
                stdout=output,
                stderr=output,
            )
        address = f"http://127.0.0.1:{port}"
        try:
            with httpx.Client(
                base_url=address, headers=headers, timeout=60, trust_env=False
            ) as client:
                if _has_started(process, client, log):
                    yield client
                    return
        finally:
            process.terminate()
            process.wait(30)
    raise AssertionError(f"LiteLLM ended {ATTEMPTS} times: {log.read_text()[-4000:]}")


def _has_started(process: subprocess.Popen[bytes], client: httpx.Client, log: Path) -> bool:
    """Wait until it answers; False if it has ended, as it does where another has the port."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            return False
        try:
            if client.get("/health/liveliness").is_success:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"LiteLLM did not start in {START_S:.0f} s: {log.read_text()[-4000:]}")


@dataclass(frozen=True)
class Chain:
    """A caller's proxy, the guardrail server's engine behind it, and the model."""

    proxy: httpx.Client
    engine: WordEngine
    model: FastAPI

    def ask(self, text: str, *guardrails: str, **fields: Any) -> httpx.Response:
        """A chat completion of the model, guarded by those named."""
        self.model.state.asked.clear()
        self.engine.conversations.clear()
        body = {"model": "assistant", "messages": [{"role": "user", "content": text}]}
        return self.proxy.post(
            "/v1/chat/completions", json=body | {"guardrails": list(guardrails)} | fields
        )

    def stream(self, text: str, *guardrails: str) -> tuple[str, str]:
        """What of a streamed reply is given out, and the error that ends it, empty without one."""
        response = self.ask(text, *guardrails, stream=True)
        given, error = "", ""
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    error = event["error"]["message"]
                for choice in event.get("choices", []):
                    given += choice["delta"].get("content") or ""
        return given, error or ("" if response.is_success else response.text)

    @property
    def was_model_asked(self) -> bool:
        return bool(self.model.state.asked)


def variant(config: dict[str, Any], name: str, **settings: Any) -> dict[str, Any]:
    """The guardrail `centurion` of the file with other settings, and another name."""
    params = config["guardrails"][0]["litellm_params"] | settings
    return {"guardrail_name": name, "litellm_params": params}


def with_a_tenant(folder: Path) -> FastAPI:
    """A server that only answers who has KEY."""
    rule_sets = {"support": RuleSet.any_of(list(WORDS))}
    tenant = {"keys_sha256": [key_hash(KEY)], "rule_sets": ["support"]}
    path = folder / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": {"shop": tenant}}))
    tenants = load_tenants(path, rule_sets)
    return create_app(WordEngine(), rule_sets=rule_sets, tenants=tenants)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """The file with these servers' addresses, and variants of its guardrail beside it. None is on
    by default: a test names those that it is about.
    """
    folder = tmp_path_factory.mktemp("litellm")
    engine, model = WordEngine(), model_app()
    with (
        serving(create_app(engine)) as server,  # type: ignore[arg-type]
        serving(with_a_tenant(folder)) as guarded,
        serving(model) as upstream,
    ):
        at_server = {"http://localhost:8000": str(server.base_url).rstrip("/")}
        at_model = {"http://localhost:8080": str(upstream.base_url).rstrip("/")}
        text = addressed(CONFIG.read_text(encoding="utf-8"), at_server | at_model)
        rules_as_models = addressed(RULES_AS_MODELS.read_text(encoding="utf-8"), at_server)
        config: dict[str, Any] = yaml.safe_load(text)
        config["model_list"] += yaml.safe_load(rules_as_models)["model_list"]
        as_it_is = config["guardrails"][0]["litellm_params"]
        assert as_it_is["default_on"] is True  # every request is checked
        as_it_is["default_on"] = False
        config["guardrails"] += [
            variant(config, "not-on-error", fail_on_error=False),
            variant(config, "open", unreachable_fallback="fail_open"),
            variant(config, "gone", api_base=NOBODY),
            variant(config, "gone-open", api_base=NOBODY, unreachable_fallback="fail_open"),
            variant(config, "tenant", api_base=str(guarded.base_url), api_key=KEY),
            variant(config, "stranger", api_base=str(guarded.base_url), api_key="another"),
            variant(config, "reply-only", mode="post_call"),
            variant(config, "at-chunks", streaming_end_of_stream_only=False),
            variant(config, "given-at-once", streaming_transform_mode="block_only"),
        ]
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        with litellm_proxy(path) as proxy:
            yield Chain(proxy, engine, model)


def test_a_reply_is_judged_as_the_end_of_its_conversation(chain: Chain) -> None:
    response = chain.ask("Say: Rest well.", "centurion")
    assert response.json()["choices"][0]["message"]["content"] == "Rest well."
    asked = Message("user", "Say: Rest well.")
    assert chain.engine.conversations == [(asked,), (asked, Message("assistant", "Rest well."))]
    messages = [
        {"role": "system", "content": "You are a nurse."},
        {"role": "user", "content": "My head hurts."},
        {"role": "assistant", "content": "Since when?"},
        {"role": "user", "content": [{"type": "text", "text": "Say: Rest."}]},
    ]
    assert chain.ask("", "centurion", messages=messages).is_success
    roles = [message.role for message in chain.engine.conversations[-1]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("guardrail", "text", "rule"),
    [
        ("centurion", "Who lives at 5 Elm Street?", "pii_leak"),
        ("centurion-moderation", "Is ibuprofen good?", "medical_advice"),
        ("centurion", BAD_REPLY, "medical_advice"),
        ("centurion-moderation", BAD_REPLY, "medical_advice"),
    ],
)
def test_a_violation_is_not_given_out(chain: Chain, guardrail: str, text: str, rule: str) -> None:
    response = chain.ask(text, guardrail)
    assert rule in response.text and "choices" not in response.json()
    is_reply = text.startswith("Say")
    assert response.is_error if is_reply else response.status_code == 400
    assert chain.was_model_asked == is_reply


@pytest.mark.parametrize("guardrail", GUARDRAILS)
@pytest.mark.parametrize("text", [UNJUDGED, UNJUDGED_REPLY, BREAKING, BREAKING_REPLY])
def test_what_has_no_verdict_is_not_given_out(chain: Chain, guardrail: str, text: str) -> None:
    response = chain.ask(text, guardrail)
    assert "choices" not in response.json()
    statuses = (500, 500) if guardrail == "centurion" else (422, 503)
    assert response.status_code == statuses[text in (BREAKING, BREAKING_REPLY)]
    assert chain.was_model_asked == text.startswith("Say")


@pytest.mark.parametrize(
    ("guardrail", "text", "passes"),
    [
        *((guardrail, text, False) for guardrail in OPEN for text in VIOLATING),
        ("not-on-error", UNJUDGED, True),
        ("not-on-error", UNJUDGED_REPLY, True),
        ("not-on-error", BREAKING, True),
        ("open", UNJUDGED, False),
        ("open", UNJUDGED_REPLY, False),
        ("open", BREAKING, True),
        ("open", BREAKING_REPLY, True),
        ("gone", "Hello", False),
        ("gone-open", "Is ibuprofen good?", True),
    ],
)
def test_what_lets_pass_is_what_the_settings_say_and_a_422_is_not_unreachable(
    chain: Chain, guardrail: str, text: str, passes: bool
) -> None:
    response = chain.ask(text, guardrail)
    assert response.is_success == passes
    assert ("violates medical_advice" in response.text) == (text in VIOLATING and not passes)


def test_a_tenant_s_key_is_sent_and_without_it_nothing_passes(chain: Chain) -> None:
    assert chain.ask("Hello", "tenant").is_success
    assert "violates medical_advice" in chain.ask(BAD_REPLY, "tenant").text
    assert "401" in chain.ask("Hello", "stranger").text
    assert not chain.was_model_asked


def test_a_reply_whose_request_was_not_checked_is_unjudged(chain: Chain) -> None:
    response = chain.ask("Hello", "reply-only")
    assert chain.was_model_asked and response.is_error and "422" in response.text


@pytest.mark.parametrize("guardrail", ["centurion", "at-chunks"])
def test_a_streamed_reply_is_given_out_whole_if_it_is_allowed(chain: Chain, guardrail: str) -> None:
    given, error = chain.stream(REST, guardrail)
    assert given.strip() == REST.removeprefix("Say: ") and not error
    final = chain.engine.conversations[-1]
    assert [message.role for message in final] == ["user", "assistant"]
    assert final[-1].content.strip() == given.strip()
    checks = len(chain.engine.conversations)
    assert checks == 2 if guardrail == "centurion" else checks > 2


@pytest.mark.parametrize("text", [BAD_REPLY, UNJUDGED_REPLY, BREAKING_REPLY])
@pytest.mark.parametrize("guardrail", ["centurion", "at-chunks"])
def test_no_streamed_word_is_given_out_unchecked(chain: Chain, guardrail: str, text: str) -> None:
    given, error = chain.stream(text, guardrail)
    assert given == "" and error


def test_litellm_s_own_way_to_stream_gives_out_what_it_then_objects_to(chain: Chain) -> None:
    given, error = chain.stream(BAD_REPLY, "given-at-once")
    assert "ibuprofen" in given and error == "violates medical_advice"


def test_a_rule_is_a_model(chain: Chain) -> None:
    fields = {"model": "rules/medical_advice", "logprobs": True, "top_logprobs": 2}
    said = chain.ask("Is ibuprofen good?", **fields).json()["choices"][0]
    assert said["message"]["content"] == "yes"
    words = {word["token"] for word in said["logprobs"]["content"][0]["top_logprobs"]}
    assert words == {"yes", "no"}
    assert chain.ask("Hello", **fields).json()["choices"][0]["message"]["content"] == "no"
    for text in (UNJUDGED, BREAKING):
        response = chain.ask(text, **fields)
        assert response.is_error and "choices" not in response.json()
    assert chain.ask("Hello", model="rules/no_such_rule").is_error
