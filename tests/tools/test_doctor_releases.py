"""Files judged by given releases (`doctor --for`), values at which engines stop, and remedies that are carried out."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusing import refusal

from zero_study import check, cli
from zero_study.doctor import examine, several, text
from zero_study.doctor.findings import Finding, Settings
from zero_study.engines import cpu_launch

FSDP = {"distributed_type": "FSDP", "num_processes": 8}
FSDP2 = FSDP | {"fsdp_config": {"version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
MESH = FSDP2 | {"parallelism_config": {"parallelism_config_dp_shard_size": 8}}
JSON = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0,
        "gradient_accumulation_steps": "auto"}  # fmt: skip
TRL = {"dataset_name": "d", "model_name_or_path": "m", "output_dir": "o", "per_device_train_batch_size": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def written(content: dict[str, Any], name: str | None = None) -> Path:
    path = Path(name or ("mine.json" if "zero_optimization" in content else "mine.yaml"))
    path.write_text(json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content))
    return path


def wrong(content: dict[str, Any], *releases: str) -> dict[str, Finding]:
    findings = examine.examine(written(content), *releases).findings
    return {finding.key: finding for finding in findings if finding.matters and not finding.is_about_release}


@pytest.mark.parametrize(
    ("content", "key", "without", "having", "effect"),
    [
        (FSDP2, "fsdp_config.fsdp_version", "accelerate==1.4.0", "accelerate==1.6.0", "ignored"),
        (MESH, "parallelism_config", "accelerate==1.9.0", "accelerate==1.10.0", "crashes"),
        (JSON | {"zero_optimization": {"stage": 2, "compute_grad_norm": True}},
         "zero_optimization.compute_grad_norm", "deepspeed==0.19.6", "deepspeed==0.19.7", "crashes"),
        (JSON | {"torch_autocast": {"enabled": True}},
         "torch_autocast.enabled", "deepspeed==0.17.1", "deepspeed==0.17.2", "ignored"),
        (JSON | {"zero_optimization": {"stage": 3, "stage3_allgather_sequential": True}},
         "zero_optimization.stage3_allgather_sequential", "deepspeed==0.18.4", "deepspeed==0.18.5", "crashes"),
    ],
)  # fmt: skip
def test_a_key_is_judged_by_the_release(content, key, without, having, effect):
    finding = wrong(content, without)[key]
    assert finding.effect == effect
    assert having.partition("==")[2] in finding.message  # the release that has it
    assert key not in wrong(content, having)
    assert key not in wrong(content)
    assert cli.run(["doctor", str(written(content)), "--for", without, "--for", "torch==2.6.0"]) == 1


def test_a_class_that_is_younger_than_the_release_is_not_judged():
    """DeepSpeed moved the keys of fp16 and bf16 to classes in 0.17.1, and had them before."""
    content = JSON | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert not wrong(content, "deepspeed==0.16.9")
    result = examine.examine(written(content), "deepspeed==0.16.9")
    assert any("0.16.9" in entry.why and "0.19.8" in entry.why for entry in result.not_checked)


def test_defaults_and_removed_keys_are_those_of_the_release():
    content = {key: value for key, value in JSON.items() if key != "gradient_clipping"} | {"sparse_gradients": False}
    assert wrong(content)["sparse_gradients"].effect == "crashes"
    assert not wrong(content, "deepspeed==0.16.9")
    by_key = {finding.key: finding for finding in examine.examine(written(content), "deepspeed==0.16.9").findings}
    assert by_key["gradient_clipping"].engine_has == 0.0
    assert not by_key["gradient_clipping"].is_note


@pytest.mark.parametrize(
    ("releases", "severity"),
    [
        (["transformers==4.50.0", "trl==0.15.2"], None),
        (["transformers==4.51.0", "trl==0.15.2"], "matters"),
        (["transformers==4.51.0"], None),  # some class of an unknown trl may have it
    ],
)
def test_arguments_that_transformers_removed(releases, severity):
    found = examine.examine(written(TRL | {"evaluation_strategy": "no"}), *releases).findings
    matters = [finding.key for finding in found if finding.matters]
    assert matters == (["evaluation_strategy"] if severity else [])


@pytest.mark.parametrize(
    ("content", "release", "rules"),
    [(FSDP2, "accelerate==0.20.0", "accelerate 1.15.0"), (JSON, "deepspeed==99.0", "deepspeed 0.19.8")],
)
def test_an_unknown_release_is_not_checked(content, release, rules, capsys):
    assert cli.run(["doctor", str(written(content)), "--for", release]) == 3
    assert rules in " ".join(capsys.readouterr().out.split())
    assert cli.run(["doctor", str(written(content)), "--for", "trl==99.0"]) == 0  # which does not read it
    assert "--for numpy==1.0" in refusal(cli.run, ["doctor", "mine.yaml", "--for", "numpy==1.0"])


def test_a_corrected_file_is_one_for_the_release():
    path = written({"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2}})
    assert cli.run(["doctor", str(path), "--for", "accelerate==1.4.0", "--fix", "fixed.yaml"]) == 1
    assert yaml.safe_load(Path("fixed.yaml").read_text())["fsdp_config"]["fsdp_version"] == 2  # the owner decides


# ---------------------------------------------------------------- values


ACCELERATE = {"distributed_type": "MULTI_GPU", "num_processes": 2}
MACHINES = {"distributed_type": "MULTI_GPU", "num_processes": 4, "num_machines": 2, "main_process_ip": "10.0.0.1",
            "machine_rank": 1}  # fmt: skip
SFT = {"output_dir": "o", "num_train_epochs": 1, "per_device_train_batch_size": 2, "save_total_limit": 1}


@pytest.mark.parametrize(
    ("content", "key", "values", "sound"),
    [  # each as accelerate 1.15, DeepSpeed 0.19.8 or transformers 5.23 was seen to act
        (ACCELERATE, "num_processes", [0, -1, "eight", 2.5], [1, "2"]),
        (MACHINES, "num_machines", [0, -1, "2"], [2]),
        (MACHINES, "machine_rank", [2, -1, "x"], [0]),
        (MACHINES, "main_process_ip", ["<MASTER_IP>", "$MASTER_ADDR", "x.x.x.x", "MASTER_ADDR", "127.0.0.1"],
         ["node-1", "10.1.2.3", "fe80::1", "head.cluster.local"]),
        (MACHINES, "main_process_port", [-5, 99999, "29500"], [29500]),
        (ACCELERATE, "dynamo_config.dynamo_backend", ["FOO"], ["INDUCTOR", "no"]),
        (JSON, "train_micro_batch_size_per_gpu", [0, -2, 2.5, "2"], [2, "auto"]),
        (JSON, "gradient_accumulation_steps", [0, -1, "4"], [4]),
        (JSON, "gradient_clipping", ["one", -1.0], [0.0, 1]),
        (JSON, "zero_optimization.reduce_bucket_size", [0, -5], [5e8]),
        (JSON | {"zero_optimization": {"stage": 3}}, "zero_optimization.stage3_prefetch_bucket_size", [-5, "-5"], [0]),
        (JSON | {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_type": "linear"}}},
         "scheduler.params.warmup_num_steps", [200], [10]),
        (JSON | {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_type": "linear"}}},
         "scheduler.params.warmup_min_lr", [1e-3], [0, 1e-5]),
        (SFT, "per_device_train_batch_size", [0, -1, "2", 2.5], [2]),
        (SFT, "gradient_accumulation_steps", [0, -1, 1.5], [4]),
        (SFT, "learning_rate", [-1.0, "auto"], [0, 2e-5]),
        (SFT, "num_train_epochs", [0, "many"], [1, 0.5]),
        (SFT, "warmup_steps", [-1], [0, 0.1, 10]),
        (SFT | {"max_steps": 50}, "warmup_steps", [100], [50]),
        (SFT | {"learning_rate": 1e-5}, "lr_scheduler_kwargs", [{"min_lr": 1e-4}], [{"min_lr": 1e-6}]),
        (SFT, "ddp_backend", ["foo"], ["gloo", "cpu:gloo,cuda:nccl"]),
    ],
)  # fmt: skip
def test_values_that_stop_or_contradict_are_found(content, key, values, sound):
    for value in [*values, *sound]:
        changed = copy.deepcopy(content)
        examine._put(changed, key, value)
        assert (key in wrong(changed)) == (value in values), value


def test_text_that_some_parsers_convert_is_only_noted():
    def of(name: str, **changes: Any) -> Finding:
        (finding,) = [
            f for f in examine.examine(written(SFT | changes, name)).findings if f.key == "learning_rate"
        ]  # fmt: skip
        return finding

    assert of("args.json", learning_rate="2e-5").matters
    assert of("args.yaml", learning_rate="2e-5").is_note
    assert not of("args.yaml", learning_rate="2e-5").matters


@pytest.mark.computes  # imports torch
def test_deepspeed_stops_at_these_values(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    right = JSON | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    DeepSpeedConfig(right)
    for key, value in {
        "train_micro_batch_size_per_gpu": -2, "gradient_accumulation_steps": 0, "train_batch_size": "2",
        "zero_optimization.stage3_max_live_parameters": -1, "zero_optimization.stage3_prefetch_bucket_size": -5,
    }.items():  # fmt: skip
        changed = copy.deepcopy(right)
        examine._put(changed, key, value)
        assert wrong(changed)[key].effect == "crashes"
        with pytest.raises((AssertionError, ValueError, TypeError)):
            DeepSpeedConfig(changed)


# ---------------------------------------------------------------- a Trainer that reads the DeepSpeed file


PAIRS: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    ({"bf16": True}, {"fp16": {"enabled": True}}, "fp16.enabled"),
    ({"fp16": True}, {"bf16": {"enabled": True}}, "bf16.enabled"),
    ({"bf16": False}, {"bf16": {"enabled": True}}, "bf16.enabled"),
    ({"bf16": True}, {"bf16": {"enabled": True}}, None),
    ({"bf16": True}, {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, None),
    ({"bf16": True}, {"bf16": {"enabled": True}, "fp16": {"enabled": False}}, None),
    ({"max_grad_norm": 0.2}, {"gradient_clipping": 1.0}, "gradient_clipping"),
    ({"max_grad_norm": 0.2}, {"gradient_clipping": "auto"}, None),
    ({"max_grad_norm": 0.2}, {"gradient_clipping": 0.2}, None),
]
KINDS_OF_FILE = {
    "arguments": SFT,
    "trl": TRL,
    "llamafactory": {"stage": "sft", "finetuning_type": "lora", "dataset": "d", "template": "q", "output_dir": "o"},
}


def named(kind: str, arguments: dict[str, Any], changes: dict[str, Any]) -> list[Finding]:
    written(JSON | changes, "ds.json")
    path = written(KINDS_OF_FILE[kind] | arguments | {"deepspeed": "ds.json"}, "args.yaml")
    together = several.examine([path, Path("ds.json")]).results[Path("ds.json")]
    assert isinstance(together, examine.Examined)
    alone = [f for f in examine.examine(path).findings if f.file == "ds.json" and f.matters]
    assert alone == [finding for finding in together.findings if finding.matters]
    return alone


@pytest.mark.parametrize("kind", KINDS_OF_FILE)
@pytest.mark.parametrize(("arguments", "changes", "key"), PAIRS)
def test_precision_and_clipping_are_compared_with_the_arguments(kind, arguments, changes, key):
    assert [finding.key for finding in named(kind, arguments, changes)] == ([] if key is None else [key])


@pytest.mark.computes  # imports torch
@pytest.mark.parametrize(("arguments", "changes", "key"), PAIRS)
def test_trainer_stops_as_it_is_said_and_not_after_the_remedy(arguments, changes, key):
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    def mismatches(content: dict[str, Any]) -> list[str]:
        config = HfTrainerDeepSpeedConfig(copy.deepcopy(content))
        config.trainer_config_process(
            TrainingArguments(output_dir="o", per_device_train_batch_size=2, use_cpu=True, **arguments)
        )
        return config.mismatches

    content = JSON | changes
    assert [key in line for line in mismatches(content)] == ([] if key is None else [True])
    for finding in named("arguments", arguments, changes):
        examine._put(content, finding.key, finding.mend)
    assert mismatches(content) == []


@pytest.mark.parametrize("clipping", [None, "auto"])
def test_no_remedy_changes_the_clipping_of_a_trainer(clipping):
    """A number would stop a Trainer with another max_grad_norm, and it is unknown what reads the file."""
    content = {key: value for key, value in JSON.items() if key != "gradient_clipping"}
    content |= {} if clipping is None else {"gradient_clipping": clipping}
    examined = examine.examine(written(content))
    (note,) = [finding for finding in examined.findings if finding.key == "gradient_clipping"]
    assert note.is_note
    assert "Trainer" in note.message + note.remedy
    assert examined.verdict.status == 0
    assert examine.mended(examined) == content
    assert "Trainer" in " ".join(text.text(examined).split())


def test_a_written_norm_that_has_no_effect_is_found():
    content = {key: value for key, value in JSON.items() if key != "gradient_clipping"}
    written(content, "ds.json")
    findings = examine.examine(written(SFT | {"max_grad_norm": 0.2, "deepspeed": "ds.json"}, "args.yaml")).findings
    (finding,) = [finding for finding in findings if finding.matters]
    assert (finding.key, finding.mend) == ("gradient_clipping", "auto")


def test_a_file_of_another_program_is_no_deepspeed_file(capsys):
    """It has one key of DeepSpeed among its own."""
    own = {
        "data_dir": "d",
        "num_workers": 4,
        "learning_rate": 1e-4,
        "max_steps": 10,
        "amp": True,
        "seed": 1,
        "bf16": True,
    }
    path = written(own | {"train_micro_batch_size_per_gpu": 4}, "train.yaml")
    assert cli.run(["doctor", str(path)]) == 3
    assert examine.examine(path).kind is None
    assert (
        examine.examine(written({"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}})).kind == "deepspeed"
    )


# ---------------------------------------------------------------- several machines


TWO = {"distributed_type": "DEEPSPEED", "num_processes": 4, "num_machines": 2, "machine_rank": 0,
       "main_process_ip": "10.0.0.1", "deepspeed_config": {"zero_stage": 3}}  # fmt: skip


@pytest.mark.computes  # imports torch
def test_the_default_launcher_of_two_machines_starts_two_trainings():
    """accelerate then names a hostfile "None", without which DeepSpeed uses this machine only."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    def command(path: Path) -> tuple[list[str] | None, str]:
        arguments = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        arguments, defaults, _ = _validate_launch_command(arguments)
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        words, _ = prepare_deepspeed_cmd_env(arguments)
        return words, str(getattr(arguments, "nnodes", None))

    path = written(TWO)
    words, _ = command(path)
    assert words is not None
    assert words[:3] == ["deepspeed", "--hostfile", "None"]
    (finding,) = wrong(TWO).values()
    assert "alone" in finding.message
    content = copy.deepcopy(TWO)
    examine._put(content, finding.key, finding.mend)
    assert command(written(content)) == (None, "2")  # torchrun with two machines
    assert not wrong(content)
    one_machine = TWO | {"num_machines": 1, "num_processes": 2}
    written(one_machine, "ds.yaml")
    flags = "--num_machines $SLURM_NNODES --num_processes 16 --machine_rank $RANK --main_process_ip $HOST"
    for more, is_found in (("", True), ("--deepspeed_multinode_launcher standard", False)):
        command = f"accelerate launch --config_file ds.yaml {flags} \\\n {more} train.py"
        Path("job.sbatch").write_text(f"#!/bin/bash\n#SBATCH --nodes=2\nsrun {command}\n")
        found = [each.key for each in examine.examine(Path("job.sbatch")).findings if each.matters]
        assert found == ([finding.key] if is_found else [])
    assert "job.sbatch" in check.examine([Path()]).configs
    with_hosts = Settings(TWO | {"deepspeed_config": {"zero_stage": 3, "deepspeed_hostfile": "hosts"}}).content
    assert "alone" not in next(iter(wrong(dict(with_hosts)).values())).message


