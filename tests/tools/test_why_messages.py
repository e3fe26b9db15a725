"""Rules of `zero-study why`: each states its own message, and the messages are those that packages really print."""

from __future__ import annotations

import ast
import importlib.metadata
import mmap
import re
import time
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import why_errors
import yaml
from torch.distributed.checkpoint.api import CheckpointException

from zero_study.logs import printed_failures
from zero_study.logs.printed_steps import Line
from zero_study.why import answer, json_answer, rules
from zero_study.why.fact import Fact
from zero_study.why.rules import Rule

RULES = rules.rules()
BY_ID = {rule.id: rule for rule in RULES}
PACKAGES = Path(torch.__file__).parents[1]
SOUND = Path(__file__).parents[1] / "why" / "sound"
SENTENCES = ("happened", "because", "check")
GROUP = re.compile(r"\{(\w+)\}")


def facts_of(text: str) -> list[Fact]:
    """Return what the rules state about a text."""
    return list(rules.facts(printed_failures.read(f"{line}\n".encode() for line in text.splitlines())))


def ids_of(text: str) -> set[str]:
    return {fact.id for fact in facts_of(text)}


def sentences_of(rule: Rule) -> list[str]:
    return [*(getattr(rule, name) for name in SENTENCES), *rule.changes]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_example_of_a_rule_gives_its_fact(rule: Rule) -> None:
    (fact,) = (fact for fact in facts_of(rule.example) if fact.id == rule.id)
    assert (fact.kind, fact.certainty, fact.is_note) == (rule.kind, "stated", rule.is_note)
    assert fact.is_open == (not rule.because)
    assert fact.evidence
    names = re.compile(rule.match).groupindex
    text = "\n".join((fact.happened, fact.because, *fact.changes, fact.check))
    assert [name for name in names if f"{{{name}}}" in text] == []


def test_ids_are_unique_and_have_a_kind_and_no_rule_has_the_id_of_a_computed_fact() -> None:
    ids = [rule.id for rule in RULES]
    computed = yaml.safe_load(json_answer.COMPUTED.read_text(encoding="utf-8"))
    assert len(ids) == len(set(ids))
    assert set(ids).isdisjoint(computed)
    assert {
        id for id in ids if not re.fullmatch(r"(?:memory|hang|wrong|slow|start-up|save|launch)/[a-z0-9-]+", id)
    } == set()
    assert len(json_answer.ids()) == len(ids) + len(computed)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_name_in_braces_is_a_group(rule: Rule) -> None:
    groups = set(re.compile(rule.match).groupindex)
    in_braces = {name for sentence in sentences_of(rule) for name in GROUP.findall(sentence)}
    assert in_braces - groups == set()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_says_who_prints_it_and_its_files_and_releases_are_installed(rule: Rule) -> None:
    assert rule.raised_by
    for package, release in re.findall(
        r"(accelerate|deepspeed|transformers|peft|safetensors|torch) (\d+\.\d+\.\d+):", rule.raised_by
    ):
        assert importlib.metadata.version(package).startswith(release), f"{package} {release} is not installed"
    for address in rule.seen:  # odd threads are kept for judging the answers
        assert int(address.rpartition("/")[2]) % 2 == 0


def test_braces_that_are_no_group_stay() -> None:
    rule = Rule(
        id="save/braces", kind="save", match=r"(?P<old>a)|(?P<new>b)|(?P<none>c)",
        happened="{old}{new} is {'x': 1} ({none})", because='{"bf16": {"enabled": true}}', example="error b",
    )  # fmt: skip
    fact = rule.found(printed_failures.Log(lines=[Line(1, None, "error b")]))
    assert fact is not None
    assert (fact.happened, fact.because) == ("b is {'x': 1}", '{"bf16": {"enabled": true}}')


def test_values_are_those_of_the_exception_and_not_of_the_quoted_code() -> None:
    log = """Traceback (most recent call last):
  File "/env/deepspeed/launcher/runner.py", line 248, in _parse_hostfile
    raise ValueError(f"Hostfile contains a bad entry: {line}, unable to proceed with launching")
ValueError: Hostfile contains a bad entry: worker-0 gpus=8, unable to proceed with launching"""
    (fact,) = facts_of(log)
    assert "worker-0 gpus=8" in fact.happened
    assert [line.number for line in fact.evidence] == [4, 3]


def test_a_rule_needs_its_frame_its_code_and_its_text_and_must_not_have_the_excluded_one() -> None:
    values: dict[str, Any] = {"kind": "save", "happened": "It failed.", "raised_by": "frob", "example": "x"}
    log = printed_failures.read(
        line.encode()
        for line in [
            "Traceback (most",
            '  File "/x/frob.py", line 3, in call',
            "    check(x)",
            "ValueError: no frob, but nothing else",
        ]
    )
    assert Rule(id="a", match="no frob", frames="frob.py:3 in call", code=r"check\(", **values).found(log)
    for condition in ({"frames": "other.py"}, {"code": "other"}, {"without": "nothing else"}):
        assert Rule(id="a", match="no frob", **(values | condition)).found(log) is None
    with pytest.raises(ValueError, match="certainty"):
        Rule(id="a", match="x", **(values | {"certainty": "certain"}))


# ---------------------------------------------------------------- what installed packages print


