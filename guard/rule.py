"""A policy rule: one YAML file that holds its whole life."""

from __future__ import annotations

import hashlib
import json
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from guard.arguments import comma_separated
from guard.conversation.example import ROLES
from guard.errors import GuardError
from guard.files.strict_json import load_json
from guard.files.yaml_file import Strict, load_named
from guard.home import HOME, yaml_files

RULES = HOME / "recipes" / "rules"

MANIFEST_KEY = "labelling"  # of a data set's manifest: what its labels follow from in the rule
EDIT = "EDIT:"  # marks what has to be filled in in a new rule's file
Judged = Literal["user", "assistant", "tool", "conversation"]
LONGEST_TITLE = 160  # characters
LONGEST_FOR_READER = 1_200  # characters, unless title and policy have more
RuleTurn = Literal["title", "policy", "none", "reader"]
Turns = Literal["any", "last"]
# The turns that weights look for a violation in: all of the judged speaker's turns, or the last.
Last = Literal["last user", "last assistant", "last tool", "last conversation"]
Reads = Literal[Judged, Last]
LAST_OF: dict[Judged, Reads] = dict(zip(get_args(Judged), get_args(Last), strict=True))
# The roles whose turns count. Results of tools may be in the system message, as documents are.
SPEAKERS: dict[Reads, tuple[str, ...]] = {
    "user": ("user",),
    "assistant": ("assistant",),
    "tool": ("tool", "system"),
    "conversation": ROLES,
}
SPEAKERS |= {last: SPEAKERS[judged] for judged, last in LAST_OF.items()}
LAST_TURNS: dict[Judged, str] = {
    "user": "the user's last turn",
    "assistant": "the assistant's last turn",
    "tool": "what a tool returned last",
    "conversation": "the last turn",
}


class RuleExample(Strict):
    """One illustrated case of a rule."""

    text: str
    violates: bool


class Gate(Strict):
    """What takes a version on trial back by itself: more than this, over a window of conversations.

    Shares are of the conversations that its champion judged; `most_flagged` is a multiple of what
    that flags. At most 5 % of the windows of a version that keeps to all of it take it back.
    """

    most_disagreement: float | None = Field(default=None, gt=0, lt=1)
    most_flagged: float | None = Field(default=1.5, gt=0, le=100)
    most_unjudged: float | None = Field(default=0.05, gt=0, lt=1)
    # Seconds; no more than one in 20 checks with this version may take longer.
    slower_than: float | None = Field(default=None, gt=0)
    least_checks: int = Field(default=50, ge=1)
    window: int = Field(default=10_000, ge=100)

    @model_validator(mode="after")
    def _may_abort(self) -> Self:
        if self.least_checks > self.window:
            raise ValueError("least_checks should be at most window")
        return self


