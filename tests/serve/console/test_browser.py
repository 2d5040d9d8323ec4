"""The console in Chromium, as people use it: by keys, without scripts, and with axe-core's eyes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.clients import CLIENTS
from tests.serve.console.browser import DRIVER, Browser, browsing
from tests.serve.console.conftest import RULE, ServedConsole, Start, save_replay
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DRIVER is None, reason="no Chromium here: apt install chromium-driver"),
]
AXE = "lib/python3*/site-packages/axe_selenium_python/node_modules/axe-core/axe.min.js"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as opened:
        yield opened


def signed_in(browser: Browser, console: ServedConsole, role: str) -> str:
    """The console's address, where an admin of this role has signed in by the keyboard."""
    address = f"{console.client.base_url}/console"
    browser.open(f"{address}/login")
    browser.write("#key", f"{role}'s key\n")
    wait_until(lambda: RULE in browser.text())
    return address


def test_ten_conversations_are_reviewed_by_keys(browser: Browser, start: Start) -> None:
    console = start()
    console.review_later(11)
    browser.open(f"{signed_in(browser, console, 'reviewer')}/reviews")
    for voted, key in enumerate("vavavavava", start=1):
        browser.press(key)
        wait_until(lambda voted=voted: f"{voted} labelled" in browser.text())  # type: ignore[misc]
    assert [label.label for label in console.store.settled(RULE)].count("allow") == 5
    browser.press("u")
    wait_until(lambda: "9 labelled" in browser.text())
    assert len(console.store.settled(RULE)) == 9
    browser.press("s")
    wait_until(lambda: browser.run("return location.search") == "?skip=1")
    browser.press("v")
    wait_until(lambda: "Nothing more waits" in browser.text())
    assert "script" not in browser.run("return location.href")
    assert len(console.store.settled(RULE)) == 10


@pytest.mark.parametrize("has_scripts", [True, False])
def test_a_version_is_tried_published_and_taken_back(
    browser: Browser, start: Start, has_scripts: bool
) -> None:
    console = start()
    console.review_later(1)
    browser.devtools("Emulation.setScriptExecutionDisabled", value=not has_scripts)
    address = signed_in(browser, console, "publisher")
    first, _, third = console.versions
    browser.open(f"{address}/rules/{RULE}")
    browser.write("#mode-mode", "canary:10%")
    for action, shown in (
        ("mode", f"{third[:12]}, canary:10%"),
        ("publish", f"{third[:12]}, enforce"),
        ("rollback", f"{first[:12]}, enforce"),
    ):
        browser.write(f"#{action}-reason", "we looked")
        browser.click(f"form[action$={action}] button")
        wait_until(lambda shown=shown: shown in browser.text("figure"))  # type: ignore[misc]
    assert console.kept.champion(RULE) == first
    browser.open(f"{address}/reviews")
    browser.click("button[value=allow]")
    wait_until(lambda: "1 labelled" in browser.text())
    browser.devtools("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.parametrize("is_dark", [False, True])
def test_axe_finds_nothing_serious_on_any_page(
    browser: Browser, start: Start, is_dark: bool
) -> None:
    console = start()
    console.review_later(1)
    save_replay(console.kept)
    (axe,) = Path(CLIENTS.parent).glob(AXE)
    address = signed_in(browser, console, "publisher")
    browser.dark(is_dark)
    version = console.kept.champion(RULE)[:12]
    pages = ["", f"/rules/{RULE}", f"/versions/{version}", "/reviews", "/replays"]
    for page in [*pages, "/replays/replay", "/try", "/login", "/nothing"]:
        browser.open(address + page)
        assert browser.faults(axe) == [], page
