"""Who is signed in to the console: in memory, by random ids that cookies carry, for some hours."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from serve.tenants.admin import Admin

LONGEST_S = 12 * 3600.0
IDLE_S = 3600.0


@dataclass
class Session:
    """An admin who is signed in, since when, and when last seen."""

    admin: Admin
    since: float
    seen: float


class Sessions:
    """The sessions of one process. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._secret = secrets.token_bytes(32)

    def begin(self, admin: Admin) -> str:
        """The id of a new session."""
        for session_id in list(self._sessions):
            self._live(session_id)
        session_id = secrets.token_urlsafe(32)
        self._sessions[session_id] = Session(admin, self._clock(), self._clock())
        return session_id

    def admin(self, session_id: str) -> Admin | None:
        """Whose session it is; None of one that is over."""
        session = self._live(session_id)
        if session is None:
            return None
        session.seen = self._clock()
        return session.admin

    def end(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def token(self, session_id: str) -> str:
        """What a form of our own pages carries: a page of another site cannot know it."""
        return hmac.new(self._secret, session_id.encode(), hashlib.sha256).hexdigest()

    def is_token(self, session_id: str, token: str) -> bool:
        expected = self.token(session_id).encode()
        return hmac.compare_digest(expected, token.encode("utf-8", "surrogatepass"))

    def _live(self, session_id: str) -> Session | None:
        session, now = self._sessions.get(session_id), self._clock()
        if session is None or now > session.since + LONGEST_S or now > session.seen + IDLE_S:
            self.end(session_id)
            return None
        return session
