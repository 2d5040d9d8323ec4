"""What a deployment runs: programs of `.venv-clients`, the pinned environment of others' clients,
and the server by its own options. Tests only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from serve.engine.thread.engine_thread import CLOSING_S
from serve.up_arguments import parse_arguments

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CLIENTS = ROOT / ".venv-clients" / "bin"
# No client is to look for updates, prices or a place for statistics: nothing leaves the machine.
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "NEMO_GUARDRAILS_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "*",
    "OPENAI_API_KEY": "none is needed",
}


def program(name: str) -> Path:
    """A program of the clients' environment, which must be there: a contract is never skipped."""
    path = CLIENTS / name
    assert path.exists(), f"no {path.relative_to(ROOT)}: run `make test`, or bash setup/clients.sh"
    return path


def environment(**more: str) -> dict[str, str]:
    """What a client's process gets: neither the checkout's modules nor the tests' settings."""
    kept: dict[str, str] = {}
    for name, value in os.environ.items():
        if not name.lower().endswith("_proxy") and name not in ("PYTHONPATH", "PYTHONHOME"):
            kept[name] = value
    return kept | OFFLINE | more


def output(name: str, *arguments: str, given: str = "", **more: str) -> str:
    """What a program prints, fed with `given`. Fails with what it said if it fails."""
    done = subprocess.run(
        [program(name), *arguments],
        input=given,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def addressed(text: str, addresses: Mapping[str, str]) -> str:
    """A file of deploy/ with these addresses in place of those that stand there."""
    for written, real in addresses.items():
        assert written in text, f"{written} stands nowhere in it"
        text = text.replace(written, real)
    return text


def assert_understood(command: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a command that runs `python -m serve.up`, as the server reads them."""
    assert command[0].endswith(".venv/bin/python")
    assert command[1:3] == ["-m", "serve.up"]
    monkeypatch.setattr(sys, "argv", ["serve.up", *command[3:]])
    return vars(parse_arguments())


def timeout_of(options: dict[str, Any]) -> float:
    """How long after a stop signal checks may be under way, in seconds."""
    return float(options["timeout"]) + CLOSING_S
