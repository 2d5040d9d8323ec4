"""The base's last lesson: it is trained together with one aLoRA a rule, on the rules' own questions
(train/tiny/joint.py).

    python -m data.build --rule all --train 2400 --seed 11 --runs runs/joint     # rows that no adapter is trained or tested on
    python -m train.tiny.build_joint --rows runs/joint
    cp runs/joint/base/* recipes/models/tiny/

Begins with the adapters of `make train RULE=all`, seed 0, and throws them away: the base is another
one then, and all its adapters have to be trained again. Resumes where it was interrupted. A
finished run that is repeated trains nothing and writes the checkpoint and its card again, with the
linear probe of that checkpoint if the work folder holds one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from guard.errors import GuardError, exits_cleanly
from guard.layout import ROOT, Runs
from guard.method import PEFT_WEIGHTS
from train.tiny.build import OUT, PROBE


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows",
        type=Path,
        required=True,
        help="the --runs folder of data.build with another --seed than the adapters' own",
    )
    parser.add_argument("--rules", default="all", help="rules with a phrase book (default all)")
    parser.add_argument(
        "--runs",
        type=Path,
        default=Runs().root,
        help="where the adapters to begin with are (default runs/)",
    )
    parser.add_argument(
        "--base",
        type=Path,
        default=OUT,
        help="go on from this checkpoint (default recipes/models/tiny)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "joint" / "base",
        help="where the new one goes, not where --base is (default runs/joint/base)",
    )
    parser.add_argument(
        "--steps", type=int, default=1200, help="of two rows a rule (default %(default)s)"
    )
    parser.add_argument(
        "--lr", type=float, default=3e-4, help="the base's peak learning rate (default %(default)s)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "runs" / "joint",
        help=f"where the resumable state goes, and {PROBE} may lie (default runs/joint)",
    )
    return parser.parse_args()


@exits_cleanly
def main() -> None:
    """Adapters and rows, training, the base alone, its card."""
    args = arguments()
    if args.out.resolve() == args.base.resolve():
        raise GuardError(
            "the new base would take the place of the one it goes on from",
            got=str(args.out),
            remedy="Choose another --out",
        )
    from data.generator.library import rules_with_phrases
    from guard.prompt import PromptBuilder
    from guard.recipe import load_recipe
    from guard.rule import load_rule, rule_names
    from train.examples import load
    from train.tiny.export import export_joint
    from train.tiny.joint import ROWS_A_RULE, Course, train, validate

    recipe = load_recipe("tiny").model_copy(update={"base": str(args.base)})
    written = {path.stem for path in rules_with_phrases()}
    names = [name for name in rule_names(args.rules) if name in written]
    folders = [Runs(args.runs).adapter(recipe.name, name, "alora") for name in names]
    if missing := [folder for folder in folders if not (folder / PEFT_WEIGHTS).is_file()]:
        raise GuardError(
            "no adapter to begin with", where=missing[0], remedy="Run `make train RULE=all`"
        )
    builder = PromptBuilder.from_base(recipe.base_path)
    rows = [load(Runs(args.rows).data(name), load_rule(name), recipe, builder) for name in names]
    course = Course(args.base, folders, rows, builder, args.steps, args.lr)
    args.work.mkdir(parents=True, exist_ok=True)
    joint = train(course, args.work / "checkpoint.pt")
    scores = dict(zip(names, validate(joint, course), strict=True))
    for name, score in scores.items():
        print(f"{name:28}{score:.3f}")
    told: dict[str, Any] = {
        "steps": args.steps,
        "rules": names,
        "rows_a_step": ROWS_A_RULE * len(names),
        "peak_learning_rate": args.lr,
        "validation_auroc": {name: round(score, 4) for name, score in scores.items()},
    }
    export_joint(joint.take_out(), args.base, args.out, told, args.work / PROBE)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
