"""Which strategy a file is, what is refused before a start, and what the engine must prove after it, key by key."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launching
import psutil
import pytest
import torch
from refusing import refusal

from study.compare import facts
from study.compare import table as runs_table
from study.config import build_config
from study.records import find as records
from study.records import schema
from study.records.schema import Proof, Record
from study.run import Run, make_run
from study.running import checks
from study.training import accelerators, optimizer_steps, proof, request
from zero_study import files, models
from zero_study.engines.keys import engine_settings, known_keys
from zero_study.errors import Refusal
from zero_study.strategy import file, theory_engine
from zero_study.strategy import shipped as names
from zero_study.strategy.file import find_strategy, read_by_name, read_strategy
from zero_study.theory import peaks, shapes
from zero_study.theory.engine import StepConfig

HEAD = "num_processes: 2\nmixed_precision: 'no'\n"


@pytest.fixture(autouse=True)
def box(monkeypatch):
    """A box without a GPU, its extensions built, in the folder from which the files name their JSON."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checks.extensions, "check", lambda needs: None)
    monkeypatch.chdir(file.CONFIGS.parent)


def reading(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    message = refusal(read_strategy, path)
    assert message.startswith(f"{path}: ")
    return message


# ---------------------------------------------------------------- files


DS = HEAD + "distributed_type: DEEPSPEED\n"
# What is refused, and what the message names: the key, what is wrong with it.
REFUSED = [
    ("", "the file has no keys. Start from a copy of a file in accelerate_configs/"),
    ("- a", "no keys"),
    ("a: [", "cannot be read as YAML"),
    (HEAD, "distributed_type is missing"),
    (HEAD + "distributed_type: TPU", "distributed_type is TPU", "XLA"),
    (HEAD + "distributed_type: MULTI_CPU", "starts only one process", "Write MULTI_GPU"),
    (DS, "needs a deepspeed_config section"),
    (HEAD + "distributed_type: MULTI_GPU\ndeepspeed_config: {zero_stage: 2}", "needs a deepspeed_config section"),
    *((DS + f"deepspeed_config: {{deepspeed_config_file: x.json, {key}: 1}}", f"{key}: accelerate stops",
       "set it in the JSON") for key in ("zero_stage", "gradient_clipping")),
    (DS + "deepspeed_config: 2", "deepspeed_config is 2", "a section"),
    (DS + "deepspeed_config: {zero3_init_flag: true}", "zero_stage is missing"),
    (DS + "deepspeed_config: {zero_stage: 2, gradient_clipping: none}", "gradient_clipping is none", "a number"),
    (HEAD + "distributed_type: FSDP", "distributed_type: FSDP needs an fsdp_config section"),
    (HEAD.replace("2", "'2'") + "distributed_type: 'NO'", "num_processes is '2'", "a whole number >= 1"),
    (HEAD + "distributed_type: 'NO'\nuse_cpu: true", "use_cpu is true", "turn every strategy into plain DDP"),
    (HEAD.replace("'no'", "no") + "distributed_type: 'NO'", "mixed_precision is false", "Write 'no'"),
    (HEAD.replace("'no'", "fp8") + "distributed_type: 'NO'", "mixed_precision is fp8", "pass --precision"),
]  # fmt: skip


def test_files_are_read_strictly(tmp_path):
    missing = {text: (words, output) for text, *words in REFUSED if not has(output := reading(tmp_path, text), words)}
    assert not missing


def has(message: str, words: list[str]) -> bool:
    return all(word in message for word in words)


def test_all_errors_of_a_file_are_listed_at_once(tmp_path, monkeypatch):
    """Also those of the JSON that it names."""
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text(json.dumps({"zero_optimization": {"stage": 4, "overlap_com": True}, "optimizer": {}}))
    message = reading(
        tmp_path,
        "distributed_type: DEEPSPEED\nnum_processes: '2'\nuse_cpu: true\nipex_config: {}\n"
        "deepspeed_config: {deepspeed_config_file: mine.json, offload_param_nvme_path: /fast, zero3_int_flag: true}",
    )
    for expected in (
        "Unknown key 'ipex_config'",
        "Unknown key 'deepspeed_config.zero3_int_flag'",
        "deepspeed_config.offload_param_nvme_path is /fast",
        "num_processes is '2'. Write a whole number",
        "use_cpu is true",
        "mine.json: ",
        "optimizer is not accepted in this file. The run sets this",
    ):
        assert expected in message
    text = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: mine.json}"
    Path("mine.yaml").write_text(text)
    output = refusal(read_strategy, Path("mine.yaml"))
    assert output.startswith("mine.json: Unknown key 'zero_optimization.overlap_com'. Write overlap_comm. ")
    assert "zero_optimization.stage is 4" in output


