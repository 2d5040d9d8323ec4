"""Checks without a pause on a server whose rules are replaced in turn.

Knows nothing of reports on disk.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.bench.http.overhead import as_body
from serve.bench.http.reload.versions import ServedSpans, logit_of, outcome, put_in_place


class Reloading:
    """A server under checks, whose rules are replaced in turn.

    `versions`: the folders of each rule's weights. `folders`: where the server reads them.
    """

    def __init__(
        self,
        address: str,
        folders: Mapping[str, Path],
        versions: Mapping[str, Sequence[Path]],
        conversations: Sequence[tuple[Message, ...]],
        logits: Sequence[Mapping[str, Sequence[float]]],
    ) -> None:
        self._address, self._folders, self._versions = address, folders, versions
        rules = list(folders)
        self._bodies = [as_body(messages, rules) for messages in conversations]
        self._logits = logits
        self._served = {rule: ServedSpans() for rule in rules}
        for served in self._served.values():
            served.start(0)
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.unjudged_rules = 0
        self.replacement_ms: list[float] = []

    def run(self, checks: int, replacements: int, clients: int, bar: tqdm) -> None:
        """Check by `clients` clients, and replace rules meanwhile.

        Raises GuardError if a replacement is refused.
        """
        numbers = itertools.count()
        every = checks // replacements
        due: list[threading.Event] = [threading.Event() for _ in range(replacements)]

        def send_checks() -> None:
            with self._client() as client:
                while (number := next(numbers)) < checks:
                    self._check(client, number % len(self._bodies))
                    bar.update()
                    replacement = number // every
                    if replacement < replacements:
                        due[replacement].set()

        with ThreadPoolExecutor(clients) as pool, self._client() as admin:
            running = [pool.submit(send_checks) for _ in range(clients)]
            for event in due:
                event.wait()
                self._replace(admin)
            for client in running:
                client.result()

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self._address, timeout=120, trust_env=False)

    def _check(self, client: httpx.Client, number: int) -> None:
        sent = time.perf_counter()
        try:
            response = client.post("/v1/check", json=self._bodies[number])
        except httpx.TransportError as error:
            with self._lock:
                self.errors[type(error).__name__] += 1
            return
        answered = time.perf_counter()
        with self._lock:
            if response.status_code != httpx.codes.OK:
                self.errors[str(response.status_code)] += 1
                return
            self._count(response.json(), number, sent, answered)

    def _count(self, answer: dict[str, Any], number: int, sent: float, answered: float) -> None:
        self.unjudged_rules += len(answer["unjudged"])
        for result in answer["results"]:
            rule = result["rule"]
            served = self._served[rule].between(sent, answered)
            logit = logit_of(result["p_violation"])
            self.outcomes[outcome(logit, self._logits[number][rule], served)] += 1

    def _replace(self, admin: httpx.Client) -> None:
        """Replace the next rule as if it was trained again.

        Raises GuardError if the server refuses that.
        """
        turn = next(self._turn)
        rules = list(self._folders)
        rule = rules[turn % len(rules)]
        version = (turn // len(rules) + 1) % len(self._versions[rule])
        put_in_place(self._versions[rule][version], self._folders[rule])
        with self._lock:
            self._served[rule].start(version)
        began = time.perf_counter()
        response = admin.post(f"/admin/rules/{rule}")
        self.replacement_ms.append(1000 * (time.perf_counter() - began))
        if response.status_code != httpx.codes.OK:
            raise GuardError(
                "a replacement was refused", got=response.text, remedy="See the server's log"
            )
        with self._lock:
            self._served[rule].end_previous()
