"""The server's own log on stderr: what failed and where in the code, and not on which text.

Errors about values quote them (pydantic's, Unicode's, a missing key), so of these the kind and the
place are logged and their words are not.
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType
from typing import Any

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
QUOTES_VALUES = (ValueError, TypeError, LookupError, AssertionError)


class ContentFreeFormatter(logging.Formatter):
    """Formats tracebacks without the words of errors that may quote a request."""

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        """The chain of errors, the first first."""
        parts: list[str] = []
        error = ei[1]
        while error is not None:
            frames = "".join(traceback.format_tb(error.__traceback__))
            words = ""
            if not isinstance(error, QUOTES_VALUES):
                words = f": {error}"
            parts.append(f"{frames}{type(error).__name__}{words}")
            error = error.__cause__ or error.__context__
        return "\nwhich led to\n".join(reversed(parts))


def configuration() -> dict[str, Any]:
    """The process's settings of `logging`: warnings, errors and replaced rules, to stderr."""
    formatter = {"()": ContentFreeFormatter, "fmt": FORMAT}
    handler = {"class": "logging.StreamHandler", "formatter": "content_free"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"content_free": formatter},
        "handlers": {"stderr": handler},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {"uvicorn": {"level": "WARNING"}, "serve.api.watch": {"level": "INFO"}},
    }
