"""Runs that silently are something else: each is refused here, or is now what was written.

The rows are those of a table measured on accelerate 1.15, deepspeed 0.19.8, transformers 5.23 and torch 2.13. One row
comes with the notebooks: papermill runs a notebook with its defaults when a parameter's name is not declared.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest
import torch
import yaml
from launching import ROOT, attempt
from safetensors.torch import load_file
from test_parity import CLIPPED, UNCLIPPED

from study.config import build_config
from study.errors import Refusal
from study.run import Run, make_run
from study.running.checks import check
from study.strategy import file
from study.strategy.file import CONFIGS, find_strategy, read_strategy
from study.training import accelerators, gradient_norm, proof, weights
from study.training.memory import PhaseMemory

# Of one process and of two, and 15 held-out examples: no multiple of any batch.
COMPARED = {"gradient_clipping": 0.5, "dropout": 0, "global_batch_size": 8, "num_eval_examples": 15, "save_model": True}
BF16 = {"precision": "bf16", "micro_batch_size": 2}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """A box without a GPU, as the launches see it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def shipped(name: str) -> file.Strategy:
    return read_strategy(find_strategy(name))


def changed(folder: Path, name: str, section: str | None = None, **changes) -> Path:
    """Write a shipped accelerate file with these keys changed, or the keys of one of its sections."""
    content = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    (content[section] if section else content).update(changes)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def with_json(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, **changes) -> Path:
    """Write a shipped accelerate file and its DeepSpeed JSON with these top keys changed; work in their folder."""
    shutil.copytree(CONFIGS, folder / CONFIGS.name)
    path = folder / CONFIGS.name / f"{name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    monkeypatch.chdir(folder)
    return path.with_suffix(".yaml")


def reading(path: Path) -> str:
    with pytest.raises(Refusal) as caught:
        read_strategy(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def checking(config: dict, chosen: file.Strategy, world_size: int = 2) -> str:
    with pytest.raises(Refusal) as caught:
        check(make_run(build_config(**config), chosen, world_size))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def verifying(found, config: dict, name: str) -> str:
    """What is said when the engine turns out to be `found`."""
    with pytest.raises(Refusal) as caught:
        proof.verify(found, Run(build_config(**config), shipped(name), 2, Path("run")))
    return str(caught.value)


def plugin(name: str, monkeypatch: pytest.MonkeyPatch, **flags) -> dict:
    """The DeepSpeed configuration of a run on two processes, as the launcher and the study make it."""
    chosen = shipped(name)
    section = chosen.content["deepspeed_config"]
    with monkeypatch.context() as launcher:  # for this call only: a run that the test starts would be refused for it
        for key in [key for key in os.environ if key.startswith("ACCELERATE_")]:
            launcher.delenv(key)
        launcher.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        if "deepspeed_config_file" in section:
            launcher.chdir(ROOT)
            launcher.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", section["deepspeed_config_file"])
        else:
            launcher.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(section["zero_stage"]))
        return accelerators._deepspeed_plugin(Run(build_config(**flags), chosen, 2, Path("run"))).deepspeed_config


# ---------------------------------------------------------------- how many processes, and which engine


def test_multi_cpu_is_one_process(tmp_path):
    """distributed_type: MULTI_CPU."""
    message = reading(changed(tmp_path, "ddp", distributed_type="MULTI_CPU"))
    assert message.startswith(f"{tmp_path / 'ddp.yaml'}: distributed_type: MULTI_CPU: accelerate starts one process")
    assert "write MULTI_GPU" in message


@pytest.mark.launches
def test_deepspeed_without_an_accelerator_is_several_worlds_of_one():
    """A DeepSpeed YAML where torch sees no accelerator, no gloo handler."""
    run = launching.run("zero2", **CLIPPED)
    assert run.record.proof.world_size == 2
    assert run.record.proof.backend == "gloo"
    assert [line["samples"] for line in run.steps] == [8] * 8  # summed over the ranks of one world
    alone = run.record.proof.model_copy(update={"world_size": 1})
    assert verifying(alone, CLIPPED, "zero2").startswith(
        "world_size: the run asks for 2, the engine has 1; change num_proc"
    )


