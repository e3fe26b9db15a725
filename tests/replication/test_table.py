"""Test that the table of runs shows what records and outcomes contain, and refuses invalid ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic

from study.compare import predicted, table
from study.compare.predicted import with_theory
from study.config import build_config
from study.records import find as records
from study.records import pack, schema
from study.records.laboratory import LABORATORY
from study.records.steps import read_steps
from zero_study.errors import Refusal
from zero_study.strategy.file import read_by_name


def only(folder: Path) -> pd.Series:
    """The one row of a folder."""
    rows = with_theory(table.read([folder]))
    assert len(rows) == 1
    return rows.iloc[0]


def test_theory_is_joined_and_changes_no_fact(tmp_path):
    synthetic.write_run(tmp_path)
    synthetic.write_outcome(tmp_path, "skipped", seed=1)
    rows = table.read([tmp_path])
    assert list(rows.columns) == list(table.COLUMNS)
    joined = with_theory(rows)
    assert {name: str(kind) for name, kind in joined.dtypes.items()} == table.COLUMNS | predicted.COLUMNS
    pd.testing.assert_frame_equal(joined[list(rows.columns)], rows)
    assert joined.loc[1, list(predicted.COLUMNS)].isna().all()


def test_identity_and_settings(tmp_path):
    path = synthetic.write_run(tmp_path, strategy="zero1", seed=3, study="s", global_batch_size=16, dropout=0.2)
    row, written = only(tmp_path), schema.read(path)
    for name in ("run_id", "command", "machine", "num_params"):
        assert row[name] == getattr(written, name)
    facts = {
        "study": "s", "strategy": "zero1", "box": "Synthetic CPU, 8 cores", "device": "cpu", "status": "ok",
        "world_size": 2, "seed": 3, "repeat": 0, "global_batch_size": 16, "micro_batch_size": 8,
        "gradient_accumulation_steps": 1, "num_steps": 40, "sequence_length": 64, "dropout": 0.2,
        "libraries": "torch 2.13.0, accelerate 1.15.0, deepspeed 0.19.8, transformers 5.23.0",
    }  # fmt: skip
    assert row[list(facts)].to_dict() == facts


def test_a_record_whose_file_was_another_than_the_shipped_one_is_of_another_strategy(tmp_path):
    written = read_by_name("zero3").written
    other = written["yaml"] | {"deepspeed_config": {**written["yaml"]["deepspeed_config"], "zero_stage": 2}}
    for seed, content in enumerate([written, None, {**written, "yaml": other}]):
        path = synthetic.write_run(tmp_path, strategy="zero3", seed=seed)
        synthetic.change(path, strategy_file=content)
    assert list(table.read([tmp_path])["strategy"]) == ["zero3", "zero3", "zero3-changed"]


@pytest.mark.parametrize(("num_steps", "averaged"), [(2, 1), (9, 3), (40, 10)])
def test_what_was_learned_is_that_of_the_steps(tmp_path, num_steps, averaged):
    """A short run ends with a third of its steps."""
    path = synthetic.write_run(tmp_path, num_steps=num_steps)
    synthetic.change_step(path, 2, grad_norm=None)  # an overflow under a loss scaler
    lines = read_steps(path)
    losses, row = [line["loss"] for line in lines], only(tmp_path)
    assert row["mean_final_loss"] == pytest.approx(np.mean(losses[-averaged:]))
    assert row["last_loss"] == losses[-1]
    assert row["loss_area"] == pytest.approx(np.mean(losses))
    assert row["mean_grad_norm"] == pytest.approx(np.mean([line["grad_norm"] for line in lines if line["grad_norm"]]))
    assert table.steps(table.read([tmp_path]))["grad_norm"].isna().sum() == 1
    held_out = schema.read(path).evaluation[-1]
    assert (row["eval_loss"], row["perplexity"]) == (held_out["loss"], held_out["perplexity"])
    assert math.isnan(row["accuracy"])


def test_speed_on_gpus(tmp_path):
    path = synthetic.write_run(tmp_path, box="gpu", precision="bf16", seconds=0.25)
    row, written = only(tmp_path), schema.read(path)
    assert row["box"] == "8 x NVIDIA H200"
    assert row["seconds_per_step"] == written.timing.median_seconds
    assert row["seconds_lower"] < row["seconds_per_step"] < row["seconds_upper"]
    assert row["tokens_per_second"] == written.timing.tokens_per_second
    assert row["tokens_per_second_per_gpu"] == written.timing.tokens_per_second / 2
    assert row["model_flops_per_second"] == written.model_flops_per_sequence * written.timing.samples_per_second
    assert row["mfu"] == pytest.approx(row["model_flops_per_second"] / 2 / 989e12)
    assert row["energy_joules"] == sum(written.energy_joules)
    assert row["joules_per_token"] == row["energy_joules"] / written.tokens


LOAD = {"seconds": 10.0, "num_processors": 2, "own_seconds": 18.0, "other_seconds": 0.4, "stolen_seconds": 0.5}


@pytest.mark.parametrize(
    ("box", "changed", "share", "has_times"),
    [
        ("cpu", {"load": LOAD}, 0.045, True),
        ("cpu", {"load": LOAD | {"stolen_seconds": 0.7}}, 0.055, False),
        ("cpu", {"load": LOAD | {"other_seconds": 9.0}, "other_machines": [{}]}, math.nan, True),  # theirs is not known
        ("gpu", {"load": LOAD | {"other_seconds": 9.0}}, math.nan, True),
    ],
)
def test_a_disturbed_run_has_no_times(tmp_path, box, changed, share, has_times):
    synthetic.change(synthetic.write_run(tmp_path, box=box), **changed)
    row = only(tmp_path)
    assert row["share_of_others"] == pytest.approx(share, nan_ok=True)
    for name in ("seconds_per_step", "seconds_lower", "tokens_per_second", "samples_per_second"):
        assert np.isnan(row[name]) != has_times, name
    assert row["mean_final_loss"] > 0


UNKNOWN_GPU = {"name": "NVIDIA RTX 5000 Ada Generation", "memory_bytes": 2**35, "capability": "8.9"}  # not in the list


@pytest.mark.parametrize(
    ("gpus", "changes", "oversubscribed"),
    [
        ([UNKNOWN_GPU] * 2, {"precision": "bf16"}, False),
        ([synthetic.GPU, UNKNOWN_GPU | {"name": "NVIDIA L4"}], {"precision": "bf16"}, False),
        ([synthetic.GPU | {"name": "Tesla T4"}] * 2, {"precision": "bf16"}, False),  # which has no unit for the type
        ([], {"box": "cpu"}, False),
        ([synthetic.GPU], {}, True),  # none of two ranks has the card to itself, and each counts all of its energy
        ([synthetic.GPU] * 8, {"share_device": True}, True),
        ([UNKNOWN_GPU] * 8, {"share_device": True, "world_size": 1}, False),  # with nobody
    ],
)
def test_no_mfu_without_one_known_peak(tmp_path, gpus, changes, oversubscribed):
    synthetic.write_run(tmp_path, **{"box": "gpu", **changes}, machine={"gpus": gpus})
    row = only(tmp_path)
    assert math.isnan(row["mfu"])
    assert row["model_flops_per_second"] > 0
    assert (row["oversubscribed"], row["share_device"]) == (oversubscribed, "share_device" in changes)
    if gpus:
        assert math.isnan(row["energy_joules"]) is oversubscribed
        assert row["peak_allocated_bytes"] > 0


@pytest.mark.parametrize(
    ("threads", "usable", "cores", "oversubscribed"),
    [(1, None, "2", False), (2, None, "2", True), (1, 1, "1 of 2", True), (1, 2.0, "2", False)],
)
def test_threads_decide_whether_cores_suffice(tmp_path, threads, usable, cores, oversubscribed):
    """A run under `taskset -c 0` is on a box of its own."""
    machine = {"num_cores": 2, "num_threads_per_process": threads, "usable_cores": usable}
    synthetic.write_run(tmp_path, machine=machine)
    row = only(tmp_path)
    assert (row["box"], row["oversubscribed"]) == (f"Synthetic CPU, {cores} cores", oversubscribed)


def test_memory_is_the_largest_ranks_while_training(tmp_path):
    path = synthetic.write_run(tmp_path, box="gpu", world_size=4)
    peaks = json.loads(path.read_text())["peak_memory"]
    peaks[2]["first_step"]["allocated_bytes"] = 10**12
    peaks[1]["built"]["reserved_bytes"] = 10**13  # before training: not counted
    synthetic.change(path, peak_memory=peaks)
    row = only(tmp_path)
    assert row["peak_allocated_bytes"] == 10**12
    assert row["peak_reserved_bytes"] == max(phases["steady_steps"]["reserved_bytes"] for phases in peaks)
    assert row["rank_tensor_bytes"][2] == 10**12
    assert len(row["rank_tensor_bytes"]) == 4
    assert row["memory_imbalance"] == 10**12 / min(row["rank_tensor_bytes"])
    assert row["device_memory_bytes"] == synthetic.GPU["memory_bytes"]
    assert row[["peak_tensor_bytes", "peak_resident_bytes"]].isna().all()


@pytest.mark.parametrize("strategy", ["zero2", "ddp"])
def test_memory_on_a_cpu(tmp_path, strategy):
    """DDP's buckets are C++ tensors, which the probe of live tensors does not see."""
    written = schema.read(synthetic.write_run(tmp_path, strategy=strategy))
    steady, row = [phases["steady_steps"] for phases in written.peak_memory], only(tmp_path)
    tensors = [peak.tensor_bytes + 4 * written.num_params * (strategy == "ddp") for peak in steady]
    assert row["rank_tensor_bytes"] == [rank["peak"] for rank in row["rank_parts"]] == tensors
    assert row["peak_tensor_bytes"] == max(tensors)
    assert row["peak_resident_bytes"] == max(peak.resident_bytes for peak in steady)
    assert row["memory_imbalance"] == max(tensors) / min(tensors)
    assert row["device_memory_bytes"] == 32e9
    assert math.isnan(row["peak_allocated_bytes"])


