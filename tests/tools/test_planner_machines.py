"""How many GPUs a model needs, which machine is the cheapest, and how long a whole training takes."""

from __future__ import annotations

import functools
import json
import math
import operator
import re
from pathlib import Path
from typing import Any

import pytest

from zero_study import cli, planner
from zero_study.errors import Refusal
from zero_study.planner import calibration, choose, machines, machines_text, training_text, units
from zero_study.planner.machines import Comparison, NumbersOfGpus
from zero_study.planner.request import Request
from zero_study.theory.step_time import StepTime


@functools.cache
def numbers() -> NumbersOfGpus:
    return machines.numbers_of_gpus("llama-3.1-8b", Request("h100-sxm", tokens=1e9))


@functools.cache
def compared(budget: float | None = None, deadline: float | None = None) -> Comparison:
    names = ["a100-80gb", "h100-sxm", "rtx-4090"]
    return machines.compare("llama-3.1-8b", Request("h100-sxm", tokens=1e9), names, None, budget, deadline)


def test_each_number_of_gpus_has_the_answer_that_this_number_gets() -> None:
    assert [machine.num_gpus for machine in numbers().machines] == [1, 2, 4, 8]
    for machine in numbers().machines:
        alone = planner.advise("llama-3.1-8b", Request("h100-sxm", machine.num_gpus)).recommended
        assert alone is not None
        assert alone.strategy == machine.option.strategy
        assert alone.seconds == pytest.approx(machine.option.seconds)


def test_the_answer_names_the_first_number_that_is_comfortable() -> None:
    first, second, *_ = numbers().machines
    assert (first.is_comfortable, second.is_comfortable) == (False, True)
    assert "use 2 x h100-sxm: " in machines_text.answer_of_numbers(numbers())


def test_a_whole_training_is_its_steps() -> None:
    advice = planner.advise("gpt2", Request("a100-80gb", 8, examples=1000, epochs=2.5))
    option = advice.recommended
    assert option is not None
    training = machines.whole_training(option, advice.request)
    assert training is not None
    tokens_per_step = 8 * 8 * 1024
    assert training.tokens == 1000 * 2.5 * 1024
    assert training.steps == -(-training.tokens // tokens_per_step)
    assert training.hours == pytest.approx(training.steps * option.seconds / 3600)
    assert training.dollars == pytest.approx(training.hours * option.prediction.dollars_per_hour)
    assert training.hours_low <= training.hours <= (training.hours_high or float("inf"))


def test_the_cheapest_and_the_fastest_machine_keep_the_limits() -> None:
    every = compared()
    cheapest = every.cheapest
    assert cheapest is not None
    for machine in every.machines:
        assert machine.certain_cost * (1 + choose.EQUALLY_FAST) >= cheapest.certain_cost
        if machine.certain_cost < cheapest.certain_cost:
            assert machine.num_gpus >= cheapest.num_gpus
    assert every.fastest is max(every.machines, key=lambda machine: machine.option.total_tokens_per_second)
    limited = compared(budget=250.0, deadline=6.0)
    for machine in limited.within_limits:
        assert machine.training is not None
        assert machine.training.hours <= 6
        assert (machine.training.dollars or 0) <= 250
    assert limited.verdict.num_findings == 0
    assert compared(budget=0.01).cheapest is None
    assert compared(budget=0.01).verdict.num_findings == 1
    assert "None of " in machines_text.answer_of_comparison(compared(budget=0.01))


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "counts"),
    [
        ("llama-3.1-8b", "b200", {}, (2, 8)),
    ],
)
def test_a_smaller_machine_wins_if_both_cost_the_same(
    model: str, gpu: str, settings: dict[str, Any], counts: tuple[int, int]
) -> None:
    comparison = machines.compare(model, Request(gpu, tokens=1e8, **settings), [gpu, "h100-sxm"])
    cheapest, least = comparison.cheapest, comparison.machines[0]
    assert cheapest is not None
    assert (cheapest.num_gpus, least.num_gpus) == counts
    assert (cheapest.cost or 0) <= (1 + choose.EQUALLY_FAST) * (least.cost or 0)
    table = machines_text.text_of_comparison(comparison).partition("\nmachine ")[2].splitlines()
    assert table[1].startswith(f"{cheapest.num_gpus} x {cheapest.gpu.name} ")


