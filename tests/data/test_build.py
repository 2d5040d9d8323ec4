import json
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import data.build as command
from data import manifest, sources
from data.build import build, code_files
from data.generator.generate import Counts
from data.generator.library import BACKGROUND, PHRASES
from data.new_rule import WHO
from data.rows import read_rows
from data.sources import SOURCES
from guard.conversation.example import GENERATOR, SPLITS, Example, read_examples, write_examples
from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import split_files
from guard.rule import RULES, load_rule, rule_names

pytestmark = pytest.mark.slow

SMALL = Counts(train=16, validation=8, test=8)
# The rules that come with the project; one that somebody adds may be worded as they like.
SHIPPED = tuple(sorted(path.stem for path in PHRASES.glob("*.yaml") if path.stem != BACKGROUND))
SOME = ("medical_advice", "pii_leak", "refund_promise")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_rule_is_complete_and_its_text_is_short(name: str) -> None:
    rule = load_rule(name)
    assert 5 <= len(rule.text().split()) <= 15
    assert 15 <= len(rule.policy.split()) <= 75
    assert rule.text().startswith(f"{WHO[rule.judged]} must not ")
    assert {example.violates for example in rule.examples} == {True, False}


def test_an_unknown_rule_gives_the_nearest_name() -> None:
    with pytest.raises(GuardError, match="Did you mean 'medical_advice'"):
        load_rule("medical_advise")


