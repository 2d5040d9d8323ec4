"""The server's log: where it failed, and never on which text."""

from __future__ import annotations

import logging
import logging.config
import sys

import pytest
from pydantic import BaseModel

from guard.errors import GuardError
from serve.api.observe.server_log import ContentFreeFormatter, configuration
from tests.serve.api.observe.toy_record import MARKER


class Number(BaseModel):
    number: int


def quoting() -> None:
    Number(number=MARKER)  # type: ignore[arg-type]


def formatted(error_text: str | None = None) -> str:
    try:
        try:
            quoting()
        except ValueError as cause:
            if error_text is None:
                raise
            raise GuardError(error_text) from cause
    except Exception:
        return ContentFreeFormatter().formatException(sys.exc_info())


def test_the_words_of_an_error_about_a_value_are_left_out_and_its_place_is_not() -> None:
    text = formatted()
    assert "ValidationError" in text and "in quoting" in text and __file__ in text
    whole = formatted("the disk is full")
    assert MARKER not in text + whole
    assert whole.index("ValidationError") < whole.index("GuardError: the disk is full")


def test_warnings_go_to_stderr_in_this_format(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logging.config.dictConfig(configuration())
        log = logging.getLogger("serve.test")
        log.info("nothing of interest")
        try:
            quoting()
        except ValueError:
            log.exception("a check failed")
    finally:
        root.handlers[:], root.level = handlers, level
    text = capsys.readouterr().err
    assert "ERROR serve.test: a check failed" in text and "nothing of interest" not in text
    assert MARKER not in text
