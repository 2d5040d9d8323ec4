"""A real HTTP server that plays an LLM's endpoint, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.debate.debate import generate
from data.debate.paid_endpoint import Writers
from guard.conversation.example import Example, Message
from guard.endpoint import Endpoint
from guard.rule import load_rule
from tests.llm_endpoint import Reply

RULE = load_rule("refund_promise")
SEEDS = ((Message("user", "The lamp is broken."), Message("assistant", "I will have a look.")),)
WORDS = [
    *("amber", "birch", "cedar", "delta", "ember", "flint", "grove", "heron", "inlet", "jetty"),
    *("kelp", "larch", "maple", "north", "ocean", "pearl", "quartz", "raven", "slate", "thorn"),
]


@dataclass
class Server:
    """Plays an LLM: what it says follows from what it is asked.

    `change` may turn an answer into a fault.
    """

    change: Callable[[str, str], Reply | None] = lambda kind, text: None
    delay_s: float = 0.0
    requests: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, body: dict[str, Any], _: str | None) -> Reply:
        name = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]
        system, user = (message["content"] for message in body["messages"])
        word = next(word for word in system.split()[1:] if word != "are")
        kind = {"design": "dimensions", "an": "advocate", "a": "judge"}.get(word, word)
        self.requests.append(name)
        self.kinds.append(kind)
        text = self.reply(kind, system, user, name)
        return replace(self.change(kind, text) or Reply(text), delay_s=self.delay_s)

    def reply(self, kind: str, system: str, user: str, name: str) -> str:
        rng = random.Random(name)
        if kind == "dimensions":
            ways = []
            for n in range(3):
                ways.append({"name": f"way {n}", "values": [f"{word} {n}" for word in WORDS[:4]]})
            return json.dumps({"dimensions": ways})
        if kind == "write":
            label = "yes" if "conversation that VIOLATES" in user else "no"
            words = " ".join(rng.choices(WORDS, k=14))
            again = "rewritten" if "Your last attempt" in user else "first"
            turns = [
                {"role": "user", "content": f"{words}?"},
                {"role": "assistant", "content": f"{label} {again} {name} {words[::-1]}."},
            ]
            draft = json.dumps({"messages": turns, "reasoning": f"because {name}"})
            return f"Here it is:\n```json\n{draft}\n```"
        if kind == "advocate":
            return f"<think>hm</think>It is so, {name}."
        conversation = user[user.index("<conversation>") : user.index("</conversation>")]
        violates = "Assistant: yes" in conversation
        return json.dumps({"violates": violates, "reason": f"as it says, {name}"})


def endpoint(server: Server, **settings: Any) -> Endpoint:
    settings = {"backoff_s": 0.001, "timeout_s": 20, "role": "generator"} | settings
    return Endpoint(server.url, "toy", "key", **settings)


def debated(
    server: Server, answers: Path, wanted: int = 40, seed: int = 0, **more: Any
) -> tuple[list[Example], dict[str, Any]]:
    """What `generate` gives of the server's answers, with the budget and the endpoint's settings of
    `more`.
    """
    seeds, budget_usd = more.pop("seeds", SEEDS), more.pop("budget_usd", None)
    writers = Writers(endpoint(server, **more), wanted, "", seeds, budget_usd)
    return generate(RULE, seed, writers, answers)