@pytest.mark.launches
def test_use_cpu_in_the_environment_is_ddp(tmp_path):
    """ACCELERATE_USE_CPU=true with a ZeRO-2 YAML."""
    words = ["accelerate", "launch", "--config_file", CONFIGS / "zero2.yaml", "--main_process_port", "0"]
    done = attempt([*words, ROOT / "study" / "train.py"], cwd=tmp_path, env={"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("zero-study: ")]
    assert "ACCELERATE_USE_CPU is set in the environment, and accelerate takes it for a part of the strategy's" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.launches
def test_flags_of_the_launcher_override_the_file(tmp_path):
    """Another stage on the launcher's command line than in the file."""
    words = ["accelerate", "launch", "--config_file", CONFIGS / "zero3.yaml", "--main_process_port", "0"]
    done = attempt([*words, "--zero_stage", "2", ROOT / "study" / "train.py"], cwd=tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("zero-study: ")]
    assert "--zero_stage" in line
    assert "is said in the strategy's file" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.launches
def test_settings_that_nothing_reads():
    """training_args.deepspeed = {...} after TrainingArguments(...) was built: the trainer uses no such arguments."""
    for path in [
        ROOT / "study" / "train.py",
        *(ROOT / "study" / "training").glob("*.py"),
        *(ROOT / "study" / "workloads").glob("*.py"),
    ]:
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        if path.name != "body.py":  # which trains, before any run, what runs start from
            assert not {"TrainingArguments", "Trainer"} & names
    found = launching.run("zero2", **CLIPPED).record.proof  # and what trains is asked what it is
    assert (found.engine_class, found.distributed_type, found.zero_stage) == ("DeepSpeedEngine", "DEEPSPEED", 2)
    plain = found.model_copy(update={"distributed_type": "MULTI_CPU", "zero_stage": None})
    assert "distributed_type: the run asks for DEEPSPEED" in verifying(plain, CLIPPED, "zero2")


# ---------------------------------------------------------------- clipping


@pytest.mark.parametrize("written", [None, "auto", 0.0])
def test_no_clipping_is_clipping_at_one(written, tmp_path, monkeypatch):
    """gradient_clipping absent, auto or 0.0 in the YAML."""
    path = changed(tmp_path, "zero2", "deepspeed_config", gradient_clipping=written)
    if written is None:
        content = yaml.safe_load(path.read_text())
        del content["deepspeed_config"]["gradient_clipping"]
        path.write_text(yaml.safe_dump(content))
    chosen = read_strategy(path)
    if written == 0.0:
        assert "gradient_clipping 0.0 differs from the run's 1.0; write 'auto'" in checking({}, chosen)
    else:
        assert chosen.gradient_clipping is None
    assert plugin("zero2", monkeypatch, gradient_clipping=0)["gradient_clipping"] == 0


@pytest.mark.launches
def test_no_clipping_is_none():
    """gradient_clipping 0, as far as the engine itself: norms above 1 are not clipped, as DDP's are not."""
    runs = [launching.run(name, **UNCLIPPED) for name in ("ddp", "zero2")]
    assert [run.record.proof.gradient_clipping for run in runs] == [0, 0]
    assert max(line["grad_norm"] for line in runs[1].steps) > 1
    assert runs[1].steps[-1]["loss"] == pytest.approx(runs[0].steps[-1]["loss"], rel=1e-5)


@pytest.mark.launches
def test_clip_grad_norm_under_deepspeed_clips_nothing():
    """accelerator.clip_grad_norm_(...) under DeepSpeed: the study asks the engine, which clips, for the norm before."""
    engine = SimpleNamespace(zero_optimization_stage=lambda: 2, get_global_grad_norm=lambda: 7.0)
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value="DEEPSPEED"))
    assert gradient_norm.gradient_norm_reader(accelerator, engine, build_config())() == 7.0
    ddp, zero2 = (launching.run(name, **CLIPPED) for name in ("ddp", "zero2"))
    assert zero2.record.proof.gradient_clipping == CLIPPED["gradient_clipping"]
    assert zero2.steps[0]["grad_norm"] > CLIPPED["gradient_clipping"]
    for mine, theirs in zip(zero2.steps, ddp.steps, strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


# ---------------------------------------------------------------- NVMe


@pytest.mark.parametrize("key", ["offload_optimizer_nvme_path", "offload_param_nvme_path"])
def test_nvme_path_in_the_yaml_is_dropped(key, tmp_path):
    """offload_*_nvme_path: /fast/disk in the YAML."""
    message = reading(changed(tmp_path, "zero3", "deepspeed_config", **{key: "/fast/disk"}))
    assert f"deepspeed_config.{key}: /fast/disk is dropped by accelerate; remove it and pass --swap-dir" in message


def test_nvme_path_that_runs_would_share(tmp_path, monkeypatch):
    """The folder is emptied at start: two runs must not share one."""
    zero = json.loads((CONFIGS / "zero3_nvme_offload.json").read_text())["zero_optimization"]
    zero["offload_param"]["nvme_path"] = "/fast/disk"
    path = with_json(tmp_path, "zero3_nvme_offload", monkeypatch, zero_optimization=zero)
    assert "zero_optimization.offload_param.nvme_path would be shared by runs; remove it" in reading(path)
    config, chosen = build_config(swap_dir=tmp_path), file.read_by_name("zero3_nvme_offload")
    runs = [Run(config, chosen, 2, tmp_path / name) for name in ("one/a", "one/b", "two/a")]  # two of one name
    for run in runs:
        run.swap_folder.mkdir()
    runs[0].remove_swap_folder()
    assert [run.swap_folder.exists() for run in runs] == [False, True, True]
    assert all(run.swap_folder.parent == tmp_path for run in runs)


@pytest.mark.parametrize("name", ["zero3_tuned", "zero2"])
def test_an_engine_is_made_of_what_was_read(tmp_path, monkeypatch, name):
    """A file that was edited after the study had read it made another engine than the one that was recorded."""
    shutil.copytree(CONFIGS, tmp_path / CONFIGS.name)
    monkeypatch.chdir(tmp_path)
    run = Run(build_config(), read_strategy(Path(CONFIGS.name, f"{name}.yaml")), 2, tmp_path / "run")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")  # as the launcher has read it
    if run.strategy.deepspeed_json:
        edited = tmp_path / CONFIGS.name / f"{name}.json"
        edited.write_text(json.dumps({"zero_optimization": {"stage": 1, "overlap_comm": True}}))
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(edited))
    zero = accelerators._deepspeed_plugin(run).deepspeed_config["zero_optimization"]
    assert zero["stage"] == run.strategy.zero_stage
    assert "overlap_comm" not in zero