# What `accelerate config` writes: every section, keys of TPUs, the precision.
WRITTEN = """{compute_environment: LOCAL_MACHINE, debug: false, downcast_bf16: 'no', enable_cpu_affinity: false,
machine_rank: 0, main_training_function: main, mixed_precision: bf16, num_machines: 1, num_processes: 2,
rdzv_backend: static, same_network: true, tpu_env: [], tpu_use_cluster: false, tpu_use_sudo: false, use_cpu: false,
"""
FSDP = """distributed_type: FSDP, fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP,
fsdp_reshard_after_forward: true, fsdp_offload_params: false, fsdp_state_dict_type: FULL_STATE_DICT,
fsdp_cpu_ram_efficient_loading: false, fsdp_use_orig_params: true, fsdp_activation_checkpointing: false}}"""


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 1, zero3_init_flag: false}}", "bf16"),
        ("distributed_type: MULTI_GPU, deepspeed_config: {}, fsdp_config: {}}", "bf16-autocast"),
        (FSDP, "bf16"),
    ],
)
def test_a_file_that_accelerate_wrote_is_a_strategy_where_the_run_agrees(tmp_path, text, precision):
    path = tmp_path / "mine.yaml"
    path.write_text(WRITTEN + text)
    read = read_strategy(path)
    assert read.mixed_precision == "bf16"
    checks.check(make_run(build_config(precision=precision), read, 2))
    with pytest.raises(Refusal, match=rf"bf16, .*--precision fp32\. Use --precision {precision}"):
        checks.check(make_run(build_config(), read, 2))


