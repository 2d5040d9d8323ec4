"""The synchronous client. Knows nothing of what a response means (`attempts.py`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from .answers import CheckAnswer, NotAllowed
from .attempts import DEADLINE_S, PATH, Asked, Attempts, unreachable
from .reply import CHECK_CHARACTERS, HOLD_BACK, Reply


class GuardClient:
    """Checks conversations on the server at `base_url`.

    A check has `deadline_s` seconds, retries included. Each wait for the server (to connect, to
    send, for a piece of the answer) ends after what is left of them when the request begins; so one
    that is slow at several of these may take a multiple. `messages` are OpenAI's: dicts with a role
    and a content. `http_client` is one of the caller's own, with its proxies and certificates; it
    is not closed here.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        deadline_s: float = DEADLINE_S,
        http_client: httpx.Client | None = None,
    ) -> None:
        self._http = http_client or httpx.Client()
        self._closes_http = http_client is None
        self._url = base_url.rstrip("/") + PATH
        self._api_key = api_key
        self._deadline_s = deadline_s

    def check(
        self,
        messages: Sequence[Mapping[str, Any]],
        rules: Sequence[str] | None = None,
        *,
        rule_set: str | None = None,
        metadata: Mapping[str, str] | None = None,
        cache_salt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        explain: bool = False,
        policies: Sequence[str] | None = None,
    ) -> CheckAnswer:
        """The verdicts of `rules`, of a rule set, or of all rules; and of `policies`, sentences.

        `tools` are judged with the messages. With `explain` the answer says which turn carries each
        violation. Raises CheckFailed if there is no answer before the deadline.
        """
        selection = Asked(rules, rule_set, metadata, cache_salt, tools, explain, policies)
        return self._check(messages, selection)

    def guarded_stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        pieces: Iterable[str | None],
        rules: Sequence[str] | None = None,
        *,
        rule_set: str | None = None,
        metadata: Mapping[str, str] | None = None,
        cache_salt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        check_characters: int = CHECK_CHARACTERS,
        hold_back: int = HOLD_BACK,
    ) -> Iterator[str]:
        """The reply whose text comes in `pieces`, as far as checks have allowed it (`reply.py`); a
        piece of None, as OpenAI's last one, has no text.

        Raises NotAllowed instead of what is a violation or could not be judged, CheckFailed where
        there is no verdict.
        """
        selection = Asked(rules, rule_set, metadata, cache_salt, tools)
        reply = Reply(messages, check_characters, hold_back)
        for piece in pieces:
            if reply.add(piece or ""):
                self._allow(reply, selection)
                if text := reply.allowed():
                    yield text
        if not reply.is_empty:
            self._allow(reply, selection)
            if text := reply.ended():
                yield text

    def close(self) -> None:
        """Close the connections, unless they are a client's of the caller's own."""
        if self._closes_http:
            self._http.close()

    def __enter__(self) -> GuardClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _allow(self, reply: Reply, selection: Asked) -> None:
        answer = self._check(reply.conversation, selection)
        if not answer.is_allowed:
            raise NotAllowed(answer)

    def _check(self, messages: Sequence[Mapping[str, Any]], selection: Asked) -> CheckAnswer:
        attempts, content = Attempts(self._deadline_s), selection.content(messages)
        while True:
            headers, left = attempts.headers(self._api_key), attempts.seconds_left
            try:
                with self._http.stream(
                    "POST", self._url, content=content, headers=headers, timeout=left
                ) as receiving:
                    response = attempts.received(receiving)
            except httpx.HTTPError as error:
                raise unreachable(self._url, error) from error
            answer = attempts.answer(response)
            if isinstance(answer, CheckAnswer):
                return answer
            time.sleep(answer)
