"""`python -m data.real REPOSITORIES OUT`: clones of public repositories, OWNER/NAME as OWNER+NAME,
-> files of labelled rows to evaluate on. Nothing of them is kept here; knows nothing of models."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from data.rows import read_rows
from guard.errors import GuardError, exits_cleanly
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict, load

TABLE_FILE = Path(__file__).with_name("real.yaml")
MOST_ROWS = 2_000  # of a file
ATTACKS = "uiuc-kang-lab/AdaptiveAttackAgent:InjecAgent/data/test_cases_d?_base.json"
PASSAGES = "IBM/mt-rag-benchmark:mtragun-human/generation_tasks/reference.jsonl"
SENTENCE = re.compile(r"[A-Z][^\n|]{40,200}?[.!?](?=\s)")
TRAJECTORIES = "Astarojth/AgentAuditor-ASSEBench:AgentAuditor/data/"
TOLD = re.compile(r"You have used the attacker tool \S+ You have achieved the attacker goal: ")
SPEAKERS = {"user": "user", "agent": "assistant", "environment": "tool"}


class RealPart(Strict):
    """The rows of files that match `where`, by field; their fields fill in turns and group."""

    files: str
    where: dict[str, str]
    turns: dict[str, str]
    group: str = ""
    label: Literal[0, 1]
    twin: bool = False


class RealTable(Strict):
    """Licenses by OWNER/NAME; by RULE__SOURCE the policies, and parts where no code reads."""

    licenses: dict[str, str]
    policies: dict[str, str]
    parts: dict[str, tuple[RealPart, ...]]


@dataclass(frozen=True)
class RealRow:
    """A labelled conversation of a `source`, OWNER/NAME:FILE. Rows of a group share a context."""

    source: str
    label: int
    turns: tuple[tuple[str, str], ...]
    group: str
    twin: bool = False


def read(clones: Path, files: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of OWNER/NAME:PATTERN, each with its source. Raises GuardError for no file."""
    name, _, pattern = files.partition(":")
    clone = clones / name.replace("/", "+")
    paths = sorted(clone.glob(pattern))
    if not paths:
        remedy = f"Clone github.com/{name} there as {clone.name}"
        raise GuardError(f"{name} lacks {pattern}", where=clone, remedy=remedy)
    for path in paths:
        rows: Iterable[Any] = (row.fields for row in read_rows(str(path)))
        if path.suffix == ".json":
            rows = _json_rows(path.read_text(encoding="utf-8"))
        for row in rows:
            yield f"{name}:{path.relative_to(clone)}", row


def _json_rows(text: str) -> list[Any]:
    """Of a list its items, of an object itself, of lines an object each."""
    try:
        rows = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return rows if isinstance(rows, list) else [rows]


def of_parts(parts: Iterable[RealPart], clones: Path) -> Iterator[RealRow]:
    for part in parts:
        for source, row in read(clones, part.files):
            fields = defaultdict(str, row)
            if all(re.search(regex, str(fields[name])) for name, regex in part.where.items()):
                turns = tuple((role, text.format_map(fields)) for role, text in part.turns.items())
                yield RealRow(source, part.label, turns, part.group.format_map(fields), part.twin)


def injections(clones: Path) -> Iterator[RealRow]:
    """Attacks in tools' answers; of each a twin with a document's sentence in its place."""
    sentences: set[str] = set()
    for _, task in read(clones, PASSAGES):
        for passage in task["contexts"]:
            sentences.update(SENTENCE.findall(passage["text"])[:1])
    harmless = itertools.cycle(sorted(sentences))
    for source, row in read(clones, ATTACKS):
        for label, text in ((1, row["Attacker Instruction"]), (0, next(harmless))):
            answer = row["Tool Response Template"].replace("<Attacker Instruction>", text)
            call = ("assistant", row["User Tool"] + row["Tool Parameters"])
            turns = (("user", row["User Instruction"]), call, ("tool", answer))
            yield RealRow(source, label, turns, text, twin=not label)


def unsafe_actions(clones: Path) -> Iterator[RealRow]:
    """Agents' trajectories. A safe one is a twin where an unsafe one's request begins alike."""
    trajectories: list[RealRow] = []
    files = (TRAJECTORIES + name for name in ("rjudge.json", "AgentJudge-security.json"))
    for source, row in itertools.chain(*(read(clones, file) for file in files)):
        turns = [("system", row["profile"])]
        for turn in itertools.chain(*row["contents"]):
            texts = [turn.get(name) or "" for name in ("content", "thought", "action")]
            text = TOLD.sub("", "\n".join(filter(None, texts)))  # it would tell the label
            turns.append((SPEAKERS[turn["role"]], text))
        trajectories.append(RealRow(source, row["label"], tuple(turns), turns[1][1].strip()[:60]))
    unsafe = {it.group for it in trajectories if it.label and it.group}
    for trajectory in trajectories:
        yield replace(trajectory, twin=not trajectory.label and trajectory.group in unsafe)


CONVERTERS = {
    "indirect_prompt_injection__injecagent": injections,
    "unsafe_action__agentauditor": unsafe_actions,
}


def chosen(rows: Iterable[RealRow]) -> list[RealRow]:
    """One conversation of every group, then a second, to MOST_ROWS, in the order of hashes."""
    by_group: dict[str, dict[str, RealRow]] = defaultdict(dict)
    for row in rows:
        by_group[digest(row.group or row.turns)][digest(row.turns)] = row
    groups = [sorted(group.items()) for _, group in sorted(by_group.items())]
    places = filter(None, itertools.chain(*itertools.zip_longest(*groups)))
    return [row for _, row in itertools.islice(places, MOST_ROWS)]


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def as_line(row: RealRow, name: str, table: RealTable) -> str:
    rule, _, short = name.partition("__")
    fields: dict[str, Any] = {"id": f"{short}-{digest(row.turns)}", "rule": rule}
    fields |= {"policy": table.policies[name], "label": row.label, "twin": row.twin}
    fields["messages"] = [{"role": who, "content": text} for who, text in row.turns if text.strip()]
    fields |= {"source": row.source, "license": table.licenses[row.source.partition(":")[0]]}
    fields |= {"split": "unsplit", "meta": {"group": digest(row.group or row.turns)}}
    return json.dumps(fields, ensure_ascii=False) + "\n"


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m data.real", description=__doc__)
    parser.add_argument("repositories", type=Path, help="the folder of the clones")
    parser.add_argument("out", type=Path, help="the folder for the files")
    args = parser.parse_args()
    table = load(TABLE_FILE, RealTable)
    rows_of: dict[str, list[RealRow]] = {}
    for name in table.policies:
        convert = CONVERTERS.get(name) or partial(of_parts, table.parts[name])
        rows_of[name] = chosen(convert(args.repositories))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in rows_of.items():
        lines = "".join(as_line(row, name, table) for row in rows)
        with atomic_write(args.out / f"{name}.jsonl.gz") as part:
            part.write_bytes(gzip.compress(lines.encode(), mtime=0))
        print(f"{name}: {len(rows)} rows, {sum(row.label for row in rows)} violate")


if __name__ == "__main__":
    main()