def test_a_json_that_everybody_copies_is_a_strategy_where_the_run_agrees(tmp_path, monkeypatch):
    scale = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16}
    content = {
        ZERO: {"stage": 2}, "bf16": {"enabled": True}, "steps_per_print": 2000, "train_batch_size": "auto",
        "fp16": {"enabled": "auto", "hysteresis": 2, "min_loss_scale": 1, **scale}, "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    read = read_strategy(beside(tmp_path, monkeypatch, "zero2_tuned", json.dumps(content)))
    assert read.mixed_precision == "bf16"
    checks.check(make_run(build_config(precision="bf16"), read, 2))
    with pytest.raises(Refusal, match="mixed_precision is bf16, but the run requests --precision fp32"):
        checks.check(make_run(build_config(), read, 2))
    for section, key in ((content["fp16"], "hysteresis"), (content, "wall_clock_breakdown")):
        section[key] = 4
        with pytest.raises(Refusal, match=rf"{key} is 4\. Write"):
            read_strategy(beside(tmp_path / key, monkeypatch, "zero2_tuned", json.dumps(content)))


def test_digests_are_those_of_what_is_shipped():
    """Where this fails, a shipped file was changed: older runs of its name are of another strategy from now on."""
    written = {path.stem: read_strategy(path).written for path in sorted(file.CONFIGS.rglob("*.yaml"))}
    assert {name: names.digest(each) for name, each in written.items()} == names.DIGESTS


@pytest.mark.parametrize(
    ("edited", "before", "after", "name"),
    [
        ("zero3.yaml", "zero_stage: 3", "zero_stage: 2", "zero3-changed"),
        ("ddp_tuned.json", "true", "false", "ddp_tuned-changed"),
        ("zero2_tuned.json", '"reduce_bucket_size": "auto"', '"reduce_bucket_size": 1000', "zero2_tuned-changed"),
        ("zero3.yaml", "num_processes: 2", "num_processes: 8", "zero3"),
        ("zero3.yaml", "gradient_clipping: auto", "gradient_clipping: 0.5", "zero3"),
        ("zero3.yaml", "  offload_param_device: none\n", "", "zero3"),  # as accelerate does without it
    ],
)
def test_a_shipped_name_with_other_content_is_another_name(tmp_path, monkeypatch, edited, before, after, name):
    path = shutil.copytree(file.CONFIGS, tmp_path / file.CONFIGS.name) / edited
    monkeypatch.chdir(tmp_path)
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    assert read_strategy(path.with_suffix(".yaml")).name == name


def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> Path:
    """Write a shipped accelerate file beside this DeepSpeed JSON; work in their folder."""
    folder = shutil.copytree(file.CONFIGS, tmp_path / file.CONFIGS.name)
    (folder / f"{name}.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    return Path(folder.name) / f"{name}.yaml"


ZERO = "zero_optimization"


REFUSED_JSON = [
    ([1], "no keys"),
    ({}, "zero_optimization is missing"),
    ({ZERO: {}}, "zero_optimization.stage is missing"),
    ({ZERO: {"stage": True}}, "zero_optimization.stage is true", "0, 1, 2 or 3"),
    ({ZERO: {"stage": "2"}}, "zero_optimization.stage is 2", "as text"),
    ({ZERO: {"stage": 3, "stage3_max_live_paramters": 0}}, "Unknown key", "Write stage3_max_live_parameters"),
    ({ZERO: {"stage": 3, "offload_param": {"devise": "cpu"}}}, "Unknown key", "offload_param.devise", "Write device"),
    ({ZERO: {"stage": 3, "offload_optimizer": None}}, "zero_optimization.offload_optimizer is null", "a section"),
    ({ZERO: {"stage": 3, "offload_optimizer": {"device": "nvm"}}}, "device is nvm", "none, cpu and nvme"),
    ({ZERO: {"stage": 3, "offload_param": {"nvme_path": "/x"}}}, "offload_param.nvme_path", "pass --swap-dir"),
    (
        {ZERO: {"stage": 3, "reduce_bucket_size": "huge"}},
        "reduce_bucket_size is 'huge'",
        "a whole number > 0 or 'auto'",
    ),
    ({ZERO: {"stage": 3, "reduce_bucket_size": 0}}, "reduce_bucket_size is 0", "a number above 0"),
    ({ZERO: {"stage": 3, "allgather_bucket_size": "auto"}}, "allgather_bucket_size is auto", 'replaces "auto"'),
    ({ZERO: {"stage": 3, "sub_group_size": 0.5}}, "sub_group_size is 0.5", "a whole number"),
    ({ZERO: {"stage": 3, "overlap_comm": 1}}, "overlap_comm is 1", "true or false"),
    ({ZERO: {"stage": 3}, "gradient_clipping": "none"}, "gradient_clipping is none", "Write a number"),
    ({ZERO: {"stage": 3}, "gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0", "at least 1"),
    ({ZERO: {"stage": 2, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size", "only at stage 3"),
    ({ZERO: {"stage": 3, "zero_hpz_partition_size": 0}}, "zero_hpz_partition_size is 0", "> 0"),
    ({ZERO: {"stage": 3, "zero_quantized_gradients": True}}, "zero_quantized_gradients is not accepted", "Remove it"),
    ({ZERO: {"stage": 3, "mics_shard_size": 2}}, "zero_optimization.mics_shard_size is 2", "has removed this key"),
    ({ZERO: {"stage": 3, "offload_optimizer": {"ratio": 0.5}}}, "offload_optimizer.ratio", "second AdamW"),
    ({ZERO: {"stage": 3}, "train_batch_size": 8}, "train_batch_size is 8", 'write "auto"'),
    *(
        ({ZERO: {"stage": 3}, key: {"type": "x"}}, f"{key} is not accepted in this file. The run sets this")
        for key in ("scheduler", "data_types")
    ),
]


REFUSED_DDP = [
    ([], "no keys"),
    ("{", "cannot be read as JSON"),
    ({}, "Allowed: gradient_as_bucket_view"),
    ({"gradient_as_bucket_view": "yes"}, "false, true"),
    ({"gradient_as_bucket_view": True, "static_graph": True}, "'static_graph'"),
]


@pytest.mark.parametrize(("name", "refused"), [("zero3_tuned", REFUSED_JSON), ("ddp_tuned", REFUSED_DDP)])
def test_a_json_is_read_strictly(name, refused, tmp_path, monkeypatch):
    path = beside(tmp_path, monkeypatch, name, "")
    missing = {}
    for content, *words in refused:
        path.with_suffix(".json").write_text(content if isinstance(content, str) else json.dumps(content))
        output = refusal(read_strategy, path)
        if not (output.startswith(f"{path.with_suffix('.json')}: ") and has(output, words)):
            missing[str(content)] = (words, output)
    assert not missing


def test_a_file_whose_settings_are_unlike_is_read_each_by_its_own_key(tmp_path, monkeypatch):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}
    path = beside(tmp_path, monkeypatch, "zero3_tuned", json.dumps({ZERO: zero, "gradient_accumulation_steps": 4}))
    in_json = read_strategy(path)
    devices = "offload_optimizer_device: nvme, offload_param_device: cpu"
    path.write_text(DS + f"deepspeed_config: {{zero_stage: 3, {devices}, gradient_accumulation_steps: 3}}")
    in_yaml = read_strategy(path)
    result = [(s.offload_optimizer_device, s.offload_param_device, s.gradient_accumulation_steps)
             for s in (in_json, in_yaml)]  # fmt: skip
    assert result == [("cpu", "nvme", 4), ("nvme", "cpu", 3)]


def test_sizes_may_be_whole_floats(tmp_path, monkeypatch):
    """Most public files write 1e9. DeepSpeed makes an integer of it, and refuses 1.5."""
    sizes = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "sub_group_size": 1000000000.0,
             "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 5e7}  # fmt: skip
    as_integers = {key: int(size) for key, size in sizes.items()}
    engines = []
    path = beside(tmp_path, monkeypatch, "zero3_tuned", "")
    for written in (sizes, as_integers):
        path.with_suffix(".json").write_text(json.dumps({ZERO: {"stage": 3, **written}}))
        engines.append(theory_engine.engine_of_strategy(read_strategy(path), 8192, 64, "bf16"))
    assert engines[0] == engines[1]
    shape = shapes.find("llama-2-70b")
    assert (
        peaks.peak(shape, engines[0], StepConfig(1, 1024)).total
        == peaks.peak(shape, engines[1], StepConfig(1, 1024)).total
    )
    path.with_suffix(".json").write_text(json.dumps({ZERO: {"stage": 3, **sizes, "sub_group_size": 1.5}}))
    assert "sub_group_size is 1.5" in refusal(read_strategy, path)


def test_auto_becomes_what_suits_the_model(tmp_path, monkeypatch):
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {"stage": 3, **dict.fromkeys(keys, "auto"), "offload_param": {"device": "cpu", "buffer_size": "auto"}}
    path = beside(tmp_path, monkeypatch, "zero3_tuned", json.dumps({ZERO: zero}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path.with_suffix(".json")))
    plugin = accelerators._deepspeed_plugin(Run(build_config(), read_strategy(path), 2, tmp_path))
    filled = plugin.deepspeed_config[ZERO]
    assert [filled[key] for key in keys] == [128**2, 14_745, 1280]
    assert filled["offload_param"]["buffer_size"] == models.swap_buffer_size(128, 2)


def test_a_compiled_run_has_no_timer_that_cannot_be_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    timers = [
        accelerators._deepspeed_plugin(
            Run(build_config(compile=compiles), read_by_name("zero2"), 2, tmp_path)
        ).deepspeed_config.get("timers")
        for compiles in (True, False)
    ]
    assert timers == [{"throughput": {"enabled": False}}, None]


# ---------------------------------------------------------------- FSDP


def test_fsdp_section_is_read_strictly(tmp_path):
    changes = [
        ("fsdp_version: 2", "fsdp_version: 1", "fsdp_config.fsdp_version is 1"),
        ("fsdp_version: 2", "fsdp_versoin: 2", "Unknown key 'fsdp_config.fsdp_versoin'. Write fsdp_version"),
        ("fsdp_reshard_after_forward: true", "", "fsdp_config.fsdp_reshard_after_forward is missing"),
        (": true", ": FULL_SHARD", "fsdp_config.fsdp_reshard_after_forward is FULL_SHARD"),
        ("TRANSFORMER_BASED_WRAP", "NO_WRAP", "fsdp_config.fsdp_auto_wrap_policy is NO_WRAP"),
        ("params: false", "params: 1", "fsdp_config.fsdp_offload_params is 1"),
        ("SHARDED_STATE", "LOCAL_STATE", "fsdp_config.fsdp_state_dict_type is LOCAL_STATE_DICT"),
    ]
    text = find_strategy("fsdp2").read_text()
    output = {expected: reading(tmp_path, text.replace(before, after, 1)) for before, after, expected in changes}
    assert not {expected: message for expected, message in output.items() if expected not in message}


@pytest.mark.parametrize(
    ("workload", "size", "expected"),
    [
        ("bert-imdb", "tiny", {"BertLayer": 2}),
        ("gpt-wikitext", "tiny", {"GPT2Block": 2}),
        ("gpt-wikitext", "2.7b", {"GPTNeoBlock": 32}),
        ("gpt-wikitext", "6b", {"GPTJBlock": 28}),
    ],
)
def test_fsdp_wraps_the_layers_of_every_model(workload, size, expected, monkeypatch):
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    from study.training import accelerators
    from study.workloads import WORKLOADS
    from study.workloads.sources import Splits

    splits = Splits(train=None, evaluation=None, vocab_size=128, pad_token_id=0, description={})
    with torch.device("meta"):
        config = build_config(workload=workload, size=size, attention="eager")
        model = WORKLOADS[workload].build_model(config, splits)
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", read_by_name("fsdp2").content["fsdp_config"]["fsdp_auto_wrap_policy"])
    plugin = accelerators.make_fsdp_plugin(make_run(config, read_by_name("fsdp2"), 2))
    plugin.set_auto_wrap_policy(model)
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    result = Counter(type(module).__name__ for module in model.modules() if policy(module))
    assert result == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"units": {"BertForSequenceClassification": 1}},
            "units: the run requests 2 FSDP units of BertLayer, but the engine has",
        ),
        (
            {"unsharded_parameters": 41},
            "unsharded_parameters: the run requests 0, but the engine has 41. To correct this, change ",
        ),
        (
            {"mesh": [1, 2]},
            "mesh: the run requests [2], but the engine has [1, 2]. To correct this, change parallelism_config in ",
        ),
        ({"reshard_after_forward": False}, "reshard_after_forward: the run requests True, but the engine has False."),
        (
            {"compute_dtypes": ["bfloat16"]},
            "compute_dtypes: the run requests ['float32'], but the engine has ['bfloat16'",
        ),
        (
            {"reduce_dtypes": ["bfloat16"]},
            "reduce_dtypes: the run requests ['float32'], but the engine has ['bfloat16'].",
        ),
        (
            {"offloads": True},
            "offloads: the run requests False, but the engine has True. To correct this, change fsdp_offload_params",
        ),
    ],
)
def test_what_was_sharded_otherwise_is_refused(changed, expected):
    smoke = records.find([launching.ROOT / "reports" / "cpu" / "records" / "smoke"])
    proved = next(file.record.proof for file in smoke if file.record.run_id == "bert-imdb-tiny-fsdp2-2x-seed0")
    run = make_run(build_config(), read_by_name("fsdp2"), 2)
    proof.verify(proved, run)
    other = proved.model_copy(update={"sharding": proved.sharding.model_copy(update=changed)})
    assert refusal(proof.verify, other, run).startswith(expected)


# ---------------------------------------------------------------- before a start


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("fsdp2_cpu_offload", {}, "fsdp2_cpu_offload needs a GPU"),
        ("fsdp2", {"precision": "bf16", "accumulation_dtype": "bf16"}, "--accumulation-dtype bf16: fsdp2 adds"),
        (
            "ddp",
            {"precision": "fp16-autocast"},
            "--precision fp16-autocast needs a GPU. On a CPU, use bf16 or bf16-autocast",
        ),
        (
            "zero2",
            {"accumulation_dtype": "bf16"},
            "--accumulation-dtype bf16 needs --precision bf16, but the run has fp32",
        ),
        # Stage 0 in 16 bits takes a step of Adam as it is built; DDP has no 16-bit parameters, FSDP2 no autocast.
        ("zero0", {"precision": "bf16"}, "--precision bf16 at ZeRO stage 0 makes an extra Adam step"),
        ("ddp", {"precision": "bf16"}, "--precision bf16 (16-bit parameters with fp32 masters) needs DeepSpeed"),
        ("fsdp2", {"precision": "bf16-autocast"}, "--precision bf16-autocast: fsdp2 computes in fp32, or in bf16"),
    ],
)
def test_what_cannot_run_here(name, flags, expected):
    run = make_run(build_config(**flags), read_by_name(name), 2)
    assert refusal(checks.check, run).startswith(expected)