class Rule(Strict):
    """A rule in plain language.

    `title` is one short sentence that forbids something. `policy` is the paragraph that the label
    answers. The model's recipe says which of them stands in an adapter's prompt, if any.
    """

    id: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    title: str = Field(min_length=3, max_length=LONGEST_TITLE)
    policy: str = Field(min_length=10)
    judged: Judged
    # Whether a violation in any of the judged speaker's turns counts, or only one in the last: then
    # every message has to be checked as it comes. Heads read and data are labelled accordingly.
    turns: Turns = "any"
    # Whether the same words may be allowed in one conversation and a violation in another: then
    # nothing that is said in others stands in this rule's generated rows.
    depends_on_context: bool = False
    terms: tuple[str, ...] = ()
    violates: tuple[str, ...] = Field(min_length=1)
    allows: tuple[str, ...] = Field(min_length=1)
    examples: tuple[RuleExample, ...] = ()
    # Whether the rule is about orders to a machine: then a note to the judge could violate it too.
    commands: bool = False
    # The share of allowed conversations that may be flagged, on the validation split.
    max_fpr: float | None = Field(default=None, gt=0, lt=1)
    # The share of twins that may be flagged there: of harmless ones that look like a violation.
    max_fpr_twins: float | None = Field(default=None, gt=0, lt=1)
    # The rules whose adapters are this rule's own, as one: nothing of it is trained but a head.
    compose: tuple[str, ...] = ()
    # "generator", or a .jsonl/.csv path; "generator+" before it: both
    data: str = "generator"
    gate: Gate = Gate()
    approvals: int = Field(default=1, ge=1, le=9)  # of different people, before a version is served

    @field_validator("title", "policy")
    @classmethod
    def _says_something(cls, text: str) -> str:
        if len(" ".join(text.split())) < 3:
            raise ValueError("should have at least 3 characters besides spaces")
        return text

    @field_validator("compose")
    @classmethod
    def _are_parents(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if names and len(set(names)) < max(2, len(names)):
            raise ValueError("name two or more rules, each once, or leave compose out")
        return names

    @property
    def reads(self) -> Reads:
        if self.turns == "last":
            return LAST_OF[self.judged]
        return self.judged

    @property
    def balanced(self) -> Rule:
        """The rule without its rates, as where there are too few rows for any."""
        return self.model_copy(update={"max_fpr": None, "max_fpr_twins": None})

    def text(self, turn: RuleTurn = "title") -> str:
        if turn == "reader":
            return _for_reader(self)
        return " ".join({"title": self.title, "policy": self.policy, "none": ""}[turn].split())


def _for_reader(rule: Rule) -> str:
    """The whole rule in one line: title and policy, and of its lists, in turn, as many whole lines
    as there is room for. What is still to be filled in says nothing.
    """
    lists = {"Violates": rule.violates, "Allowed": rule.allows, "Terms": rule.terms}
    kept: dict[str, list[str]] = {heading: [] for heading in ("Terms", "Violates", "Allowed")}
    text = f"{rule.text()} {rule.text('policy')}"
    for lines in zip_longest(*lists.values()):
        for heading, line in zip(lists, lines, strict=True):
            if line is None or line.startswith(EDIT):
                continue
            kept[heading].append(line)
            longer = _with_lists(rule, kept)
            if len(longer) > LONGEST_FOR_READER:
                return text
            text = longer
    return text


def _with_lists(rule: Rule, lists: dict[str, list[str]]) -> str:
    parts = [rule.title, rule.policy]
    for heading, lines in lists.items():
        if lines:
            parts += [f"{heading}:", *lines]
    return " ".join(" ".join(parts).split())


def text_hash(rule_text: str) -> str:
    """SHA-256 of the rule turn's text: an adapter answers exactly this wording."""
    return hashlib.sha256(rule_text.encode()).hexdigest()


def in_words(rule: Rule, note: str = "") -> str:
    """The whole rule for an LLM or a person who decides by it, with a `note` after the policy."""
    parts = [f"Rule: {rule.title}\n{rule.policy.strip()}"]
    answers = {True: "yes", False: "no"}
    examples = [f"{case.text.strip()} -> {answers[case.violates]}" for case in rule.examples]
    if rule.turns == "last":
        last = LAST_TURNS[rule.judged]
        parts.append(f"Only {last} counts; what stands before it is context.")
    if note:
        parts.append(note)
    lists = {
        "Terms": rule.terms,
        "Violates the rule": rule.violates,
        "Does not violate the rule": rule.allows,
        "Examples": examples,
    }
    for heading, lines in lists.items():
        if lines:
            parts.append("\n- ".join((f"{heading}:", *lines)))
    return "\n\n".join(parts)


def load_rule(name: str, rules: Path = RULES) -> Rule:
    return load_named(name, rules, Rule, "id")


def rule_names(selection: str, rules: Path = RULES) -> list[str]:
    """The names in a list, or those of all rule files, in a stable order."""
    if selection == "all":
        names = [path.stem for path in yaml_files(rules)]
        if not names:
            raise GuardError("no rules", where=rules, remedy="Write one: recipes/rules/<id>.yaml")
        return names
    names = comma_separated(selection, "rule")
    for name in names:
        load_rule(name, rules)
    return names


def labelling(rule: Rule) -> dict[str, Any]:
    return rule.model_dump(include={"judged", "turns", "commands", "depends_on_context"})


def check_labelling(data: Path, rule: Rule) -> None:
    """Raise GuardError if the rows in `data` were made for other fields of the rule. A folder
    without a manifest, as a study's, is taken as it is.
    """
    manifest = data / "manifest.json"
    if not manifest.is_file():
        return
    remedy = f"Run `make data RULE={rule.id} FORCE=1`"
    kept = load_json(manifest, remedy=remedy)
    if not isinstance(kept, dict):
        raise GuardError("the manifest is not an object", where=manifest, remedy=remedy)
    then = kept.get(MANIFEST_KEY, {})
    changed = [name for name, value in labelling(rule).items() if then.get(name, value) != value]
    if changed:
        was = ", ".join(f"{name}: {json.dumps(then[name])}" for name in changed)
        now = ", ".join(f"{name}: {json.dumps(labelling(rule)[name])}" for name in changed)
        problem = f"the rows of {rule.id} were made for {was}; the rule says {now}"
        remedy = f"Run `make data RULE={rule.id}` again, rows of your own with labels that fit"
        raise GuardError(problem, where=data, remedy=remedy)