def test_several_geforce_cards_do_not_win_by_less_than_their_error() -> None:
    comparison = machines.compare("llama-3.1-8b", Request("h100-sxm"), ["rtx-5090", "rtx-pro-6000", "a100-80gb"])
    cheapest, least = comparison.cheapest, comparison.machines[0]
    assert cheapest is not None
    assert (cheapest.gpu.name, least.gpu.name) == ("rtx-pro-6000", "rtx-5090")
    assert least.certain_cost > (cheapest.cost or 0) > (least.cost or 0)
    answer = machines_text.answer_of_comparison(comparison)
    assert f"{least.num_gpus} x rtx-5090 is predicted to cost less" in answer
    without_price = machines.compare("gpt2", Request("mi300x"), ["mi300x", "mi325x"])
    assert "cost less" not in machines_text.answer_of_comparison(without_price)
    alone = machines.compare("gpt2", Request("rtx-4090"), ["rtx-4090", "a100-80gb"]).cheapest
    assert alone is not None
    assert (alone.gpu.name, alone.num_gpus) == ("rtx-4090", 1)  # one card counts as any other


def test_no_price_is_rounded_to_nothing_and_each_has_its_provider_and_interval() -> None:
    request = Request("rtx-4090", lora_rank=16, load_in_4bit=True, tokens=1e6)
    comparison = machines.compare("llama-2-7b", request, ["rtx-4090", "a100-80gb"])
    text = " ".join(machines_text.text_of_comparison(comparison).split())
    assert not re.search(r"\$0(?![.\d])", text)
    answer = machines_text.answer_of_comparison(comparison)
    for machine in (comparison.cheapest, comparison.fastest):
        assert machine is not None
        assert training_text.provider_of(machine.gpu) in answer
    for machine in comparison.machines:
        low, high = (
            units.price_in_words((machine.cost or 0) * end / machine.option.seconds)
            for end in (machine.option.fastest_seconds, machine.option.slowest_seconds)
        )
        assert f"{units.price_in_words(machine.cost)} ({low}-{high})" in text


@pytest.mark.parametrize("gpu", [gpu for gpu in machines.GPUS.values() if gpu.price_per_hour])
def test_each_price_has_a_provider(gpu: Any) -> None:
    known = {"Amazon EC2", "Azure", "Jarvislabs", "Lambda", "Paperspace", "RunPod community cloud"}
    assert training_text.provider_of(gpu) in known


def test_the_budget_that_is_enough_also_keeps_the_deadline() -> None:
    missed = compared(budget=1.0, deadline=6.0)
    in_time = [m.training.dollars or 0 for m in missed.machines if m.training is not None and m.training.hours <= 6]
    assert min(in_time) > (missed.machines[0].cost or 0)  # the cheapest machine misses the deadline
    assert missed.enough is None
    assert f"a budget of at least ${math.ceil(min(in_time)):,}," in machines_text.answer_of_comparison(missed)


def test_more_gpus_are_named_if_they_would_keep_the_deadline() -> None:
    late = machines.compare("llama-3.1-8b", Request("h100-sxm", tokens=1e9), ["h100-sxm"], 8, deadline=1.0)
    assert late.within_limits == []
    assert late.enough is not None
    assert late.enough.num_gpus > 8
    assert late.enough.training is not None
    assert late.enough.training.hours <= 1
    answer = machines_text.answer_of_comparison(late)
    assert answer.count("8 x h100-sxm") == 1
    assert f"{late.enough.num_gpus} x h100-sxm" in answer
    assert machines_text.content_of_comparison(late)["enough"]["num_gpus"] == late.enough.num_gpus
    never = machines.compare("llama-3.1-8b", Request("rtx-4090", tokens=1e9), ["rtx-4090"], 8, deadline=0.1)
    assert never.enough is None
    assert "No larger machine" in machines_text.answer_of_comparison(never)