# ---------------------------------------------------------------- who started this process


class Ancestor:
    def __init__(self, command: str, folder: Path) -> None:
        self.command, self.folder = command, folder

    def cmdline(self) -> list[str]:
        return self.command.split()

    def cwd(self) -> str:
        return str(self.folder)

    def environ(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("launcher", "flags", "num_processes", "num_machines"),
    [
        ("python -m accelerate.commands.launch", "", 2, 1),
        ("/env/bin/python /env/bin/accelerate launch", "--num_processes 4", 4, 1),
        ("/env/bin/accelerate-launch", "--num_machines 2 --num_processes 16", 16, 2),
    ],
)
def test_launch_is_read_from_the_launchers_command(monkeypatch, launcher, flags, num_processes, num_machines):
    command = f"{launcher} --config_file accelerate_configs/zero3.yaml {flags} study/train.py"
    others = [Ancestor(other, Path("/")) for other in ("", "bash -c accelerate", "python /env/bin/accelerate config")]
    ancestors = [*others, Ancestor(command, file.CONFIGS.parent)]
    monkeypatch.setattr(psutil.Process, "parents", lambda self: ancestors)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(num_processes))
    run = request.requested_run(build_config(global_batch_size=16))
    assert run.strategy == dataclasses.replace(read_by_name("zero3"), path=run.strategy.path)
    assert str(run.strategy.path) == "accelerate_configs/zero3.yaml"  # as a record may show it
    assert (run.world_size, run.num_machines) == (num_processes, num_machines)


