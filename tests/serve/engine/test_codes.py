"""The codes of what has no verdict: one closed list, in the code and in the documents."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from guard.home import ROOT
from serve.api.errors import Unjudged
from serve.engine.codes import CODES, STATUS_CODES, code_of, code_of_status
from serve.engine.prompts import Unanswerable
from serve.engine.refusals import CallerGone, Overloaded, TooLate


def test_the_documents_list_every_code_once_in_its_order() -> None:
    page = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## Why there is no verdict\n(.*?)\n## ", page, re.DOTALL)
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)[1:] == list(CODES)


def test_every_code_is_given_somewhere() -> None:
    given = set(STATUS_CODES.values()) | {code_of_status(400), code_of(asyncio.CancelledError())}
    sources = [path for path in Path(ROOT / "serve").rglob("*.py") if path.name != "codes.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    given |= {code for code in CODES if f'"{code}"' in text}
    assert given == set(CODES)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TooLate("late"), "too_late"),
        (Overloaded("full"), "overloaded"),
        (CallerGone("gone"), "caller_gone"),
        (asyncio.CancelledError(), "caller_gone"),
        (Unanswerable("long", "too_long", remedy="Shorten it"), "too_long"),
        (Unjudged("an image", "unread_content"), "unread_content"),
        (HTTPException(413), "too_long"),
        (HTTPException(401), "request_refused"),
        (GuardError("broken"), "engine_failed"),
        (SystemExit(2), "engine_failed"),  # whose own `code` is none of ours
    ],
)
def test_an_error_has_its_own_code_or_that_of_its_status(error: BaseException, code: str) -> None:
    assert code_of(error) == code