def test_a_build_writes_splits_and_manifest_and_the_same_bytes_again(tmp_path: Path) -> None:
    rule = load_rule("refund_promise")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        assert build(rule, GENERATOR, SMALL, 0, "keep", folder)
    for name in (*(f"{split}.jsonl" for split in SPLITS), "manifest.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    assert [row["rows"] for row in manifest["counts"]] == [18, 4, 4, 4, 4]  # two with a long turn
    assert len(read_examples(folders[0] / "test.jsonl")) == 8


def test_a_build_is_not_redone_until_an_input_changes_or_a_file_is_gone(tmp_path: Path) -> None:
    rule = load_rule("refund_promise")
    assert build(rule, GENERATOR, SMALL, 0, "keep", tmp_path)
    assert not build(rule, GENERATOR, SMALL, 0, "keep", tmp_path)
    assert build(rule, GENERATOR, SMALL, 1, "keep", tmp_path)
    assert build(rule, GENERATOR, SMALL, 1, "keep", tmp_path, force=True)
    assert build(
        rule.model_copy(update={"policy": rule.policy + " Always."}),
        GENERATOR,
        SMALL,
        1,
        "keep",
        tmp_path,
    )
    for name in ("train.jsonl", "manifest.json"):
        (tmp_path / name).unlink()
        assert build(rule, GENERATOR, SMALL, 1, "keep", tmp_path)


def _own(tmp_path: Path, planted: bool) -> str:
    rng = random.Random(0)
    rows: list[dict[str, object]] = []
    for number in range(48):
        text = " ".join("".join(rng.choices("abcdefghij", k=4)) for _ in range(12))
        rows.append({"text": text, "label": number % 2, "split": SPLITS[number % 6 // 2]})
    if planted:
        rows[4]["text"] = rows[0]["text"]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_own_data_are_built_and_built_again_when_the_file_changes(tmp_path: Path) -> None:
    source, folder, rule = (
        _own(tmp_path, planted=False),
        tmp_path / "out",
        load_rule("medical_advice"),
    )
    assert build(rule, source, SMALL, 0, "keep", folder)
    assert not build(rule, source, SMALL, 0, "keep", folder)
    with Path(source).open("a") as file:
        file.write(
            json.dumps(
                {"text": "one more row that nobody has seen before", "label": 1, "split": "train"}
            )
            + "\n"
        )
    assert build(rule, source, SMALL, 0, "keep", folder)


def test_a_planted_near_duplicate_stops_the_build_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(GuardError, match="near duplicates across splits"):
        build(
            load_rule("medical_advice"),
            _own(tmp_path, planted=True),
            SMALL,
            0,
            "keep",
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()


def test_a_build_that_is_interrupted_while_it_writes_leaves_the_old_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, written = load_rule("refund_promise"), iter(range(2))
    build(rule, GENERATOR, SMALL, 0, "keep", tmp_path)

    def interrupted(path: Path, examples: list[Example]) -> str:
        if next(written, None) is None:
            raise KeyboardInterrupt
        return write_examples(path, examples)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(command, "write_examples", interrupted)
        build(rule, GENERATOR, SMALL, 1, "keep", tmp_path)
    assert not build(rule, GENERATOR, SMALL, 0, "keep", tmp_path)


def test_a_build_that_is_interrupted_while_it_renames_leaves_nothing_that_passes_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, replace = load_rule("refund_promise"), Path.replace
    build(rule, GENERATOR, SMALL, 0, "keep", tmp_path)

    def interrupted(path: Path, target: Path) -> Path:
        if target == tmp_path / "validation.jsonl":
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", interrupted)
        build(rule, GENERATOR, SMALL, 1, "keep", tmp_path)
    with pytest.raises(GuardError, match=r"no such file"):
        split_files(tmp_path)
    assert build(rule, GENERATOR, SMALL, 0, "keep", tmp_path)


def test_a_bad_new_source_leaves_the_old_data_set_current(tmp_path: Path) -> None:
    rule, folder = load_rule("medical_advice"), tmp_path / "out"
    build(rule, GENERATOR, SMALL, 0, "keep", folder)
    with pytest.raises(GuardError, match="near duplicates"):
        build(rule, _own(tmp_path, planted=True), SMALL, 0, "keep", folder)
    assert not build(rule, GENERATOR, SMALL, 0, "keep", folder)
    source = _own(tmp_path, planted=False)
    with Path(source).open("a") as file:
        file.write('{"text": "a", "label": 1, "split": "test", "meta": {"note": "\\ud83d"}}\n')
    with pytest.raises(GuardError, match=r"own.jsonl:49: half of a surrogate pair"):
        build(rule, source, SMALL, 0, "keep", folder)
    assert not build(rule, GENERATOR, SMALL, 0, "keep", folder)


def test_own_rows_that_are_too_few_for_the_rule_s_rate_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """As training would. Of generated rows there are as many as the command says."""
    own, folder = _own(tmp_path, planted=False), tmp_path / "out"
    rule = load_rule("medical_advice")
    validation = [row.fields for row in read_rows(own) if row.fields["split"] == "validation"]
    allowed = sum(row["label"] == 0 for row in validation)
    assert allowed > 1
    low = rule.model_copy(update={"max_fpr": 0.9 / allowed})
    told = (
        rf"own\.jsonl: too few allowed.*{allowed} rows.*Have at least {allowed + 1}.*leave it out"
    )
    with pytest.raises(GuardError, match=told):
        build(low, own, SMALL, 0, "keep", folder)
    assert not folder.exists()
    build(low, f"generator+{own}", SMALL, 0, "keep", folder)  # beside 4 generated ones
    too_low = rule.model_copy(update={"max_fpr": 0.9 / (allowed + 4)})
    with pytest.raises(GuardError, match=f"too few allowed.*{allowed + 4} rows"):
        build(too_low, f"generator+{own}", SMALL, 0, "keep", folder)
    build(too_low, GENERATOR, SMALL, 0, "keep", folder)
    build(rule.model_copy(update={"max_fpr": 1 / allowed}), own, SMALL, 0, "keep", folder)


def test_a_local_data_folder_is_read_again_when_a_file_in_it_changes(tmp_path: Path) -> None:
    source, folder, rule = f"hub:{tmp_path / 'set'}", tmp_path / "out", load_rule("medical_advice")
    rows = [
        json.loads(line) for line in Path(_own(tmp_path, planted=False)).read_text().splitlines()
    ]
    (tmp_path / "set").mkdir()
    for split in SPLITS:
        text = "".join(
            json.dumps({"text": row["text"], "label": row["label"]}) + "\n"
            for row in rows
            if row["split"] == split
        )
        (tmp_path / "set" / f"{split}.jsonl").write_text(text)
    assert build(rule, source, SMALL, 0, "keep", folder)
    assert not build(rule, source, SMALL, 0, "keep", folder)
    with (tmp_path / "set" / "train.jsonl").open("a") as file:
        file.write(
            json.dumps({"text": "one more row that nobody has seen before", "label": 1}) + "\n"
        )
    assert build(rule, source, SMALL, 0, "keep", folder)
    (tmp_path / "set" / "validation.jsonl").rename(tmp_path / "set" / "val.jsonl")
    assert build(rule, source, SMALL, 0, "keep", folder)


def test_what_cleaning_drops_is_counted_in_the_manifest_and_shown(tmp_path: Path) -> None:
    source = Path(_own(tmp_path, planted=False))
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    rows[4]["text"] = rows[0][
        "text"
    ]  # a training row's text in the test split, with the same label
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(load_rule("medical_advice"), str(source), SMALL, 0, "clean", tmp_path / "out")
    described = manifest.load(tmp_path / "out")
    assert described["dropped"] == 1
    assert (
        "  1 rows dropped: their group or nearly their text is in a later split"
        in manifest.table("medical_advice", described)
    )
    assert (
        "  few rows: on 16 test rows an accuracy is uncertain by up to 24 points either way (95 %)"
        in manifest.table("medical_advice", described)
    )


def test_somebodys_own_rule_without_phrases_leaves_generated_data_current(
    tmp_path: Path, rules: Path
) -> None:
    rule = load_rule("pii_leak")
    assert build(rule, GENERATOR, SMALL, 0, "keep", tmp_path / "out")
    (rules / "loud.yaml").write_text(
        (rules / "quiet.yaml").read_text().replace("id: quiet", "id: loud")
    )
    assert not build(rule, GENERATOR, SMALL, 0, "keep", tmp_path / "out")
    with (rules / "refund_promise.yaml").open("a") as file:
        file.write("# its phrases are among the distractors\n")
    assert build(rule, GENERATOR, SMALL, 0, "keep", tmp_path / "out")


def _few(rule: str, runs: Path) -> list[str]:
    """Options for 32 rows of `rule`, written below `runs`."""
    counts = ["--train", "16", "--validation", "8", "--test", "8"]
    return ["--rule", rule, *counts, "--runs", str(runs)]


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["data.build", *arguments])
    command.main()


def test_the_command_writes_where_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(monkeypatch, *_few("pii_leak", tmp_path))
    assert f"written to {tmp_path / 'data' / 'pii_leak'}" in capsys.readouterr().out
    _run(monkeypatch, *_few("pii_leak", tmp_path))
    assert "unchanged in" in capsys.readouterr().out


def test_counts_of_generated_rows_are_refused_with_a_source_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    arguments = ["--rule", "pii_leak", "--runs", str(tmp_path), "--data", str(rows)]
    with pytest.raises(SystemExit):
        _run(monkeypatch, *arguments, "--train", "400")
    assert "--train and --validation and --test are for data of" in capsys.readouterr().err


@pytest.mark.parametrize("source", [GENERATOR, "llm"])
def test_splits_are_refused_with_a_source_that_has_splits_of_its_own(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--rule", "pii_leak", "--runs", str(tmp_path), "--data", source]
    with pytest.raises(SystemExit):
        _run(monkeypatch, *arguments, "--splits", "clean")
    assert "--splits is for rows of your own" in capsys.readouterr().err


def test_options_of_an_endpoint_that_is_not_asked_again_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(monkeypatch, *_few("pii_leak", tmp_path))
    path = tmp_path / "data" / "pii_leak" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"source": "llm"}))
    with pytest.raises(SystemExit):
        _run(monkeypatch, "--rule", "pii_leak", "--runs", str(tmp_path), "--examples", "4000")
    printed = capsys.readouterr().err
    assert "--examples would change nothing" in printed and "DATA=llm" in printed


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of SOME shipped rules, and somebody's own `quiet`, which has no phrases."""
    folder = tmp_path / "rules"
    folder.mkdir()
    for name in SOME:
        shutil.copy(RULES / f"{name}.yaml", folder)
    (folder / "quiet.yaml").write_text(
        (RULES / "pii_leak.yaml").read_text().replace("id: pii_leak", "id: quiet")
    )
    monkeypatch.setattr(command, "rule_names", partial(rule_names, rules=folder))
    for module in (command, sources):
        monkeypatch.setattr(module, "load_rule", partial(load_rule, rules=folder))
        monkeypatch.setattr(module, "RULES", folder)
    return folder


def _built_from(runs: Path, rule: str) -> tuple[str, str]:
    described = manifest.load(runs / "data" / rule)
    return described["source"], described["splits"]


@pytest.mark.parametrize("rule", ["pii_leak", "quiet"])
def test_own_data_stay_a_rules_data_until_others_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rules: Path,
    rule: str,
) -> None:
    source, more = _own(tmp_path, planted=False), ["--rule", rule, "--runs", str(tmp_path)]
    _run(monkeypatch, *more, "--data", source, "--splits", "new")
    capsys.readouterr()
    _run(monkeypatch, *more)  # what `make all` says
    assert "unchanged in" in capsys.readouterr().out
    _run(monkeypatch, *more, "--force")
    assert _built_from(tmp_path, rule) == (source, "new")
    assert "the source was" not in capsys.readouterr().out
    (rules / f"{rule}.yaml").write_text(
        (rules / f"{rule}.yaml").read_text() + f"data: {source}.csv\n"
    )
    with pytest.raises(SystemExit):
        _run(monkeypatch, *more)
    printed = capsys.readouterr()
    assert f"{source}.csv: no such file" in printed.err
    assert "the source was" not in printed.out  # and still is
    Path(f"{source}.csv").write_text(
        "text,label\n"
        + "".join(f"row {number} {'yes' * number},{number % 2}\n" for number in range(40))
    )
    _run(monkeypatch, *more)
    assert (
        f"{rule}: the source was {source} and is now {source}.csv, as `data:` in its rule file says"
        in capsys.readouterr().out
    )


def test_a_generator_that_a_rules_file_names_wins_over_earlier_own_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: Path
) -> None:
    few = _few("pii_leak", tmp_path)
    own = ["--rule", "pii_leak", "--runs", str(tmp_path), "--data", _own(tmp_path, planted=False)]
    _run(monkeypatch, *own, "--splits", "new")
    file = rules / "pii_leak.yaml"
    file.write_text(file.read_text() + f"data: {GENERATOR}\n")
    _run(monkeypatch, *few)
    assert _built_from(tmp_path, "pii_leak")[0] == GENERATOR