# ---------------------------------------------------------------- after it

FOUND = Proof(
    world_size=2, distributed_type="DEEPSPEED", backend="gloo", device="cpu", engine_class="DeepSpeedEngine",
    optimizer_class="AdamW", zero_stage=3, gradient_clipping=1.0, gradient_accumulation_steps=1, micro_batch_size=4,
    precision="fp32", parameter_dtypes=["float32"], master_dtypes=["float32"], param_persistence_threshold=100_000,
    partitioned_parameters=10,
)  # fmt: skip


def asked(**flags) -> Run:
    return Run(build_config(**flags), read_by_name("zero3"), 2, Path("run"))


def verify(result: Proof, **flags) -> None:
    proof.verify(result, asked(**flags))


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("world_size", 1, "num_processes in "),
        ("distributed_type", "MULTI_CPU", "distributed_type in "),
        ("zero_stage", 2, "zero_stage in "),
        ("offload_optimizer_device", "cpu", "offload_optimizer_device in "),
        ("offload_param_device", "nvme", "offload_param_device in "),
        ("gradient_clipping", 0.0, "or --gradient-clipping"),
        ("gradient_accumulation_steps", 2, "or --micro-batch-size"),
        ("micro_batch_size", 8, "--micro-batch-size or --global-batch-size"),
        ("precision", "bf16", "or --precision"),
        ("device", "cuda", "CUDA_VISIBLE_DEVICES"),
        ("swap_folder", "none", "--swap-dir"),
        ("parameter_dtypes", ["bfloat16"], "or zero3_init_flag in "),
    ],
)
def test_whatever_differs_is_refused(name, value, remedy):
    message = refusal(verify, FOUND.model_copy(update={name: value}))
    assert message.startswith(
        f"{name}: the run requests {getattr(FOUND, name)}, but the engine has {value}. To correct this, change "
    )
    assert remedy in message


