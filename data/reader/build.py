"""What the reader is trained and tested on: `make reader FROM=CLONES`.

Out: `runs/reader/data/{train,validation,test}.jsonl`, a unit a line. What a policy of validation or
of the test is about is in no policy of training, and their conversations are none of training's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from data.reader import questions, topics
from data.reader.policies import Composer, Unit
from data.reader.questions import LabelledQuestion
from guard.conversation.example import SPLITS
from guard.errors import exits_cleanly
from guard.files.atomic import atomic_write
from guard.layout import Runs
from guard.rule import load_rule, rule_names

# Units of training, by the function that reads their source; of other splits a share of these.
FAMILIES = {
    topics.clinc: 2600,
    topics.banking: 1200,
    topics.hatecheck_targets: 500,
    topics.hatecheck_tones: 400,
    topics.edos: 400,
    topics.tweets: 400,
    topics.emoji: 250,
    topics.harms: 500,
    topics.personal: 1000,
}
SHARES = {"train": 1.0, "validation": 0.12, "test": 0.2}
QUESTIONS = {
    questions.grounded: 900,
    questions.refusals: 500,
    questions.orders_in_documents: 1000,
    questions.agents: 120,
}
GENERATED = 800  # of a rule
HELD_OUT = {
    "legal_advice": "validation",
    "refund_promise": "test",
    "competitor_recommendation": "test",
}
# Rules of which a conversation may break two, or whose labels say nothing about another's rows.
ALIKE = (
    {"medical_advice", "self_harm_risk"},
    {"pii_disclosure", "pii_leak"},
    {"jailbreak_attempt", "prompt_injection", "unsafe_plan", "unconfirmed_action"},
    {"legal_advice", "financial_advice"},
)
NEVER_ANOTHERS = {"off_topic", "groundedness", "repetition"}
T = TypeVar("T")
Split = str


def units(clones: Path, runs: Runs, seed: int) -> Iterator[tuple[Split, str, Unit]]:
    """Each unit behind its split and its source."""
    for read, count in tqdm(FAMILIES.items(), desc="topics", leave=False):
        rng = random.Random(f"{seed}/{read.__name__}")
        family, rows = read(clones, rng)
        composer = Composer(family, rng)
        for split, share in SHARES.items():
            of_split = [row for row in rows if split_of(row.group) == split]
            for _ in range(int(count * share)):
                unit = composer.unit(of_split, split)
                if unit is not None:
                    yield split, read.__name__, unit
    for ask, count in QUESTIONS.items():
        rng = random.Random(f"{seed}/{ask.__name__}")
        pairs = list(ask(clones, rng).units(rng))
        for group, unit in _sample(pairs, count, rng):
            yield split_of(group), ask.__name__, unit
    yield from _generated(runs, seed)


def _generated(runs: Runs, seed: int) -> Iterator[tuple[Split, str, Unit]]:
    rng = random.Random(f"{seed}/generated")
    rules = {name: load_rule(name) for name in rule_names("all")}
    asked: dict[str, LabelledQuestion] = {}
    for name, rule in rules.items():
        asked[name] = questions.generated(rule, runs.data(name), GENERATED, rng)
    for name, question in asked.items():
        split = HELD_OUT.get(name, "train")
        for _, unit in question.units(rng):
            kind = rng.random()
            if kind < 0.3:
                unit = questions.of_last_turn(unit, rules[name].judged, rng)
            elif kind < 0.65:
                policies = (*unit.policies, _of_another(name, asked, rng))
                unit = replace(unit, policies=policies, labels=((1, 0), (0, 0)))
            yield split, "generated", unit


def _of_another(name: str, asked: Mapping[str, LabelledQuestion], rng: random.Random) -> str:
    """A rule about something else, which conversations of this one keep."""
    alike = [group for group in ALIKE if name in group]
    excluded = {name}.union(NEVER_ANOTHERS, HELD_OUT, *alike)
    others = [other for other in asked if other not in excluded]
    return rng.choice(asked[rng.choice(others)].forbids)


def split_of(group: str) -> Split:
    """The split of a conversation, by a hash of its group."""
    digest = hashlib.sha256(group.encode()).digest()[0]
    if digest < 20:
        return "validation"
    return "test" if digest < 50 else "train"


def _sample(items: Sequence[T], count: int, rng: random.Random) -> list[T]:
    return rng.sample(list(items), min(len(items), count))


def _line(source: str, unit: Unit) -> dict[str, Any]:
    conversations: list[list[dict[str, str]]] = []
    for turns in unit.conversations:
        conversations.append([{"role": turn.role, "content": turn.text} for turn in turns])
    return {
        "source": source,
        "conversations": conversations,
        "policies": unit.policies,
        "labels": unit.labels,
    }


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    help_text = "the folder of the sources, each cloned as OWNER+NAME"
    parser.add_argument("clones", type=Path, help=help_text)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    runs = Runs()
    all_units = list(units(arguments.clones, runs, arguments.seed))
    random.Random(arguments.seed).shuffle(all_units)
    counts: Counter[tuple[str, str]] = Counter()
    folder = runs.reader / "data"
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        file = folder / f"{split}.jsonl"
        with atomic_write(file) as part, part.open("w", encoding="utf-8") as lines:
            for of_split, source, unit in all_units:
                if of_split == split:
                    lines.write(json.dumps(_line(source, unit), ensure_ascii=False) + "\n")
                    counts[source, split] += 1
    for (source, name), count in sorted(counts.items()):
        print(f"{source:20} {name:10} {count:5}")
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
