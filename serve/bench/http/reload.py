"""Rules replaced while they are checked: is any answer lost, or of a version that was not served?

Every rule has VERSIONS of random weights. Which logit each of them gives a conversation is asked of
an engine of its own first, so an answer tells by which weights it was made. Then clients
check without a pause, and after every so many answers the next rule in turn is trained again, as
training would do it, and replaced by `POST /admin/rules/{rule}`. An answer must be that of a
version that was served at some time between its request and its arrival; one that is near none of
them was made by a mix, or read keys and values of other weights. Knows nothing of speed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
from tqdm import tqdm

from guard.card import read_card
from guard.errors import GuardError
from guard.example import Message
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.http.overhead import as_body
from serve.bench.http.server import random_runs, rule_names, server_process
from serve.bench.report import (
    BenchReport,
    Spread,
    notes,
    origin,
    peak_of_processes_mib,
    publish,
    source,
)
from serve.bench.scores import judged
from serve.bench.workload.prompts import conversation
from serve.bench.workload.random_adapter import random_adapters
from serve.engine import GuardEngine

CHECKS, REPLACEMENTS = 20_000, 200
RULES, VERSIONS, CLIENTS = 8, 4, 8
CONVERSATIONS, TOKENS = 24, (100, 400)
SCALE = 0.5  # of the weights: large, so that versions say different things
TOLERANCE = 0.05  # nats of a logit between two batches of different make-up, in bfloat16
TOLD_APART = 3 * TOLERANCE  # nearer logits of two versions say nothing

Outcome = Literal["right", "wrong_version", "no_version", "told_nothing"]


class ReloadReport(BenchReport):
    """Everything in `runs/reload_bench.json`."""

    checks: int
    replacements: int
    rules: int
    versions_a_rule: int
    clients: int
    errors: dict[str, int]  # checks without verdicts, by what came instead
    unjudged_rules: int  # of the checks that were answered
    right: int  # verdicts of a version that was served meanwhile
    wrong_version: int  # of another version
    no_version: int  # of none: a mix, or stale blocks
    told_nothing: int  # two versions say nearly the same of this conversation
    replacement_ms: Spread


@dataclass
class ServedSpans:
    """Since when each version of a rule is served, and until when; by time.perf_counter.

    While a rule is being replaced, both are.
    """

    spans: list[tuple[int, float, float]] = field(default_factory=list)

    def start(self, version: int) -> None:
        """From now on it may answer."""
        self.spans.append((version, time.perf_counter(), float("inf")))

    def end_previous(self) -> None:
        """From now on the version before the last may answer no more."""
        version, since, _ = self.spans[-2]
        self.spans[-2] = (version, since, time.perf_counter())

    def between(self, sent: float, answered: float) -> set[int]:
        """The versions that were served at some time of a check."""
        meanwhile: set[int] = set()
        for version, since, until in list(self.spans):
            if since <= answered and until >= sent:
                meanwhile.add(version)
        return meanwhile


def expected(
    recipe: Recipe,
    versions: Mapping[str, Sequence[Path]],
    conversations: Sequence[tuple[Message, ...]],
) -> list[dict[str, list[float]]]:
    """The logits that each conversation has by each rule's versions, in nats, by an engine of its
    own.

    Raises GuardError if there is none.
    """
    folders: dict[str, Path] = {}
    for rule, of_rule in versions.items():
        folders |= {f"{rule}@{number}": folder for number, folder in enumerate(of_rule)}
    logits: list[dict[str, list[float]]] = []
    with GuardEngine(recipe, folders) as engine:
        for messages in conversations:
            check = judged(engine.check(messages), where="the expected logits")
            of_conversation: dict[str, list[float]] = {rule: [] for rule in versions}
            for verdict in check.verdicts:  # in the order of the folders
                rule = verdict.rule.partition("@")[0]
                of_conversation[rule].append(logit_of(verdict.p_violation))
            logits.append(of_conversation)
    return logits


def logit_of(p: float) -> float:
    """The uncalibrated logit of a probability: random adapters' cards leave it as it is."""
    return math.log(p) - math.log1p(-p)


def outcome(logit: float, of_versions: Sequence[float], served: set[int]) -> Outcome:
    """What a verdict's logit says of the weights that gave it.

    `of_versions`: the logit of each version. Where one that was served and one that was not
    say nearly the same, it tells nothing of which it was.
    """
    near: set[int] = set()
    for version, logit_of_version in enumerate(of_versions):
        if abs(logit - logit_of_version) <= TOLERANCE:
            near.add(version)
    if not near:
        return "no_version"
    if not near & served:
        return "wrong_version"
    for version, not_served in itertools.product(near & served, range(len(of_versions))):
        if not_served in served:
            continue
        if abs(of_versions[version] - of_versions[not_served]) < TOLD_APART:
            return "told_nothing"
    return "right"


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
        """Check and replace. Raises GuardError if a replacement is refused."""
        numbers = itertools.count()
        every = checks // replacements
        due: list[threading.Event] = [threading.Event() for _ in range(replacements)]

        def check_on() -> None:
            with self._client() as client:
                while (number := next(numbers)) < checks:
                    self._check(client, number % len(self._bodies))
                    bar.update()
                    replacement = number // every
                    if replacement < replacements:
                        due[replacement].set()

        with ThreadPoolExecutor(clients) as pool, self._client() as admin:
            running = [pool.submit(check_on) for _ in range(clients)]
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
        """Train the next rule again, and have it served. Raises GuardError if that is refused."""
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
            raise GuardError("a replacement was refused", got=response.text, remedy="See its log")
        with self._lock:
            self._served[rule].end_previous()


