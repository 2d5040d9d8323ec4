"""Whether a command of a deployment starts the server as it is. Tests only."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from serve.engine.thread.engine_thread import CLOSING_S
from serve.up_arguments import parse_arguments


def assert_understood(command: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a command that runs `python -m serve.up`, as the server reads them."""
    assert command[0].endswith(".venv/bin/python")
    assert command[1:3] == ["-m", "serve.up"]
    monkeypatch.setattr(sys, "argv", ["serve.up", *command[3:]])
    return vars(parse_arguments())


def timeout_of(options: dict[str, Any]) -> float:
    """How long after a stop signal checks may be under way, in seconds."""
    return float(options["timeout"]) + CLOSING_S
