"""Generated conversations whose utterances are known speech acts, and rules about those acts.

What the zero-shot judge learns from. The acts and topics are everyday ones; those of the served
rules come from their phrase books (`rule_talk.py`). Knows nothing of models.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from guard.conversation.example import Message

RULE_ATTEMPTS = 40  # draws of a rule with the wanted answer, before one about promises is taken


@dataclass(frozen=True)
class SpeechAct:
    """An act's phrasings with {vp} = verb phrase, and how a rule names it, with {vp} in `named` and
    {topic} in `about`.
    """

    cores: tuple[str, ...]
    named: tuple[str, ...]
    about: tuple[str, ...]


@dataclass(frozen=True)
class EverydayTopic:
    """The verbs and objects of one everyday topic; any verb goes with any object."""

    verbs: tuple[str, ...]
    objects: tuple[str, ...]


def _content() -> dict[str, Any]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return cast(dict[str, Any], yaml.safe_load(text))


def _act(content: dict[str, list[str]]) -> SpeechAct:
    cores, named, about = content["cores"], content["named"], content.get("about", ())
    return SpeechAct(tuple(cores), tuple(named), tuple(about))


_CONTENT = _content()
TOPICS = {
    name: EverydayTopic(tuple(topic["verbs"]), tuple(topic["objects"]))
    for name, topic in _CONTENT["topics"].items()
}
ACTS = {name: _act(act) for name, act in _CONTENT["acts"].items()}
OPENINGS = tuple(_CONTENT["openings"])
CLOSINGS = tuple(_CONTENT["closings"])
QUOTES = tuple(_CONTENT["quotes"])
SALAD = tuple(_CONTENT["salad"])
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
PAUSED = ".?!"  # an utterance that ends with none of these gets a full stop before the next one

Scope = Literal["vp", "topic", "any"]


@dataclass(frozen=True)
class RuleQuestion:
    """A rule and whether the conversation violates it (1)."""

    rule_text: str
    label: int


@dataclass(frozen=True)
class Utterance:
    """What a speaker says at once, and the act that it is. A quoted act is not the speaker's
    own.
    """

    role: str
    act: str
    topic: str | None
    vp: str | None
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class ActLabel:
    """The act that a message has just come to the end of: `upto` is the message's text so far."""

    upto: str
    act: str
    topic: str | None
    quoted: bool | None  # None: not known


@dataclass(frozen=True)
class _ForbiddenAct:
    """What a rule forbids: the act of `who` (None: of anybody), on its verb phrase, its topic, or
    any.
    """

    act: str
    who: str | None
    topic: str | None
    vp: str | None
    scope: Scope = "vp"

    def is_in(self, utterances: list[Utterance]) -> bool:
        """Whether somebody whom the rule names performs it."""
        return any(self._matches(utterance) for utterance in utterances)

    def _matches(self, utterance: Utterance) -> bool:
        if utterance.act != self.act or utterance.quoted:
            return False
        if self.who is not None and utterance.role != self.who:
            return False
        if self.scope == "vp":
            return utterance.vp == self.vp
        return self.scope == "any" or utterance.topic == self.topic

    def text(self, rng: random.Random) -> str:
        """A sentence that says so."""
        act = self._name(rng)
        forbids = rng.choice(forbids_of(self.who)).format(act=act)
        return f"{rng.choice(WHO[self.who])} {forbids}."

    def _name(self, rng: random.Random) -> str:
        act = ACTS[self.act]
        if self.scope == "topic":
            return rng.choice(act.about).format(topic=self.topic)
        name = rng.choice(act.named)
        if self.scope == "vp":
            return name.format(vp=self.vp)
        if act.about:
            return name.format(vp="do anything")
        return name


def forbids_of(who: str | None) -> tuple[str, ...]:
    """The ways to forbid, for a rule whose subject is `who`; None: nobody, whose sentences have no
    `not`.
    """
    if who is None:
        return NOBODY_FORBIDS
    return FORBIDS