def put_in_place(version: Path, folder: Path) -> None:
    """What training does when it has ended: a folder that is whole takes another's place."""
    part = folder.with_name("part")
    shutil.copytree(version, part)
    read_card(part).model_copy(update={"rule": folder.parent.name}).save(part)
    before = folder.rename(folder.with_name("replaced"))
    part.rename(folder)
    shutil.rmtree(before)


def run(
    recipe: Recipe, checks: int = CHECKS, replacements: int = REPLACEMENTS, clients: int = CLIENTS
) -> ReloadReport:
    """Replace rules of a server in a process of its own while it is asked."""
    method = recipe.sharing_methods[0]
    names = rule_names(RULES)
    prompts = PromptBuilder.of(recipe)
    shortest, longest = TOKENS
    conversations: list[tuple[Message, ...]] = []
    for number in range(CONVERSATIONS):
        tokens = shortest + (longest - shortest) * number // (CONVERSATIONS - 1)
        conversations.append(conversation(prompts, tokens, 9000 + number))
    with (
        random_adapters(recipe, [method], RULES * VERSIONS, SCALE) as adapters,
        random_runs(recipe, RULES) as runs,
    ):
        drawn = list(adapters[method].values())
        versions: dict[str, list[Path]] = {}
        folders: dict[str, Path] = {}
        for number, rule in enumerate(names):
            versions[rule] = drawn[number * VERSIONS : (number + 1) * VERSIONS]
            folders[rule] = runs.root / recipe.name / rule / method
            put_in_place(versions[rule][0], folders[rule])
        logits = expected(recipe, versions, conversations)
        with (
            server_process(recipe, runs) as server,
            tqdm(total=checks, desc="reload", unit="check") as bar,
        ):
            reloading = Reloading(server.address, folders, versions, conversations, logits)
            reloading.run(checks, replacements, clients, bar)
            peak_mib = peak_of_processes_mib()
    outcomes = reloading.outcomes
    return ReloadReport(
        **origin(recipe, peak_mib),
        checks=checks,
        replacements=len(reloading.replacement_ms),
        rules=RULES,
        versions_a_rule=VERSIONS,
        clients=clients,
        errors=dict(reloading.errors),
        unjudged_rules=reloading.unjudged_rules,
        right=outcomes["right"],
        wrong_version=outcomes["wrong_version"],
        no_version=outcomes["no_version"],
        told_nothing=outcomes["told_nothing"],
        replacement_ms=Spread.of(reloading.replacement_ms, with_p95=True),
    )


def table(report: ReloadReport) -> str:
    """The report as text."""
    errors = ", ".join(f"{count} {problem}" for problem, count in report.errors.items()) or "none"
    verdicts = report.right + report.wrong_version + report.no_version + report.told_nothing
    lines = [
        f"{report.replacements} replacements of {report.rules} rules during {report.checks:,} "
        f"checks by {report.clients} clients",
        f"checks without an answer      {errors}",
        f"rules without a verdict       {report.unjudged_rules:,}",
        f"verdicts                      {verdicts:,}",
        f"  of a version then served    {report.right:,}",
        f"  of another version          {report.wrong_version:,}",
        f"  of no version               {report.no_version:,}",
        f"  not told apart              {report.told_nothing:,}",
        f"a replacement                 {report.replacement_ms.text()} ms",
    ]
    lines += notes(
        "Of no version: a mix of two, or keys and values of other weights. Not told apart: a "
        "version that was served and one that was not say nearly the same of the conversation."
    )
    return "\n".join([*lines, f"{source(report)}; random aLoRAs."])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--checks", CHECKS, "checks")
    add_count(parser, "--replacements", REPLACEMENTS, "how many times a rule is replaced meanwhile")
    parser.add_argument("--quick", action="store_true", help="400 checks, 10 replacements")


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and print the table."""
    checks, replacements = arguments.checks, arguments.replacements
    if arguments.quick:
        checks, replacements = 400, 10
    if replacements > checks:
        remedy = "Ask for at least as many checks"
        raise GuardError("more replacements than checks", got=replacements, remedy=remedy)
    report = run(load_recipe(arguments.model), checks, replacements)
    publish(report, arguments.runs / "reload_bench.json", table)
