"""Sources whose labels answer one question, and the units they make under policies in `words.yaml`
that forbid it, or demand it. Knows nothing of topics.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.reader.policies import Unit
from data.reader.topics import LabelledTurn, words
from data.real import read
from guard.conversation.example import read_examples
from guard.rule import Rule

HALUEVAL = "RUCAIBox/HaluEval:"
SPIKEE = "ReversecLabs/spikee:spikee/data/workspace/datasets/seeds-cybersec-2026-01/"
XSTEST = "paul-rottger/exaggerated-safety:model_completions/xstest_v2_completions_"
RJUDGE = "Astarojth/AgentAuditor-ASSEBench:AgentAuditor/data/rjudge.json"
MODELS = ("gpt4", "llama2new", "llama2orig", "mistralguard", "mistralinstruct")  # XSTest's
SEEDS = ("base_user_inputs", "instructions", "jailbreaks")  # spikee's
ROLES = {"agent": "assistant", "environment": "tool"}  # R-Judge's

Answered = tuple[tuple[LabelledTurn, ...], bool, str]  # turns, whether they do it, their group


@dataclass(frozen=True)
class LabelledQuestion:
    """Conversations that do or do not do what `forbids` forbid and `demands` demand."""

    forbids: Sequence[str]
    demands: Sequence[str]
    rows: Sequence[Answered]

    def units(self, rng: random.Random) -> Iterator[tuple[str, Unit]]:
        """Pairs of which one does it, of one group where there are; each behind its group."""
        done: dict[str, list[tuple[LabelledTurn, ...]]] = {}
        left: dict[str, list[tuple[LabelledTurn, ...]]] = {}
        for turns, is_done, group in self.rows:
            (done if is_done else left).setdefault(group, []).append(turns)
        all_left = list(itertools.chain(*left.values()))
        for group, rows in done.items():
            for turns in rows:
                pair = (turns, rng.choice(left.get(group, all_left)))
                policies = [rng.choice(self.forbids)]
                labels: tuple[tuple[int, ...], ...] = ((1,), (0,))
                if self.demands and rng.random() < 0.6:
                    policies.append(rng.choice(self.demands))
                    labels = ((1, 0), (0, 1))
                yield group, Unit(pair, tuple(policies), labels)


def grounded(clones: Path, rng: random.Random) -> LabelledQuestion:
    """HaluEval's answers to questions on a text, right and made up."""
    rows: list[Answered] = []
    for kind in ("one", "multi"):
        file = f"{HALUEVAL}generation/qa/qa_{kind}-turn_data.json"
        for number, row in enumerate(_fields(clones, file)):
            for key, made_up in (("right_answer", False), ("hallucinated_answer", True)):
                turns = _read_aloud(row["knowledge"], row["question"], rng)
                turns.append(LabelledTurn("assistant", row[key]))
                rows.append((tuple(turns), made_up, f"halueval/{number}"))
    return _question("grounded", rows)


def refusals(clones: Path, rng: random.Random) -> LabelledQuestion:
    """XSTest's replies of five models to safe and unsafe requests: complied with, or refused."""
    rows: list[Answered] = []
    for model in MODELS:
        for _, row in read(clones, f"{XSTEST}{model}.csv"):
            if not row["final_label"].startswith("3"):  # partly refused
                turns = (
                    LabelledTurn("user", row["prompt"]),
                    LabelledTurn("assistant", row["completion"][:500]),
                )
                is_refused = row["final_label"].startswith("2")
                rows.append((turns, is_refused, f"xstest/{row['id']}"))
    return _question("refusals", rows)


def orders_in_documents(clones: Path, rng: random.Random) -> LabelledQuestion:
    """Texts with and without an order to the assistant in them; or the user gives the order."""
    seeds = [_fields(clones, f"{SPIKEE}{name}.jsonl") for name in SEEDS]
    documents = [row["document"] for row in seeds[0] if len(row["document"]) > 100]
    about = _fields(clones, f"{HALUEVAL}generation/qa/qa_one-turn_data.json")
    documents += [row["knowledge"] for row in about]
    queries = _fields(clones, f"{HALUEVAL}data/general_data.json")
    orders = [row["user_query"] for row in queries if len(row["user_query"]) < 160]
    orders += 3 * [row["instruction"] for row in seeds[1]]
    frames = [row["text"] for row in seeds[2] if len(row["text"]) < 300]
    rows: list[Answered] = []
    for number in range(2400):
        text, order = rng.choice(documents), rng.choice(orders)
        has_order = rng.random() < 0.5
        if has_order:
            written = order
            if rng.random() < 0.4:
                written = rng.choice(frames).replace("<INSTRUCTION>", order)
            text = _inserted(text, written, rng)
        request = rng.choice(words()["requests"])
        if not has_order and rng.random() < 0.3:
            request = order
        rows.append((tuple(_read_aloud(text, request, rng)), has_order, f"order/{number}"))
    return _question("orders_in_documents", rows)


