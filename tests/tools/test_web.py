"""The answers of the planner's web page, without a browser. tests/both/test_site.py asks them in a browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from launching import ROOT
from web_form import LABELS, PAGE

from zero_study import cli
from zero_study.cli import web
from zero_study.planner import advice_text

QUESTION = ["--model", "gpt2", "--gpu", "h100-sxm", "--gpus", "8"]
# Modules that a browser does not have. An import of one of them fails in the test below.
MISSING = ("numpy", "torch", "transformers", "pandas", "ssl")
WITHOUT_THEM = f"""
import sys
for name in {MISSING}:
    sys.modules[name] = None
from zero_study.cli import web
for words in {[QUESTION, ["--model", "qwen2.5-32b", "--gpu", "t4", "--gpus", "1"]]}:
    assert "answer" in web.answer(words)
assert "refusal" in web.answer({QUESTION}, "{{}}")
web.as_json({QUESTION})
web.choices()
"""


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    """What `zero-study advise --json` prints."""
    assert cli.run(["advise", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_answer_has_what_the_command_prints(capsys):
    answer = web.answer(QUESTION)
    of_command = printed(QUESTION, capsys)
    assert web.as_json(QUESTION) == of_command
    assert {each["name"] for each in answer["strategies"]} == {each["strategy"] for each in of_command["strategies"]}
    assert answer["recommended"] == of_command["recommended"]
    assert answer["launch"]["command"] == of_command["launch"]["command"]
    assert answer["assumed"] == of_command["assumed"]
    assert answer["command"] == f"zero-study advise {' '.join(QUESTION)}"


def test_bars_end_where_the_printed_memory_ends():
    for strategy in web.answer(QUESTION)["strategies"]:
        assert sum(strategy["parts"].values()) == pytest.approx(strategy["needed_bytes"])
        assert all(size >= 0 for size in strategy["parts"].values()), strategy["name"]
        low, predicted, high = strategy["seconds"]
        assert low < predicted
        assert high is None or predicted < high
        assert strategy["cells"]["GiB"] == advice_text.gib(strategy["needed_bytes"])


def test_the_page_has_the_changes_that_help_and_the_whole_training():
    words = ["--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--gpus", "2", "--tokens", "1e9"]
    answer, remedies = web.answer(words), web.as_json(words)["remedies"]
    assert "The whole training of 1,000,000,000 tokens" in answer["training"]
    recommended, *others = [each["options"] for each in remedies]
    assert f"({recommended})" in answer["answer"]
    assert [each["options"] for each in answer["changes"]] == others
    assert answer["recommended"] == remedies[0]["strategy"]
    assert answer["launch"] == web.as_json(words)["launch"]


def test_everything_can_be_sent_to_the_page():
    json.dumps([web.answer(QUESTION), web.as_json(QUESTION), web.choices()])


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], "--model"),
        (["--model", "gpt2", "--gpus", "8"], "--gpu"),
        (["--model", "gpt2", "--gpu", "h100-sxm", "--global-batch-size", "8"], "--gpus"),
        (["--model", "gpt2", "--gpu", "h100-sxm", "--gpus", "0"], "--gpus 0"),
        ([*QUESTION, "--write", "a.yaml"], "--write"),
        ([*QUESTION, "--trace"], "--trace"),
        ([*QUESTION, "--budget", "5"], "--budget"),
        ([*QUESTION, "--tensor-parallel", "2"], "--tensor-parallel"),
        ([*QUESTION, "--unknown"], "--unknown"),
        ([*QUESTION, "--help"], "--help"),
        (["--model", "no-such-model", "--gpu", "h100-sxm", "--gpus", "8"], "no-such-model"),
    ],
)
def test_what_the_page_refuses(words, names):
    answer = web.answer(words)
    assert set(answer) == {"refusal"}
    assert names in answer["refusal"]


def test_a_pasted_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--gpu", "h100-sxm", "--gpus", "8"]
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "vocab_size": 1000,
              "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}  # fmt: skip
    assert web.answer(words, json.dumps(config))["command"].endswith("--model config.json")
    assert "config.json" in web.answer(words, "not JSON")["refusal"]


def test_a_pasted_configuration_does_not_answer_a_later_question(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--gpu", "h100-sxm", "--gpus", "8"]
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    assert "answer" in web.answer(words, json.dumps(config))
    assert "refusal" in web.answer([*words, "--model", web.CONFIG])
    assert not list(tmp_path.iterdir())


@pytest.mark.launches
def test_a_browser_has_all_that_an_answer_needs(tmp_path):
    completed = subprocess.run(
        [sys.executable, "-c", WITHOUT_THEM], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr


def test_the_hub_is_not_contacted_in_a_browser(monkeypatch):
    monkeypatch.setattr(sys, "platform", "emscripten")
    answer = web.answer(["--model", "owner/model", "--gpu", "h100-sxm", "--gpus", "8"])
    assert "config.json" in answer["refusal"]


def test_the_page_offers_what_the_command_knows():
    choices = web.choices()
    assert len(choices["models"]) > 250
    assert len(choices["gpus"]) > 40
    offered = set(re.findall(r'<select id="([a-z-]+)" name', PAGE)) - {"gpu", "load-in-4bit", "sync-each-batch"}
    assert offered <= {name for name, values in choices["options"].items() if values}
    flags = {flag[2:] for option in cli.all_commands()["advise"].params for flag in option.opts}
    assert set(re.findall(r' name="([a-z0-9-]+)"', PAGE)) - {"config"} == set(LABELS)
    assert set(LABELS) <= flags
    question = [word for name, value in choices["first"]["question"].items() for word in (f"--{name}", value)]
    assert choices["first"]["answer"] == web.answer(question, labels=LABELS)


def test_how_many_gpus_are_needed(capsys):
    words = ["--model", "llama-3.1-8b", "--gpu", "h100-sxm"]
    answer, of_command = web.answer(words, labels=LABELS), printed(words, capsys)
    assert web.as_json(words) == of_command
    assert answer["answer"] == of_command["answer"]
    assert answer["machines"] == of_command["machines"]
    for row, machine in zip(answer["strategies"], of_command["machines"], strict=True):
        assert row["name"] == machine["strategy"]
        assert row["needed_bytes"] == pytest.approx(machine["needed_bytes_per_gpu"], abs=1)


def test_a_model_that_fits_on_no_number_of_gpus():
    words = ["--model", "llama-3.1-8b", "--gpu", "t4", "--sequence-length", "131072"]
    answer = web.answer(words, labels=LABELS)
    assert answer["strategies"] == answer["machines"] == []
    assert LABELS["gpus"] in answer["answer"]


# Trainings that need changes of every kind.
CHANGED = [
    ["--model", "llama-3.1-8b", "--gpu", "a100-80gb", "--gpus", "8", "--sequence-length", "131072"],
    ["--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--gpus", "1"],
    ["--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--gpus", "2", "--tokens", "1e9"],
    ["--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--gpus", "2", "--micro-batch-size", "4"],
    ["--model", "qwen2.5-32b", "--gpu", "rtx-4090", "--gpus", "1"],
    ["--model", "qwen2.5-32b", "--gpu", "rtx-4090", "--gpus", "1", "--lora-rank", "8", "--lora-target", "all-linear"],
    ["--model", "llama-3.1-70b", "--gpu", "h100-sxm", "--gpus", "8", "--activation-checkpointing", "none"],
    ["--model", "llama-3.1-8b", "--gpu", "t4", "--gpus", "1", "--sequence-length", "131072"],
    ["--model", "gpt2", "--gpu", "h100-sxm", "--gpus", "8", "--global-batch-size", "7"],
    ["--model", "gpt2", "--gpu", "h100-sxm", "--gpus", "8", "--load-in-4bit"],
    ["--model", "gpt2", "--gpu", "h100-sxm", "--global-batch-size", "8"],
]


def texts(content: object) -> list[str]:
    """All texts of an answer that are for reading."""
    if isinstance(content, dict):
        return [text for key, each in content.items() if key not in web.COMMANDS for text in texts(each)]
    if isinstance(content, list):
        return [text for each in content for text in texts(each)]
    return [content] if isinstance(content, str) else []


@pytest.mark.parametrize("words", CHANGED, ids=lambda words: " ".join(words))
def test_the_page_names_its_fields_and_no_options(words):
    answer = web.answer(words, labels=LABELS)
    json.dumps(answer)
    named = [name for text in texts(answer) for name in re.findall(r"--([a-z0-9-]+)", text)]
    without_field = {"disk", "disk-bandwidth", "host-cores", "host-bandwidth", "dropout"}  # what the form does not have
    assert set(named) <= without_field
    changes = [*answer.get("changes", []), *answer.get("adapters", []), *filter(None, [answer.get("change")])]
    for change in changes:
        assert set(re.findall(r"--([a-z0-9-]+)", change["options"])) <= set(LABELS)
        assert ("QLoRA" in change["words"]) == ("--load-in-4bit" in change["options"])


def test_words_for_options():
    labels = {"a-rank": "Rank", "b": "Flag", "gpus": "GPUs", "load-in-4bit": "Four bits"}
    lora = "--lora-rank 16 --lora-target all-linear"
    for text, expected in {
        "Use --a-rank 16 --b: it fits.": 'Use "Rank" 16, "Flag": it fits.',
        "Add --gpus and --a-rank, or --b.": 'Add "GPUs" and "Rank", or "Flag".',
        "--gpus 0: must be more": '"GPUs" 0: must be more',
        "see `zero-study advise --gpus list` or --unknown": "see `zero-study advise --gpus list` or --unknown",
        f"Use {lora} --load-in-4bit: it fits.": "Use QLoRA: it fits.",
        f"QLoRA fits ({lora} --load-in-4bit): 4 s": "QLoRA fits: 4 s",
        f"LoRA fits ({lora}): 4 s": "LoRA fits: 4 s",
        f"Use {lora} --b: it fits.": 'Use LoRA, "Flag": it fits.',
    }.items():
        assert web.labeled(text, labels) == expected


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (None, None), (3, None), ("--gpu", None), ({"a": 1}, None), ([1, None], None), ([["--gpu"]], None),
        (QUESTION, 3), (QUESTION, b"{}"), (QUESTION, {"model_type": "gpt2"}), (QUESTION, "\ud800"), (["\ud800"], None),
        ([*QUESTION, "\x1b[2J"], None), ([*QUESTION, "--lora-rank", "a\nb"], None), (["--help"], None),
        ([*QUESTION[:-2], "--gpu-memory", "nan"], None),
    ],
)  # fmt: skip
def test_odd_questions_are_refused_in_one_line(words, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = web.answer(words, config)
    json.dumps(answer)
    if "refusal" in answer:
        assert answer["refusal"].isprintable()
    assert not (tmp_path / web.CONFIG).exists()


@pytest.mark.parametrize(
    ("words", "are_adapters_named"),
    [
        (QUESTION, False),  # it fits
        (["--model", "qwen2.5-32b", "--gpu", "rtx-4090", "--gpus", "1"], True),
        (["--model", "qwen2.5-32b", "--gpu", "rtx-4090", "--gpus", "1", "--lora-rank", "8"], False),  # has an adapter
    ],
)
def test_adapters_are_suggested_only_if_nothing_fits(words, are_adapters_named):
    answer = web.answer(words)
    assert bool(answer["adapters"]) == are_adapters_named
    assert answer["change"] is None or answer["change"]["options"] in answer["answer"]
    for each in answer["adapters"]:
        # The options can be added to the question, and have the predicted result.
        changed = web.answer([*words, *each["options"].split()])
        fitting = [strategy["name"] for strategy in changed["strategies"] if strategy["fits"]]
        assert bool(fitting) == (" fits: " in each["predicted"])
        assert not fitting or each["predicted"].split()[0] in fitting


def test_a_difference_of_nothing_is_not_called_less_time():
    words = [
        "--model",
        "qwen2.5-32b",
        "--gpu",
        "rtx-4090",
        "--gpus",
        "1",
        "--lora-rank",
        "16",
        "--lora-target",
        "all-linear",
    ]
    assert " 0 %" not in web.answer(words)["answer"]
