"""What the LLM is asked in a debate about a policy, from `prompts.yaml`, and the forms of its
answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Literal

from pydantic import Field

from data.debate.reply import Form
from guard.conversation.example import Message
from guard.files.yaml_file import Strict, load
from guard.prompt.decoder import ROLE_LABELS
from guard.rule import Judged, Rule, in_words

Leaning = Literal["recall", "precision"]
Chat = Sequence[Mapping[str, str]]
PROMPTS_FILE = Path(__file__).with_name("prompts.yaml")


class DebatePrompt(Strict):
    """One question: who is asked, what, and the form of the answer; in each, names to fill in."""

    system: str
    task: str
    form: str = ""

    def chat(self, *context: str, **names: object) -> Chat:
        """The question after its `context`."""
        parts = [*context, *(Template(part).substitute(names) for part in (self.task, self.form))]
        system = Template(self.system).substitute(names)
        user = "\n\n".join(part for part in parts if part)
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]


class DebatePrompts(Strict):
    """What the file holds."""

    whose: dict[Judged, str]
    leanings: dict[Leaning, str]
    decompose: DebatePrompt
    write: DebatePrompt
    again: str
    advocate: DebatePrompt
    judge: DebatePrompt


PROMPTS = load(PROMPTS_FILE, DebatePrompts)


class Dimension(Form):
    """A way in which cases of the policy differ, and its possible values."""

    name: str = Field(min_length=1)
    values: tuple[str, ...] = Field(min_length=2)


class Decomposition(Form):
    """The answer to `decompose`."""

    dimensions: tuple[Dimension, ...] = Field(min_length=2)


class DraftTurn(Form):
    """One message of a draft."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = Field(min_length=1)


class ConversationDraft(Form):
    """The answer to `write`: a case."""

    messages: tuple[DraftTurn, ...] = Field(min_length=1)
    reasoning: str

    @property
    def as_messages(self) -> tuple[Message, ...]:
        return tuple(Message(turn.role, turn.content) for turn in self.messages)


class Vote(Form):
    """The answer to `judge`."""

    violates: bool
    reason: str


@dataclass(frozen=True)
class Topic:
    """What a case has to show. The number keeps two cases of one kind from being one question."""

    number: int
    dimension: str
    value: str
    label: int


def decompose(rule: Rule, seeds: Sequence[Sequence[Message]]) -> Chat:
    parts = [in_words(rule)]
    if seeds:
        parts.append("\n".join(["Conversations as they occur, unlabelled:", *map(_tagged, seeds)]))
    return PROMPTS.decompose.chat(*parts)


def write(
    rule: Rule, topic: Topic, draft: ConversationDraft | None, dissent: Sequence[str]
) -> Chat:
    """A boundary case with the topic's label; after dissent, the same anew."""
    verb = ("does NOT violate", "VIOLATES")[topic.label]
    names = {"verb": verb, "whose": PROMPTS.whose[rule.judged], **vars(topic)}
    asked = PROMPTS.write
    if draft:
        last = json.dumps(draft.model_dump(), ensure_ascii=False)
        objections = "\n".join(["It was not agreed upon:", *(f"- {reason}" for reason in dissent)])
        again = [asked.task, "$last", "$objections", PROMPTS.again]
        asked = asked.model_copy(update={"task": "\n\n".join(again)})
        names |= {"last": f"Your last attempt:\n{last}", "objections": objections}
    return asked.chat(in_words(rule), **names)


def advocate(rule: Rule, draft: ConversationDraft, label: int, transcript: Sequence[str]) -> Chat:
    verb = ("does not violate", "violates")[label]
    return PROMPTS.advocate.chat(*_case(rule, draft, transcript), verb=verb)


def judge(
    rule: Rule, draft: ConversationDraft, leaning: Leaning, transcript: Sequence[str]
) -> Chat:
    names = {"whose": PROMPTS.whose[rule.judged], "leaning": PROMPTS.leanings[leaning]}
    return PROMPTS.judge.chat(*_case(rule, draft, transcript), **names)


def _case(rule: Rule, draft: ConversationDraft, transcript: Sequence[str]) -> list[str]:
    """The rule, the case, and what was said of it so far."""
    parts = [in_words(rule), _tagged(draft.as_messages)]
    if transcript:
        parts.append("\n".join(["What was said so far:", *transcript]))
    return parts


def _tagged(messages: Sequence[Message]) -> str:
    """The turns behind their labels; further lines of a turn begin with a bar."""
    turns = []
    for message in messages:
        lines = message.content.splitlines() or [""]
        turns.append(f"{ROLE_LABELS[message.role]} " + "\n| ".join(lines))
    return "\n".join(["<conversation>", *turns, "</conversation>"])
