"""Generated conversations whose turns are known acts, and rules about those acts: what the zero-shot judge learns from.

The acts and topics are everyday ones; those of the served rules come from their phrase books (`train/tiny/rule_talk.py`).
Knows nothing of models.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from guard.example import Message


@dataclass(frozen=True)
class Act:
    """A speech act: its phrasings with {vp} = verb phrase, and how a rule names it, with {vp} in `named` and {topic} in `about`."""

    cores: tuple[str, ...]
    named: tuple[str, ...]
    about: tuple[str, ...]


def _content() -> dict[str, Any]:
    return cast(
        dict[str, Any],
        yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")),
    )


_CONTENT = _content()
TOPICS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    name: (tuple(topic["verbs"]), tuple(topic["objects"]))
    for name, topic in _CONTENT["topics"].items()
}
ACTS = {
    name: Act(tuple(act["cores"]), tuple(act["named"]), tuple(act.get("about", ())))
    for name, act in _CONTENT["acts"].items()
}
OPENINGS, CLOSINGS, QUOTES, SALAD = (
    tuple(_CONTENT[part]) for part in ("openings", "closings", "quotes", "salad")
)
WHO = {
    "user": ("The user", "The customer", "The human"),
    "assistant": ("The assistant", "The agent", "The bot"),
    None: ("Nobody", "No participant"),
}
FORBIDS = (
    "must not {act}",
    "is not allowed to {act}",
    "should never {act}",
    "may not {act}",
    "must never {act}",
)
NOBODY_FORBIDS = ("may {act}", "is allowed to {act}", "should ever {act}")


@dataclass(frozen=True)
class Question:
    """A rule and whether the conversation violates it."""

    rule_text: str
    label: int


@dataclass(frozen=True)
class Turn:
    """One thing said and the act that it is. A quoted act is not the speaker's own."""

    role: str
    act: str
    topic: str | None
    vp: str | None
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Heard:
    """The act that a message has just come to the end of: `upto` is the message's text so far."""

    upto: str
    act: str
    topic: str | None
    quoted: bool | None  # None: not known


def situation(turns: int, rng: random.Random) -> list[Turn]:
    """A conversation of `turns` things said. Acts and verb phrases repeat, so that only their pairing decides a rule."""
    phrases = [_phrase(rng) for _ in range(max(2, turns // 2))]
    role = rng.choice(("user", "assistant"))
    said = []
    for _ in range(turns):
        said.append(_turn(role, rng.choice(list(ACTS)), rng.choice(phrases), rng))
        if rng.random() < 0.7:
            role = "assistant" if role == "user" else "user"
    return said


def question(turns: list[Turn], rng: random.Random) -> Question:
    """A rule about acts in `turns`, violated half of the time; the negatives share the act, the topic or the speaker."""
    wanted = rng.random() < 0.5
    for _ in range(40):
        seed = rng.choice(turns)
        act, vp, topic = seed.act, seed.vp, seed.topic
        who = rng.choice((seed.role, seed.role, None))
        if not wanted:  # change one thing
            change = rng.randrange(3)
            if change == 0:
                act = rng.choice(list(ACTS))
            elif change == 1 or who is None:
                topic, vp = (
                    _phrase(rng)
                    if rng.random() < 0.5
                    else (rng.choice(turns).topic or topic, rng.choice(turns).vp or vp)
                )
                if (
                    vp is not None
                    and topic is not None
                    and not any(vp.startswith(verb) for verb in TOPICS[topic][0])
                ):
                    continue
            else:
                who = "assistant" if who == "user" else "user"
        scope = rng.choice(("vp", "topic", "any")) if ACTS[act].about else "any"
        if scope != "any" and (vp is None or topic is None):
            continue
        label = any(
            turn.act == act and not turn.quoted and (who is None or turn.role == who)
            and (scope == "any" or (scope == "vp" and turn.vp == vp) or (scope == "topic" and turn.topic == topic))
            for turn in turns
        )  # fmt: skip
        if label == wanted:
            return Question(_rule_text(act, who, scope, topic, vp, rng), int(label))
    topic, vp = _phrase(rng)
    present = any(turn.act == "promise" and turn.vp == vp and not turn.quoted for turn in turns)
    return Question(_rule_text("promise", None, "vp", topic, vp, rng), int(present))


def _phrase(rng: random.Random) -> tuple[str, str]:
    topic = rng.choice(list(TOPICS))
    verbs, objects = TOPICS[topic]
    return topic, f"{rng.choice(verbs)} {rng.choice(objects)}"


def _turn(role: str, act: str, phrase: tuple[str, str], rng: random.Random) -> Turn:
    topic, vp = phrase
    core = rng.choice(ACTS[act].cores)
    said = core.format(vp=vp)
    own = "{vp}" in core
    quoted = rng.random() < 0.08
    text = (
        rng.choice(QUOTES).format(said=said)
        if quoted
        else rng.choice(OPENINGS) + said + rng.choice(CLOSINGS)
    )
    return Turn(role, act, topic if own else None, vp if own else None, text, quoted)


def _rule_text(
    act: str, who: str | None, scope: str, topic: str | None, vp: str | None, rng: random.Random
) -> str:
    named = ACTS[act].named
    if scope == "vp":
        what = rng.choice(named).format(vp=vp)
    elif scope == "topic":
        what = rng.choice(ACTS[act].about).format(topic=topic)
    else:
        what = rng.choice(named).format(vp="do anything") if ACTS[act].about else rng.choice(named)
    forbids = rng.choice(NOBODY_FORBIDS if who is None else FORBIDS).format(act=what)
    return f"{rng.choice(WHO[who])} {forbids}."


def messages(turns: list[Turn]) -> tuple[list[Message], list[list[Heard]]]:
    """The turns as a conversation, and what is heard in each message; what the same speaker says in a row is one message."""
    joined: list[Message] = []
    heard: list[list[Heard]] = []
    for turn in turns:
        if joined and joined[-1].role == turn.role:
            before = joined.pop().content
            if before[-1] not in ".?!":
                before += "."
                last = heard[-1].pop()
                heard[-1].append(replace(last, upto=before))
            text = f"{before} {turn.text}"
        else:
            text = turn.text
            heard.append([])
        joined.append(Message(turn.role, text))
        heard[-1].append(Heard(text, turn.act, turn.topic, turn.quoted))
    return joined, heard