def situation(turns: int, rng: random.Random) -> list[Utterance]:
    """A conversation of `turns` utterances. Acts and verb phrases repeat, so that only their
    pairing decides a rule.
    """
    phrases = [_phrase(rng) for _ in range(max(2, turns // 2))]
    role = rng.choice(("user", "assistant"))
    utterances = []
    for _ in range(turns):
        utterances.append(_utterance(role, rng.choice(list(ACTS)), rng.choice(phrases), rng))
        if rng.random() < 0.7:
            role = _listener(role)
    return utterances


def _listener(role: str | None) -> str:
    if role == "user":
        return "assistant"
    return "user"


def question(utterances: list[Utterance], rng: random.Random) -> RuleQuestion:
    """A rule about acts in `utterances`, violated half of the time; the negatives share the act,
    the topic or the speaker.
    """
    is_violated = rng.random() < 0.5
    for _ in range(RULE_ATTEMPTS):
        forbidden = _forbidden_act(utterances, is_violated, rng)
        if forbidden is not None and forbidden.is_in(utterances) == is_violated:
            return RuleQuestion(forbidden.text(rng), int(is_violated))
    topic, vp = _phrase(rng)
    promise = _ForbiddenAct("promise", None, topic, vp)
    return RuleQuestion(promise.text(rng), int(promise.is_in(utterances)))


def _forbidden_act(
    utterances: list[Utterance], is_violated: bool, rng: random.Random
) -> _ForbiddenAct | None:
    """An act of the conversation, one part of it changed unless it is to be found there; None:
    makes no sense.
    """
    seed = rng.choice(utterances)
    who = rng.choice((seed.role, seed.role, None))
    forbidden = _ForbiddenAct(seed.act, who, seed.topic, seed.vp)
    if is_violated:
        return _scoped(forbidden, rng)
    changed = _changed(forbidden, utterances, rng)
    if changed is None:
        return None
    return _scoped(changed, rng)


def _scoped(forbidden: _ForbiddenAct, rng: random.Random) -> _ForbiddenAct | None:
    """The part of the act that is forbidden; None where what it is about is not known."""
    if not ACTS[forbidden.act].about:
        return replace(forbidden, scope="any")
    scopes: tuple[Scope, ...] = ("vp", "topic", "any")
    scope = rng.choice(scopes)
    if scope != "any" and (forbidden.vp is None or forbidden.topic is None):
        return None
    return replace(forbidden, scope=scope)


def _changed(
    forbidden: _ForbiddenAct, utterances: list[Utterance], rng: random.Random
) -> _ForbiddenAct | None:
    """Another act, another verb phrase or another speaker; None where the verb phrase is not of the
    topic.
    """
    change = rng.randrange(3)
    if change == 0:
        return replace(forbidden, act=rng.choice(list(ACTS)))
    if change == 2 and forbidden.who is not None:
        return replace(forbidden, who=_listener(forbidden.who))
    if rng.random() < 0.5:
        topic, vp = _phrase(rng)
        return replace(forbidden, topic=topic, vp=vp)
    other_topic = rng.choice(utterances).topic or forbidden.topic
    other_vp = rng.choice(utterances).vp or forbidden.vp
    if not _go_together(other_topic, other_vp):
        return None
    return replace(forbidden, topic=other_topic, vp=other_vp)


def _go_together(topic: str | None, vp: str | None) -> bool:
    if topic is None or vp is None:
        return True
    return vp.startswith(TOPICS[topic].verbs)


def _phrase(rng: random.Random) -> tuple[str, str]:
    """A topic and a verb phrase of it."""
    name = rng.choice(list(TOPICS))
    topic = TOPICS[name]
    return name, f"{rng.choice(topic.verbs)} {rng.choice(topic.objects)}"


def _utterance(role: str, act: str, phrase: tuple[str, str], rng: random.Random) -> Utterance:
    topic, vp = phrase
    core = rng.choice(ACTS[act].cores)
    statement = core.format(vp=vp)
    quoted = rng.random() < 0.08
    if quoted:
        text = rng.choice(QUOTES).format(said=statement)
    else:
        text = rng.choice(OPENINGS) + statement + rng.choice(CLOSINGS)
    if "{vp}" not in core:
        return Utterance(role, act, None, None, text, quoted)
    return Utterance(role, act, topic, vp, text, quoted)


def messages(utterances: list[Utterance]) -> tuple[list[Message], list[list[ActLabel]]]:
    """The utterances as a conversation, and the acts of each message; what the same speaker says in
    a row is one message.
    """
    joined: list[Message] = []
    labels: list[list[ActLabel]] = []
    for utterance in utterances:
        text = utterance.text
        if joined and joined[-1].role == utterance.role:
            before = _with_pause(joined.pop().content, labels[-1])
            text = f"{before} {text}"
        else:
            labels.append([])
        joined.append(Message(utterance.role, text))
        labels[-1].append(ActLabel(text, utterance.act, utterance.topic, utterance.quoted))
    return joined, labels


def _with_pause(text: str, labels: list[ActLabel]) -> str:
    """The text with a full stop, if it lacks one, also in the label of the act that it ends
    with.
    """
    if text[-1] in PAUSED:
        return text
    text += "."
    labels[-1] = replace(labels[-1], upto=text)
    return text