def test_what_a_new_rule_still_has_to_say_is_told_at_every_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rules: Path
) -> None:
    more = ("--rule", "quiet", "--data", _own(tmp_path, planted=False), "--runs", str(tmp_path))
    _run(monkeypatch, *more)
    assert "EDIT" not in capsys.readouterr().out
    path = rules / "quiet.yaml"
    path.write_text(
        re.sub(
            r"^policy:.*?(?=^\w)",
            "policy: 'EDIT: what is forbidden'\n",
            path.read_text(),
            flags=re.MULTILINE | re.DOTALL,
        )
    )
    for _ in range(2):
        _run(monkeypatch, *more)
        assert f"{path} still says EDIT:" in capsys.readouterr().out


def test_one_rules_error_leaves_the_others_alone_and_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rules: Path
) -> None:
    (rules / "aloud.yaml").write_text((rules / "quiet.yaml").read_text())  # its id is another's
    with pytest.raises(SystemExit) as caught:
        _run(
            monkeypatch,
            *_few("all", tmp_path),
        )
    assert caught.value.code == 2
    built = (tmp_path / "data").glob("*/manifest.json")
    assert sorted(path.parent.name for path in built) == sorted(SOME)
    first, second = capsys.readouterr().err.splitlines()[-2:]  # after the progress of all others
    of_aloud = f"error: aloud: {rules / 'aloud.yaml'}: id differs from the file's name"
    assert first.startswith(of_aloud)
    assert second.startswith("error: quiet: ") and "no phrases for the rule 'quiet'" in second


