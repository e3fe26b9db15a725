"""Test that files which take endless time or memory are refused in one sentence by the common readers."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from refusing import refusal

from study.records import steps
from zero_study import cli, files
from zero_study.errors import Refusal


def _aliases(levels: int, width: int = 9) -> str:
    """A few lines of YAML that describe `width` to the power of `levels` values."""
    lines = ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels))]
    return "\n".join([*lines, f"question: *a{levels - 1}"]) + "\n"


@pytest.mark.parametrize(
    "command", [["plan", "bomb.yaml"], ["train", "--strategy", "bomb.yaml"], ["dry-run", "--world", "2", "bomb.yaml"]]
)
@pytest.mark.parametrize("text", [_aliases(12), "a: [" + "b," * 600_000 + "]\n"], ids=["aliases", "size"])
def test_a_yaml_file_that_describes_endless_values_is_refused(command, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bomb.yaml").write_text(text)
    began = time.process_time()
    assert "bomb.yaml: cannot be read as YAML" in refusal(cli.run, command)
    assert time.process_time() - began < 10


def test_a_few_aliases_are_read():
    assert files.parse_yaml("a: &a [1, 2]\nb: [*a, *a]\n") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    assert files.parse_yaml(_aliases(5))["a1"] == [["x"]] * 9


def test_a_json_file_of_endless_values_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_VALUES", 1000)
    path = tmp_path / "known.json"
    path.write_text(json.dumps([{"a": 1}] * 600))
    assert "known.json: cannot be read as a matrix" in refusal(files.load, path, "a matrix")
    path.write_text(json.dumps([{"a": "x" * 9}] * 300))
    assert len(files.load(path, "a matrix")) == 300


def test_a_value_of_any_length_makes_a_short_message(tmp_path):
    for parts in ("x" * 100_000, ["y" * 90_000] * 5, {"a": [1] * 100_000}):
        (tmp_path / "mine.yaml").write_text(json.dumps({"question": "Which?", "parts": parts}).replace(",", ", "))
        with pytest.raises(Refusal) as refused:
            cli.run(["plan", str(tmp_path / "mine.yaml")])
        assert len(str(refused.value)) < 1000


def test_steps_are_parsed_in_parts(monkeypatch):
    lines = [json.dumps(dict.fromkeys(steps.STEP_KEYS, 1.0) | {"step": number}) for number in range(1, 8)]
    content = "".join(f"{line}\n" for line in lines)
    whole = steps.parse_steps("steps.jsonl", content.encode())
    monkeypatch.setattr(steps, "AT_ONCE", 3)
    assert steps.parse_steps("steps.jsonl", content.encode()) == whole
    with pytest.raises(Refusal, match="line 5 is not step 5"):
        steps.parse_steps("steps.jsonl", content.replace('"step": 5', '"step": 4').encode())
    with pytest.raises(Refusal, match="line 2 is not step 2"):
        steps.parse_steps("steps.jsonl", content.replace("\n", f",{lines[2]}\n", 1).encode())
    assert steps.parse_steps("steps.jsonl", b"") == []
