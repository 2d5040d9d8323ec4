"""What replicas cost and keep: a check beside one server's, conversations that grow, replicas that
are killed, rules that are replaced. Each is measured on the real server over HTTP.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from serve.bench.cluster.load import LoadOutcomes, UndisturbedCheck, expected_of, under_load
from serve.bench.cluster.servers import MeasuredServer, replica_processes, wait_for_all
from serve.bench.cluster.words import VIOLATES
from serve.bench.http.overhead import as_body, judged_answer
from serve.bench.http.reload.versions import SCALE, put_in_place
from serve.bench.http.server import rule_names
from serve.bench.workload.prompts import conversation
from serve.bench.workload.random_adapter import random_adapters
from serve.cluster.pool import REPLICA_HEADER

RULES = 8
TOKENS = 300  # of a conversation that is sent again and again under load
CONVERSATIONS = 24
WARM_UP = 3  # checks by each server that do not count
SENDERS = 4
BEFORE_KILL_S = 0.3
# The difference in p_violation that tells two versions of a rule apart. Rounding in batches of
# other sizes is at most a quarter of it.
TOLD_APART = 0.05
FEWEST_APART = 4  # texts


@dataclass(frozen=True)
class CheckCosts:
    """What a server's checks took and how many tokens they computed.

    `first`: checks of new conversations. `again`: of the same ones once more.
    """

    first_ms: list[float] = field(default_factory=list)
    again_ms: list[float] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    again_tokens: list[int] = field(default_factory=list)


def check_costs(
    clients: Sequence[httpx.Client], recipe: Recipe, rules: int, tokens: int, repeats: int
) -> list[CheckCosts]:
    """The costs of checks by each server, asked in turns after a few checks that do not count."""
    prompts = PromptBuilder.of(recipe)
    names = rule_names(rules)
    costs = [CheckCosts() for _ in clients]
    for number in range(-WARM_UP, repeats):
        for server, client in enumerate(clients):
            seed = 9000 + len(clients) * (number + WARM_UP) + server
            body = as_body(conversation(prompts, tokens, seed), names)
            first_ms, first_tokens = _check_cost(client, body)
            again_ms, again_tokens = _check_cost(client, body)
            if number >= 0:
                costs[server].first_ms.append(first_ms)
                costs[server].again_ms.append(again_ms)
                costs[server].first_tokens.append(first_tokens)
                costs[server].again_tokens.append(again_tokens)
    return costs


def _check_cost(client: httpx.Client, body: dict[str, Any]) -> tuple[float, int]:
    """Send a check. Returns its milliseconds and computed tokens."""
    began = time.perf_counter()
    response = client.post("/v1/check", json=body)
    took_ms = 1000 * (time.perf_counter() - began)
    return took_ms, _computed_tokens(response)


def _computed_tokens(response: httpx.Response) -> int:
    tokens: int = judged_answer(response)["usage"]["computed_tokens"]
    return tokens


@dataclass(frozen=True)
class Affinity:
    """Checks of conversations that grew.

    `kept`: how many came to the replica of the check before. The lists hold the computed tokens of
    first and second checks, and of second checks that found nothing in the cache.
    """

    checks: int
    kept: int
    replicas: int
    first_computed: list[int]
    second_computed: list[int]
    second_anew: list[int]


def measure_affinity(
    client: httpx.Client, recipe: Recipe, rules: Sequence[str], conversations: int, turns: int
) -> Affinity:
    """Send conversations of `turns` checks, each two messages longer, in a random order.

    A conversation's second check is sent once more under a salt of its own, for which everything
    is computed anew.
    """
    prompts = PromptBuilder.of(recipe)
    texts = [list(conversation(prompts, 600, 7000 + number)) for number in range(conversations)]
    order = [number for number in range(conversations) for _ in range(turns)]
    random.Random(0).shuffle(order)
    replica_of: dict[int, str] = {}
    length = dict.fromkeys(range(conversations), 0)
    kept: list[bool] = []
    computed: dict[int, list[int]] = defaultdict(list)  # by a check's number in its conversation
    second_anew: list[int] = []
    for number in order:
        messages = texts[number][: 3 + 2 * length[number]]
        length[number] += 1
        body = as_body(messages, rules)
        response = client.post("/v1/check", json=body)
        computed[length[number]].append(_computed_tokens(response))
        replica = response.headers[REPLICA_HEADER]
        if number in replica_of:
            kept.append(replica == replica_of[number])
        replica_of[number] = replica
        if length[number] == 2:
            salted = client.post("/v1/check", json=body | {"cache_salt": "anew"})
            second_anew.append(_computed_tokens(salted))
    replicas = len(set(replica_of.values()))
    return Affinity(len(kept), sum(kept), replicas, computed[1], computed[2], second_anew)


def checks_of(
    server: MeasuredServer, recipe: Recipe, rules: Sequence[str]
) -> list[UndisturbedCheck]:
    """The checks to send under load, and what the server says of them while nothing happens."""
    prompts = PromptBuilder.of(recipe)
    texts: list[Sequence[Message]] = []
    for number in range(CONVERSATIONS):
        texts.append(conversation(prompts, TOKENS, 5000 + number))
    return expected_of(server.client, texts, rules)


def word_checks_of(server: MeasuredServer) -> list[UndisturbedCheck]:
    """As `checks_of`, for an engine without a model: every second message violates all rules."""
    texts: list[Sequence[Message]] = []
    for number in range(CONVERSATIONS):
        word = VIOLATES if number % 2 else "agrees"
        texts.append([Message("user", f"conversation {number} {word}")])
    return expected_of(server.client, texts, server.rules)


def kill_replicas_under_load(
    server: MeasuredServer,
    checks: Sequence[UndisturbedCheck],
    kills: int,
    on_event: Callable[[], Any],
) -> tuple[LoadOutcomes, list[float]]:
    """Kill replicas, one after the other, while checks are sent.

    Returns what came of the checks, and for each kill the milliseconds until all were back.
    """
    back_ms: list[float] = []
    generator = random.Random(0)
    with under_load(server.client, checks, SENDERS) as outcomes:
        for _ in range(kills):
            time.sleep(BEFORE_KILL_S)
            victim = generator.choice(replica_processes())
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            wait_for_all(server.client, without=victim)
            back_ms.append(1000 * (time.monotonic() - began))
            on_event()
    return outcomes, back_ms


@dataclass(frozen=True)
class RuleChanges:
    """What became of checks and answers while a rule was replaced."""

    outcomes: LoadOutcomes
    change_ms: list[float]
    answers: int  # each of many texts at once, by the rule that was replaced
    mixed: int  # answers by two versions
    late: int  # answers by the old version, asked for after the new one was served


def replace_rule_under_load(
    server: MeasuredServer, recipe: Recipe, changes: int, on_event: Callable[[], Any]
) -> RuleChanges:
    """Replace a rule's weights to and fro while checks are sent.

    Watches by which version each answer was given.
    """
    method = recipe.sharing_methods[0]
    rule = server.rules[0]
    folder = server.runs.adapter(recipe.name, rule, method)
    checks = checks_of(server, recipe, server.rules[1:])
    prompts = PromptBuilder.of(recipe)
    words = [" ".join(m.content for m in conversation(prompts, 40, seed)) for seed in range(16)]
    request = {"input": words, "model": rule}
    change_ms: list[float] = []
    answers = mixed = late = 0
    with contextlib.ExitStack() as until_measured:
        made = until_measured.enter_context(random_adapters(recipe, [method], 2, SCALE))
        versions = list(made[method].values())
        scores: list[list[float]] = []
        for version in versions:
            _serve(server, rule, version, folder)
            scores.append(_scores(server.client, request, rule))
        check_told_apart(*scores)
        outcomes = until_measured.enter_context(under_load(server.client, checks, SENDERS))
        for number in range(changes):
            new = number % 2
            change_ms.append(_serve(server, rule, versions[new], folder))
            for _ in range(3):
                versions_given = _versions(_scores(server.client, request, rule), scores)
                answers += 1
                mixed += len(versions_given) > 1
                late += versions_given == {1 - new}
            on_event()
    return RuleChanges(outcomes, change_ms, answers, mixed, late)


def _serve(server: MeasuredServer, rule: str, version: Path, folder: Path) -> float:
    """Put a version in the place of a rule's weights. Returns how long serving it took, in ms."""
    put_in_place(version, folder)
    began = time.perf_counter()
    server.client.post(f"/admin/rules/{rule}").raise_for_status()
    return 1000 * (time.perf_counter() - began)


def _scores(client: httpx.Client, request: dict[str, Any], rule: str) -> list[float]:
    answer = client.post("/v1/moderations", json=request).raise_for_status().json()
    return [result["category_scores"][rule] for result in answer["results"]]


def check_told_apart(first: Sequence[float], second: Sequence[float]) -> None:
    """Raise GuardError if two versions of a rule score nearly all texts alike.

    No answer would then tell by which of them it was given.
    """
    pairs = zip(first, second, strict=True)
    apart = sum(abs(score - new_score) > TOLD_APART for score, new_score in pairs)
    if apart < FEWEST_APART:
        got = f"{apart} of {len(first)} texts, fewer than {FEWEST_APART}"
        remedy = "Random weights of this SCALE do not move this base enough: raise it"
        raise GuardError("two versions of a rule say nearly the same", got=got, remedy=remedy)


def _versions(answered_scores: Sequence[float], scores: Sequence[Sequence[float]]) -> set[int]:
    """The versions that judged the texts, as far as the versions differ on a text."""
    versions = set()
    for score, first, second in zip(answered_scores, scores[0], scores[1], strict=True):
        if abs(first - second) > TOLD_APART:
            versions.add(int(abs(score - second) < abs(score - first)))
    return versions