@pytest.mark.launches
def test_nvme_offload_swaps_where_it_was_told():
    """Swap files went under ./none of the current directory."""
    run = launching.run("zero3_nvme_offload", **CLIPPED)
    assert Path(run.record.proof.swap_folder) == run.run_dir / "swap"
    assert not (ROOT / "none").exists()
    assert not (run.run_dir / "swap").exists()  # cleared away at the end


@pytest.mark.launches
def test_nvme_offload_keeps_the_weights():
    """NVMe parameter offload in fp32 of a model built outside zero.Init: weights rounded to bf16, or a crash."""
    runs = [launching.run(name, **CLIPPED).record for name in ("ddp", "zero3_nvme_offload")]
    assert runs[1].proof.parameter_dtypes == ["float32"]
    assert runs[0].initial_parameters == runs[1].initial_parameters
    rounded = {"parameter_dtypes": ["bfloat16", "float32"], "swap_folder": str(Path("run") / "swap")}
    message = verifying(runs[1].proof.model_copy(update=rounded), CLIPPED, "zero3_nvme_offload")
    assert "parameter_dtypes: the run asks for ['float32'], the engine has ['bfloat16', 'float32']" in message
    assert "zero3_init_flag in " in message


# ---------------------------------------------------------------- what is written and not read


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_stage", 3),
        ("offload_param_device", "cpu"),
        ("gradient_clipping", 1.0),
        ("gradient_accumulation_steps", 2),
        ("zero3_save_16bit_model", True),
    ],
)
def test_keys_beside_a_json(key, value, tmp_path):
    """What the YAML says beside a deepspeed_config_file."""
    path = changed(tmp_path, "zero3_tuned", "deepspeed_config", **{key: value})
    message = reading(path)
    assert f"deepspeed_config.{key}: accelerate stops where deepspeed_config_file is named beside it" in message
    assert "remove it, and write it into the JSON" in message


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_at_stage_zero(precision):
    """bf16 or fp16 at stage 0 takes a dummy Adam step at construction."""
    message = checking({"precision": precision}, shipped("zero0"))
    assert message.startswith(f"--precision {precision} at ZeRO stage 0 takes a dummy Adam step")
    assert message.endswith(f"use --precision {precision}-autocast")


