"""What a step of training aLoRAs on cached prefixes makes a GPU launch, counted without one.

It is `make bench NAME=train_launches`. A base with the layers and heads of Qwen3-4B in tiny widths
takes real steps on the CPU: forward, backward and optimizer. Every operator that would launch a
kernel is counted: no views, no allocations. Before: attention reads each prefix in place, as on a
CPU; after: prefixes of like length share a product, as on a GPU. Exact, the same on every machine,
and no time: what a launch costs, only a GPU can tell.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from guard.files.atomic import atomic_write
from guard.machine.provenance import provenance
from train.bench.workload import RANDOM_BASES, Base, job_of, pool
from train.examples import Rows

if TYPE_CHECKING:
    from train.prefix.fleet import Fleet

BASE: Base = "narrow-4B"
ADAPTERS = 10
CONVERSATIONS = (10, 40, 160)  # in a step, each read by one adapter
HOST_BYTES = 2**36  # of cached prefixes: all of them
HEAD_DIM = 128  # of Qwen3-4B


@dataclass(frozen=True)
class LaunchCell:
    """Launches of a step of `adapters` adapters, by operator: prefixes read in place, and padded.

    `tokens`: of all prefixes.
    """

    conversations: int
    adapters: int
    tokens: int
    in_place: dict[str, int]
    padded: dict[str, int]


def count(base: Base, conversations: int, adapters: int) -> LaunchCell:
    """Count a step either way, after a first that makes the optimizers' states.

    Each adapter reads its own share of the conversations, all of them in every step.
    """
    with tempfile.TemporaryDirectory() as folder:
        fleet = _fleet(base, conversations, adapters, Path(folder))
        fleet.begin()
        list(fleet.step())
        tokens = 0
        for member in fleet.members:
            tokens += sum(row.prompt.invocation_start for row in member.rows)
        return LaunchCell(
            conversations=conversations,
            adapters=adapters,
            tokens=tokens,
            in_place=_launches(fleet, in_place=True),
            padded=_launches(fleet, in_place=False),
        )


def _fleet(base: Base, conversations: int, adapters: int, folder: Path) -> Fleet:
    from train.adapter.load import load_base
    from train.adapter.settings import trainer_config
    from train.prefix.budget import Budget
    from train.prefix.fleet import Fleet
    from train.prefix.member import Member

    share = conversations // adapters
    settings = {"per_device_train_batch_size": share, "gradient_accumulation_steps": 1}
    jobs = [job_of(base, folder / str(index), max_steps=3, **settings) for index in range(adapters)]
    rows = pool(jobs[0].builder, conversations)
    members: list[Member] = []
    for index, job in enumerate(jobs):
        adapter_rows = rows[index * share : (index + 1) * share]
        members.append(Member(job, Rows(adapter_rows, (), ()), trainer_config(job)))
    model = load_base(jobs[0].recipe, members[0].config.device)
    return Fleet(model, members, Budget(host=HOST_BYTES))


def _launches(fleet: Fleet, *, in_place: bool) -> dict[str, int]:
    from train.bench.launch_count import LaunchCount

    fleet.in_place = in_place
    with LaunchCount() as counted:
        list(fleet.step())
    return dict(counted.launches.most_common())


def table(cells: Sequence[LaunchCell]) -> str:
    """Launches of a step as Markdown."""
    lines = [
        f"Launches of a step of {cells[0].adapters} adapters, Qwen3-4B's layers and heads.",
        "",
        "| conversations | tokens | in place | padded | share |",
        "|---|---|---|---|---|",
    ]
    for cell in cells:
        before, after = sum(cell.in_place.values()), sum(cell.padded.values())
        lines.append(
            f"| {cell.conversations} | {cell.tokens:,} | {before:,} | {after:,} "
            f"| {after / before:.1%} |"
        )
    return "\n".join(lines)


def arguments(_: argparse.ArgumentParser) -> None:
    """Add this benchmark's options: none, it is about one shape."""


def main(arguments: argparse.Namespace) -> None:
    """Count, write the report and print the table."""
    from train.prefix import prefixes

    # As many copies of keys and values as at full width.
    prefixes.COPIED_BYTES = prefixes.COPIED_BYTES * RANDOM_BASES[BASE]["head_dim"] // HEAD_DIM
    cells: list[LaunchCell] = []
    for conversations in tqdm(CONVERSATIONS, desc="train_launches", unit="step"):
        cells.append(count(BASE, conversations, ADAPTERS))
    report = {**provenance(), "cells": [asdict(cell) for cell in cells]}
    out: Path = arguments.runs / "train_launches_bench.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as part:
        part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{table(cells)}\n\nwritten to {out}")
