"""A small text grammar: alternatives, slots, inflection, tidying.

A template is one line of text:

    (a|b|)          one of the alternatives, may be empty, may nest
    {drug}          a value of the slot `drug`; the same value everywhere in one exchange
    {drug.2}        another value of the same slot
    {treat:ing,my}  a slot that holds a clause: verbs as -ing forms, pronouns in the first person
    ^take           inside a slot's value: a verb that follows the slot's form (base, ing, past, s)
    <you> <object> <your> <yourself>
                    inside a slot's value: pronouns in the slot's person
                    (you, my, our, her, his, their)
    #               inside a slot's value: a random digit from 1 to 9

Templates are written in lower case; sentences get their capitals, and "a" becomes "an", at the end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from data.generator.words import WORDS
from guard.errors import GuardError, choose_from

FORMS = ("base", "ing", "past", "s")
PRONOUNS = WORDS.pronouns
IRREGULAR = {base: tuple(forms.split()) for base, forms in WORDS.irregular.items()}

_CHOICE = re.compile(r"\(([^()]*)\)")
_SLOT = re.compile(r"\{([a-z_]+)(\.\d)?(?::([a-z,]+))?\}")
_VERB = re.compile(r"\^([a-z]+)")
_PRONOUN = re.compile(r"<(you|object|your|yourself)>")


def resolve(template: str, rng: random.Random) -> str:
    """The template with every alternative chosen and its slots still open: its *phrasing*."""
    while match := _CHOICE.search(template):
        chosen = rng.choice(match[1].split("|"))
        template = template[: match.start()] + chosen + template[match.end() :]
    return " ".join(template.split())


def slot_names(template: str) -> set[str]:
    """The slots a template refers to, each with its number: `drug`, `drug.2`."""
    return {match[1] + (match[2] or "") for match in _SLOT.finditer(template)}


def without_choices(template: str) -> str:
    """The parts of a template that are in every phrasing: all but its alternatives."""
    while _CHOICE.search(template):
        template = _CHOICE.sub("", template)
    return template


def check(template: str, slots: Mapping[str, Sequence[str]], *, where: object) -> None:
    flat = without_choices(template)
    if re.search(r"[()|]", flat):
        problem, remedy = "brackets do not match, or '|' outside brackets", "Write (one|another)"
        raise GuardError(problem, where=where, got=template, remedy=remedy)
    for match in _SLOT.finditer(template):
        refuse_unknown("unknown slot", [match[1]], slots, where, template)
        modifiers = (match[3] or "base").split(",")
        refuse_unknown("unknown form", modifiers, [*FORMS, *PRONOUNS], where, template)
    if re.search(r"[{}]", _SLOT.sub("", template)):
        remedy = "Write {name}, {name.2} or {name:form,person}"
        raise GuardError("malformed slot", where=where, got=template, remedy=remedy)


def refuse_unknown(
    problem: str, names: Iterable[str], valid: Collection[str], where: object, got: object = None
) -> None:
    """Raise GuardError at the first of `names` that is not `valid`."""
    for name in names:
        if name not in valid:
            remedy = choose_from(name, sorted(valid))
            raise GuardError(f"{problem} '{name}'", where=where, got=got, remedy=remedy)


@dataclass
class Bindings:
    """The slot values of one exchange; with one `key` two exchanges talk about the same."""

    slots: Mapping[str, Sequence[str]]
    key: str
    _values: dict[str, str] = field(default_factory=dict)

    def fill(self, phrasing: str) -> str:
        def value(match: re.Match[str]) -> str:
            modifiers = (match[3] or "").split(",")
            form = next((m for m in modifiers if m in FORMS), "base")
            person = next((m for m in modifiers if m in PRONOUNS), "you")
            text = self._value(match[1], match[2] or "")
            text = _VERB.sub(lambda verb: inflect(verb[1], form), text)
            return _PRONOUN.sub(lambda word: PRONOUNS[person][word[1]], text)

        return _SLOT.sub(value, phrasing)

    def _value(self, name: str, index: str) -> str:
        if name + index not in self._values:
            entries = list(self.slots[name])
            # {drug} is the first, {drug.2} the second, whichever is filled first
            random.Random(f"{self.key}/{name}").shuffle(entries)
            entry = entries[(int(index.removeprefix(".") or 1) - 1) % len(entries)]
            rng = random.Random(f"{self.key}/{name}{index}")
            raw = re.sub("#", lambda _: str(rng.randint(1, 9)), resolve(entry, rng))
            # Slots inside a value belong to it: {person.2} has a name of its own. Verbs and
            # pronouns stay open for the user of the value.
            self._values[name + index] = _SLOT.sub(
                lambda match: self._value(match[1], match[2] or index), raw
            )
        return self._values[name + index]


def inflect(verb: str, form: str) -> str:
    if form == "base":
        return verb
    if form == "s":
        return _third_person(verb)
    if verb in IRREGULAR:
        ing, past = IRREGULAR[verb]
        return {"ing": ing, "past": past}[form]
    if form == "ing":
        return verb.removesuffix("e") + "ing"
    if _ends_in_consonant_y(verb):
        return verb[:-1] + "ied"
    return verb.removesuffix("e") + "ed"


def _third_person(verb: str) -> str:
    if verb in ("have", "be"):
        return {"have": "has", "be": "is"}[verb]
    if _ends_in_consonant_y(verb):
        return verb[:-1] + "ies"
    if verb.endswith(("s", "x", "sh", "ch", "o")):
        return verb + "es"
    return verb + "s"


def _ends_in_consonant_y(verb: str) -> bool:
    return verb.endswith("y") and verb[-2] not in "aeiou"


def tidy(text: str) -> str:
    """One utterance with single spaces, sentence capitals, "I", a/an and a final stop."""
    text = " ".join(text.split())
    text = re.sub(r" ([,.;:?!])", r"\1", text)
    text = re.sub(r"([,;:])(?=[,.;:?!])", "", text)
    text = re.sub(r"([.?!])(\"?)[.,;]+", r"\1\2", text)
    text = re.sub(
        r"\b([Aa]) (?=[aiAI]|[eE](?!u)|[oO](?!ne\b|ne-)|u(?!ni[^nm]|s[eu]|k))", r"\1n ", text
    )
    text = re.sub(r"\b(some|the|your|my) an? ", r"\1 ", text)
    text = re.sub(r"\bi(?=\b(?!\.e))", "I", text)
    text = re.sub(r"(^|[.?!]['\"]? )(['\"]?)([a-z])", lambda m: m[1] + m[2] + m[3].upper(), text)
    if not text or text[-1] in ".?!:":
        return text
    return text.rstrip(",; ") + "."