def test_rows_that_are_given_while_another_command_writes_are_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other command knows what the rows were when it began, and nothing of these."""
    more = ["--rule", "pii_leak", "--runs", str(tmp_path)]
    own = ["--data", _own(tmp_path, planted=False), "--splits", "clean"]
    load, said = manifest.load, []

    def load_while_another_builds(folder: Path) -> dict[str, Any]:
        monkeypatch.setattr(manifest, "load", load)
        with pytest.raises(SystemExit):
            _run(monkeypatch, *more, *own)
        said.append(capsys.readouterr().err)
        return load(folder)

    monkeypatch.setattr(manifest, "load", load_while_another_builds)
    _run(monkeypatch, *_few("pii_leak", tmp_path))
    assert re.search("pii_leak/lock: another command is writing these data. Wait for it", said[0])
    assert _built_from(tmp_path, "pii_leak") == (GENERATOR, "keep")
    _run(monkeypatch, *more, *own)
    assert _built_from(tmp_path, "pii_leak")[1] == "clean"


def test_a_hub_data_set_says_that_it_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(read_rows(_own(tmp_path, planted=False)))
    monkeypatch.setattr("data.rows._hub", lambda name: iter(rows))  # the hub is not there in tests
    more = ("--rule", "pii_leak", "--runs", str(tmp_path))
    _run(monkeypatch, *more, "--data", "hub:some/set")
    assert "is read once" not in capsys.readouterr().out
    _run(monkeypatch, *more)
    assert "a hub data set is read once; FORCE=1 reads it again" in capsys.readouterr().out


def test_generated_data_come_back_when_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--rule", "pii_leak", "--runs", str(tmp_path)]
    _run(monkeypatch, *more, "--data", _own(tmp_path, planted=False), "--splits", "clean")
    _run(monkeypatch, *_few("pii_leak", tmp_path), "--data", GENERATOR)
    assert _built_from(tmp_path, "pii_leak") == (GENERATOR, "keep")


def test_a_rule_without_phrases_says_where_its_data_can_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rules: Path
) -> None:
    with pytest.raises(SystemExit):
        _run(monkeypatch, "--rule", "quiet", "--runs", str(tmp_path))
    assert (
        "`make data RULE=quiet DATA=FILE` or `data: FILE` in recipes/rules/quiet.yaml"
        in capsys.readouterr().err
    )


def test_own_data_of_any_script_with_uneven_meta_are_built(tmp_path: Path) -> None:
    rows = [
        {
            "text": " ".join(
                chr(0x3042 + number) + chr(0x4E00 + 7 * number + step) for step in range(6)
            ),
            "label": number % 2,
            "meta": {"severity": "mild", "cores": 3, "phrasings": ["free text"]}
            if number % 3
            else {"domain": None},
        }
        for number in range(60)
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert build(load_rule("medical_advice"), str(path), SMALL, 0, "keep", tmp_path / "out")
    described = manifest.load(tmp_path / "out")
    assert described["dimensions"] == {"severity": {"mild": 42}}  # two with a long turn
    assert (
        described["auroc_from_surface"]["words"] == {}
    )  # no word occurs twice, so there is none to guess by
    assert "AUROC" not in manifest.table("medical_advice", described)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rule", "pii_leek"), "Did you mean 'pii_leak'"),
        (("--rule", "all", "--data", "own.jsonl"), "--data is the data of one rule"),
        (("--rule", "pii_leak", "--data", "nowhere.csv"), "no such file"),
        (("--rule", "pii_leak", "--train", "7"), "multiple of 4"),
        (
            ("--rule", "pii_leak", "--data", "lmm"),
            "Known: generator, llm, FILE, generator+FILE, hub:ORG/NAME",
        ),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as caught:
        _run(monkeypatch, *arguments, "--runs", str(tmp_path))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_data_sets_depend_on_the_code_of_every_folder_of_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {str(path.relative_to(ROOT)) for path in code_files()}
    assert {
        "data/build.py",
        "data/generator/writer.py",
        "data/debate/prompts.py",
        "data/generator/__init__.py",
        # How rows are read.
        *(f"guard/conversation/{name}.py" for name in ("chat", "keys", "row")),
        *("guard/prompt/encodings.py", "guard/prompt/text.py", "guard/files/strict_json.py"),
    } <= names
    assert not any("__pycache__" in name for name in names)
    assert {name.partition("/")[0] for name in names} == {"data", "guard"}
    rule = load_rule("refund_promise")
    assert build(rule, GENERATOR, SMALL, 0, "keep", tmp_path / "out")
    assert not build(rule, GENERATOR, SMALL, 0, "keep", tmp_path / "out")
    changed = tmp_path / "writer.py"
    changed.write_text("# another way to write\n")
    unchanged = [path for path in code_files() if path.name != "writer.py"]
    monkeypatch.setattr(command, "code_files", lambda: [*unchanged, changed])
    assert build(rule, GENERATOR, SMALL, 0, "keep", tmp_path / "out")


def test_the_help_lists_the_sources_and_imports_nothing_that_takes_seconds() -> None:
    script = (
        "import sys, runpy\n"
        "sys.argv = ['data.build', '--help']\n"
        "try:\n"
        "    runpy.run_module('data.build', run_name='__main__')\n"
        "except SystemExit:\n"
        "    print(*sorted({name.partition('.')[0] for name in sys.modules}), sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    text, modules = done.stdout, set(done.stdout.splitlines())
    for source in SOURCES.values():
        assert f"  {source.shape}" in text and source.description in text
    heavy = {"torch", "vllm", "transformers", "datasets", "sklearn", "scipy", "numpy", "pandas"}
    assert not heavy & modules


def test_forced_data_that_are_interrupted_are_built_again_without_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = load_rule("medical_advice")
    assert build(rule, GENERATOR, SMALL, 1, "keep", tmp_path)
    with monkeypatch.context() as interrupted:
        interrupted.setattr("data.build.refuse_leaks", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(rule, GENERATOR, SMALL, 1, "keep", tmp_path, force=True)
    assert build(rule, GENERATOR, SMALL, 1, "keep", tmp_path)


def test_forced_data_whose_source_fails_are_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = load_rule("medical_advice")
    assert build(rule, GENERATOR, SMALL, 1, "keep", tmp_path)

    def fail(_: object) -> Any:
        raise GuardError("no endpoint")

    with monkeypatch.context() as offline:
        failing = replace(SOURCES[GENERATOR], load=fail)
        offline.setattr("data.build.source_named", lambda _: failing)
        with pytest.raises(GuardError, match="no endpoint"):
            build(rule, GENERATOR, SMALL, 1, "keep", tmp_path, force=True)
    assert not build(rule, GENERATOR, SMALL, 1, "keep", tmp_path)


def interrupt(*_: object) -> None:
    """As Ctrl+C does."""
    raise KeyboardInterrupt
