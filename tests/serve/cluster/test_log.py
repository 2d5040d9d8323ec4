from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from guard.home import ROOT
from serve.cluster.log import relayed

LOGS = """
import logging, pathlib, sys
from serve.cluster.log import log_into
log_into(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else None)
logging.getLogger("serve").warning("a rule is served as before")
logging.getLogger("serve").info("nothing to see")
try:
    int("the words of a request")
except ValueError:
    logging.getLogger("serve").exception("a check failed")
"""


def test_lines_of_other_processes_come_out_here_without_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "log"
    command = [sys.executable, "-c", LOGS]
    with relayed(pipe):
        for _ in range(2):
            run = subprocess.run([*command, str(pipe)], cwd=ROOT, capture_output=True, check=True)
            assert run.stderr == b""
    lines = capsys.readouterr().err
    assert lines.count("WARNING serve: a rule is served as before") == 2
    assert lines.count("ValueError") == 2
    assert "words of a request" not in lines and "nothing to see" not in lines
    without_pipe = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert b"a rule is served as before" in without_pipe.stderr


def test_a_stderr_that_is_gone_keeps_nobody_who_logs_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
