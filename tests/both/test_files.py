"""Test how files are read, and which names files and runs may have."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from refusing import refusal

from study.claims import ledger
from study.running import studies
from zero_study import files
from zero_study.errors import Refusal
from zero_study.strategy import file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: 'a' is listed twice"),
        ('{a: 1, "a": 2}', "line 1: 'a' is listed twice"),
        ("<<: {a: 1}\n<<: {b: 1}", "line 2: '<<' is listed twice"),
        *((f"a: {number}", f"'{number}' is a number that YAML") for number in ("010", "0x10", "1:30", "1_000", ".inf")),
        ("a: 2026-02-30", "'2026-02-30' is a date in YAML"),
        ("a: " + "1" * 5000, "has more than 19 digits"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested more deeply than 40"),
        (f"x: &x {'[' * 20}1{']' * 20}\ny: {'[' * 20}*x{']' * 20}", "nest it more deeply than 40"),
        ("- " * 200_000, "line 1: it is nested more deeply than 40"),  # libyaml would use up the stack
        ("a: 1\nb: \ufeff", r"line 2: '\ufeff' is read differently"),
        ("a: &a [*a]", "or within itself. Write the aliased"),
        ("yes: 1", "'yes' is not a word, so it cannot be a key"),
        ("[a]: 1", "a key is a list or a mapping"),
        ("a: !!int '1'", "is a YAML tag"),
        ("a:\t1", r"line 1: '\t' is read differently by different YAML libraries"),
    ],
)
def test_what_yaml_would_read_otherwise_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    said = refusal(files.read_yaml, path, studies.STUDIES)
    assert said.startswith(f"{path}: cannot be read as YAML (")
    assert message in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n " + "[" * 41 + "]" * 41, "line 2: it is nested more deeply than 40"),
        ("- " * 3000, "line 1: it is nested more deeply than 40"),
        (f"x: &x {'[' * 20}1{']' * 20}\ny: {'[' * 20}*x{']' * 20}", "its aliases (*) nest it more deeply than 40"),
        ("a: &a [*a]", "its aliases (*) nest it more deeply than 40, or within itself"),
    ],
)
def test_deep_nesting_is_refused_without_libyaml_too(monkeypatch, text, message):
    monkeypatch.setattr(files, "_LOADER", yaml.SafeLoader)
    with pytest.raises(ValueError, match=re.escape(message)):
        files.parse_yaml(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": [{"b": 1, "b": 2}]}', "'b' is listed twice"),
        ("[" * 41 + "]" * 41, "nested more deeply than 40"),
        ("1" * 5000, "has more than 19 digits"),
        ("1e999", "1e999 is not a number"),
        ("[NaN]", "NaN is not a number"),
        ('"\\ud800"', "surrogates not allowed"),
        ("\ufeff1", "Unexpected UTF-8 BOM"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json_for_everybody_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.json"
    path.write_text(text)
    said = refusal(files.load, path, "JSON")
    assert said.startswith(f"{path}: cannot be read as JSON (")
    assert message in said


def test_what_is_written_plainly_is_read_as_it_is(tmp_path):
    content = {"a": 0, "b": -17, "c": 1.5, "d": "010", "e": ["1:30", True, None], "f": "2026-02-30", "é": "😀"}
    assert files.parse_json(json.dumps(content)) == content
    assert files.parse_yaml(yaml.safe_dump(content)) == content
    assert files.parse_yaml("a: &x [1]\nb: *x\nc: {<<: {d: 1}, e: 2}") == {"a": [1], "b": [1], "c": {"d": 1, "e": 2}}
    assert files.parse_json("[" * 40 + "]" * 40) == yaml.safe_load("[" * 40 + "]" * 40)
    path = tmp_path / "mine.json"  # by its name, as accelerate does: in JSON 1e3 is a number, in YAML 1.1 a word
    path.write_text('{"a": 1e3}')
    assert files.read_yaml(path, tmp_path) == {"a": 1000.0}


@pytest.mark.parametrize("folder", [file.CONFIGS, studies.STUDIES, ledger.FOLDER])
def test_all_files_of_the_project_are_read_as_others_read_them(folder):
    for path in folder.rglob("*.yaml"):
        assert files.read_yaml(path, folder) == yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", None))
    for path in folder.rglob("*.json"):
        assert files.load(path, "JSON") == json.loads(path.read_text())


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_FILE", 1 << 20)
    (tmp_path / "a.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(Refusal, match="it is larger than 1 MiB"):
        files.load(tmp_path / "a.json", "JSON")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../../x", "a/b", "a\\b", "lr:a", "a b", "a\n", "-a", ".a", "a.", "é", "x" * 129,
     "record", "Manifest", "config"],
)  # fmt: skip
def test_no_name(name):
    said = refusal(files.check_name, name, "the name")
    assert said.startswith("the name ")
    assert len(said) < 300
    for good in ("a", "_x", "zero3_tuned", "bert-imdb-tiny-ddp-2x-seed0.v2", "x" * 128):
        assert files.check_name(good, "the name") == good


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path):
    """Whoever may write into a run's folder could have had the run write into any other file."""
    other = tmp_path / "other"
    for name in ("record.json", "record.json.part", "stdout.log"):
        other.write_text("mine")
        (tmp_path / name).symlink_to(other)
    files.write_json(tmp_path / "record.json", {})
    with files.open_new(tmp_path / "stdout.log", "w") as log:
        log.write("said")
    assert other.read_text() == "mine"
    assert ((tmp_path / "record.json").read_text(), (tmp_path / "stdout.log").read_text()) == ("{}\n", "said")


def test_what_a_terminal_would_obey_is_written_out():
    assert files.redact_paths("a\x1b[2Jb\tc\nd") == "a\\x1b[2Jb\tc\nd"


def test_a_folder_that_another_process_fills_or_removes_meanwhile_is_no_error(tmp_path):
    """Two processes that take and leave a lock at once: `Directory not empty`, once in 15,000 times."""
    (tmp_path / "full" / "inner").mkdir(parents=True)
    files.remove_empty([tmp_path / "gone", tmp_path / "full"])
    files.remove_empty([tmp_path / "full", tmp_path])
    assert (tmp_path / "full" / "inner").exists()
    files.remove_empty([tmp_path / "full" / "inner", tmp_path / "full"])
    assert not (tmp_path / "full").exists()