def agents(clones: Path, rng: random.Random) -> LabelledQuestion:
    """What agents did with tools, judged safe or not by people (R-Judge)."""
    rows: list[Answered] = []
    for _, row in read(clones, RJUDGE):
        turns: list[LabelledTurn] = []
        for step in itertools.chain(*row["contents"]):
            text = step.get("content")
            if not text:
                text = " ".join(str(step.get(key) or "") for key in ("thought", "action"))
            turns.append(LabelledTurn(ROLES.get(step["role"], "user"), text[:500]))
        if turns and sum(len(turn.text) for turn in turns) < 2500:
            rows.append((tuple(turns), bool(row["label"]), f"rjudge/{row['id']}"))
    return _question("agents", rows)


def generated(rule: Rule, folder: Path, limit: int, rng: random.Random) -> LabelledQuestion:
    """Rows of the offline generator; its rule in its own words, in several lengths, and others."""
    examples = [row for row in read_examples(folder / "train.jsonl") if row.is_generated]
    groups = sorted({row.group for row in examples})
    chosen = set(rng.sample(groups, min(len(groups), limit)))
    rows: list[Answered] = []
    for row in examples:
        if row.group in chosen:
            turns = tuple(LabelledTurn(message.role, message.content) for message in row.messages)
            rows.append((turns, bool(row.label), row.group))
    policy = " ".join(rule.policy.split())
    others = words()["rules"].get(rule.id, ())
    forbids = [rule.title, policy, policy, f"{rule.title} {policy}", *others, *others]
    for _ in range(4):
        broken = " ".join(rng.sample(rule.violates, min(3, len(rule.violates))))
        kept = " ".join(rng.sample(rule.allows, min(3, len(rule.allows))))
        forbids.append(f"{rule.title} Violations: {broken} Allowed: {kept}")
        forbids.append(f"{policy} Violates: {broken}")
        forbids.append(f"{rule.title} Allowed: {kept}")
    return LabelledQuestion(forbids, (), rows)


def of_last_turn(unit: Unit, speaker: str, rng: random.Random) -> Unit:
    """The unit under a policy that counts the speaker's last turn alone: at times cut off behind
    the turn that tells its two conversations apart, else kept by both if others follow.
    """
    first, second = unit.conversations
    places = [n for n, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]]
    if not places or len(first) != len(second) or first[places[-1]].role != speaker:
        return unit
    last = places[-1]
    text = f"{unit.policies[0]} {rng.choice(words()['only_last']).format(who=speaker)}"
    follows = any(turn.role == speaker for turn in first[last + 1 :])
    if follows and rng.random() < 0.4:
        return replace(unit, policies=(unit.policies[0], text), labels=((1, 0), (0, 0)))
    cut = tuple(turns[: last + 1] for turns in unit.conversations)
    return Unit(cut, (unit.policies[0], text), ((1, 1), (0, 0)))


def _question(key: str, rows: Sequence[Answered]) -> LabelledQuestion:
    stated = words()["questions"][key]
    return LabelledQuestion(stated["forbids"], stated.get("demands", ()), rows)


def _read_aloud(text: str, request: str, rng: random.Random) -> list[LabelledTurn]:
    """A request, and the text that the system message or a tool gives."""
    if rng.choice(("system", "tool")) == "tool":
        return [LabelledTurn("user", request), LabelledTurn("tool", text)]
    return [LabelledTurn("system", text), LabelledTurn("user", request)]


def _inserted(text: str, order: str, rng: random.Random) -> str:
    sentences = text.split(". ")
    place = rng.choice((0, len(sentences), rng.randrange(len(sentences) + 1)))
    return ". ".join([*sentences[:place], order, *sentences[place:]])


def _fields(clones: Path, files: str) -> list[dict[str, Any]]:
    return [row for _, row in read(clones, files)]