def test_a_ddp_without_the_views_that_were_asked_for_is_refused():
    run = Run(build_config(), read_by_name("ddp_tuned"), 2, Path("run"))
    of_ddp = {"distributed_type": "MULTI_CPU", "engine_class": "DistributedDataParallel"}
    of_deepspeed = ("zero_stage", "param_persistence_threshold", "partitioned_parameters", "master_dtypes")
    result = FOUND.model_copy(update={**of_ddp, **dict.fromkeys(of_deepspeed), "gradient_as_bucket_view": True})
    proof.verify(result, run)
    output = refusal(proof.verify, result.model_copy(update={"gradient_as_bucket_view": False}), run)
    assert output.startswith(
        "gradient_as_bucket_view: the run requests True, but the engine has False. To correct this, change "
    )
    assert output.endswith("ddp_tuned.json")


def test_ranks_that_share_a_gpu_speak_through_gloo(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpus = {backend: FOUND.model_copy(update={"device": "cuda", "backend": backend}) for backend in ("gloo", "nccl")}
    verify(on_gpus["nccl"])
    verify(on_gpus["gloo"], share_device=True)
    with pytest.raises(Refusal, match=r"^backend: the run requests gloo, but the engine has nccl"):
        verify(on_gpus["nccl"], share_device=True)


def test_ranks_are_on_as_many_gpus_as_asked():
    assert proof.verify_gpus([None, None], asked()) is None  # a CPU
    assert proof.verify_gpus(["a", "b"], asked()) == 2
    assert proof.verify_gpus(["a", "a"], asked(share_device=True)) == 1
    with pytest.raises(
        Refusal, match=r"^num_gpus: the run requests 2 GPUs, but its 2 ranks use 1. Add or remove --share-device$"
    ):
        proof.verify_gpus(["a", "a"], asked())
    with pytest.raises(Refusal, match=r"^num_gpus: the run requests 1 GPUs, but its 2 ranks use 2"):
        proof.verify_gpus(["a", "b"], asked(share_device=True))


def test_masters_of_sixteen_bits():
    result = {"precision": "bf16", "parameter_dtypes": ["bfloat16"], "accumulation_dtype": "bfloat16"}
    with pytest.raises(Refusal, match=r"^accumulation_dtype: .* float32, .* bfloat16. To correct this, change"):
        verify(FOUND.model_copy(update=result), precision="bf16")
    result |= {"accumulation_dtype": "float32", "master_dtypes": ["bfloat16"]}
    with pytest.raises(
        Refusal, match=r"^master_dtypes: the run requests \['float32'\], but the engine has \['bfloat16'\]"
    ):
        verify(FOUND.model_copy(update=result), precision="bf16")


def test_stage_3_that_shards_nothing():
    with pytest.raises(Refusal, match=r"^partitioned_parameters: .* 100000 elements. Change --size"):
        verify(FOUND.model_copy(update={"partitioned_parameters": 0}))


def test_the_global_norm_is_exact_where_torchs_own_is_not():
    """Of a large CPU tensor torch's fp32 norm is off by more than the study's parity allows."""
    torch.manual_seed(0)
    tensors = [torch.randn(30_000, 128), torch.randn(512), torch.randn(3, 3)]
    exact = sum(t.double().square().sum() for t in tensors).sqrt().item()
    assert optimizer_steps.global_norm(tensors).item() == pytest.approx(exact, rel=3e-7)
    assert torch.nn.utils.get_total_norm(tensors).item() != pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("limit", [0, 0.5, 100.0])
def test_clipping_outside_deepspeed_is_torchs(limit):
    """As `clip_grad_norm_` does it; 0 clips nothing."""
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    for model in (ours, theirs):
        for number, parameter in enumerate(model.parameters(), 1):
            parameter.grad = torch.full_like(parameter, float(number))
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit or float("inf"))
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value="NO"), unscale_gradients=lambda: None)
    read = optimizer_steps.gradient_norm_reader(accelerator, ours, build_config(gradient_clipping=limit))
    assert read().item() == pytest.approx(norm.item(), rel=1e-6)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_launcher_that_writes_the_environment_is_refused(tmp_path):
    """DeepSpeed's own write all variables, tokens included, to .deepspeed_env; without one, accelerate takes pdsh."""
    text, standard = find_strategy("zero2").read_text(), "  deepspeed_multinode_launcher: standard\n"
    for launcher in ("pdsh", "slurm"):
        output = reading(tmp_path, text.replace(standard, f"  deepspeed_multinode_launcher: {launcher}\n"))
        assert has(output, [f"multinode_launcher is {launcher}. ", "launcher: standard"])
    output = reading(tmp_path, text.replace(standard, "").replace("num_machines: 1", "num_machines: 2"))
    assert has(output, ["num_machines is 2, and deepspeed_multinode_launcher is not set", "launcher: standard"])


