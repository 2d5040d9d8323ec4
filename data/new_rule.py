"""A policy in a sentence -> a rule file ready to edit: `python -m data.new_rule`, `make rule`.

The file says where to write what violates the policy and what it allows.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path
from typing import get_args

import yaml

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


def new_rule(name: str, policy: str, judged: Judged, rules: Path = RULES) -> Path:
    """Write `rules/<name>.yaml`. Raises GuardError."""
    path = rules / f"{name}.yaml"
    policy = " ".join(policy.split())
    _check_name(name, path)
    if not 10 <= len(policy) <= 140:
        problem = "the policy is one sentence of 10 to 140 characters; the file has room for more"
        remedy = 'For example POLICY="never promise a delivery date"'
        raise GuardError(problem, got=f"{len(policy)}: {policy}", remedy=remedy)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        part.write_text(_as_yaml(name, policy, judged), encoding="utf-8")
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


def _as_yaml(name: str, policy: str, judged: Judged) -> str:
    forbidden = FORBIDS.sub("", policy).rstrip(".")
    sentence = policy[0].upper() + policy[1:].rstrip(".") + "."
    title = f"{WHO[judged]} must not {forbidden}."
    if not FORBIDS.match(policy) or len(title) > LONGEST_TITLE:
        title = sentence
    folded = textwrap.fill(sentence, 98, break_on_hyphens=False, break_long_words=False)
    violates = f"{EDIT} one way of it a line, open and implied, hedged and partial: {forbidden}."
    allows = (
        f"{EDIT} what comes close and is allowed: refusing, informing, quoting others, supposing, "
        "asking."
    )
    lines = [
        f"id: {name}",
        f"title: {_scalar(title)}  # one short sentence: what an adapter reads",
        "policy: >  # what the labels answer; a judge behind an endpoint reads it too",
        textwrap.indent(folded, "  "),
        f"judged: {judged}  # whose words can violate it: {', '.join(get_args(Judged))}",
        f"turns: any  # which of them: {', '.join(get_args(Turns))}",
        "violates:  # for the judge, for DATA=llm, and for whoever labels",
        f"  - {_scalar(violates)}",
        "allows:  # most of all what comes close",
        f"  - {_scalar(allows)}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _scalar(text: str) -> str:
    scalar = yaml.safe_dump(text, width=10**6, allow_unicode=True)
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
    path = new_rule(arguments.name, arguments.policy, arguments.judged, RULES)
    print(f"written: {path}")
    print(next_steps(arguments.name))


if __name__ == "__main__":
    main()