def test_model_states_are_those_of_the_rank_with_most(tmp_path):
    path = synthetic.write_run(tmp_path, strategy="zero2")
    states = json.loads(path.read_text())["model_state_bytes"]
    states[1]["gradients"] += 1000
    synthetic.change(path, model_state_bytes=states)
    row, most = only(tmp_path), states[1]
    assert row["model_state_bytes"] == most["parameters"] + most["gradients"] + most["optimizer_states"]
    assert (row["parameter_bytes"], row["gradient_bytes"]) == (most["parameters"], most["gradients"])
    assert row["optimizer_state_bytes"] == most["optimizer_states"]
    assert row["communication_buffer_bytes"] == most["communication_buffers"]
    assert row["num_ranks_proved"] == 2
    # arXiv:1910.02054, sec. 5, fp32: parameters whole, gradients and Adam's 8 bytes halved.
    assert row["paper_state_bytes"] == row["num_params"] * (4 + 4 / 2 + 8 / 2)
    parts = ("paper_parameter_bytes", "paper_gradient_bytes", "paper_optimizer_state_bytes")
    assert [row[part] / row["num_params"] for part in parts] == [4, 2, 4]


def test_an_all_reduce_counts_twice(tmp_path):
    path = synthetic.write_run(tmp_path)
    sent = [("all_reduce", 3, 1000), ("all_gather", 2, 100), ("reduce_scatter", 1, 10)]
    sent = [{"kind": kind, "count": count, "bytes": num_bytes} for kind, count, num_bytes in sent]
    synthetic.change(path, collectives_per_step=sent)
    row = only(tmp_path)
    assert (row["collective_bytes"], row["collective_count"]) == (2110, 6)
    synthetic.write_run(tmp_path / "alone", strategy="single", world_size=1)
    assert only(tmp_path / "alone")["collective_bytes"] == 0


