"""What an admin's key may ask, for both clients: rules, their versions, and feedback on a check.

The answers are the server's JSON, as its `/docs` describes them. Knows nothing of connections.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

Answer = TypeVar("Answer")


class Administration(ABC, Generic[Answer]):
    """Asked once each, whatever comes of it. Raises CheckFailed for what the server refuses."""

    @abstractmethod
    def _send(self, method: str, path: str, body: object = None) -> Answer: ...

    def rules(self) -> Answer:
        """What judges: of each rule its champion, and the version on trial beside it."""
        return self._send("GET", "/admin/rules")

    def versions(self, rule: str) -> Answer:
        """A rule's versions, newest first, and the events that decided about them."""
        return self._send("GET", _path(rule))

    def publish(
        self, rule: str, *, reason: str, version: str | None = None, champion: str | None = None
    ) -> Answer:
        """Have a version served, by default the candidate; not instead of another `champion`."""
        return self._decide(rule, "publish", reason=reason, version=version, champion=champion)

    def rollback(
        self, rule: str, *, reason: str, version: str | None = None, champion: str | None = None
    ) -> Answer:
        """Have an earlier version served again, by default the champion before."""
        return self._decide(rule, "rollback", reason=reason, version=version, champion=champion)

    def set_mode(self, rule: str, mode: str, *, reason: str, version: str | None = None) -> Answer:
        """Set a version's mode, as "shadow" or "canary:10%", by default the candidate's."""
        return self._decide(rule, "mode", reason=reason, mode=mode, version=version)

    def _decide(self, rule: str, action: str, **body: str | None) -> Answer:
        return self._send("POST", f"{_path(rule)}/{action}", body)

    def feedback(
        self,
        request_id: str,
        rule: str,
        label: Literal["violation", "allow"],
        *,
        reviewer: str,
        note: str = "",
        conversation: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> Answer:
        """Say what the rule should have said to the check with this `x-request-id`. Name its
        `conversation` if several checks have that, and its `messages` if it was not kept.
        """
        body = {"request_id": request_id, "rule": rule, "label": label, "reviewer": reviewer}
        more = {"note": note, "conversation": conversation, "messages": messages}
        return self._send("POST", "/v1/feedback", body | more)


def _path(rule: str) -> str:
    return f"/admin/rules/{quote(rule, safe='')}"