# ---------------------------------------------------------------- every key, read back from the engine


def test_every_key_that_a_file_may_set_is_read_from_the_engine():
    """Any other key is refused as unknown when the file is read."""
    unread = {key for key, paths in known_keys.read()["read"].items() if not paths}
    assert set(known_keys.accepted_values("json")) == set(engine_settings.readers()) | unread


ZERO2 = {"stage": 2, "reduce_bucket_size": "auto"}


@pytest.mark.parametrize(
    ("content", "key", "wanted", "actual"),
    [
        ({"communication_data_type": "bf16"}, "communication_data_type", "bfloat16", "float32"),
        ({"zero_optimization": {**ZERO2, "reduce_scatter": False}}, "zero_optimization.reduce_scatter", False, True),
        ({"aio": {"queue_depth": 16}}, "aio.queue_depth", 16, 8),
        ({"zero_optimization": {**ZERO2, "offload_param": {"device": "none", "pin_memory": False}}},
         "zero_optimization.offload_param.pin_memory", False, None),
    ],
)  # fmt: skip
def test_an_engine_with_another_setting_is_refused(content, key, wanted, actual, tmp_path, monkeypatch):
    path = beside(tmp_path, monkeypatch, "zero2_tuned", json.dumps({"zero_optimization": ZERO2, **content}))
    run = Run(build_config(), read_strategy(path), 2, tmp_path)
    everything = dict.fromkeys(engine_settings.readers()) | dict(engine_settings.requested(run.strategy.deepspeed_json))
    result = FOUND.model_copy(update={"zero_stage": 2, "partitioned_parameters": None, "settings": everything})
    proof.verify(result, run)
    output = refusal(proof.verify, result.model_copy(update={"settings": {**everything, key: actual}}), run)
    assert output.startswith(
        f"{key}: the run requests {wanted}, but the engine has {actual}. To correct this, change the JSON of "
    )


