"""Reviews from the command line: `make reviews`, and the rows of `make data DATA=…+reviews`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from guard.errors import GuardError, exits_cleanly
from guard.files.atomic import atomic_write
from guard.layout import Runs
from guard.rule import load_rule
from serve.registry.reviews import ReviewStore, SettledLabel, cipher


def listing(store: ReviewStore) -> str:
    """How far the reviews of each rule are."""
    lines = [f"{'rule':<24}  to label  violation  allow  disputed"]
    for rule, waiting, violations, allows, disputed in store.progress():
        lines.append(f"{rule:<24}  {waiting:8,}  {violations:9,}  {allows:5,}  {disputed:8,}")
    return "\n".join(lines)


def export(store: ReviewStore, rule: str, file: Path) -> str:
    """Write the rule's settled labels as rows for `make data`; a line about them. Of equal
    conversations one is written, and none where their labels differ.
    """
    cipher()
    settled = store.settled(rule)
    said: defaultdict[Any, set[str]] = defaultdict(set)  # by the conversations
    for label in settled:
        said[label.messages].add(label.label)
    unreadable = sum(label.messages is None for label in settled)
    if unreadable and unreadable == len(settled):
        remedy = "Set CENTURION_REVIEW_KEY to the key that `make up` was started with"
        problem = "another key encrypted all labelled checks"
        raise GuardError(problem, where=store.file, remedy=remedy)
    lines: dict[Any, str] = {}
    for label in settled:
        if label.messages is not None and len(said[label.messages]) == 1:
            lines.setdefault(label.messages, _as_line(label))
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as part:
        part.touch(mode=0o600)
        part.write_text("".join(lines.values()), encoding="utf-8")
    contradictory = len(said) - len(lines) - bool(unreadable)
    left_out = f"{contradictory} contradictory, {unreadable} of another key"
    return f"{rule}: {len(lines)} reviewed rows, left out: {left_out} -> {file}"


def _as_line(label: SettledLabel) -> str:
    turns = [dataclasses.asdict(message) for message in label.messages or ()]
    names = {"id": f"review-{label.id}", "group": f"review-{label.conversation}"}
    violates = int(label.label == "violation")
    return json.dumps({**names, "label": violates, "messages": turns}) + "\n"


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m serve.reviews", description="Reviewed checks.")
    runs = "the folder of weights and results (default: %(default)s)"
    parser.add_argument("--runs", type=Path, default=Runs().root, help=runs)
    parser.add_argument("--export", metavar="RULE", help="write its settled labels for make data")
    arguments = parser.parse_args()
    store = ReviewStore(Runs(arguments.runs))
    if not store.file.exists():
        remedy = "`make up REVIEWS=policy.yaml` keeps checks for review"
        raise GuardError("nothing was kept for review", where=store.file, remedy=remedy)
    if arguments.export:
        load_rule(arguments.export)
        file = Runs(arguments.runs).reviews(arguments.export)
        print(export(store, arguments.export, file))
    else:
        print(listing(store))


if __name__ == "__main__":
    main()
