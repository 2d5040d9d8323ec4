"""Public labelled data as conversations whose turns hold topics. Knows nothing of policies.

Each function reads one repository as it is checked out. What a topic is called in a policy stands
in `words.yaml`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from data.real import read

SMALL_TALK = "small talk"
# Intents of clinc/oos-eval that ask for nothing.
NO_REQUEST = {"yes", "no", "maybe", "repeat", "goodbye", "greeting", "thank_you", "cancel"}
LONGEST_MESSAGE = 1200  # characters


@dataclass(frozen=True)
class LabelledTurn:
    """One message, and the topics that its source's labels say are in it."""

    role: str
    text: str
    topics: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Labelled:
    """A conversation, and all topics that somebody looked for in it."""

    turns: tuple[LabelledTurn, ...]
    looked_for: frozenset[str]
    group: str


@dataclass(frozen=True)
class Family:
    """Topics of one kind, which a user's messages hold. `does`: verbs before a topic's phrase.
    `is_complete`: whatever is said has one of the topics, so that a policy may allow only some.
    """

    name: str
    does: Sequence[Sequence[str]]
    phrases: Mapping[str, Sequence[str]]
    is_complete: bool = False
    domains: Mapping[str, Sequence[str]] = field(default_factory=dict)


Fields = Mapping[str, Any]
Source = tuple[Family, list[Labelled]]


@dataclass(frozen=True)
class MessageFile:
    """Files, OWNER/NAME:PATTERN, with a message a row. `text` is its field; without `noise`."""

    files: str
    text: str
    group: Callable[[Fields], str]
    noise: re.Pattern[str] = re.compile("(?!)")


HATECHECK = MessageFile(
    "paul-rottger/hatecheck-data:test_suite_cases.csv",
    "test_case",
    lambda row: f"hatecheck/{row['templ_id']}",
)
EDOS = MessageFile(
    "rewire-online/edos:data/edos_labelled_aggregated.csv", "text", itemgetter("rewire_id")
)
TWEETS = MessageFile(
    "t-davidson/hate-speech-and-offensive-language:data/labeled_data.csv",
    "tweet",
    lambda row: f"tweet/{row['']}",
    re.compile(r"https?://\S+|&#?\w+;|@\w+:?|\bRT\b|!!+"),
)
EMOJI = MessageFile(
    "HannahKirk/Hatemoji:HatemojiBuild/train.csv",
    "text",
    lambda row: f"emoji/{row.get('matched_id') or row['entry_id']}",
)
PERSONAL = MessageFile(
    "microsoft/presidio-research:data/synth_dataset_v2.json",
    "full_text",
    lambda row: f"personal/{row['template_id']}",
)


