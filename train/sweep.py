"""Settings of a rule's aLoRA against each other: layers, ranks, learning rates, seeds. What has the
same layers is trained together on the same cached prefixes, and kept below `runs/sweeps` as a
study's weights are: never served. The table is of the validation split.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from guard.errors import exits_cleanly
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict, load
from guard.home import HOME, own_or_shipped
from guard.layout import Runs, is_current
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from guard.rule import RULES, RuleTurn, load_rule
from guard.weights.card import read_card
from train.job import Job
from train.run import JobAndRows, check, claim_and_train, outdated_jobs, see_one_gpu

GRIDS = HOME / "recipes" / "sweeps"
HEAD = ("settings", "seeds", "accuracy %", "by seed", "95 % by rows", "AUROC", "nll")
RULE_OFF = ("---",) * len(HEAD)
Values = Annotated[list[Any], Field(min_length=1)]


class SweepGrid(Strict):
    """What to try, each value a list: every combination, with every seed. `lora` and `trainer` are
    the recipe's arguments, `layers` and `rule_turn` its keys; an empty list: as in the recipe.
    """

    layers: list[int] = Field(default_factory=list)
    rule_turn: list[RuleTurn] = Field(default_factory=list)
    lora: dict[str, Values] = Field(default_factory=dict)
    trainer: dict[str, Values] = Field(default_factory=dict)
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)

    def combinations(self) -> Iterator[Combination]:
        """Every combination, the last argument's values in turn first."""
        values: dict[tuple[str, str], list[Any]] = {}
        if self.layers:
            values["", "layers"] = self.layers
        if self.rule_turn:
            values["", "rule_turn"] = list(self.rule_turn)
        for section, arguments in (("lora", self.lora), ("trainer", self.trainer)):
            for name, stated in arguments.items():
                values[section, name] = stated
        for chosen in itertools.product(*values.values()):
            yield Combination(dict(zip(values, chosen, strict=True)))


@dataclass(frozen=True)
class Combination:
    """Settings to try, by section of the recipe's method ("": of the recipe) and argument."""

    settings: Mapping[tuple[str, str], Any]

    @property
    def name(self) -> str:
        """`r=8 learning_rate=0.001`."""
        stated = [f"{name}={value}" for (_, name), value in self.settings.items()]
        return " ".join(stated) or "as in the recipe"

    def recipe(self, recipe: Recipe) -> Recipe:
        """`recipe` with these settings for the aLoRA. `lora_alpha` keeps its ratio to `r` unless it
        is one of them.
        """
        sections: dict[str, dict[str, Any]] = {"": {}, "lora": {}, "trainer": {}}
        for (section, name), value in self.settings.items():
            sections[section][name] = value
        method = recipe.settings(recipe.sharing_method)
        lora = method.lora | sections["lora"]
        is_scaled = {"r", "lora_alpha"} <= method.lora.keys()
        if is_scaled and "r" in sections["lora"] and "lora_alpha" not in sections["lora"]:
            lora["lora_alpha"] = method.lora["lora_alpha"] * lora["r"] / method.lora["r"]
        trainer = method.trainer | sections["trainer"]
        changed = method.model_copy(update={"lora": lora, "trainer": trainer})
        methods = recipe.methods | {recipe.sharing_method: changed}
        return recipe.model_copy(update={"methods": methods} | sections[""])


class SweepRuns(Runs):
    """The layout of `runs/`, with the weights of the combination `label` apart from the served."""

    def adapter(self, model: str, rule: str, method: str, seed: int = 0) -> Path:
        return Runs(self.root / "sweeps" / self.label).adapter(model, rule, method, seed)


def sweep(
    rule_name: str,
    grid: Path,
    recipe: Recipe,
    *,
    runs: Runs | None = None,
    force: bool = False,
    rules: Path = RULES,
) -> Path:
    """Train what is not trained yet, write the table and return its file. Raises GuardError for bad
    input first; at the end, with the table written, one that names what was not trained.
    """
    runs = runs or Runs()
    jobs = _jobs(rule_name, load(grid, SweepGrid), recipe, runs, rules)
    for job in jobs:
        check([job])
    work: list[JobAndRows] = []
    failed: list[str] = []
    for same_prompts in _by_rule_turn(jobs):
        outdated, without_threshold = outdated_jobs(same_prompts, force=force)
        work += outdated
        failed += without_threshold
    file = runs.root / "sweeps" / f"{recipe.name}-{rule_name}-{grid.stem}.md"
    try:
        claim_and_train(work, failed, force=force)
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as part:
            part.write_text(table(jobs) + "\n", encoding="utf-8")
    return file


def _jobs(rule_name: str, grid: SweepGrid, recipe: Recipe, runs: Runs, rules: Path) -> list[Job]:
    """One job for each combination and seed. The threshold is balanced, as a study's is."""
    rule = load_rule(rule_name, rules).model_copy(update={"max_fpr": None})
    builder, method = PromptBuilder.of(recipe), recipe.sharing_method
    jobs: list[Job] = []
    for combination in grid.combinations():
        changed, layout = combination.recipe(recipe), SweepRuns(runs.root, combination.name)
        for seed in grid.seeds:
            jobs.append(Job(rule, changed, method, seed, builder, layout, of_study=True))
    return jobs


def _by_rule_turn(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs whose rows are the same prompts."""
    by_turn: dict[RuleTurn, list[Job]] = {}
    for job in jobs:
        by_turn.setdefault(job.recipe.rule_turn, []).append(job)
    return list(by_turn.values())


def table(jobs: Sequence[Job]) -> str:
    """Markdown: a line for each combination, means over its seeds that are trained."""
    seeds: dict[str, list[Job]] = {}
    for job in jobs:
        seeds.setdefault(job.runs.label, []).append(job)
    rows = [HEAD, RULE_OFF, *(_row(name, of_name) for name, of_name in seeds.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _row(name: str, jobs: Sequence[Job]) -> list[str]:
    trained = [job for job in jobs if is_current(job.folder, job.inputs)]
    cells = [name, f"{len(trained)} of {len(jobs)}"]
    if not trained:
        return cells + ["-"] * (len(HEAD) - len(cells))
    measured = [read_card(job.folder).metrics["validation"] for job in trained]
    accuracy = [100 * metrics["accuracy"] for metrics in measured]
    low, high = 100 * np.mean([metrics["accuracy_ci95"] for metrics in measured], axis=0)
    cells += [f"{np.mean(accuracy):.1f}", f"{min(accuracy):.1f} to {max(accuracy):.1f}"]
    cells.append(f"{low:.1f} to {high:.1f}")
    return cells + [f"{np.mean([it[key] for it in measured]):.3f}" for key in ("auroc", "nll")]


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rule", required=True, help="a rule in recipes/rules")
    parser.add_argument("--model", default="tiny", help="a recipe in recipes/models")
    grid = "what to try (default: recipes/sweeps/rank.yaml)"
    parser.add_argument("--grid", default=str(own_or_shipped(GRIDS / "rank.yaml")), help=grid)
    parser.add_argument("--force", action="store_true", help="train again what was trained before")
    args = parser.parse_args()
    see_one_gpu(os.environ)
    file = sweep(args.rule, Path(args.grid), load_recipe(args.model), force=args.force)
    print(f"{file.read_text(encoding='utf-8')}\nwritten to {file}")


if __name__ == "__main__":
    main()