ENGINE = """
import dataclasses
from pathlib import Path
from study.config import build_config
from zero_study.errors import Refusal
from zero_study.engines import extensions
from study.run import make_run
from zero_study.strategy.file import read_by_name
from study.training import proof, setup
extensions.use_own_folder()
run = make_run(build_config(output_dir=Path("run")), read_by_name("zero2"), 2)
accelerator = setup.start(run)
engine = setup.build(run, accelerator)
for other in (
    dataclasses.replace(run, strategy=read_by_name("zero1")),
    dataclasses.replace(run, strategy=read_by_name("zero2_cpu_offload")),
    dataclasses.replace(run, config=run.config.model_copy(update={"micro_batch_size": 2})),
    run,
):
    try:
        proof.verify(proof.read_back(accelerator, engine.model, engine.optimizer, other), other)
        accelerator.print("AS ASKED", flush=True)
    except Refusal as refusal:
        accelerator.print("REFUSED", refusal, flush=True)
"""


@pytest.mark.launches
def test_a_real_engine_is_held_against_what_others_would_have_asked(tmp_path):
    """The engine of one run, read back for another one: what is proven is what was built, whatever is asked."""
    (script := tmp_path / "script.py").write_text(ENGINE)
    completed = launching.script(script, tmp_path, strategy="zero2")
    output = [line for line in completed.stdout.splitlines() if line.startswith(("REFUSED", "AS ASKED"))]
    assert [line.partition(". ")[0] for line in output] == [
        "REFUSED zero_stage: the run requests 1, but the engine has 2",
        "REFUSED offload_optimizer_device: the run requests cpu, but the engine has none",
        "REFUSED gradient_accumulation_steps: the run requests 2, but the engine has 1",
        "AS ASKED",
    ], completed.stderr


# ---------------------------------------------------------------- what is one strategy

OF_ZERO2 = Path(__file__).parents[1] / "fixtures" / "records" / "auto-zero2"
TEMPLATE = json.loads((OF_ZERO2 / "record.json").read_text())
DEFAULTS = {**dict.fromkeys(engine_settings.readers(), 1), "communication_data_type": "float32"}


def write(folder: Path, name: str, proven: dict[str, Any] | None, **changes: Any) -> Record:
    (folder / name).mkdir()
    shutil.copy(OF_ZERO2 / "steps.jsonl", folder / name)
    (folder / name / "config.json").write_text("{}\n")
    facts = {**TEMPLATE, "run_id": name, "proof": {**TEMPLATE["proof"], "settings": proven}, **changes}
    files.write_json(folder / name / "record.json", facts)
    return schema.read(folder / name)


def test_runs_of_one_name_whose_engines_differ_are_not_repeats(tmp_path):
    """Half the bytes and another arithmetic, by one key of the JSON: under one name they were pooled as repeats."""
    other = {**DEFAULTS, "communication_data_type": "bfloat16", "zero_optimization.reduce_scatter": False}
    write(tmp_path, "a", DEFAULTS, started_at="2026-11-21T10:00:00+00:00")
    write(tmp_path, "b", DEFAULTS, started_at="2026-11-21T10:01:00+00:00")
    write(tmp_path, "c", other, started_at="2026-11-21T10:02:00+00:00")
    runs = runs_table.read([tmp_path]).set_index("run_id")
    names = runs["strategy"].to_dict()
    assert names["a"] == names["b"] == f"{TEMPLATE['strategy']} (reduce_scatter 1, communication_data_type as computed)"
    assert names["c"] == f"{TEMPLATE['strategy']} (reduce_scatter False, communication_data_type bfloat16)"
    assert runs["repeat"].to_dict() == {"a": 0, "b": 1, "c": 0}


def test_a_strategy_is_the_same_whatever_it_trains_in_what_batches(tmp_path):
    tiny, mini = (
        {**DEFAULTS, "zero_optimization.reduce_bucket_size": hidden**2, "train_batch_size": batch}
        for hidden, batch in ((128, 8), (256, 16))
    )
    records = [
        write(tmp_path, "tiny", tiny, size="tiny"),
        write(tmp_path, "mini", mini, size="mini", config={**TEMPLATE["config"], "size": "mini"}),
    ]
    first, second = (facts.engine_fingerprint(record) for record in records)
    assert first == second
    assert first["zero_optimization.reduce_bucket_size"] == "auto"
    other = write(tmp_path, "other", {**tiny, "zero_optimization.overlap_comm": False})
    assert facts.engine_fingerprint(other) != first
