"""`python -m serve.up --replicas 2` on the tiny base, from its start to its end; what its processes
log, and how many there may be.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from pytest import CaptureFixture, MonkeyPatch

from guard.home import ROOT
from guard.layout import Runs
from serve.cluster.log import relayed
from serve.registry.registry import Registry
from tests.serve.cluster.words_cluster import REPLICA, p_of
from tests.serve.guarded import CONVERSATION, save_adapter
from tests.serve.server_process import StartedServer

RULES = ("medical_advice", "pii_leak")
NO_RAY = """
import sys
sys.modules["ray"] = None  # as where it is not installed
import serve.up, serve.doctor.__main__, serve.scan.run
from serve.cluster.served import ServedOptions
from serve.cluster.start import running_cluster
with running_cluster(2, ServedOptions(())):
    pass
"""


class ClusterProcess(StartedServer):
    """The command with two replicas, and its home folder, in which Ray must leave nothing."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        self.home = folder / "home"
        self.home.mkdir()
        for seed, rule in enumerate(RULES):
            save_adapter(self.runs / "tiny" / rule / "alora", rule, seed=seed)
        environment = {name: value for name, value in os.environ.items() if "RAY" not in name}
        environment |= {"HOME": str(self.home)}
        options = {"runs": self.runs, "replicas": 2}
        super().__init__(folder, options, env=environment, start_new_session=True)


@pytest.fixture
def cluster(tmp_path: Path, uncompiled: None) -> Iterator[ClusterProcess]:
    cluster = ClusterProcess(tmp_path)
    yield cluster
    cluster.process.kill()
    cluster.process.wait()


def messages(count: int) -> list[dict[str, str]]:
    """A conversation of so many turns; a shorter one is the beginning of a longer one."""
    turns = []
    for number, message in enumerate(itertools.islice(itertools.cycle(CONVERSATION), count)):
        turns.append({"role": message.role, "content": f"{message.content} ({number})"})
    return turns


def checked(client: httpx.Client, count: int) -> httpx.Response:
    answer = client.post("/v1/check", json={"messages": messages(count)})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.slow
def test_two_replicas_of_the_tiny_base_judge_keep_conversations_change_rules_and_end(
    cluster: ClusterProcess,
) -> None:
    with httpx.Client(base_url=cluster.address, timeout=60, trust_env=False) as client:
        first = checked(client, 3)
        longer = checked(client, 9)
        assert first.headers[REPLICA] == longer.headers[REPLICA]
        usage = first.json()["usage"]
        read = usage["cached_tokens"] + usage["computed_tokens"]
        # Of what the first check had read nothing is computed again.
        assert longer.json()["usage"]["cached_tokens"] > read / len(RULES) * 0.7

        before = p_of(longer.json())
        folder = cluster.runs / "tiny" / "pii_leak" / "alora"
        save_adapter(folder, "pii_leak", seed=7)
        registry = Registry(Runs(cluster.runs))
        second = registry.register(folder, actor="ann", note="trained")
        assert p_of(checked(client, 9).json()) == before
        registry.publish(second.rule, second.id, actor="ann", reason="better")
        change = client.post("/admin/rules/pii_leak").json()
        assert change["version"] != change["version_before"]
        now = p_of(checked(client, 9).json())
        assert abs(now["pii_leak"] - before["pii_leak"]) > 1e-3
        weights = second.folder / "adapter_model.safetensors"
        weights.chmod(0o644)
        weights.write_bytes(b"half a file")
        assert client.post("/admin/rules/pii_leak").status_code == 409
        assert client.get("/readyz").json() == client.get("/healthz").json() == {"status": "ok"}
        metrics = client.get("/metrics").text
        assert "guard_adapters 4.0" in metrics and "guard_replicas 2.0" in metrics
    left = psutil.Process(cluster.process.pid).children(recursive=True)
    assert len(left) >= 4
    os.killpg(cluster.process.pid, signal.SIGINT)  # as Ctrl+C does, to whatever it has started
    assert cluster.process.wait(60) == 0
    assert [process for process in left if process.is_running()] == []
    assert not (cluster.home / ".ray").exists()
    assert cluster.audit.read_text().count('"kind": "check"') == 4
    assert cluster.process.stdout is not None
    output = cluster.output + cluster.process.stdout.read()
    assert [line for line in output.splitlines() if "ray" in line.lower()] == []
    errors = cluster.errors.read_text()
    assert "the rule pii_leak" in errors  # the log says why
    assert re.findall(r"\braylet\b|ServeReplica|INFO", errors) == []


def test_without_ray_all_is_imported_and_replicas_say_what_to_do() -> None:
    done = subprocess.run([sys.executable, "-c", NO_RAY], cwd=ROOT, capture_output=True, text=True)
    assert "GuardError: replicas need Ray" in done.stderr and "make up REPLICAS=2" in done.stderr


LOGS = """
import logging, pathlib, sys
from serve.cluster.log import log_into
log_into(pathlib.Path(sys.argv[1]))
logging.getLogger("serve").warning("a rule is served as before")
logging.getLogger("serve").info("nothing to see")
try:
    int("the words of a request")
except ValueError:
    logging.getLogger("serve").exception("a check failed")
"""


def test_lines_of_other_processes_come_out_here_without_content(
    tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    pipe = tmp_path / "log"
    command = [sys.executable, "-c", LOGS, str(pipe)]
    with relayed(pipe):
        for _ in range(2):
            run = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
            assert run.stderr == b""
    lines = capsys.readouterr().err
    assert lines.count("WARNING serve: a rule is served as before") == 2
    assert lines.count("ValueError") == 2
    assert "words of a request" not in lines and "nothing to see" not in lines


def test_a_stderr_that_is_gone_keeps_nobody_who_logs_waiting(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def fail(line: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=fail, flush=lambda: None))
    pipe = tmp_path / "log"

    def log_much() -> None:
        with pipe.open("w") as lines:
            lines.write("a line\n" * 50_000)  # a pipe holds 64 KiB

    with relayed(pipe):
        logging_thread = threading.Thread(target=log_much, daemon=True)
        logging_thread.start()
        logging_thread.join(30)
        is_waiting = logging_thread.is_alive()
        if is_waiting:  # read what fills the pipe, so that this ends
            threading.Thread(target=pipe.read_bytes, daemon=True).start()
    assert not is_waiting
