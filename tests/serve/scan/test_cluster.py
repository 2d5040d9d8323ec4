"""Actors write what one engine writes, byte for byte, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import Runs
from serve.scan.parts import PartFolder, manifest_of
from serve.scan.run import main
from serve.scan.scan import scan
from serve.selection import Selection, open_engines, served_parts
from tests.serve.cluster.words_engine import WordsEngine, save_words
from tests.serve.guarded import CONVERSATION, save_adapter
from tests.serve.scan.words_scan import ROWS_A_PART, words_folder, write_words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
ENGINE_ROWS, ENGINE_ROWS_A_PART = 24, 8
WORDS_PARTS = 12


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_actors_write_what_one_engine_writes(
    tmp_path: Path,
    uncompiled: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for seed, rule in enumerate(("mild", "stern"), start=1):
        save_adapter(tmp_path / "runs" / "tiny" / rule / "alora", rule, seed=seed)
    opening = [{"role": turn.role, "content": turn.content} for turn in CONVERSATION]
    rows: list[dict[str, Any]] = []
    for number in range(ENGINE_ROWS):
        text = f"number {number} of them " * (1 + number % 9)
        rows.append({"messages": [*opening[: number % 3], {"role": "user", "content": text}]})
    rows[5] = {"id": "c5"}
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = served_parts(Selection(runs=Runs(tmp_path / "runs")))
    manifest = manifest_of(parts, [str(file)], ENGINE_ROWS_A_PART, "jsonl")
    with open_engines(parts) as engine:
        scan(engine, PartFolder(tmp_path / "engine", manifest))
    command = [sys.executable, "-m", "serve.scan.run", "--files", str(file), "--cluster"]
    command += ["--runs", str(tmp_path / "runs"), "--rows-a-part", str(ENGINE_ROWS_A_PART)]
    command += ["--out", str(tmp_path / "actors"), "--actors", "2"]
    assert f"{ENGINE_ROWS} conversations, 2 rules" in run(command)
    assert content(tmp_path / "actors") == content(tmp_path / "engine")
    monkeypatch.setattr("sys.argv", command[2:])
    capsys.readouterr()
    main()
    assert capsys.readouterr().out.startswith("nothing changed")


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
            stat = (folder / "stat").read_text()
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
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


@pytest.fixture
def rules(tmp_path: Path) -> dict[str, Path]:
    names = ("mild", "stern")
    return {name: save_words(tmp_path / "rules" / name, name.encode()) for name in names}


def test_a_killed_actor_is_replaced_and_a_killed_scan_goes_on(
    tmp_path: Path, rules: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_words(tmp_path / "a.jsonl", WORDS_PARTS * ROWS_A_PART)
    whole = words_folder(file, rules, tmp_path / "whole")
    with monkeypatch.context() as quick:
        quick.setattr("tests.serve.cluster.words_engine.SLOW_S", 0.0)  # in this process
        scan(WordsEngine(rules), whole)
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "tests.serve.scan.words_scan"]
    command += [str(file), str(tmp_path / "rules"), str(out)]
    killed = subprocess.Popen(command)
    wait_for((out / "part-000000.jsonl").exists, killed)
    first = wait_for(lambda: actors(killed.pid), killed)[0]
    os.kill(first, signal.SIGKILL)
    kept = len(list(out.glob("part-*")))
    wait_for(lambda: len(list(out.glob("part-*"))) > kept, killed)
    assert first not in actors(killed.pid)
    under = descendants(killed.pid)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    times = {path: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert 0 < len(times) < WORDS_PARTS
    run(command)
    assert content(out) == content(whole.folder)
    assert {path: path.stat().st_mtime_ns for path in times} == times  # none is written again
    # The threads of an actor spin briefly beside Ray's processes.
    assert (tmp_path / "spin_count").read_text() == "10000"
    deadline = time.monotonic() + 60
    while any((Path("/proc") / str(pid)).exists() for pid in under):
        assert time.monotonic() < deadline, "a killed scan leaves processes"
        time.sleep(0.1)


def test_an_actor_with_other_weights_is_refused(tmp_path: Path, rules: dict[str, Path]) -> None:
    from serve.scan.cluster import PartJudge

    folder = words_folder(write_words(tmp_path / "a.jsonl", 1), rules, tmp_path / "out")
    start = partial(WordsEngine, rules)
    PartJudge(start, folder.folder, folder.manifest, Path.cwd())
    save_words(rules["stern"], b"trained again")
    with pytest.raises(GuardError, match=r"trained again since the scan began \(got stern\)"):
        PartJudge(start, folder.folder, folder.manifest, Path.cwd())


def test_a_part_without_all_rows_is_noticed(tmp_path: Path, rules: dict[str, Path]) -> None:
    from serve.scan.cluster import PartSource

    file = write_words(tmp_path / "a.jsonl", 2 * ROWS_A_PART)
    folder = words_folder(file, rules, tmp_path / "out")
    whole = ROWS_A_PART * len(rules)
    (task,) = PartSource(folder, {0: whole, 1: whole}).get_read_tasks(1)
    assert list(task()) == []
    (task,) = PartSource(folder, {0: whole, 1: 0}).get_read_tasks(1)
    with pytest.raises(GuardError, match=r"part-000001\.jsonl: the part is broken"):
        list(task())


@pytest.mark.parametrize(
    ("nodes", "actors", "cores"),
    [([8], 1, 8), ([8], 3, 2), ([8, 8, 8, 8], 2, 8), ([8, 8, 8, 8], 5, 4), ([0, 5, 2], 3, 2)],
)
def test_an_actor_has_the_most_cores_for_which_all_find_a_node(
    nodes: list[int], actors: int, cores: int
) -> None:
    from serve.scan.cluster import most_cores_each

    assert most_cores_each(nodes, actors) == cores


def test_actors_work_in_any_folder_s_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.cluster_utils import Cluster

    from serve.scan.cluster import scan_on_cluster

    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)  # Ray reads it once in a process
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(elsewhere)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        monkeypatch.chdir(here)
        rule = save_words(Path("mild"), b"mild")
        write_words(Path("a.jsonl"), 3)
        folder = words_folder(Path("a.jsonl"), {"mild": rule}, Path("out"))
        start = partial(WordsEngine, {"mild": rule})
        finished = scan_on_cluster(start, folder, actors=1)
        Path("broken.jsonl.gz").write_bytes(b"not gzip")
        broken = words_folder(Path("broken.jsonl.gz"), {"mild": rule}, Path("broken"))
        with pytest.raises(GuardError, match=r"^[^\n]*broken\.jsonl\.gz: not readable[^\n]*$"):
            scan_on_cluster(start, broken, actors=1)
    finally:
        nodes.shutdown()
    assert finished.conversations == 3
    assert {row["source"] for row in folder.read(0)} == {"a.jsonl"}
