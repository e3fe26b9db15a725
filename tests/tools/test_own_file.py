"""Test that `advise --strategy FILE` reads a user's file as accelerate does, and that its launch can be executed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from refusing import refusal

from zero_study import cli, planner
from zero_study.doctor import examine
from zero_study.errors import Refusal
from zero_study.files import FILL_IN
from zero_study.planner import Request, choose, launch
from zero_study.strategy import file, own_file
from zero_study.theory.stacks import STACKS, StackName

BLOCKS = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
FSDP1: dict[str, Any] = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", "fsdp_config": {
    **BLOCKS, "fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": True, "fsdp_use_orig_params": True, "fsdp_sync_module_states": True,
}}  # fmt: skip
FSDP2 = FSDP1 | {"fsdp_config": {**BLOCKS, "fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": True}}
ZERO2 = {"distributed_type": "DEEPSPEED", "num_processes": 8, "mixed_precision": "bf16", "deepspeed_config": {
    "zero_stage": 2, "gradient_accumulation_steps": 4,
}}  # fmt: skip
# A DeepSpeed file of the kind that transformers' guide shows.
JSON: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "none"},
        "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}  # fmt: skip


def written(folder: Path, content: dict[str, Any], name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content))
    return str(path)


def ask(strategy: str, num_gpus: int = 8, model: str = "qwen2.5-1.5b", **settings: Any) -> choose.Advice:
    return planner.advise(model, Request("h100-sxm", num_gpus, strategy=strategy, **settings))


def engine(strategy: str, num_gpus: int = 8, **settings: Any) -> Any:
    return ask(strategy, num_gpus, **settings).options[0].prediction.engine


# ---------------------------------------------------------------- what a file means


def test_fsdp_of_both_versions_is_predicted_as_the_shipped_file(tmp_path):
    """Only how long FSDP1's hooks take differs."""
    settings = {"precision": "bf16", "sync_each_batch": False}
    shipped = ask("fsdp2", **settings).options[0].prediction
    first, second = (written(tmp_path, content, f"{name}.yaml") for name, content in (("a", FSDP1), ("b", FSDP2)))
    assert ask(second).options[0].prediction.engine == shipped.engine
    advice = ask(first)
    assert advice.options[0].prediction.peak.total == shipped.peak.total
    assert advice.options[0].prediction.engine.is_fsdp1
    assert any("FSDP1" in note for note in advice.notes)
    assert not ask(second).notes


@pytest.mark.parametrize(
    ("sharding", "reshards", "replicas"),
    [("FULL_SHARD", True, 1), ("2", False, 1), ("HYBRID_SHARD", True, 2), ("HYBRID_SHARD_ZERO2", False, 2)],
)
def test_sharding_strategies_of_fsdp1(sharding, reshards, replicas, tmp_path):
    content = FSDP1 | {"fsdp_config": FSDP1["fsdp_config"] | {"fsdp_sharding_strategy": sharding}}
    found = engine(written(tmp_path, content), 16)
    assert (found.reshard_after_forward, found.replicas) == (reshards, replicas)


