"""Files of strict YAML, whose values mean what they look like, and files of text."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from guard.errors import GuardError
from guard.files.text_file import read_text
from guard.files.yaml_file import Strict, load


class Part(Strict):
    colour: str
    weight_kg: float = 1.0


class Toy(Strict):
    name: str = "toy"
    count: int = 0
    flag: bool = False
    rate: float = 0.0
    tags: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    mixed: str | list[str] | list[Part] = ""
    passed_on: dict[str, Any] = Field(default_factory=dict)


def read(tmp_path: Path, text: str) -> Toy:
    path = tmp_path / "toy.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path, Toy)


NUMBERS = {"2e-4": 2e-4, "1e5": 1e5, "1E+5": 1e5, "1.0": 1.0, ".5": 0.5, "5.": 5.0, "3": 3}
NUMBERS |= {"-.5e-3": -5e-4, "+1.5": 1.5}
BOOLEANS = {"true": True, "True": True, "FALSE": False, "false": False}
WORDS = ["no", "yes", "on", "off", "No", "Y", "n", "2026-01-31", "1:30", "12:30:45"]
WORDS += ["010", "0x1f", "1_000", "e5", "1e", "="]


@pytest.mark.parametrize(
    ("text", "value"), [*NUMBERS.items(), *BOOLEANS.items(), *((word, word) for word in WORDS)]
)
def test_scalars_are_what_they_look_like_in_fields_and_in_free_form_settings(
    tmp_path: Path, text: str, value: object
) -> None:
    field = {bool: "flag", str: "name"}.get(type(value), "rate")
    toy = read(tmp_path, f"{field}: {text}\npassed_on: {{key: {text}}}")
    assert getattr(toy, field) == toy.passed_on["key"] == value
    assert type(toy.passed_on["key"]) is type(value)
    if field == "name":
        assert read(tmp_path, f"tags: [{text}]").tags == (text,)


def test_lists_are_tuples_where_declared_and_lists_where_passed_on(tmp_path: Path) -> None:
    toy = read(tmp_path, "tags: [a, b]\npassed_on: {modules: [q, k], nested: {sizes: [1, 2]}}")
    assert toy.tags == ("a", "b")
    assert toy.passed_on == {"modules": ["q", "k"], "nested": {"sizes": [1, 2]}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmae: x", r"toy.yaml: unknown key 'nmae'. Did you mean 'name'\?"),
        ("zzzzzz: x", r"unknown key 'zzzzzz'. Known: name, count, .*, passed_on\."),
        ("parts: [{colour: red, zzzz: x}]", r"key 'parts.0.zzzz'. Known: colour, weight_kg\."),
        ("passed_on: {!!binary aGk=: x}", "not a tree of keys and values: keys must be"),
        ("parts: [{wieght_kg: 2.0}]", "key 'parts.0.wieght_kg'. Did you mean 'weight_kg'"),
        ("parts: [{weight_kg: 2.0}]", "missing key 'parts.0.colour'"),
        ("count: three", "'count': input should be a valid integer, got 'three'"),
        ("count: 010", "'count': input should be a valid integer, got '010'"),
        ("name: 5", "'name': input should be a valid string, got 5"),
        ("mixed: 5", "'mixed': input should be a valid string or a valid array, got 5"),
        ("mixed: {a: 1}", "'mixed': .* valid string or a valid array, got an object"),
        ("mixed: [1]", "'mixed.0': input should be a valid string or an object, got 1"),
        ("mixed: [{}]", "missing key 'mixed.0.colour'"),
        ("mixed: [{colour: [x]}]", "'mixed.0.colour': .* valid string, got a list"),
        (f"count: {'x' * 99}", f"'count': .*, got '{'x' * 60}'"),
        ("tags: one", "'tags': input should be a valid array, got 'one'"),
        ("count: x\nrate: y", "'count': .*; 'rate': "),
        ("name: a\ncount: 1\nname: b", "not valid YAML line 3: the key 'name' is given twice"),
        ("name: [", "not valid YAML line 1"),
        ("name: !!python/object/apply:os.getcwd []", "not valid YAML line 1"),
        ("- name", r"must be a mapping of keys to values \(got \['name'\]\)"),
        ("", r"must be a mapping of keys to values \(got nothing\)"),
    ],
)
def test_a_mistake_is_named_with_its_file_key_and_value(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(GuardError, match=message) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "toy.yaml") in str(caught.value)


def test_a_file_that_cannot_be_read_or_is_missing_is_named(tmp_path: Path) -> None:
    for text in ("count: " + "9" * 5000, "passed_on: " + "[" * 2000 + "]" * 2000):
        with pytest.raises(GuardError, match=r"a value cannot be read: (Exceeds|maximum rec)"):
            read(tmp_path, text)
    (tmp_path / "toy.yaml").write_bytes(b"name: caf\xe9")
    with pytest.raises(GuardError, match=r"toy.yaml:1: not UTF-8 text \(got byte 0xe9, .*'é'\)"):
        load(tmp_path / "toy.yaml", Toy)
    (tmp_path / "medical_advice.yaml").touch()
    (tmp_path / "pii_leak.yaml").touch()
    known = r"no such file. Did you mean 'medical_advice'\? Known: medical_advice, pii_leak"
    with pytest.raises(GuardError, match=known):
        load(tmp_path / "medical_advise.yaml", Toy)


TEXT = "text,label\r\ncafé,1\r\n"


def test_text_is_read_without_its_mark_and_unpacked(tmp_path: Path) -> None:
    for name, content, text in (
        ("a.csv", TEXT.encode("utf-8-sig"), TEXT),
        ("a.csv.gz", gzip.compress(TEXT.encode()), TEXT),
        ("a.csv.gz", b"", ""),
    ):
        (tmp_path / name).write_bytes(content)
        assert read_text(tmp_path / name) == text
    with pytest.raises(GuardError, match="cannot be read: Is a directory"):
        read_text(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", gzip.compress(b"x"), r"a.csv: a gzip file, though its name does not end in .gz"),
        ("a.gz", b"text", r"a.gz: not a readable gzip file, though its name ends in .gz.*Rename"),
        ("a.gz", gzip.compress(gzip.compress(b"x")), "a.gz: a gzip file, not text in UTF-8"),
        (
            "a.csv",
            b"PK\x03\x04",
            r"a zip archive, as .xlsx is, not text in UTF-8\. Save it as text",
        ),
        ("a.csv", TEXT.encode("utf-16"), "UTF-16 or UTF-32 text, not text in UTF-8"),
        ("a.csv", TEXT.encode("utf-16-le"), "UTF-16 text or a binary file"),
        ("a.csv", TEXT.encode("cp1252"), r"a.csv:2: not UTF-8 text \(got byte 0xe9, .* 'é'\)"),
        ("a.csv", b"a\rb\r\xe9", "a.csv:3: not UTF-8 text"),
    ],
)
def test_what_is_no_text_says_what_it_is_and_where(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GuardError, match=message):
        read_text(tmp_path / name)
