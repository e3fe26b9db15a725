"""README answers first: few words, few numbers in a sentence, and each of them from a committed record."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import first_screen
import launching
import pytest
from launching import ROOT
from test_weight import written

README = (ROOT / "README.md").read_text(encoding="utf-8")
FINDINGS = (
    README.partition("## What came out")[2].partition("\n**No GPU")[0]
    + README.partition("**ZeRO-3")[2].partition("**")[0]
)
# Numbers of names: a stage, a release, and what is no quantity.
NAMES = re.compile(r"ZeRO-\d|FSDP2|\d+\.\d+\.\d+|\(\[[^)]*\)\)|\([^)]*\)")


def numbers(sentence):
    return re.findall(r"\d+(?:\.\d+)?", NAMES.sub("", sentence))


def test_it_is_short():
    assert len(written(README)) <= 600
    assert not re.search(r"^ *\d+\. ", README, re.MULTILINE)  # a sentence's number would begin a list
    rows = [line for line in README.splitlines() if line.startswith("|")]
    assert len(rows) <= 9
    assert all(len(cell.split()) <= 10 for row in rows for cell in row.strip("|").split("|"))


def test_a_finding_has_at_most_two_numbers_a_sentence_and_none_without_a_record():
    sentences = re.split(r"[.;)] (?=[A-Z(*\[])", " ".join(FINDINGS.split()))
    assert max(len(numbers(each)) for each in sentences) == 2
    said = {number.said.split()[0] for number in first_screen.NUMBERS}
    assert {each for sentence in sentences for each in numbers(sentence)} <= said


@pytest.mark.parametrize("number", first_screen.NUMBERS, ids=lambda number: number.what)
def test_a_number_is_what_the_records_say(number):
    assert number.found() == number.said
    assert number.said in " ".join(README.split())
    study = ROOT / "study" / "studies" / f"{number.study}.yaml"
    assert number.study == "conformance" or "uperseded by" not in study.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_try_prints_what_it_shows(tmp_path):
    commands, shown = re.search(
        r"```sh\nmake setup.*?activate\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL
    ).groups()
    commands = commands.replace("study train", f"study train --output-dir {tmp_path}/$((i=i+1))")
    commands = "set -e; i=0\n" + commands.replace("compare runs", f"compare {tmp_path}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as after `source .venv/bin/activate`
    environment = launching.environment({"PATH": path})
    done = subprocess.run(["bash", "-c", commands], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for line in shown.splitlines()[1:]:  # but for times, which are of the machine and the hour
        named, memory, _ = re.split(r"((?<=  )[\d.]+ [MG]iB(?: +[\d.]+ x)?)", line)
        assert any(each.startswith(named) and memory in each for each in done.stdout.splitlines()), done.stdout