def test_a_json_is_read_with_the_options_of_a_program(tmp_path, monkeypatch):
    """It is read alone, and as the file that an accelerate file names."""
    monkeypatch.chdir(tmp_path)
    alone = written(tmp_path, JSON, "ds.json")
    names = {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}
    naming = written(tmp_path, {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": names})
    engines = [engine(path, stack=stack) for path in (alone, naming) for stack in ("accelerate", "trl")]
    assert {(each.zero_stage, each.offload_optimizer, each.precision) for each in engines} == {(3, "cpu", "bf16")}
    start = launch.launch(ask(naming))
    in_json = json.loads(start.files["mine-advised.json"])
    assert "optimizer" not in in_json  # because the launch names the program's
    assert in_json["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("content", "fields"), [
        ({"mixed_precision": "fp16"}, {"precision": "fp16"}),
        ({"mixed_precision": "no"}, {"precision": "fp32"}),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {"compile": True}),
        ({"num_machines": 2}, {"gpus_per_node": 4}),
        ({"fsdp_config": {**BLOCKS, "fsdp_version": 2, "fsdp_activation_checkpointing": True}},
         {"activation_checkpointing": "full"}),
        ({"parallelism_config": {"parallelism_config_dp_shard_size": 4, "parallelism_config_cp_size": 2}},
         {"context_parallel": 2}),
        ({"parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}},
         {"shard_group_size": 4}),
    ],
)  # fmt: skip
def test_a_file_decides_what_the_command_leaves_open(content, fields, tmp_path):
    path = written(tmp_path, FSDP2 | content)
    request = Request("h100-sxm", 8, strategy=path)
    assert {name: getattr(request, name) for name in fields} == fields
    assert Request("h100-sxm", 8, strategy=path, precision="tf32").precision == "tf32"


def test_the_options_of_a_program_decide_a_precision_that_the_file_does_not_state(tmp_path):
    path = written(tmp_path, {"distributed_type": "MULTI_GPU", "num_processes": 8})
    assert Request("h100-sxm", 8, strategy=path, stack="trl").chosen_precision == "bf16"
    assert Request("h100-sxm", 8, strategy=path).chosen_precision == "fp32"


def test_accumulation_in_a_file_counts_with_a_batch(tmp_path):
    path = written(tmp_path, ZERO2)
    assert Request("h100-sxm", 8, strategy=path).gradient_accumulation_steps is None
    assert Request("h100-sxm", 8, strategy=path, micro_batch_size=1).gradient_accumulation_steps == 4


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("content", "reason"), [
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type MEGATRON_LM is not predicted"),
        ({"distributed_type": "MULTI_CPU", "mpirun_config": {"mpirun_hostfile": "/h"}}, "trains on CPUs"),
        ({"distributed_type": "XLA"}, "distributed_type XLA is not predicted"),
        ({"parallelism_config": {"parallelism_config_dp_shard_size": 4, "parallelism_config_tp_size": 2}},
         "tensor parallelism"),
        ({"fsdp_config": {"fsdp_version": 2}}, "all weights are gathered at once"),
        ({"fsdp_config": {**BLOCKS, "fsdp_version": 1, "fsdp_sharding_strategy": "NO_SHARD"}}, "NO_SHARD is DDP"),
        ({"num_proceses": 8}, "num_proceses"),
        ({"mixed_precision": "bf17"}, "no precision of this name"),
        ({"distributed_type": "DEEPSPEED", "mixed_precision": None,
          "deepspeed_config": {"deepspeed_config_file": "none.json"}}, "none.json"),
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "fp8"}, "fp8 is predicted only for FSDP2"),
    ],
)  # fmt: skip
def test_what_is_not_predicted_is_refused_with_its_reason(content, reason, tmp_path, capsys):
    path = written(tmp_path, {**FSDP2, "mixed_precision": "bf16", **content})
    words = ["advise", "--model", "gpt2", "--gpu", "h100-sxm", "--gpus", "8", "--strategy", path]
    assert reason in refusal(cli.run, words)


@pytest.mark.parametrize("key", ["zero_quantized_weights", "mics_shard_size"])
def test_settings_of_deepspeed_that_are_not_predicted_are_refused(key, tmp_path):
    path = written(tmp_path, {"zero_optimization": {"stage": 3, key: 4}}, "ds.json")
    assert key in refusal(Request, "h100-sxm", 8, strategy=path)


def test_files_of_other_programs_are_refused(tmp_path):
    path = written(tmp_path, {"base_model": "m", "datasets": [], "micro_batch_size": 1})
    assert "this file is of axolotl" in refusal(Request, "h100-sxm", 8, strategy=path)


def test_this_projects_trainer_stays_strict(tmp_path):
    with pytest.raises(Refusal, match="fsdp_cpu_ram_efficient_loading is true"):
        ask(written(tmp_path, FSDP2), stack="study")
    assert own_file.read("zero2", "accelerate") is None


# ---------------------------------------------------------------- what is written


def cases() -> list[tuple[StackName, str]]:
    names = ["single", "ddp_tuned", "zero0", "zero2", "zero3_tuned", "zero3_nvme_offload", "fsdp2", "fsdp2_hybrid"]
    runs = {name: file.read_by_name(name).distributed_type for name in names}
    return [(stack, name) for stack in get_args(StackName) for name in names if runs[name] in STACKS[stack].runs]


