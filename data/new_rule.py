"""A policy in a sentence -> a rule file ready to edit: `python -m data.new_rule`, `make rule`.

With the endpoint of the GENERATOR_… variables an LLM drafts what violates the policy, what it
allows, and examples; without one the file says what to write there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import yaml
from pydantic import Field

from data.llm_reply import WRITING, Form, filled
from guard.endpoint import Completion, Endpoint, endpoint_settings
from guard.errors import GuardError, exits_cleanly
from guard.files.atomic import atomic_write
from guard.home import own_or_shipped
from guard.rule import EDIT, LONGEST_TITLE, RULES, Judged, Turns, load_rule

WHO: dict[Judged, str] = {
    "user": "The user",
    "assistant": "The assistant",
    "tool": "A tool's output",
    "conversation": "The conversation",
}
NAME = "lower-case letters, digits and _"
FORBIDS = re.compile(r"^(?:please )?(?:never|do not|don't|must not|may not) ", re.IGNORECASE)

RULE_FORM = (
    '{"title": "one short sentence that forbids it, at most 14 words", "policy": "two to four '
    'lines: what is forbidden and what is allowed", "terms": ["Term: what it means here."], '
    '"violates": ["three to six ways, indirect ones among them"], "allows": ["four to six kinds of '
    'allowed behaviour that come close"], "examples": [{"text": "User: ... Assistant: ...", '
    '"violates": true}]}'
)


class Shown(Form):
    """A labelled example."""

    text: str
    violates: bool


class RuleDraft(Form):
    """What an LLM writes of a rule, or what stands in its place."""

    title: str = Field(max_length=160)
    policy: str
    terms: tuple[str, ...] = ()
    violates: tuple[str, ...] = Field(min_length=1)
    allows: tuple[str, ...] = Field(min_length=1)
    examples: tuple[Shown, ...] = ()


def new_rule(
    name: str, policy: str, judged: Judged, rules: Path = RULES, endpoint: Endpoint | None = None
) -> Path:
    """Write `rules/<name>.yaml`, by the endpoint if there is one. Raises GuardError."""
    path = rules / f"{name}.yaml"
    policy = " ".join(policy.split())
    _check_name(name, path)
    if not 10 <= len(policy) <= 140:
        problem = "the policy is one sentence of 10 to 140 characters; the file has room for more"
        remedy = 'For example POLICY="never promise a delivery date"'
        raise GuardError(problem, got=f"{len(policy)}: {policy}", remedy=remedy)
    drafted = _by_llm(endpoint, policy, judged) if endpoint else _by_hand(policy, judged)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        part.write_text(_as_yaml(name, judged, drafted), encoding="utf-8")
    try:
        load_rule(name, rules)
    except GuardError:
        path.unlink()
        raise
    return path


def _check_name(name: str, path: Path) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        problem, remedy = f"a rule's name is {NAME}", "For example NAME=delivery_date"
        raise GuardError(problem, got=repr(name), remedy=remedy)
    if name == "all":
        raise GuardError("RULE=all means every rule", got=name, remedy="Take another name")
    if own_or_shipped(path).exists():
        remedy = "Edit it, delete it, or take another name"
        problem = "a rule of this name already exists"
        raise GuardError(problem, where=own_or_shipped(path), remedy=remedy)


def _by_hand(policy: str, judged: Judged) -> RuleDraft:
    forbidden = FORBIDS.sub("", policy).rstrip(".")
    sentence = policy[0].upper() + policy[1:].rstrip(".") + "."
    title = f"{WHO[judged]} must not {forbidden}."
    if not FORBIDS.match(policy) or len(title) > LONGEST_TITLE:
        title = sentence
    violates = f"{EDIT} one way of it a line, open and implied, hedged and partial: {forbidden}."
    allows = (
        f"{EDIT} what comes close and is allowed: refusing, informing, quoting others, supposing, "
        "asking."
    )
    return RuleDraft(title=title, policy=sentence, violates=(violates,), allows=(allows,))


def _by_llm(endpoint: Endpoint, policy: str, judged: Judged) -> RuleDraft:
    completion = asyncio.run(_ask(endpoint, policy, judged))
    try:
        if completion.refused:
            raise ValueError("refused")
        return filled(completion, RuleDraft, endpoint.url)
    except (ValueError, RecursionError, GuardError) as error:
        problem = f"the endpoint wrote no rule: {error}"
        got = completion.text[:200]
        remedy = "Try again, take another model, or unset GENERATOR_BASE_URL"
        raise GuardError(problem, where=endpoint.url, got=got, remedy=remedy) from error


async def _ask(endpoint: Endpoint, policy: str, judged: Judged) -> Completion:
    system = "You write content policies that different readers apply in the same way."
    task = f"Policy: {policy}\nWhose words are judged: {judged}.\n\n"
    task += f"Write it out as one JSON object:\n{RULE_FORM}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task}]
    async with endpoint.client() as client:
        return await endpoint.complete(client, messages, "a new rule")


def _as_yaml(name: str, judged: Judged, drafted: RuleDraft) -> str:
    policy = " ".join(drafted.policy.split())
    policy = textwrap.fill(policy, 98, break_on_hyphens=False, break_long_words=False)
    parts = [
        f"id: {name}\n",
        f"title: {_scalar(drafted.title)}  # one short sentence: what an adapter reads\n",
        "policy: >  # what the labels answer; a judge behind an endpoint reads it too\n",
        textwrap.indent(policy, "  ") + "\n",
        f"judged: {judged}  # whose words can violate it: {', '.join(get_args(Judged))}\n",
        f"turns: any  # which of them: {', '.join(get_args(Turns))}\n",
        _block("terms", "words that need a definition", drafted.terms),
        _block("violates", "for the judge, for DATA=llm, and for whoever labels", drafted.violates),
        _block("allows", "most of all what comes close", drafted.allows),
    ]
    if drafted.examples:
        parts.append("examples:\n")
    for example in drafted.examples:
        parts.append(f"  - text: {_scalar(example.text)}\n")
        parts.append(f"    violates: {str(example.violates).lower()}\n")
    return "".join(parts)


def _block(key: str, comment: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f"{key}:  # {comment}\n" + "".join(f"  - {_scalar(line)}\n" for line in lines)


def _scalar(text: str) -> str:
    scalar = yaml.safe_dump(" ".join(text.split()), width=10**6, allow_unicode=True)
    return str(scalar.removesuffix("\n").removesuffix("\n..."))


def next_steps(name: str) -> str:
    weights = f"RULE={name} MODEL=minilm METHOD=head"
    return f"""\
It judges now, by its words alone: make up RULE={name} MODEL=smollm2; or make try RULE={name}
Read and edit it, then bring labelled rows, or let an endpoint write and debate them
(GENERATOR_BASE_URL, …):
  make data RULE={name} DATA=rows.jsonl    # or DATA=llm
  make train eval {weights}
  make up {weights}
MiniLM knows English; docs/rules.md names a model for other languages."""


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.new_rule",
        description="Write a rule file from a policy, ready to edit.",
    )
    name = f"{NAME}: the file's name and the rule's id"
    parser.add_argument("--name", required=True, help=name)
    policy = 'one sentence, for example "never promise a delivery date"'
    parser.add_argument("--policy", required=True, help=policy)
    judged = "whose words can violate it (default: %(default)s)"
    parser.add_argument("--judged", choices=get_args(Judged), default="assistant", help=judged)
    arguments = parser.parse_args()
    endpoint = None
    settings = endpoint_settings(os.environ, "generator", "to write a file for you to fill in")
    if settings:
        endpoint = Endpoint(**WRITING | settings)
    path = new_rule(arguments.name, arguments.policy, arguments.judged, RULES, endpoint)
    print(f"written: {path}")
    print(next_steps(arguments.name))


if __name__ == "__main__":
    main()
