import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import data.build as command
from data import manifest, sources
from data.build import build, code_files
from data.generator.generate import Counts
from data.sources import FILE, SOURCES, DataRequest
from guard.conversation.example import GENERATOR, SPLITS, Example, write_examples
from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import split_files
from guard.rule import RULES, load_rule, rule_names
from tests.data.own_rows import in_splits, random_rows, written

pytestmark = pytest.mark.slow

SMALL = Counts(train=16, validation=8, test=8)
SOME = ("medical_advice", "pii_leak", "refund_promise")
RULE = load_rule("medical_advice")
NEW_ROW = {"text": "one more row that nobody has seen before", "label": 1, "split": "train"}

Run = Callable[..., str]


def made(source: str, folder: Path, seed: int = 0, **more: Any) -> bool:
    """Whether the data were built."""
    rule, splitting = more.pop("rule", RULE), more.pop("splitting", "keep")
    return build(DataRequest(rule, source, SMALL, seed, splitting, folder), **more)


def own(tmp_path: Path, *, planted: bool = False) -> str:
    """A file of rows in splits; with a text in two splits where it is planted."""
    rows = in_splits(random_rows())
    if planted:
        rows[4]["text"] = rows[0]["text"]
    return written(tmp_path / "own.jsonl", rows)


def interrupt(*_: object) -> Any:
    """As Ctrl+C does."""
    raise KeyboardInterrupt


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """The command with runs in `tmp_path`: what it prints, or with `fails` its errors."""

    def run(*arguments: str, rule: str = "pii_leak", fails: bool = False) -> str:
        capsys.readouterr()
        options = ["--rule", rule, "--runs", str(tmp_path), *arguments]
        monkeypatch.setattr(sys, "argv", ["data.build", *options])
        if not fails:
            command.main()
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as ended:
            command.main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run


FEW = ("--train", "16", "--validation", "8", "--test", "8")


def built_from(runs: Path, rule: str = "pii_leak") -> tuple[str, str]:
    described = manifest.load(runs / "data" / rule)
    return described["source"], described["splits"]


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of SOME shipped rules, and somebody's own `quiet`, which has no phrases."""
    folder = tmp_path / "rules"
    folder.mkdir()
    for name in SOME:
        shutil.copy(RULES / f"{name}.yaml", folder)
    text = (RULES / "pii_leak.yaml").read_text().replace("id: pii_leak", "id: quiet")
    (folder / "quiet.yaml").write_text(text)
    monkeypatch.setattr(command, "rule_names", partial(rule_names, rules=folder))
    for module in (command, sources):
        monkeypatch.setattr(module, "load_rule", partial(load_rule, rules=folder))
        monkeypatch.setattr(module, "RULES", folder)
    return folder