# ---------------------------------------------------------------- CPUs


TRAINER = """
from accelerate import PartialState
PartialState(backend="gloo")
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
arguments = TrainingArguments(output_dir="o", per_device_train_batch_size=2, max_steps=1, report_to="none",
    save_strategy="no", disable_tqdm=True, accelerator_config={"use_configured_state": True})
sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
rows = [{"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.tensor(0)} for _ in range(8)]
trainer = Trainer(BertForSequenceClassification(BertConfig(**sizes)), arguments, train_dataset=rows)
trainer.train()
engine = trainer.model_wrapped
trained = (arguments.world_size, engine.zero_optimization_stage(), trainer.state.global_step)
print("TRAINED {} {} {}\\n".format(*trained), end="", flush=True)  # one write a rank: two ranks share the pipe
"""


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_uses_zero_on_cpus_as_the_hint_says(stage):
    assert 'PartialState(backend="gloo")' in cpu_launch.OF_FILE
    assert '{"use_configured_state": True}' in cpu_launch.OF_FILE
    section = {"zero_stage": stage, "gradient_clipping": 1.0}
    written({"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section})
    Path("train.py").write_text(TRAINER)
    words = ["accelerate.commands.launch", "--config_file", "mine.yaml", "--main_process_port", "0", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.stdout.count(f"TRAINED 2 {stage} 1") == 2, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.launches
def test_accelerate_starts_several_processes_on_cpus_as_the_rule_says():
    Path("train.py").write_text(
        # one write a rank: two ranks share the pipe
        "from accelerate import Accelerator\nprint(f'OF {Accelerator().num_processes}\\n', end='', flush=True)\n"
    )
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def output(words: list[str], **variables: str) -> str:
        command = [sys.executable, "-m", *words]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment | variables, timeout=600, check=False
        ).stdout

    assert output(torchrun, ACCELERATE_USE_CPU="true").count("OF 2") == 2
    launcher = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "train.py"]
    assert output(launcher).count("OF 1") == 1
