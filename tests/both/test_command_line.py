"""The options of a command are made from the fields of a model, and `advise` hands its options to the planner."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel
from refusing import refusal

from zero_study import cli, planner
from zero_study.cli import plan
from zero_study.command_line import Option, option, options_of
from zero_study.planner import Request

OF_COMMAND = {
    "model",
    "this_machine",
    "everything",
    "as_json",
    "write",
    "kubernetes",
    "trace",
    "help_all",
    "budget",
    "deadline",
    "measured",
    "measured_step_seconds",
}
OF_COMMAND |= {f"{name}_parallel" for name in plan.PARALLELISMS}
CASE = ["--model", "gpt2", "--gpu", "h100-sxm", "--gpus", "8"]


class Sample(BaseModel):
    """A model with an option of each kind."""

    size: int = option(3, "A size.", "One")
    kind: Literal["a", "b"] | None = option(None, "A kind. [default: as the size]", "One", is_common=True)
    rate: float | None = option(None, "A rate.", "Two", metavar="GIB", unit="GiB", flag="--speed")
    compile: bool = option(False, "A switch.", "Two")
    sync: bool | None = option(None, "Another switch.", "Two")


def described(sample: Option) -> tuple[Any, ...]:
    return sample.opts, sample.secondary_opts, sample.metavar, sample.help, sample.group


def test_options_are_made_from_fields():
    size, kind, rate, switch, sync = options_of(Sample)
    assert described(size) == (["--size"], [], "INTEGER", "A size. [default: 3]", "One")
    assert described(kind) == (["--kind"], [], "[a|b]", "A kind. [default: as the size]", "One")
    assert described(rate) == (["--speed"], [], "GIB", "A rate.", "Two")
    assert described(switch) == (["--compile"], [], None, "A switch.", "Two")
    assert described(sync) == (["--sync"], ["--no-sync"], None, "Another switch.", "Two")
    assert [each.is_common for each in (size, kind)] == [False, True]


def test_what_a_preset_turns_on_can_be_turned_off():
    switch = options_of(Sample, has_presets=True)[3]
    assert (switch.secondary_opts, switch.help) == (["--no-compile"], "A switch. [default: off]")


def test_every_option_of_advise_is_a_field_of_the_request_or_of_the_command():
    names = {parameter.name for parameter in cli.all_commands()["advise"].params}
    assert names == OF_COMMAND | set(Request.model_fields)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ([], {}),
        (["--compile", "--kernels", "fused"], {"compile": True, "kernels": "fused"}),
        (["--stack", "trl"], {"stack": "trl"}),
        (["--sync-each-batch"], {"sync_each_batch": True}),
        (["--no-sync-each-batch"], {"sync_each_batch": False}),
        (["--disk-bandwidth", "6.8,4"], {"disk_bandwidth": (6.8, 4.0)}),
        (["--disk-bandwidth", "7"], {"disk_bandwidth": (7.0, 7.0)}),
        (["--lora-rank", "16", "--lora-dropout", "0.1"], {"lora_rank": 16, "lora_dropout": 0.1}),
        (["--gpu-memory", "96"], {"gpu_memory": 96.0}),
        (["--activation-checkpointing", "selective-op"], {"activation_checkpointing": "selective-op"}),
    ],
)
def test_the_command_line_and_python_make_the_same_request(words, settings, monkeypatch):
    requested = []
    monkeypatch.setattr(planner, "advise", lambda model, request, trace: requested.append(request) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.run(["advise", *CASE, *words])
    assert requested == [Request("h100-sxm", 8, **settings)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--kernels", "fuse"],
            "--kernels: 'fuse' is not one of 'fused', 'transformers'. `zero-study advise --help-all`",
        ),
        (["--lora-rank", "0"], "--lora-rank 0: must be a whole number of at least 1"),
        (["--gpus", "1000001"], "num_gpus=1000001: must be at most 1,000,000"),
        (["--network-gbps", "nan"], "network_gbps=nan: must be a number above 0, in Gbit/s of a node"),
        (["--network-gbps", "x"], "--network-gbps: 'x' is not a valid float. `zero-study advise --help-all` lists"),
        (["--disk-bandwidth", "1,2,3"], "--disk-bandwidth 1,2,3: must be one number, or two with a comma"),
        (["--no-compile"], "no such option '--no-compile'. Did you mean --compile?"),
    ],
)
def test_a_wrong_value_is_refused_in_one_message(words, message):
    assert refusal(cli.run, ["advise", *CASE, *words]).startswith(message)


@pytest.mark.parametrize("settings", [{"num_gpus": None}, {"optimizer": None}, {"stack": None}, {"num_gpus": True}])
def test_a_request_without_a_required_value_is_refused(settings):
    (name,) = settings
    assert refusal(Request, "l4", **settings).startswith(f"{name}=")


def test_a_changed_request_is_checked():
    request = Request("l4", 2, kernels="fused")
    assert request.replace(num_gpus=4) == Request("l4", 4, kernels="fused")
    assert refusal(request.replace, num_gpus=0) == "num_gpus=0: must be a whole number of at least 1"
