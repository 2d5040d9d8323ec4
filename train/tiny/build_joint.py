"""The base's last lesson: it is trained together with one aLoRA a rule, on the rules' own questions
(train/tiny/joint.py).

    # Rows that no adapter is trained or tested on:
    python -m data.build --rule all --train 2400 --seed 11 --runs runs/joint
    python -m train.tiny.build_joint --rows runs/joint
    cp runs/joint/base/* recipes/models/tiny/

Begins with the adapters of `make train RULE=all`, seed 0, and throws them away: the base is another
one then, and all its adapters have to be trained again. Resumes where it was interrupted. A
finished run that is repeated trains nothing and writes the checkpoint and its card again, with the
linear probe of that checkpoint if the work folder holds one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from guard.errors import GuardError, exits_cleanly
from guard.layout import ROOT, Runs
from guard.method import PEFT_WEIGHTS
from train.tiny.build import CHECKPOINT, OUT, PROBE, refuse_own_origin, rules_with_books

if TYPE_CHECKING:
    from train.tiny.joint import Course

WORK = ROOT / "runs" / "joint"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    rows = "the --runs folder of data.build with another --seed than the adapters' own"
    add("--rows", type=Path, required=True, help=rows)
    add("--rules", default="all", help="rules with a phrase book (default all)")
    runs = "where the adapters to begin with are (default runs/)"
    add("--runs", type=Path, default=Runs().root, help=runs)
    base = "go on from this checkpoint (default recipes/models/tiny)"
    add("--base", type=Path, default=OUT, help=base)
    out = "where the new one goes, not where --base is (default runs/joint/base)"
    add("--out", type=Path, default=WORK / "base", help=out)
    add(
        "--steps",
        type=int,
        default=1200,
        help="steps; each reads two rows per rule (default %(default)s)",
    )
    lr = "the base's peak learning rate (default %(default)s)"
    add("--lr", type=float, default=3e-4, help=lr)
    work = f"where the resumable state goes, and {PROBE} may lie (default runs/joint)"
    add("--work", type=Path, default=WORK, help=work)
    return parser.parse_args()


@exits_cleanly
def main() -> None:
    """Adapters and rows, training, the base alone, its card."""
    args = arguments()
    refuse_own_origin(args.out, args.base)
    from train.tiny.export import export_joint
    from train.tiny.joint import ROWS_A_RULE, train, validate

    names = rules_with_books(args.rules)
    course = _course(args, names)
    args.work.mkdir(parents=True, exist_ok=True)
    joint = train(course, args.work / CHECKPOINT)
    aurocs = dict(zip(names, validate(joint, course), strict=True))
    for name, auroc in aurocs.items():
        print(f"{name:28}{auroc:.3f}")
    record = {
        "steps": args.steps,
        "rules": names,
        "rows_a_step": ROWS_A_RULE * len(names),
        "peak_learning_rate": args.lr,
        "validation_auroc": {name: round(auroc, 4) for name, auroc in aurocs.items()},
    }
    probe = args.work / PROBE
    export_joint(joint.take_out(), args.base, args.out, record, course.phrasings, probe)
    print(f"wrote {args.out}")


def _course(args: argparse.Namespace, names: Sequence[str]) -> Course:
    """The adapters to begin with and the rows to train on. Raises GuardError naming an adapter that
    is missing.
    """
    from guard.prompt.decoder import PromptBuilder
    from guard.recipe import load_recipe
    from guard.rule import load_rule
    from train.examples import load
    from train.tiny.export import phrasings_of
    from train.tiny.joint import Course

    recipe = load_recipe("tiny").model_copy(update={"base": str(args.base)})
    method = recipe.sharing_method
    folders = [Runs(args.runs).adapter(recipe.name, name, method) for name in names]
    for folder in folders:
        if not (folder / PEFT_WEIGHTS).is_file():
            remedy = "Run `make train RULE=all`"
            raise GuardError("no adapter to begin with", where=folder, remedy=remedy)
    builder = PromptBuilder.from_base(recipe.base_path)
    data = Runs(args.rows)
    rows = [load(data.data(name), load_rule(name), recipe, builder) for name in names]
    phrasings = phrasings_of(names)
    return Course(args.base, folders, rows, builder, args.steps, args.lr, phrasings)


if __name__ == "__main__":
    main()