def test_the_list_of_gpus_has_every_price_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["advise", "--gpu", "list"]) == 0
    text = capsys.readouterr().out
    table, _, sources = text.partition("Prices, with their date:")
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line.strip()}
    for gpu in machines.GPUS.values():
        if gpu.price_per_hour is not None:
            assert f"{gpu.price_per_hour:.2f}" in rows[gpu.name]
            assert gpu.price_date in sources
            assert gpu.name in sources
    assert max(map(len, text.splitlines())) <= 80


def test_gpus_without_a_known_machine_are_compared_within_one_node() -> None:
    assert max(machine.num_gpus for machine in compared().machines if machine.gpu.name == "rtx-4090") == 8
    assert max(machine.num_gpus for machine in compared().machines) == machines.MOST_GPUS


def test_every_price_has_its_source_and_date() -> None:
    for machine in machines_text.content_of_comparison(compared())["machines"]:
        assert machine["price_source"].endswith(")")
    text = " ".join(machines_text.text_of_comparison(compared()).split())
    assert "RunPod" in text
    assert "Amazon EC2" in text


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--tokens", "1e9", "--examples", "5"], "both state how long"),
        (["--epochs", "3"], "--epochs needs the number of examples"),
        (["--deadline", "5"], "--deadline needs the length of the whole training"),
        (["--measured-step-seconds", "2"], "--measured-step-seconds needs --model, --gpus and one --gpu"),
        (["--gpus", "8", "--gpu", "h100-sxm,a100-80gb", "--trace"], "--trace needs --model, --gpus and one"),
        (["--tensor-parallel", "2"], "--tensor-parallel: the planner cannot predict tensor parallelism"),
        (["--context-parallel", "2", "--sequence-parallel", "2"], "are for different engines"),
    ],
)
def test_questions_without_an_answer_are_refused(words: list[str], refusal: str) -> None:
    with pytest.raises(Refusal, match=refusal):
        cli.run(["advise", "--model", "gpt2", "--gpu", "h100-sxm", *words])