def test_what_was_not_measured_is_nan_and_never_0(tmp_path):
    path = synthetic.write_run(tmp_path)
    unknown = ("collectives_per_step", "model_state_bytes", "resting_state_bytes", "peak_memory", "timing")
    unknown = dict.fromkeys((*unknown, "model_flops_per_sequence"))
    synthetic.change(path, **unknown, evaluation=[{"step": 40.0, "loss": None}], machine={"libraries": {}})
    row = only(tmp_path)
    missing = ["collective_bytes", "model_state_bytes", "paper_state_bytes", "peak_tensor_bytes", "memory_imbalance"]
    missing += ["seconds_per_step", "tokens_per_second", "model_flops_per_second", "eval_loss", "num_ranks_proved"]
    missing += ["libraries"]
    assert row[missing].isna().all()
    assert row["rank_tensor_bytes"] is None


def test_a_run_that_failed_has_a_curve_and_no_final_loss(tmp_path):
    path = synthetic.write_run(tmp_path, status="out_of_memory")
    row = only(tmp_path)
    assert (row["status"], row["message"]) == ("out_of_memory", "synthetic: out_of_memory")
    assert row[["mean_final_loss", "loss_area", "mean_grad_norm", "seconds_per_step", "eval_loss"]].isna().all()
    assert len(table.steps(table.read([tmp_path]))) == 3
    path.with_name("steps.jsonl").unlink()  # now one that took no step
    nothing = ("steps_sha256", "final_loss", "proof", "data", "peak_memory", "model_state_bytes", "initial_parameters")
    synthetic.change(path, steps_done=0, **dict.fromkeys((*nothing, "collectives_per_step")))
    row, steps = only(tmp_path), table.steps(table.read([tmp_path]))
    assert (row["box"], row["precision"], row["curve"]) == ("Synthetic CPU, 8 cores", "fp32", None)
    assert (len(steps), list(steps.columns)[-6:]) == (0, list(table.CURVE))