def test_a_build_writes_splits_and_manifest_and_the_same_bytes_again(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    assert all(made(GENERATOR, folder) for folder in folders)
    for name in (*(f"{split}.jsonl" for split in SPLITS), "manifest.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    described = json.loads((folders[0] / "manifest.json").read_text())
    assert [row["rows"] for row in described["counts"]] == [18, 4, 4, 4, 4]  # two with a long turn


def test_a_build_is_not_redone_until_an_input_changes_or_a_file_is_gone(tmp_path: Path) -> None:
    source, folder = own(tmp_path), tmp_path / "out"
    assert made(source, folder)
    assert not made(source, folder)
    assert made(source, folder, 1)
    assert made(source, folder, 1, force=True)
    changed = RULE.model_copy(update={"policy": RULE.policy + " Always."})
    assert made(source, folder, 1, rule=changed)
    for name in ("train.jsonl", "manifest.json"):
        (folder / name).unlink()
        assert made(source, folder, 1, rule=changed)
    written(Path(source), [*in_splits(random_rows()), NEW_ROW])
    assert made(source, folder, 1, rule=changed)


def test_forced_data_that_are_interrupted_are_built_again_and_those_whose_source_fails_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = own(tmp_path), tmp_path / "out"
    assert made(source, folder)
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr("data.build.refuse_leaks", interrupt)
        made(source, folder, force=True)
    assert made(source, folder)

    def fail(_: object) -> Any:
        raise GuardError("no endpoint")

    with monkeypatch.context() as offline, pytest.raises(GuardError, match="no endpoint"):
        failing = replace(SOURCES[FILE], load=fail)
        offline.setattr("data.build.source_named", lambda _: failing)
        made(source, folder, force=True)
    assert not made(source, folder)


def test_own_rows_that_are_too_few_for_the_rule_s_rate_are_refused(tmp_path: Path) -> None:
    """As training would. Of generated rows there are as many as the command says."""
    source, folder, allowed = own(tmp_path), tmp_path / "out", 8
    low = RULE.model_copy(update={"max_fpr": 0.9 / allowed})
    told = r"own\.jsonl: too few allowed.*8 rows.*Have at least 9.*leave it out"
    with pytest.raises(GuardError, match=told):
        made(source, folder, rule=low)
    assert not folder.exists()
    made(f"generator+{source}", folder, rule=low)  # beside 4 generated ones
    too_low = RULE.model_copy(update={"max_fpr": 0.9 / (allowed + 4)})
    with pytest.raises(GuardError, match=f"too few allowed.*{allowed + 4} rows"):
        made(f"generator+{source}", folder, rule=too_low)
    made(GENERATOR, folder, rule=too_low)
    made(source, folder, rule=RULE.model_copy(update={"max_fpr": 1 / allowed}))
    with pytest.raises(GuardError, match=r"own\.jsonl: too few validation twins.*0 rows"):
        made(source, folder, rule=RULE.model_copy(update={"max_fpr_twins": 0.5}))


def test_an_interrupted_build_leaves_the_old_data_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = own(tmp_path), tmp_path / "out"
    made(source, folder)
    write, rename = write_examples, Path.replace

    def writing(path: Path, examples: list[Example]) -> str:
        return interrupt() if "test" in path.name else write(path, examples)

    def renaming(path: Path, target: Path) -> Path:
        return interrupt() if target == folder / "validation.jsonl" else rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(command, "write_examples", writing)
        made(source, folder, 1)
    assert not made(source, folder)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", renaming)
        made(source, folder, 1)
    with pytest.raises(GuardError, match=r"no such file"):
        split_files(folder)
    assert made(source, folder)


def test_bad_rows_stop_a_build_and_leave_what_was_there_unless_splits_are_new(
    tmp_path: Path,
) -> None:
    folder, source = tmp_path / "out", own(tmp_path, planted=True)
    with pytest.raises(GuardError, match="near duplicates across splits"):
        made(source, folder)
    assert not folder.exists()
    made(GENERATOR, folder)
    with pytest.raises(GuardError, match="near duplicates across splits"):
        made(source, folder)
    assert not made(GENERATOR, folder)
    made(source, folder, splitting="new")
    shown = manifest.table("medical_advice", manifest.load(folder))
    assert re.search(
        r"  few rows: on \d+ test rows an accuracy is uncertain by up to \d\d p", shown
    )


def test_a_rule_without_phrases_leaves_generated_data_current(tmp_path: Path, rules: Path) -> None:
    folder = tmp_path / "out"
    assert made(GENERATOR, folder)
    text = (rules / "quiet.yaml").read_text()
    (rules / "loud.yaml").write_text(text.replace("id: quiet", "id: loud"))
    assert not made(GENERATOR, folder)
    with (rules / "refund_promise.yaml").open("a") as file:
        file.write("# its phrases are among the distractors\n")
    assert made(GENERATOR, folder)


def test_data_sets_depend_on_the_code_of_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {str(path.relative_to(ROOT)) for path in code_files()}
    assert {"data/build.py", "data/generator/writer.py", "data/debate/prompts.py"} <= names
    assert {"guard/conversation/row.py", "guard/prompt/text.py"} <= names
    assert {name.partition("/")[0] for name in names} == {"data", "guard"}
    source, folder = own(tmp_path), tmp_path / "out"
    assert made(source, folder)
    changed = tmp_path / "writer.py"
    changed.write_text("# another way to write\n")
    unchanged = [path for path in code_files() if path.name != "writer.py"]
    monkeypatch.setattr(command, "code_files", lambda: [*unchanged, changed])
    assert made(source, folder)


@pytest.mark.parametrize("rule", ["pii_leak", "quiet"])
def test_own_data_stay_until_others_are_named(
    tmp_path: Path, run: Run, rules: Path, rule: str
) -> None:
    source, run = own(tmp_path), partial(run, rule=rule)
    run("--data", source, "--splits", "new")
    assert f"unchanged in {tmp_path / 'data' / rule}" in run()  # what `make all` says
    assert "the source was" not in run("--force")
    assert built_from(tmp_path, rule) == (source, "new")
    file = rules / f"{rule}.yaml"
    text = file.read_text()
    file.write_text(f"{text}data: {source}.csv\n")
    assert f"{source}.csv: no such file" in run(fails=True)
    rows = "".join(f"row {number} {'yes' * number},{number % 2}\n" for number in range(40))
    Path(f"{source}.csv").write_text("text,label\n" + rows)
    told = f"{rule}: the source was {source} and is now {source}.csv, as `data:` in its rule file"
    assert told in run()
    # What a rule still has to say is always told.
    policy = re.compile(r"^policy:.*?(?=^\w)", re.MULTILINE | re.DOTALL)
    file.write_text(policy.sub("policy: 'EDIT: what is forbidden'\n", text))
    for _ in range(2):
        assert f"{file} still says EDIT:" in run("--data", source)


@pytest.mark.parametrize("in_file", [False, True])
def test_generated_data_come_back_when_asked_for(
    tmp_path: Path, run: Run, rules: Path, in_file: bool
) -> None:
    run("--data", own(tmp_path), "--splits", "new")
    if in_file:
        with (rules / "pii_leak.yaml").open("a") as file:
            file.write(f"data: {GENERATOR}\n")
        run(*FEW)
    else:
        run(*FEW, "--data", GENERATOR)
    assert built_from(tmp_path) == (GENERATOR, "keep")


def test_one_rules_error_leaves_the_others_alone(tmp_path: Path, run: Run, rules: Path) -> None:
    (rules / "aloud.yaml").write_text((rules / "quiet.yaml").read_text())  # its id is another's
    printed = run(*FEW, rule="all", fails=True)
    built = (tmp_path / "data").glob("*/manifest.json")
    assert sorted(path.parent.name for path in built) == sorted(SOME)
    first, second = printed.splitlines()[-2:]  # after the progress of all others
    of_aloud = f"error: aloud: {rules / 'aloud.yaml'}: id differs from the file's name"
    assert first.startswith(of_aloud)
    assert second.startswith("error: quiet: ") and "no phrases for the rule 'quiet'" in second
    assert "`make data RULE=quiet DATA=FILE` or `data: FILE` in recipes/rules/quiet.yaml" in second


def test_rows_that_are_given_while_another_command_writes_are_not_written_over(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other command knows what the rows were when it began, and nothing of these."""
    of_own = ["--data", own(tmp_path), "--splits", "new"]
    load, said = manifest.load, []

    def load_while_another_builds(folder: Path) -> dict[str, Any]:
        monkeypatch.setattr(manifest, "load", load)
        said.append(run(*of_own, fails=True))
        return load(folder)

    monkeypatch.setattr(manifest, "load", load_while_another_builds)
    run(*FEW)
    assert "pii_leak/lock: another command is writing these data. Wait for it" in said[0]
    assert built_from(tmp_path) == (GENERATOR, "keep")
    run(*of_own)
    assert built_from(tmp_path)[1] == "new"


@pytest.mark.parametrize(
    ("rule", "arguments", "message"),
    [
        ("pii_leek", (), "Did you mean 'pii_leak'"),
        ("all", ("--data", "own.jsonl"), "--data is the data of one rule"),
        ("pii_leak", ("--train", "7"), "multiple of 4"),
        ("pii_leak", ("--data", "rows.jsonl", "--train", "400"), "--train is for data"),
        ("pii_leak", ("--data", "lmm"), "Known: generator, llm, FILE, generator+FILE"),
        ("pii_leak", ("--data", "llm", "--splits", "new"), "--splits is for rows of your own"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(
    run: Run, rule: str, arguments: tuple[str, ...], message: str
) -> None:
    assert message in run(*arguments, rule=rule, fails=True)


def test_the_help_lists_the_sources_and_imports_nothing_that_takes_seconds() -> None:
    script = (
        "import sys, data.build as command\nsys.argv[1:] = ['--help']\ntry:\n    command.main()"
    )
    script += "\nfinally:\n    print(*{name.partition('.')[0] for name in sys.modules}, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for source in SOURCES.values():
        assert f"  {source.shape}" in done.stdout and source.description in done.stdout
    heavy = {"torch", "vllm", "transformers", "datasets", "sklearn", "scipy", "numpy", "pandas"}
    assert not heavy & set(done.stdout.splitlines())