def test_the_command_compares_machines_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    gpus = {name: machines.GPUS[name] for name in ("t4", "l4", "h20")}
    monkeypatch.setattr(machines, "GPUS", gpus)
    assert cli.run(["advise", "--model", "gpt2", "--tokens", "1e8", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert {machine["gpu"] for machine in content["machines"]} == {"t4", "l4"}
    assert content["without_price"] == ["h20"]
    assert content["cheapest"]["whole_training"]["dollars"] > 0


@pytest.mark.parametrize(("hours", "words"), [(0.5, "30 minutes"), (5.0, "5 hours"), (100.0, "4.2 days")])
def test_a_duration_has_the_unit_in_which_one_says_it(hours: float, words: str) -> None:
    assert training_text.duration(hours) == words


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    question = ["advise", "--model", "llama-3.1-8b", "--gpu", "a100-80gb", "--gpus", "8", "--strategy", "zero3"]
    assert cli.run([*question, *words, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def steps_of(name: str | None = None) -> dict[str, StepTime]:
    options = planner.advise("llama-3.1-8b", Request("a100-80gb", 8, strategy=name)).options
    return {option.strategy.name: option.prediction.step for option in options if option.fits}


def of_logs(tmp_path: Path, **seconds: float) -> list[str]:
    words = []
    for name, value in seconds.items():
        log = tmp_path / f"{name}.csv"
        log.write_text("step,loss,step_seconds\n" + "".join(f"{step},3.0,{value}\n" for step in range(20)))
        words += ["--measured", f"{name}={log}"]
    return words


def test_a_measured_step_calibrates_its_largest_component(capsys: pytest.CaptureFixture[str]) -> None:
    steps = steps_of()
    found = measured(capsys, "--measured-step-seconds", str(2 * steps["zero3"].total))["calibration"]
    own, added = calibration.parts_of(steps["zero3"]), steps["zero3"].total
    assert own[0] == max(own)
    assert sum(own) == pytest.approx(steps["zero3"].total)
    assert found["factors"] == pytest.approx({"computation": 1 + added / own[0]})
    assert not found["measured"][0]["is_inside_interval"]
    assert "The usual reasons" in " ".join(found["meaning"])
    assert "The rest (communication, offload) is unchanged" in " ".join(found["meaning"])
    expected = {name: step.total + calibration.parts_of(step)[0] * added / own[0] for name, step in steps.items()}
    assert {each["strategy"]: each["seconds_per_step"] for each in found["others"]} == pytest.approx(
        {name: seconds for name, seconds in expected.items() if name != "zero3"}
    )


def test_several_measured_steps_calibrate_several_components(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Steps with other speeds of computation and of offload than predicted show both speeds."""
    steps, factors = steps_of(), (1.5, 1.0, 3.0)
    true = {name: sum(map(operator.mul, factors, calibration.parts_of(step))) for name, step in steps.items()}
    words = of_logs(tmp_path, **{name: true[name] for name in ("zero3", "zero3_nvme_offload")})
    found = measured(capsys, *words)["calibration"]
    assert found["factors"] == pytest.approx({"computation": 1.5, "offload": 3.0}, rel=1e-3)
    assert [step["strategy"] for step in found["measured"]] == ["zero3", "zero3_nvme_offload"]
    times = {each["strategy"]: each["seconds_per_step"] for each in found["others"]}
    assert times["fsdp2"] == pytest.approx(true["fsdp2"], rel=1e-3)
    assert times["fsdp2_cpu_offload"] == pytest.approx(true["fsdp2_cpu_offload"], rel=1e-3)


def test_components_that_cannot_be_told_apart_share_a_factor() -> None:
    """A step that takes less than the parts that it does not calibrate."""
    step = steps_of("zero3_cpu_offload")["zero3_cpu_offload"]
    parts = calibration.parts_of(step)
    seconds = 0.9 * (sum(parts) - max(parts))
    assert calibration.factors_of([(step, seconds)]) == pytest.approx(
        dict.fromkeys(calibration.COMPONENTS, seconds / step.total)
    )


def test_the_answer_uses_the_measured_step(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--measured-step-seconds", "9", "--tokens", "1e9")
    content = measured(capsys, *words)
    (option,) = content["strategies"]
    assert [option[f"seconds_per_step{end}"] for end in ("", "_low", "_high")] == pytest.approx([9.0] * 3)
    training = option["whole_training"]
    assert training["hours"] == pytest.approx(training["steps"] * 9 / 3600)
    assert "a step took 9 s" in content["answer"]
    assert "predicted to take" not in content["answer"]
    assert content["calibration"]["measured"][0]["predicted_seconds_per_step"] < 9
    question = ["advise", "--model", "llama-3.1-8b", "--gpu", "a100-80gb", "--gpus", "8", "--strategy", "zero3"]
    assert cli.run([*question, *words]) == 0
    text = capsys.readouterr().out
    assert "9 (measured)" in text
    assert "free" in text.splitlines()[[line.startswith("strategy") for line in text.splitlines()].index(True)]


def test_a_measured_step_is_read_from_a_log(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    log = tmp_path / "steps.csv"
    log.write_text("step,loss,step_seconds\n" + "".join(f"{step},3.0,1.5\n" for step in range(20)))
    found = measured(capsys, "--measured", str(log))["calibration"]
    assert found["measured"][0]["measured_seconds_per_step"] == pytest.approx(1.5)
    with pytest.raises(Refusal, match="needs the strategy that was measured"):
        cli.run(["advise", "--model", "gpt2", "--gpu", "t4", "--gpus", "1", "--measured", str(log)])


def test_more_numbers_are_tried_until_one_is_comfortable() -> None:
    found = machines.numbers_of_gpus("llama-3.1-70b", Request("a100-80gb")).machines
    assert found[-1].is_comfortable
    assert len(found) > machines.NUM_FITTING
    assert choose.GPU_COUNTS[: len(found)] == tuple(machine.num_gpus for machine in found)


@pytest.mark.parametrize("option", ["--budget", "--deadline", "--measured-step-seconds"])
@pytest.mark.parametrize("value", ["-5", "0", "nan", "inf", "x"])
def test_limits_are_numbers_above_zero(option, value):
    with pytest.raises(Refusal, match=option):
        cli.parse(["advise", "--model", "gpt2", "--gpu", "h100", option, value])