@cache
def words() -> dict[str, Any]:
    """What `words.yaml` holds."""
    text = Path(__file__).with_name("words.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def clinc(clones: Path, rng: random.Random) -> Source:
    source = "clinc/oos-eval"
    ((_, data),) = read(clones, f"{source}:data/data_full.json")
    ((_, domains),) = read(clones, f"{source}:data/domains.json")
    utterances: dict[str, list[str]] = {}
    for text, name in data["train"]:
        utterances.setdefault(name, []).append(text)
    return _intents("clinc", utterances, domains, source, rng)


def banking(clones: Path, rng: random.Random) -> Source:
    source = "PolyAI-LDN/task-specific-datasets"
    utterances: dict[str, list[str]] = {}
    for _, row in read(clones, f"{source}:banking_data/train.csv"):
        utterances.setdefault(row["category"], []).append(row["text"])
    return _intents("banking", utterances, {}, source, rng)


def hatecheck_targets(clones: Path, rng: random.Random) -> Source:
    def topics(row: Fields) -> set[str]:
        return {row["target_ident"]} if row["label_gold"] == "hateful" else set()

    return _messages("hatecheck_targets", HATECHECK, clones, rng, topics)


def hatecheck_tones(clones: Path, rng: random.Random) -> Source:
    def topics(row: Fields) -> set[str]:
        said = {"hate"} if row["label_gold"] == "hateful" else set()
        for name, start in (("profanity", "profanity"), ("threat", "threat"), ("slur", "slur_h")):
            if row["functionality"].startswith(start):
                said.add(name)
        return said

    return _messages("hatecheck_tones", HATECHECK, clones, rng, topics)


def edos(clones: Path, rng: random.Random) -> Source:
    def topics(row: Fields) -> set[str] | None:
        if row["label_sexist"] == "sexist":
            return {"sexist", row["label_category"][0]}
        return None if rng.random() < 0.7 else set()  # most rows have none

    return _messages("edos", EDOS, clones, rng, topics)


def tweets(clones: Path, rng: random.Random) -> Source:
    topics_of = {"0": {"hate", "offensive"}, "1": {"offensive"}, "2": set[str]()}

    def topics(row: Fields) -> set[str] | None:
        return None if row["class"] == "1" and rng.random() < 0.8 else topics_of[row["class"]]

    return _messages("tweets", TWEETS, clones, rng, topics)


def emoji(clones: Path, rng: random.Random) -> Source:
    def topics(row: Fields) -> set[str]:
        return {"hateful", row["type"]} if row["label_gold"] == "1" else set()

    return _messages("emoji", EMOJI, clones, rng, topics)


def harms(clones: Path, rng: random.Random) -> Source:
    family = _family("harms")
    rows: list[Labelled] = []
    files = "openai/moderation-api-release:data/samples-1680.jsonl.gz"
    for number, (_, row) in enumerate(read(clones, files)):
        looked_for = frozenset(name for name in family.phrases if name in row)
        topics = frozenset(name for name in looked_for if row[name])
        turn = LabelledTurn("user", row["prompt"][:LONGEST_MESSAGE], topics)
        rows.append(Labelled((turn,), looked_for, f"harms/{number}"))
    return family, rows


def personal(clones: Path, rng: random.Random) -> Source:
    phrases = _family("personal").phrases

    def topics(row: Fields) -> set[str]:
        return {span["entity_type"] for span in row["spans"]} & phrases.keys()

    return _messages("personal", PERSONAL, clones, rng, topics)


def _messages(
    key: str,
    kept: MessageFile,
    clones: Path,
    rng: random.Random,
    topics: Callable[[Fields], set[str] | None],
) -> Source:
    """A user's message for each row, at times behind an assistant's opening or before its answer;
    none for a row without topics.
    """
    family = _family(key)
    rows: list[Labelled] = []
    for _, row in read(clones, kept.files):
        said = topics(row)
        if said is None:
            continue
        text = kept.noise.sub("", row[kept.text])
        turns = [LabelledTurn("user", text, frozenset(said))]
        if rng.random() < 0.3:
            turns.insert(0, LabelledTurn("assistant", rng.choice(words()["openings"])))
        if rng.random() < 0.2:
            turns.append(LabelledTurn("assistant", rng.choice(words()["acknowledged"])))
        rows.append(Labelled(tuple(turns), frozenset(family.phrases), kept.group(row)))
    return family, rows


def _family(key: str) -> Family:
    stated = words()["families"][key]
    return Family(stated["name"], stated["does"], stated["topics"])


def _intents(
    key: str,
    utterances: Mapping[str, Sequence[str]],
    domains: Mapping[str, Sequence[str]],
    source: str,
    rng: random.Random,
) -> Source:
    """Conversations of one to three of a user's utterances, those of a domain together."""
    stated = words()["families"][key]
    phrases: dict[str, list[str]] = {}
    for name in utterances:
        if name not in NO_REQUEST:
            phrases[name] = [" ".join(re.sub(r"[_?]+", " ", name).split()).lower()]
    family = Family(stated["name"], stated["does"], phrases, True, domains)
    domain_of = {name: domain for domain, names in domains.items() for name in names}
    small_talk = [
        text for name in sorted(NO_REQUEST & utterances.keys()) for text in utterances[name]
    ]
    rows: list[Labelled] = []
    for name in phrases:
        near = [topic for topic in phrases if domain_of.get(topic) == domain_of.get(name)]
        for number, text in enumerate(utterances[name]):
            turns = [LabelledTurn("user", text, frozenset({name}))]
            while rng.random() < 0.35 and len(turns) < 3:
                before = rng.choice(near)
                turns.insert(
                    0, LabelledTurn("user", rng.choice(utterances[before]), frozenset({before}))
                )
            if small_talk and rng.random() < 0.1:
                turns.append(LabelledTurn("user", rng.choice(small_talk), frozenset({SMALL_TALK})))
            if rng.random() < 0.4:
                turns = _answered(turns, rng)
            rows.append(Labelled(tuple(turns), frozenset(phrases), f"{source}/{name}/{number}"))
    return family, rows


def _answered(turns: Sequence[LabelledTurn], rng: random.Random) -> list[LabelledTurn]:
    answered: list[LabelledTurn] = []
    for turn in turns:
        answered += [turn, LabelledTurn("assistant", rng.choice(words()["acknowledged"]))]
    return answered[: len(answered) - rng.randrange(2)]
