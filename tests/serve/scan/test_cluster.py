"""Actors write what one engine writes, byte for byte, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.serve.guarded import CONVERSATION, save_adapter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
ROWS, ROWS_A_PART = 48, 8
PARTS = ROWS // ROWS_A_PART


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scans")
    for seed, rule in enumerate(("mild", "stern"), start=1):
        save_adapter(folder / "runs" / "tiny" / rule / "alora", rule, seed=seed)
    opening = [{"role": turn.role, "content": turn.content} for turn in CONVERSATION]
    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        text = f"number {number} of them " * (1 + number % 9)
        rows.append({"messages": [*opening[: number % 3], {"role": "user", "content": text}]})
    rows[5] = {"id": "c5"}
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def command(scratch: Path, out: Path, *more: str, files: str = "a.jsonl") -> list[str]:
    settings = ["--files", str(scratch / files), "--runs", str(scratch / "runs")]
    settings += ["--out", str(out), "--rows-a-part", str(ROWS_A_PART)]
    return [sys.executable, "-m", "serve.scan.run", *settings, *more]


def output(command: list[str], threads: int = 1) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(scratch: Path) -> dict[str, bytes]:
    """What a scan in one process writes."""
    table = output(command(scratch, scratch / "whole"))
    assert f"{ROWS} conversations, 2 rules" in table
    return content(scratch / "whole")


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + 240
    while not (value := condition()):
        assert process.poll() is None, "it ended early"
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)
    return value


def descendants(pid: int) -> dict[int, str]:
    """The processes under this one, by what they call themselves."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
    found: dict[int, str] = {}
    for child in parents:
        above = child
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and child != pid:
            try:
                found[child] = (Path("/proc") / str(child) / "cmdline").read_text()
            except OSError:
                continue
    return found


def actors(pid: int) -> list[int]:
    return [child for child, name in descendants(pid).items() if "ray::MapWorker" in name]


def test_two_actors_write_what_one_engine_writes(scratch: Path, whole: dict[str, bytes]) -> None:
    table = output(command(scratch, scratch / "two", "--cluster", "--actors", "2"))
    assert f"{ROWS} conversations, 2 rules" in table
    assert content(scratch / "two") == whole
    again = output(command(scratch, scratch / "two", "--cluster"))
    assert again.startswith("nothing changed")


def test_a_killed_actor_is_replaced_and_a_killed_scan_goes_on(
    scratch: Path, whole: dict[str, bytes]
) -> None:
    out = scratch / "killed"
    arguments = command(scratch, out, "--cluster", "--actors", "1")
    scan = subprocess.Popen(arguments, env=os.environ | {"OMP_NUM_THREADS": "1"})
    wait_for((out / "part-000000.jsonl").exists, scan)
    first = wait_for(lambda: actors(scan.pid), scan)[0]
    os.kill(first, signal.SIGKILL)
    kept = len(list(out.glob("part-*")))
    wait_for(lambda: len(list(out.glob("part-*"))) > kept, scan)
    assert first not in actors(scan.pid)
    under = descendants(scan.pid)
    scan.send_signal(signal.SIGKILL)
    scan.wait()
    times = {path: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert 0 < len(times) <= PARTS
    output(arguments)
    assert content(out) == whole
    assert {path: path.stat().st_mtime_ns for path in times} == times  # none is written again
    deadline = time.monotonic() + 60
    while any((Path("/proc") / str(pid)).exists() for pid in under):
        assert time.monotonic() < deadline, "a killed scan leaves processes"
        time.sleep(0.1)


def test_what_an_actor_or_the_reader_refuses_is_one_line(scratch: Path) -> None:
    (scratch / "broken.jsonl.gz").write_bytes(b"not gzip")
    broken = command(scratch, scratch / "broken", "--cluster", files="broken.jsonl.gz")
    done = subprocess.run(broken, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "broken.jsonl.gz: not readable" in done.stderr