def test_two_kinds_of_bf16(tmp_path, monkeypatch):
    """DDP with bf16 against DeepSpeed bf16."""
    message = checking({"precision": "bf16"}, shipped("ddp"))
    assert (
        "(16-bit parameters with fp32 masters) needs DeepSpeed, which ddp does not use; use --precision bf16-auto"
        in message
    )
    asks = file.read_strategy(changed(tmp_path, "ddp", mixed_precision="bf16"))
    assert "asks for bf16, the run for --precision fp32; pass --precision bf16-autocast" in checking({}, asks)
    engine = plugin("zero0", monkeypatch, precision="bf16-autocast")
    assert engine["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert "bf16" not in engine


@pytest.mark.parametrize("precision", ["bf16-autocast", "fp16-autocast", "fp16"])
def test_autocast_under_fsdp_is_more_than_autocast(precision):
    """FSDP2 has no autocast: accelerate's policy casts what is gathered, and returns what follows from it so."""
    message = checking({"precision": precision}, shipped("fsdp2"))
    assert message == (
        f"--precision {precision}: fsdp2 computes in fp32, or in bf16 of fp32 shards; use --precision bf16"
    )


def test_fp16_norm_without_clipping_is_unscaled():
    """Gradients of fp16 autocast are scaled until accelerate clips, which a run without clipping does not."""
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(value="MULTI_GPU"), unscale_gradients=lambda: scaler.unscale_(optimizer)
    )
    norm = gradient_norm.gradient_norm_reader(accelerator, model, build_config(gradient_clipping=0))
    scaler.scale(model(torch.tensor([3.0, 4.0])).sum()).backward()
    assert norm().item() == pytest.approx(5.0)
    scaler.step(optimizer)  # and it is not unscaled a second time
    assert model.weight.grad.tolist() == [[3.0, 4.0]]


@pytest.mark.launches
def test_bf16_accumulates_in_fp32(monkeypatch):
    """DeepSpeed bf16 with accumulation adds gradients up in bf16."""
    assert plugin("zero2", monkeypatch, **BF16)["data_types"] == {"grad_accum_dtype": "fp32"}
    found = launching.run("zero2", **BF16).record.proof
    assert found.gradient_accumulation_steps == 2
    assert found.precision == "bf16"
    assert found.parameter_dtypes == ["bfloat16"]
    assert found.gradient_dtypes == found.master_dtypes == found.moment_dtypes == ["float32"]


# ---------------------------------------------------------------- optimizer, schedule, accumulation


@pytest.mark.launches
def test_offload_replaces_the_optimizer():
    """torch SGD (or any non-Adam) with optimizer offload: the study has AdamW only, and says which one stepped."""
    classes = {name: launching.run(name, **CLIPPED).record.proof.optimizer_class for name in ("ddp", "zero2", "zero3")}
    assert classes == {"ddp": "AdamW", "zero2": "AdamW", "zero3": "AdamW"}
    for name in ("zero2_cpu_offload", "zero3_nvme_offload"):
        assert launching.run(name, **CLIPPED).record.proof.optimizer_class == "DeepSpeedCPUAdam"


@pytest.mark.parametrize("key", ["optimizer", "scheduler", "data_types"])
def test_what_belongs_to_the_run(key, tmp_path, monkeypatch):
    """An optimizer in the DeepSpeed config: one parameter group, FusedAdam."""
    path = with_json(tmp_path, "zero2_tuned", monkeypatch, **{key: {"type": "AdamW"}})
    assert f"{key} belongs to the run, which sets it alike for every strategy; remove it" in reading(path)


