"""Chromium as a person uses it, by the WebDriver protocol. Tests only."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.waiting import wait_until

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of a reference, by the standard
DRIVER = shutil.which("chromedriver")


class Browser:
    """A window of Chromium without a screen."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client = client
        self._session = f"/session/{session}"

    def _ask(self, path: str, **body: Any) -> Any:
        answer = self._client.post(self._session + path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def open(self, address: str) -> None:
        self._ask("/url", url=address)

    def run(self, script: str, *arguments: Any) -> Any:
        return self._ask("/execute/sync", script=script, args=list(arguments))

    def text(self, selector: str = "main") -> str:
        """What is read there; empty while another page comes."""
        content = self._client.get(f"{self._element(selector)}/text").json()["value"]
        return content if isinstance(content, str) else ""

    def click(self, selector: str) -> None:
        self._client.post(f"{self._element(selector)}/click", json={}).raise_for_status()

    def write(self, selector: str, text: str) -> None:
        self._client.post(f"{self._element(selector)}/value", json={"text": text})

    def press(self, key: str) -> None:
        """Press a key once the page's script listens: it runs after the text is there."""
        wait_until(lambda: self.run("return document.readyState") == "complete")
        strokes = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self._ask("/actions", actions=[{"type": "key", "id": "keys", "actions": strokes}])

    def dark(self, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._ask("/goog/cdp/execute", cmd=command, params=parameters)

    def faults(self, axe: Path) -> list[str]:
        """What axe-core finds on the page that is serious or critical."""
        self.run(axe.read_text(encoding="utf-8"))
        script = "const done = arguments[0]; axe.run().then(found => done(found.violations))"
        violations = self._ask("/execute/async", script=script, args=[])
        grave = [fault for fault in violations if fault["impact"] in ("serious", "critical")]
        return [json.dumps([fault["id"], fault["nodes"][0]["html"]]) for fault in grave]

    def _element(self, selector: str) -> str:
        reference = self._ask("/element", using="css selector", value=selector)[ELEMENT]
        return f"{self._session}/element/{reference}"


@contextlib.contextmanager
def browsing(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """A browser with a profile of its own."""
    arguments = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},{height}",
    ]
    options = {"goog:chromeOptions": {"args": arguments}}
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            lines = iter(driver.stdout.readline, "")
            ports = (re.search(r"successfully on port (\d+)", line) for line in lines)
            port = next(match[1] for match in ports if match)
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False
            ) as client:
                body = {"capabilities": {"alwaysMatch": options}}
                session = client.post("/session", json=body).json()["value"]["sessionId"]
                waiting = {"implicit": 10_000}  # for an element that is still to come
                client.post(f"/session/{session}/timeouts", json=waiting)
                yield Browser(client, session)
                client.delete(f"/session/{session}")
        finally:
            driver.terminate()