@pytest.fixture
def accelerate_state() -> Iterator[None]:
    """Forget the state that accelerate keeps in its process."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", why_errors.RAISERS)
def test_a_real_error_is_recognized(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any, accelerate_state: None
) -> None:
    tools = why_errors.Tools(tmp_path, monkeypatch, lambda: request.getfixturevalue("group"))
    try:
        text = why_errors.RAISERS[rule](tools)
    except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
        text = "".join(traceback.format_exception(error))
        traceback.clear_frames(error.__traceback__)
    assert text, "nothing was raised"
    assert rule in ids_of(text)
    first = answer.answer([[f"{line}\n".encode() for line in text.splitlines()]]).first_failure
    assert first is not None or BY_ID[rule].is_note or BY_ID[rule].where == "line"


FILE = re.compile(r"[\w-]+(?:/[\w.-]+)+\.(?:py|hpp|cpp|h|cc)\b")
LIBRARIES = ("torch/lib/libtorch_cpu.so", "torch/lib/libtorch_python.so", "torch/lib/libc10.so")
WORDS, SHORTEST = 3, 12  # of a part of a message that is looked for, and its characters


def parts_of(pattern: str) -> set[str]:
    """Return some words in a row of each text that a regular expression contains without other signs."""
    plain = re.sub(r"\\([^\w\s])", lambda match: chr(0xE000 + ord(match[1])), pattern)  # such as an escaped dot
    plain = re.sub(r"\(\?P<\w+>|\(\?[:=!<]*|\[[^\]]*\]|\\\w|.?[*+?]\??|.?\{\d*,?\d*\}\??|[.()|^$]", "\n", plain)
    plain = re.sub(r"[\ue000-\ue0ff]", lambda match: chr(ord(match[0]) - 0xE000), plain)
    parts = set()
    for words in map(str.split, plain.split("\n")):
        parts |= {" ".join(words[start : start + WORDS]) for start in range(max(1, len(words) - WORDS + 1))}
    return {part for part in parts if len(part) >= SHORTEST}


@cache
def texts_of(path: Path) -> str:
    """Return the texts in a Python file, with those that are written as several joined."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    names = (node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    return "\n".join([*strings, *names])


def is_in_library(text: str) -> bool:
    for name in LIBRARIES:
        with (PACKAGES / name).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(text.encode()) >= 0:
                return True
    return False


def installed_files(rule: Rule) -> list[Path]:
    return [
        path for name in FILE.findall(rule.raised_by) if (path := PACKAGES / name).is_file() and path.suffix == ".py"
    ]


# Why the file that raises the exception does not have its text.
WRITTEN_ELSEWHERE = {
    "launch/rendezvous-timeout": "the exception has no text, and its class is in another file",
    "save/hub-push": "the hub writes it",
    "start-up/zero3-copied-module": "the text is the value of a dictionary",
    "start-up/zero3-not-gathered": "the text is the value of a dictionary",
    "wrong/missing-weights": "the report is a table with the names of weights",
}
# A release and a colon mean that this file has the message. Otherwise, the file only calls what prints it.
IN_FILES = [
    rule for rule in RULES
    if re.match(r"\w+ \d+[\d.]*: ", rule.raised_by) and installed_files(rule)
    and rule.id not in why_errors.RAISERS.keys() | WRITTEN_ELSEWHERE.keys()
]  # fmt: skip
IN_LIBRARIES = [rule for rule in RULES if re.match(r"torch 2\.13[\d.]*, in C\+\+", rule.raised_by)]


@pytest.mark.parametrize("rule", IN_FILES, ids=lambda rule: rule.id)
def test_an_installed_file_has_a_part_of_the_message(rule: Rule) -> None:
    parts = parts_of(rule.match)
    assert any(part in texts_of(path) for part in parts for path in installed_files(rule)), parts


@pytest.mark.parametrize("rule", IN_LIBRARIES, ids=lambda rule: rule.id)
def test_an_installed_library_has_a_part_of_the_message(rule: Rule) -> None:
    parts = parts_of(rule.match)
    assert any(map(is_in_library, parts)), parts


def test_most_messages_were_found_in_an_installed_package() -> None:
    assert WRITTEN_ELSEWHERE.keys() | why_errors.RAISERS.keys() <= BY_ID.keys()
    checked = {rule.id for rule in (*IN_FILES, *IN_LIBRARIES)} | why_errors.RAISERS.keys()
    assert len(checked) > len(RULES) / 2


# ---------------------------------------------------------------- speed, and sound trainings


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_is_fast_on_long_lines(rule: Rule) -> None:
    pattern = rules.compiled(rule.match)
    words = ("a", "a.", "a/b", "ab:", "'a", "[0, ", "/a.so", "a_", "1", "a ", " ", f"{rule.example} ")

    def seconds() -> float:
        begin = time.process_time()
        for word in words:
            pattern.search((word * 4000)[:4000])
        return time.process_time() - begin

    assert any(seconds() < 0.5 for _ in range(3))  # other programs can slow down one of them


@pytest.mark.parametrize("path", sorted(SOUND.glob("*.log")), ids=lambda path: path.stem)
def test_a_sound_training_has_notes_only(path: Path) -> None:
    assert [fact.id for fact in facts_of(path.read_text(encoding="utf-8")) if not fact.is_note] == []


def test_the_warnings_that_sound_trainings_print_are_notes() -> None:
    path = Path(__file__).parents[1] / "fixtures" / "why" / "sound.log"
    assert [fact.id for fact in facts_of(path.read_text(encoding="utf-8")) if not fact.is_note] == []
