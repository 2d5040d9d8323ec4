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

START_S = 600.0
ATTEMPTS = 3  # to start it on a port that nobody has taken meanwhile


@contextmanager
def litellm_proxy(config: Path) -> Iterator[httpx.Client]:
    """A client of a proxy with this configuration, which ends with the block."""
    key = f"sk-{secrets.token_hex(32)}"  # without one it does not start
    log = config.with_suffix(".log")
    for _ in range(ATTEMPTS):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]  # whoever listens there first has it
        process = _start(config, port, key, log)
        try:
            headers = {"authorization": f"Bearer {key}"}
            address = f"http://127.0.0.1:{port}"
            with httpx.Client(
                base_url=address, headers=headers, timeout=60, trust_env=False
            ) as client:
                if _has_started(process, client, log):
                    yield client
                    return
        finally:
            process.terminate()
            process.wait(30)
    raise AssertionError(f"LiteLLM ended {ATTEMPTS} times: {log.read_text()[-4000:]}")


def _start(config: Path, port: int, key: str, log: Path) -> subprocess.Popen[bytes]:
    command = [program("litellm"), "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=config.parent,
            env=environment(LITELLM_MASTER_KEY=key),
            stdout=output,
            stderr=output,
        )


def _has_started(process: subprocess.Popen[bytes], client: httpx.Client, log: Path) -> bool:
    """Wait until it answers; False if it has ended, as it does where another has the port."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            return False
        try:
            if client.get("/health/liveliness").is_success:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"LiteLLM did not start in {START_S:.0f} s: {log.read_text()[-4000:]}")
