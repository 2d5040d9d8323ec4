"""`make base CORPUS=…`: rebuild the embedded tiny base from its teacher and corpora, in place of
the committed one.

Adapters of the old base do not fit the new one and have to be trained again; `git checkout
recipes/models/tiny` brings the old one back.

Goes on from the weights of `--base`, or begins anew. Takes hours on two cores; a GPU is used where
there is one, which nobody has tried yet. The committed base then had one more lesson: `python -m
train.tiny.build_joint`.

A finished run that is repeated trains nothing and writes the checkpoint and its card again, with
the linear probe of that checkpoint if the work folder holds one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from guard.errors import GuardError, exits_cleanly
from guard.layout import ROOT

if TYPE_CHECKING:
    from train.tiny.distil import Curriculum
    from train.tiny.lessons.corpus import CorpusSource
    from train.tiny.vocabulary import Vocabulary

OUT = ROOT / "recipes" / "models" / "tiny"
WORK = ROOT / "runs" / "base"
PROBE = "probe.json"
CHECKPOINT = "checkpoint.pt"
NO_RULES = "none"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    corpus = "JSON-lines files of {messages} (globs, .gz) and hub:<data set>, separated by commas"
    add("--corpus", default="", help=corpus)
    base = "go on from this checkpoint, with its vocabulary (default: begin anew)"
    add("--base", type=Path, help=base)
    rules = "rules whose phrase books conversations are written from, or none (default all)"
    add("--rules", default="all", help=rules)
    steps = "optimizer steps of about 4,000 tokens (default %(default)s)"
    add("--steps", type=int, default=3600, help=steps)
    add("--lr", type=float, default=1.5e-3, help="peak learning rate (default %(default)s)")
    vocabulary = "token ids in all (default %(default)s)"
    add("--vocabulary", type=int, default=16_384, help=vocabulary)
    out = "where the checkpoint goes (default recipes/models/tiny)"
    add("--out", type=Path, default=OUT, help=out)
    work = f"where the resumable state goes, and {PROBE} may lie (default runs/base)"
    add("--work", type=Path, default=WORK, help=work)
    add("--note", default="", help="a sentence on the run for the model card")
    return parser.parse_args()


@exits_cleanly
def main() -> None:
    """Corpus, vocabulary, lessons, distillation, checkpoint, card."""
    args = arguments()
    if not args.corpus.strip():
        raise GuardError(
            "no corpus given", remedy="Run `make base CORPUS='path/*.jsonl.gz,hub:org/name'`"
        )
    refuse_own_origin(args.out, args.base)
    from train.tiny.distil import distil
    from train.tiny.export import TrainingRecord, export
    from train.tiny.lessons.corpus import read_corpus

    rules = rules_with_books(args.rules)
    sources = read_corpus(args.corpus)
    curriculum = _curriculum(args, sources, rules)
    args.work.mkdir(parents=True, exist_ok=True)
    distilled = distil(curriculum, args.work / CHECKPOINT)
    record = TrainingRecord(sources, args.lr, curriculum.phrasings, args.note, args.base)
    tokenizer = curriculum.vocabulary.tokenizer
    export(distilled, tokenizer, args.out, record, args.work / PROBE)
    print(f"wrote {args.out}")


def refuse_own_origin(out: Path, base: Path | None) -> None:
    """Raise GuardError where a base would be written in place of the one that it goes on from: the
    same command could then not be resumed, or found done.
    """
    if base is not None and out.resolve() == base.resolve():
        raise GuardError(
            "the new base would take the place of the one it goes on from",
            got=str(out),
            remedy="Choose another --out",
        )


def rules_with_books(selection: str) -> list[str]:
    """The selected rules that have a phrase book; none for `none`."""
    from data.generator.library import rules_with_phrases
    from guard.rule import rule_names

    if selection == NO_RULES:
        return []
    written = {path.stem for path in rules_with_phrases()}
    return [name for name in rule_names(selection) if name in written]


def _curriculum(
    args: argparse.Namespace, sources: Sequence[CorpusSource], rules: Sequence[str]
) -> Curriculum:
    from guard.prompt.decoder import PromptBuilder
    from guard.rule import load_rule
    from train.tiny.distil import Curriculum
    from train.tiny.export import phrasings_of
    from train.tiny.lessons.lesson import Lessons
    from train.tiny.lessons.rule_talk import RuleTalk
    from train.tiny.teacher import Teacher

    vocabulary = _vocabulary(args, sources)
    pieces = sorted(vocabulary.tokenizer.get_vocab())
    words = [piece for piece in pieces if re.fullmatch(r"[a-z]{3,}", piece)]
    rule_talk = None
    if rules:
        rule_talk = RuleTalk([load_rule(name) for name in rules])
    lessons = Lessons(sources, words, Teacher(), rule_talk=rule_talk)
    builder = PromptBuilder(vocabulary.tokenizer.backend_tokenizer)
    phrasings = phrasings_of(rules)
    return Curriculum(vocabulary, lessons, builder, args.steps, args.lr, args.base, phrasings)


def _vocabulary(args: argparse.Namespace, sources: Sequence[CorpusSource]) -> Vocabulary:
    """The vocabulary of the base to go on from, or one cut to the corpora."""
    from train.tiny.teacher import FOLDER
    from train.tiny.vocabulary import cut_vocabulary, vocabulary_of

    if args.base:
        return vocabulary_of(args.base)
    texts: set[str] = set()
    for source in sources:
        texts.update(source.texts)
    return cut_vocabulary(FOLDER, sorted(texts), args.vocabulary)


if __name__ == "__main__":
    main()