def test_biases_and_norms_do_not_decay():
    """An optimizer in the DeepSpeed config puts weight decay on biases and LayerNorm."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    matrices, vectors = weights.parameter_groups(model, 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert matrices["params"] == [model[0].weight]
    assert {id(p) for p in vectors["params"]} == {id(p) for p in (model[0].bias, *model[1].parameters())}
    model[0].weight.ds_shape, model[0].weight.data = torch.Size([4, 4]), torch.empty(0)  # as zero.Init leaves it
    assert weights.parameter_groups(model, 0.1)[0]["params"] == [model[0].weight]


@pytest.mark.launches
def test_schedule_does_not_depend_on_the_world_size():
    """A scheduler given to prepare steps num_processes times per update."""
    one, two = launching.run("single", num_processes=1, **COMPARED), launching.run("zero3", **COMPARED)
    rates = [line["learning_rate"] for line in one.steps]
    assert rates == [line["learning_rate"] for line in two.steps]
    assert rates[0] == 1e-3
    assert rates[-1] == pytest.approx(1e-3 / 8)


@pytest.mark.launches
def test_accumulation_is_the_runs(tmp_path):
    """The program's accumulation differs from the DeepSpeed config's."""
    path = changed(tmp_path, "zero2", "deepspeed_config", gradient_accumulation_steps=4)
    message = checking({}, read_strategy(path))
    assert "gradient_accumulation_steps 4 differs from the run's 1; remove it and pass --micro-batch-size" in message
    assert launching.run("zero2", **BF16).record.proof.gradient_accumulation_steps == 2


# ---------------------------------------------------------------- the same start, the same samples


@pytest.mark.launches
def test_initial_weights_do_not_depend_on_the_strategy():
    """zero.Init gives other weights than without it for the same seed, and another dropout stream."""
    ddp, zero3 = (launching.run(name, **CLIPPED) for name in ("ddp", "zero3"))
    assert zero3.record.proof.partitioned_parameters > 0
    assert zero3.record.initial_parameters.sha256 == ddp.record.initial_parameters.sha256
    assert CLIPPED["dropout"] > 0
    assert zero3.steps[0]["loss"] == pytest.approx(ddp.steps[0]["loss"], rel=1e-6)  # the same units dropped


@pytest.mark.launches
def test_sample_order_does_not_depend_on_the_world_size():
    """DataLoader(shuffle=True) on 1 and on 2 processes."""
    one, two = launching.run("single", num_processes=1, **COMPARED), launching.run("zero3", **COMPARED)
    assert [line["tokens"] for line in one.steps] == [line["tokens"] for line in two.steps]
    assert len({line["tokens"] for line in one.steps}) > 1  # so the order shows
    for mine, theirs in zip(two.steps, one.steps, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.launches
def test_tail_samples_are_not_counted_twice():
    """even_batches repeats tail samples: 15 held-out examples are 15 on any number of processes."""
    one, two = launching.run("single", num_processes=1, **COMPARED), launching.run("zero3", **COMPARED)
    accuracies = [run.record.evaluation[-1]["accuracy"] for run in (one, two)]
    assert accuracies[0] == accuracies[1]
    assert accuracies[0] * 15 == pytest.approx(round(accuracies[0] * 15))


# ---------------------------------------------------------------- one process per run


def test_peaks_are_those_of_their_phase():
    """max_memory_allocated in a second run is the first run's peak: here each phase resets it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("needs a writable /proc/self/clear_refs, found none")
    memory = PhaseMemory(torch.device("cpu"), enabled=True)
    memory.begin("large")
    large = torch.ones(2**26)  # 256 MiB, given back to the system when freed
    del large
    memory.begin("small")
    memory.begin(None)
    peaks = memory.phases()
    assert peaks["large"].resident_bytes - peaks["small"].resident_bytes > 200 * 2**20


# ---------------------------------------------------------------- checkpoints


@pytest.mark.launches
def test_saved_weights_are_whole():
    """save_16bit_model at stage 3 returns False and writes no file."""
    run = launching.run("zero3", **COMPARED)
    saved = load_file(run.run_dir / "model" / "model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == run.record.num_params
    assert sum(float(t.double().abs().sum()) for t in saved.values()) == run.record.final_parameters.absolute_sum


@pytest.mark.slow
@pytest.mark.launches
def test_checkpoint_of_two_ranks_on_four(tmp_path):
    """An error that names both sizes. (That of accelerate and DeepSpeed: the study refuses it before.)"""
    words = ["accelerate", "launch", "--config_file", CONFIGS / "zero2.yaml", "--main_process_port", "0"]
    program = [ROOT / "tests" / "checkpoint_program.py", tmp_path / "checkpoint"]
    saved = attempt([*words, "--num_processes", "2", *program], cwd=tmp_path)
    assert saved.returncode == 0, saved.stderr[-2000:]
    loaded = attempt([*words, "--num_processes", "4", *program], cwd=tmp_path)
    assert loaded.returncode == 1
    assert "used a DP world size of 2 but the current world size is 4" in loaded.stderr