@pytest.mark.parametrize(("stack", "name"), cases())
def test_doctor_finds_nothing_in_written_files(stack, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for num_gpus in (1,) if name == "single" else (8, 16):
        for precision in ("bf16", "fp32"):
            try:
                advice = ask(name, num_gpus, stack=stack, precision=precision)
            except Refusal:  # torchtitan has no tuned DDP
                continue
            path = Path(f"{num_gpus}-{precision}{'.json' if stack == 'deepspeed' else '.yaml'}")
            for made in launch.write(advice, path) if stack != "torchtitan" else ():
                made.write_text(made.read_text().replace(FILL_IN, "10.0.0.1"))
                assert not [finding for finding in examine.examine(made).findings if finding.matters], made.read_text()


@pytest.mark.parametrize("content", [FSDP1, FSDP2, ZERO2, JSON])
def test_a_written_file_is_read_as_what_was_predicted(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = written(tmp_path, content, "ds.json" if content is JSON else "mine.yaml")
    advice = ask(own, 16)
    batch = {"micro_batch_size": 1, "gradient_accumulation_steps": 2}
    (path, *_) = launch.write(advice, Path("advised.yaml"))
    path.write_text(path.read_text().replace(FILL_IN, "10.0.0.1"))
    again, before = (ask(str(name), 16, **batch).options[0].prediction for name in (path, own))
    assert (again.engine, again.job, again.peak.total) == (before.engine, before.job, before.peak.total)


# ---------------------------------------------------------------- several machines


def commands(advice: choose.Advice) -> list[list[str]]:
    """Return the words of each printed command."""
    lines = launch.launch(advice).command.replace("\\\n", " ").split("\n")
    return [shlex.split(line) for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp2"])
def test_each_machine_has_a_complete_command(name, tmp_path, monkeypatch):
    """Accelerate takes from it what its launcher needs, and starts half of the processes on each machine."""
    monkeypatch.chdir(tmp_path)
    advice = ask(name, 16)
    launch.write(advice, Path(f"{name}.yaml"))
    parsed = []
    for program, command, *words in commands(advice):
        assert (program, command) == ("accelerate", "launch")
        parsed.append(_validate_launch_command(launch_command_parser().parse_args(words))[0])
    assert [each.machine_rank for each in parsed] == [0, 1]
    for each in parsed:
        assert (each.num_machines, each.num_processes, each.main_process_port) == (2, 16, 29500)
        assert each.main_process_ip == FILL_IN
        assert each.training_script == "train.py"
        assert each.mixed_precision == "bf16"


def test_many_machines_are_not_listed_one_by_one():
    start = launch.launch(ask("fsdp2", 64))
    assert start.command.count("accelerate launch") == 4
    assert "# on machines 4 to 7" in start.command


def test_trl_is_started_by_its_own_command():
    """A script of one's own is needed only if the command has no option for a setting."""
    assert [words[:2] for words in commands(ask("zero2", stack="trl"))] == [["trl", "sft"]]
    advice = ask("zero2", stack="trl", loss_kernel="upcast")
    assert commands(advice)[0][:2] == ["accelerate", "launch"]
    assert any(setting.startswith("sft.py: a copy of") for setting in launch.launch(advice).settings)


# ---------------------------------------------------------------- limits


def test_write_works_with_limits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["advise", "--model", "qwen2.5-32b", "--gpu", "h100-sxm", "--gpus", "16", "--tokens", "1e9"]
    assert cli.run([*words, "--deadline", "3d", "--budget", "$5,000", "--write", "32b.yaml"]) in (0, None)
    output = capsys.readouterr().out
    assert "--machine_rank 1" in output
    content = yaml.safe_load(Path("32b.yaml").read_text())
    assert (content["num_processes"], content["distributed_type"]) == (16, "FSDP")
    assert "no machine keeps" in refusal(cli.run, [*words, "--deadline", "1m", "--write", "more.yaml"])
    assert not Path("more.yaml").exists()


@pytest.mark.parametrize(("text", "hours"), [("3d", 72), ("12h", 12), ("90m", 1.5), ("1.5", 1.5)])
def test_a_deadline_may_have_a_unit(text, hours):
    words = ["advise", "--model", "gpt2", "--gpu", "h100-sxm", "--deadline", text]
    assert cli.parse(words).params["deadline"] == pytest.approx(hours)
