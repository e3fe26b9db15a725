"""Output in a terminal: the answer first, lines that fit the width, no Markdown, HTML or JSON."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import launching
import pytest

from study import cli
from study.engines.conformance import committed, installation
from study.engines.diff.recorded import FORMAT

CONFIGS = launching.ROOT / "accelerate_configs"
MARKUP = re.compile(r"\*\*|&\w+;|\]\(|^\s*\|.*\|$|\{\"\w+\": \"|^#+ ", re.MULTILINE)
OLD = "deepspeed==0.17.5\ntorch==2.6.0\ntransformers==4.45.2\ntrl==0.12.0\npeft==0.17.0\n"
NEW = "deepspeed==0.19.8\ntorch==2.13.0\ntransformers==5.23.0\ntrl==1.16.0\npeft==0.18.0\n"


def put_recording(folder: Path, scale: float) -> None:
    """Write a recording of one rank, in which a weight with a long name changes in step 1."""
    name = "model.layers.0.attention.output.dense.weight"
    entries = [[step, "weights", name, 0, 1, "float32", [1.0 + step * scale] * 32, []] for step in (0, 1)]
    recording = {
        "format": FORMAT, "rank": 0, "world_size": 1, "token": "a", "of": None, "engine": "Sequential",
        "versions": {"torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "transformers": "5.23.0"},
        "asked": 1, "steps": 1, "completed": 1, "raised": None, "backward": [], "entries": entries,
    }  # fmt: skip
    folder.mkdir()
    (folder / "rank-0.json.gz").write_bytes(gzip.compress(json.dumps(recording).encode()))


# Commands, the exit status, and a pattern of the first line: the answer.
PRINTED = {
    "upgrade old.txt new.txt": (1, r"\d+ of \d+ known changes between these files may affect training\."),
    "diff a b": (1, r"First difference: step 1"),
    "diff a a": (0, r"No difference: "),
    "claims": (0, r"\d+ of \d+ sentences have a definite verdict\."),
    "claims stages-analysis": (0, r"DeepSpeed ZeRO Optimization Stages"),
    "claims stages-analysis.loss.stage3-no-impact.bert": (0, r"Claim: "),
    "claims --search memory": (0, r"\d+ sentences contain all of these words: memory"),
    "claims --search nowhere-at-all": (0, r"No sentence contains"),
    "conformance": (1, r"\d+ of \d+ cells are wrong or crashed"),
    f"doctor {CONFIGS / 'zero3.yaml'}": (0, r".*: \d+ keys need no change: "),
}  # fmt: skip


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("line", PRINTED)
def test_output_fits_the_terminal_and_begins_with_the_answer(line, columns, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    Path("old.txt").write_text(OLD)
    Path("new.txt").write_text(NEW)
    put_recording(Path("a"), 1.0)
    put_recording(Path("b"), 9.0)
    monkeypatch.setattr(installation, "examine", lambda *cells, **options: committed.newest())
    status, answer = PRINTED[line]
    assert cli.run(line.split()) == status
    out = capsys.readouterr().out
    assert re.match(answer, " ".join(out.split()))
    longest_words = [word for word in out.split() if len(word) > columns - 10]  # paths and names are not broken
    too_long = [text for text in out.splitlines() if len(text) > columns and '"pin_memory": true' not in text]
    tables = columns < 80 and line in ("claims", "claims stages-analysis", "conformance")  # tables keep their columns
    assert tables or not [text for text in too_long if not any(word in text for word in longest_words)]
    assert not MARKUP.search(out), MARKUP.search(out)


@pytest.mark.parametrize("name", [command.name for command in cli.check.COMMANDS])
def test_help_fits_the_terminal(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "Exit status" in out
