"""LiteLLM's proxy as a process of its own. Tests only."""

from __future__ import annotations

import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.deploy.clients import environment, program

START_S = 120.0


@contextmanager
def litellm_proxy(config: Path) -> Iterator[httpx.Client]:
    """A client of a proxy with this configuration, which ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    key = f"sk-{secrets.token_hex(32)}"  # without one it does not start
    log = config.with_suffix(".log")
    command = [program("litellm"), "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=config.parent,
            env=environment(LITELLM_MASTER_KEY=key),
            stdout=output,
            stderr=output,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=address, headers=headers, timeout=60, trust_env=False) as client:
            _wait(process, client, log)
            yield client
    finally:
        process.terminate()
        process.wait(30)


def _wait(process: subprocess.Popen[bytes], client: httpx.Client, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if client.get("/health/liveliness").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"LiteLLM did not start in {START_S:.0f} s: {log.read_text()[-4000:]}")