def test_of_outcome_and_record_the_one_counts_that_says_more(tmp_path):
    synthetic.write_run(tmp_path / "a", study="s", outcome="crashed_after_result")
    row = only(tmp_path / "a")
    assert (row["status"], row["message"]) == ("crashed", "synthetic: crashed_after_result")
    assert row["mean_final_loss"] > 0  # the facts stay
    synthetic.write_run(tmp_path / "b", status="failed", study="s", outcome="ok")
    row = only(tmp_path / "b")
    assert (row["status"], row["message"]) == ("failed", "synthetic: failed")


def test_a_run_without_a_record_is_a_row(tmp_path):
    synthetic.write_outcome(tmp_path, "killed", seed=1, study="s", precision="bf16", global_batch_size=32)
    assert only(tmp_path)["box"] == schema.UNKNOWN_BOX
    synthetic.write_run(tmp_path, seed=0, study="s", precision="bf16")
    synthetic.write_outcome(tmp_path, "skipped", seed=2, study="s", message="needs 8 GPUs, found 1")
    rows = table.read([tmp_path]).set_index("seed")
    killed, skipped = rows.loc[1], rows.loc[2]
    assert (killed["status"], killed["study"], killed["global_batch_size"]) == ("killed", "s", 32)
    assert (killed["box"], killed["device"]) == (rows.loc[0, "box"], "cpu")
    # Its command says how it was set.
    assert (killed["precision"], killed["micro_batch_size"], killed["sequence_length"]) == ("bf16", 16, 64)
    assert killed[["mean_final_loss", "seconds_per_step", "peak_tensor_bytes", "num_params"]].isna().all()
    assert (skipped["status"], skipped["message"]) == ("skipped", "needs 8 GPUs, found 1")
    assert pd.isna(skipped["precision"])
    synthetic.write_run(tmp_path, box="gpu", seed=3)  # now it could be of either box
    assert table.read([tmp_path]).set_index("seed").loc[1, "box"] == schema.UNKNOWN_BOX


def test_settings_are_those_that_an_outcome_keeps_whatever_its_command_says(tmp_path):
    config = build_config(sequence_length=32).model_dump(mode="json")
    path = synthetic.write_outcome(tmp_path, "misconfigured")
    program = ["accelerate", "launch", "study/train.py"]
    synthetic.change(path, config=config, command=[*program, "--sequence-length", "48"])
    assert only(tmp_path)["sequence_length"] == 32
    # Of another version of the program, or just what was wrong: 7 sequences on 2 processes.
    commands = ([*program, "--no-flag"], [*program, "--global-batch-size", "7"])
    few = {"config": config | {"sequence_length": "few"}}
    for unknown in (few, *({"config": None, "command": each} for each in commands)):
        synthetic.change(path, **unknown)
        row = only(tmp_path)
        assert row["status"] == "misconfigured"
        assert row[["precision", "init", "config_digest"]].isna().all()


def test_run_directories_and_collected_files_give_one_table(tmp_path):
    """In one order too: NAME and NAME-repeat1 sort otherwise as directories than as lines."""
    for repeat in (0, 1):
        synthetic.write_run(tmp_path / "runs", study="s", repeat=repeat)
    killed = synthetic.write_outcome(tmp_path / "runs", "killed", seed=1)
    (killed.parent / "config.json").write_text("{}")
    pack.collect([tmp_path / "runs"], tmp_path / "records")
    assert "-repeat1" in next(iter(records.read_lines(tmp_path / "records" / "records.jsonl")))
    one, other = (table.read([tmp_path / name]).drop(columns=["curve"]) for name in ("runs", "records"))
    pd.testing.assert_frame_equal(one, other)


def test_a_copy_counts_once_and_the_one_with_an_outcome_stays(tmp_path):
    synthetic.write_run(tmp_path / "a")
    synthetic.write_run(tmp_path / "b", study="first", outcome="crashed_after_result")
    synthetic.write_run(tmp_path / "c", study="second", outcome="crashed_after_result")
    row = only(tmp_path)
    assert (row["status"], row["study"]) == ("crashed", "first")
    synthetic.write_run(tmp_path / "d", machine={"cpu": "Another CPU"})  # of this name, and begun in the same second
    assert len(table.read([tmp_path])) == 2
    assert table.read([tmp_path], boxes=["Another CPU, 8 cores"])["status"].tolist() == ["ok"]
    with pytest.raises(
        Refusal, match=r"no run of the machine 'moon' in these folders. The machines are 'Another CPU, 8 cores', 'Synth"
    ):
        table.read([tmp_path], boxes=["moon"])


