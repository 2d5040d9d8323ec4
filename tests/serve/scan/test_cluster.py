"""Actors write what one engine writes, byte for byte, whoever is killed."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from guard.errors import GuardError
from guard.home import ROOT
from serve.scan.run import main
from serve.scan.scan import scan
from tests.serve.cluster.words_cluster import trained
from tests.serve.cluster.words_engine import WordsEngine, save_words
from tests.serve.guarded import CONVERSATION, save_adapter
from tests.serve.scan.test_scan import content
from tests.serve.scan.words_scan import ROWS_A_PART, words_folder, write_words
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
ENGINE_ROWS = 24
WORDS_PARTS = 12


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """RAY_ADDRESS is a Ray of two nodes with a core each, which started in another folder. Their
    processes compile no model, nor does this one.
    """
    from ray.cluster_utils import Cluster

    importlib.import_module("torch._inductor.config")  # which reads CXX once
    os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)  # Ray reads it once in a process
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as until_ended:
        patch.setenv("CXX", "none")
        patch.setenv("PYTHONPATH", str(ROOT))
        with contextlib.chdir(tmp_path_factory.mktemp("elsewhere")):
            quiet = {"num_cpus": 1, "include_dashboard": False}
            nodes = Cluster(initialize_head=True, head_node_args=quiet)
            until_ended.callback(nodes.shutdown)
            nodes.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", nodes.address)
        yield


@pytest.mark.usefixtures("two_nodes")
def test_an_actor_writes_what_an_engine_here_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, file = tmp_path / "runs", tmp_path / "a.jsonl"
    for seed, rule in enumerate(("mild", "stern"), start=1):
        save_adapter(runs / "tiny" / rule / "alora", rule, seed=seed)
    opening = [{"role": turn.role, "content": turn.content} for turn in CONVERSATION]
    rows: list[dict[str, Any]] = []
    for number in range(ENGINE_ROWS):
        text = f"number {number} of them " * (1 + number % 9)
        rows.append({"messages": [*opening[: number % 3], {"role": "user", "content": text}]})
    rows[5] = {"id": "c5"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def scanned(name: str, *more: str) -> str:
        command = ["scan", "--files", str(file), "--runs", str(runs), "--out", str(tmp_path / name)]
        monkeypatch.setattr("sys.argv", [*command, "--rows-a-part", "8", *more])
        main()
        return capsys.readouterr().out

    for name, more in (("engine", ()), ("actors", ("--cluster", "--actors", "1"))):
        assert f"{ENGINE_ROWS} conversations, 2 rules" in scanned(name, *more)
    assert content(tmp_path / "actors") == content(tmp_path / "engine")
    assert scanned("actors", "--cluster").startswith("nothing changed")


@pytest.fixture
def rules(tmp_path: Path) -> dict[str, Path]:
    return trained(tmp_path / "rules", ("mild", "stern"))


def named(pid: int) -> dict[psutil.Process, str]:
    """The processes below a process, with the names that Ray gives them."""
    names: dict[psutil.Process, str] = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            names[process] = process.name()
    return names


def actors(pid: int) -> list[int]:
    return [process.pid for process, name in named(pid).items() if "ray::MapWorker" in name]


@pytest.mark.usefixtures("two_nodes")
def test_a_killed_actor_is_replaced_and_a_killed_scan_goes_on(
    tmp_path: Path, rules: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve.scan.cluster import scan_on_cluster

    monkeypatch.chdir(tmp_path)  # names of files are those of this folder
    file, out = write_words(Path("a.jsonl"), WORDS_PARTS * ROWS_A_PART), Path("killed")
    whole = words_folder(file, rules, Path("whole"))
    with monkeypatch.context() as quick:
        quick.setattr("tests.serve.cluster.words_engine.SLOW_S", 0.0)  # in this process
        scan(WordsEngine(rules), whole)
    command = [sys.executable, "-m", "tests.serve.scan.words_scan", "a.jsonl", "rules", "killed"]
    own_ray = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    killed = subprocess.Popen(command, env=own_ray)
    wait_until(lambda: (out / "part-000000.jsonl").exists() and actors(killed.pid), 240)
    first = actors(killed.pid)[0]
    os.kill(first, signal.SIGKILL)
    kept = len(list(out.glob("part-*")))
    wait_until(lambda: len(list(out.glob("part-*"))) > kept, 240)
    assert first not in actors(killed.pid)
    # Ray's own agents end a minute later.
    under = [process for process, name in named(killed.pid).items() if "Agent" not in name]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    times = {path: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert 0 < len(times) < WORDS_PARTS
    scan_on_cluster(partial(WordsEngine, rules), words_folder(file, rules, out), actors=2)
    assert content(out) == content(whole.folder)
    assert {path: path.stat().st_mtime_ns for path in times} == times  # none is written again
    # The threads of an actor spin briefly beside Ray's processes.
    assert Path("spin_count").read_text() == "10000"
    _, left = psutil.wait_procs(under, timeout=60)
    assert left == [], "a killed scan leaves processes"


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


@pytest.mark.usefixtures("two_nodes")
def test_an_error_behind_a_cluster_is_one_line(tmp_path: Path, rules: dict[str, Path]) -> None:
    from serve.scan.cluster import scan_on_cluster

    (tmp_path / "broken.jsonl.gz").write_bytes(b"not gzip")
    broken = words_folder(tmp_path / "broken.jsonl.gz", rules, tmp_path / "out")
    with pytest.raises(GuardError, match=r"^[^\n]*broken\.jsonl\.gz: not readable[^\n]*$"):
        scan_on_cluster(partial(WordsEngine, rules), broken, actors=1)
