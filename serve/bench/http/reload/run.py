"""Rules replaced while they are checked: is any answer lost, or of a version that was not served?

Every rule has VERSIONS of random weights. An engine of its own first says which logit each of them
gives to a conversation, so an answer shows by which weights it was made. Then clients check without
a pause. After a fixed number of answers the weights of the next rule are replaced, as training
would do it, and served by `POST /admin/rules/{rule}`. An answer must be that of a version that was
served at some time between its request and its arrival. An answer that is near no version was made
by a mix, or read keys and values of other weights. Knows nothing of speed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.layout import Runs
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count
from serve.bench.http.reload.measure import Reloading
from serve.bench.http.reload.report import ReloadReport, table
from serve.bench.http.reload.versions import SCALE, expected_logits, put_in_place
from serve.bench.http.server import random_runs, rule_names, server_process
from serve.bench.report import Spread, origin, peak_of_processes_mib, publish
from serve.bench.workload.prompts import conversation
from serve.bench.workload.random_adapter import random_adapters

CHECKS, REPLACEMENTS = 20_000, 200
RULES, VERSIONS, CLIENTS = 8, 4, 8
CONVERSATIONS, TOKENS = 24, (100, 400)


def run(
    recipe: Recipe, checks: int = CHECKS, replacements: int = REPLACEMENTS, clients: int = CLIENTS
) -> ReloadReport:
    """Replace rules of a server in a process of its own while it is asked."""
    method = recipe.sharing_methods[0]
    conversations = _conversations(recipe)
    with (
        random_adapters(recipe, [method], RULES * VERSIONS, SCALE) as adapters,
        random_runs(recipe, RULES) as runs,
    ):
        versions = _versions_by_rule(list(adapters[method].values()))
        folders = _serve_first_versions(recipe, runs, method, versions)
        logits = expected_logits(recipe, versions, conversations)
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


def _conversations(recipe: Recipe) -> list[tuple[Message, ...]]:
    """Conversations of lengths at equal steps between those of TOKENS."""
    prompts = PromptBuilder.of(recipe)
    shortest, longest = TOKENS
    conversations: list[tuple[Message, ...]] = []
    for number in range(CONVERSATIONS):
        tokens = shortest + (longest - shortest) * number // (CONVERSATIONS - 1)
        conversations.append(conversation(prompts, tokens, 9000 + number))
    return conversations


def _versions_by_rule(adapters: list[Path]) -> dict[str, list[Path]]:
    versions: dict[str, list[Path]] = {}
    for number, rule in enumerate(rule_names(RULES)):
        versions[rule] = adapters[number * VERSIONS : (number + 1) * VERSIONS]
    return versions


def _serve_first_versions(
    recipe: Recipe, runs: Runs, method: str, versions: dict[str, list[Path]]
) -> dict[str, Path]:
    """Put each rule's first version where the server reads it. Returns these folders."""
    folders: dict[str, Path] = {}
    for rule, rule_versions in versions.items():
        folders[rule] = runs.root / recipe.name / rule / method
        put_in_place(rule_versions[0], folders[rule])
    return folders


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_count(parser, "--checks", CHECKS, "checks")
    add_count(parser, "--replacements", REPLACEMENTS, "number of replacements meanwhile")
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