def test_repeats_are_counted_by_when_they_started(tmp_path):
    """Whatever the runs are called, and only among equal runs."""
    for folder, repeat in (("b", 0), ("a", 1), ("c", 2)):
        synthetic.write_run(tmp_path / folder, repeat=repeat, study=folder)
    synthetic.write_run(tmp_path, seed=1, repeat=3)
    synthetic.write_run(tmp_path, micro_batch_size=2)
    rows = table.read([tmp_path])
    assert rows[rows["seed"] == 1]["repeat"].tolist() == [0]
    same = rows[(rows["seed"] == 0) & (rows["micro_batch_size"] == 4)].sort_values("started_at")
    assert same["repeat"].tolist() == [0, 1, 2]
    assert same["study"].tolist() == ["b", "a", "c"]
    assert rows[rows["micro_batch_size"] == 2]["repeat"].tolist() == [0]


def test_the_digest_of_settings(tmp_path):
    """What decides what is trained is in it; seed, batch and what only observes are not."""
    for study, settings in {
        "plain": {},
        "same": {"seed": 1, "global_batch_size": 16, "micro_batch_size": 2, "log_with": "tensorboard"},
        "clipping": {"gradient_clipping": 0.5},
        "rate": {"learning_rate": 1e-3},
    }.items():
        synthetic.write_run(tmp_path, study=study, **settings)
    synthetic.write_outcome(tmp_path / "b", "killed", study="no-record", learning_rate=1e-3)
    digests = table.read([tmp_path]).set_index("study")["config_digest"]
    assert digests["plain"] == digests["same"]
    assert digests["rate"] == digests["no-record"]
    assert digests.nunique() == 3


def test_steps_spread_over_rows(tmp_path):
    path = synthetic.write_run(tmp_path, num_steps=12)
    synthetic.write_run(tmp_path, seed=1, num_steps=7)
    synthetic.write_outcome(tmp_path, "killed", seed=2)
    steps = table.steps(table.read([tmp_path]))
    assert steps.groupby("seed").size().to_dict() == {0: 12, 1: 7}
    mine, lines = steps[steps["seed"] == 0], read_steps(path)
    for name in ("step", "loss", "grad_norm", "learning_rate", "seconds", "tokens"):
        assert mine[name].tolist() == [line[name] for line in lines]


def test_refuses_what_is_not_there_and_what_holds_no_schema(tmp_path):
    path = synthetic.write_outcome(tmp_path, "killed")
    whole = json.loads(path.read_text())
    for content, message in (
        (json.dumps(whole | {"status": "fine"}), "status='fine'"),
        (json.dumps(whole | {"schema_version": 7}), "the record has schema_version 7"),
        ("{", "cannot be read as an outcome"),
    ):
        path.write_text(content)
        with pytest.raises(Refusal, match=f"{path.name}: {message}"):
            table.read([tmp_path])
    for folder, message in (
        (tmp_path / "no-folder", "no-folder: this folder does not exist"),
        (path.parent, "there is no record in this folder"),
    ):
        path.unlink(missing_ok=True)
        with pytest.raises(Refusal, match=message):
            table.read([folder])


@pytest.mark.parametrize(
    ("limits", "laboratory", "expected"),
    [
        ([200_000_000, 100_000_000], None, 1e8),  # the slowest machine's
        ([200_000_000, None], None, None),
        ([200_000_000, None], "100mbit", 1e8),
        ([None, None], "unlimited", math.inf),
        (None, None, None),
        (None, "5gbit", 5e9),
    ],
)
def test_a_runs_network_is_as_fast_as_its_slowest_machine(limits, laboratory, expected):
    record = schema.read(Path(__file__).parents[1] / "fixtures" / "records" / "auto-ddp")
    carried = {"interfaces": ["eth0"], "num_steps": 1, "sent_bytes": 0, "received_bytes": 0}
    network = limits and [schema.Network(**carried, rate_bits_per_second=limit) for limit in limits]
    machine = record.machine | {"environment": {LABORATORY: laboratory} if laboratory else {}}
    assert record.model_copy(update={"network": network, "machine": machine}).network_rate == expected
