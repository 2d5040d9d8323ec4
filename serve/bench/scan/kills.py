"""A scan that is killed at random moments and continued, against one that was left alone.

Each scan is the command that `make scan` runs, in a process of its own. Knows nothing of engines.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from guard.errors import GuardError
from serve.bench.scan.comparison import difference, output_of, parts_of
from serve.bench.scan.report import KilledRow
from serve.bench.scan.stored import METHOD

MOST_PARTS = 2  # parts that a scan writes before the moment in which it is killed again
POLL_S = 0.02


def measure_kills(
    files: Sequence[Path], runs: Path, model: str, rows_a_part: int, kills: int
) -> KilledRow:
    """Scan twice, and kill one scan `kills` times.

    Raises GuardError if a scan fails, or ends before all kills.
    """
    whole, killed = runs / "whole", runs / "killed"
    command = [sys.executable, "-m", "serve.scan.run", "--files", " ".join(map(str, files))]
    command += ["--runs", str(runs), "--model", model, "--method", METHOD]
    command += ["--rows-a-part", str(rows_a_part)]
    began = time.monotonic()
    scan = _start(command, whole)
    while not parts_of(whole) and scan.poll() is None:
        time.sleep(POLL_S)
    loading_s = time.monotonic() - began
    _finish(scan)
    whole_s = time.monotonic() - began
    before_judging = _kill(
        command, killed, kills, loading_s, (whole_s - loading_s) / len(parts_of(whole))
    )
    _finish(_start(command, killed))
    output = output_of(whole)
    differences = difference(output, output_of(killed))
    return KilledRow(
        conversations=output.conversations,
        rows_a_part=rows_a_part,
        kills=kills,
        kills_before_judging=before_judging,
        whole_s=whole_s,
        rows=len(output.rows),
        files=len(output.parts),
        **asdict(differences),
    )


def _kill(command: Sequence[str], out: Path, kills: int, loading_s: float, part_s: float) -> int:
    """Start and kill a scan `kills` times. Returns how many kills came before a new part was
    written.

    A kill comes while the scan loads, or at a random moment after it has written a few more parts.
    """
    draw = random.Random(0)
    before_judging = 0
    for number in range(kills):
        parts_before = len(parts_of(out))
        scan = _start(command, out)
        moment_s = draw.uniform(0, 2 * part_s)
        more_parts = draw.randint(0, MOST_PARTS)
        if more_parts == 0:
            moment_s = draw.uniform(0, loading_s)
        while len(parts_of(out)) < parts_before + more_parts and scan.poll() is None:
            time.sleep(POLL_S)
        time.sleep(moment_s)
        if scan.poll() is not None:
            problem = "the scan ended before it was killed"
            remedy = "Scan more conversations"
            raise GuardError(problem, got=f"{number} of {kills} kills", remedy=remedy)
        scan.kill()
        scan.wait()
        before_judging += len(parts_of(out)) == parts_before
        print(f"kill {number + 1}: {len(parts_of(out))} parts", flush=True)
    return before_judging


def _start(command: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen([*command, "--out", str(out)], stdout=quiet, stderr=quiet)


def _finish(scan: subprocess.Popen[bytes]) -> None:
    if scan.wait():
        raise GuardError("the scan failed", got=scan.returncode, remedy="Run `make scan` to see")
