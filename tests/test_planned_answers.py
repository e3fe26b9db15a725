"""The answers that the planner's page loads: those of the command, and all of them there."""

from __future__ import annotations

import json

import planned_answers
import pytest
from launching import ROOT

from study import cli
from study.planner.asked import PLANNED

FOLDER = ROOT / "reports" / PLANNED.folder
SOME = list(planned_answers.asked_for())[::37]


def committed(model: str) -> dict:
    text = (FOLDER / f"{model}.js").read_text()
    assert text.startswith("planned(")
    return json.loads(text.removeprefix("planned(").rstrip().removesuffix(");"))


@pytest.mark.parametrize("model", PLANNED.models)
def test_every_answer_is_there_and_some_are_made_again(model):
    """Where this fails, tools/planned_answers.py makes them anew."""
    content = committed(model)
    assert content["model"] == model
    assert list(content["answers"]) == [key.text for key in planned_answers.asked_for()]
    for key in SOME[PLANNED.models.index(model) % 3 :: 3]:
        assert content["answers"][key.text] == json.loads(json.dumps(planned_answers.answer(model, key))), key


def test_an_answer_is_that_of_the_command(capsys):
    key = planned_answers.Key("a100-80gb", 16, 2048, 8, 100)
    words = ["--model", "gpt2-xl", "--gpu", key.gpu, "--gpus", "16", "--sequence-length", "2048"]
    cli.run(["advise", *words, "--global-batch-size", "128", "--network-gbps", "100", "--json"])
    said = json.loads(capsys.readouterr().out)
    answer = planned_answers.answer("gpt2-xl", key)
    assert answer["reason"] == said["reason"]
    for row, option in zip(answer["rows"], said["strategies"], strict=True):
        named = dict(zip(planned_answers.COLUMNS, row, strict=True))
        assert named["strategy"] == option["strategy"]
        assert named["s/step"] == pytest.approx(option["seconds_per_step"], rel=5e-3)
        assert named["GiB a GPU"] == pytest.approx(option["needed_bytes_per_gpu"] / 2**30, rel=5e-3)
