"""What doctor says of anybody's files, held to the installed libraries and to what engines had; and of this machine."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

import doctor_observed
import keys as tools_keys
import launching
import pytest
import yaml
from refusing import refusal

from zero_study import cli
from zero_study.doctor import checkup, config_files, examine, findings, text
from zero_study.doctor.findings import KEEP, Finding
from zero_study.engines import extensions
from zero_study.engines.keys import allowed, known_keys
from zero_study.engines.this_machine import Machine
from zero_study.errors import Refusal
from zero_study.strategy.file import CONFIGS, read_strategy

# What doctor gets wrong of the real files, and why it stays so.
MISSED = {
    "deepspeed_autotp.json": "tensor_parallel is not examined: four ranks, and there are two",
    "mended deepspeed_autotp.json": "likewise",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of its own, from which a file's JSON is seen, and no variable that a run would refuse."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if allowed.says_which_rank(name) or allowed.of_variable(name):
            monkeypatch.delenv(name)
    return tmp_path


def examined(content: dict, name: str = "mine.yaml", **beside: dict) -> dict[str, Finding]:
    """What doctor says of each key of a file; `beside`: JSON that lies in its folder."""
    for stem, inner in beside.items():
        Path(f"{stem}.json").write_text(json.dumps(inner))
    path = Path(name)
    path.write_text(json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content))
    return {finding.key: finding for finding in examine.examine(path).findings}


def deepspeed(**section) -> dict:
    return {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section}


# ---------------------------------------------------------------- the installed libraries


def test_the_table_is_what_its_source_says():
    """Where this fails: python tools/derive/keys.py --rules."""
    assert tools_keys.written(tools_keys.made(rules_only=True)) + "\n" == tools_keys.TABLE.read_text()


@pytest.mark.launches
def test_the_table_is_that_of_the_installed_engines():
    """In a process of its own: deepspeed warns when it is imported, and leaves hooks behind."""
    completed = launching.python(["tools/derive/keys.py", "--check"], launching.ROOT)
    assert completed.returncode == 0, f"{completed.stderr}\nmend it: python tools/derive/keys.py"


def test_every_name_in_the_table_is_one_of_the_engines():
    """Of keys that rules, the strict reader, the proof and the facts speak of; REMOVED ones are DeepSpeed's own."""
    known = {
        "accelerate": {*known_keys.engine_schema("accelerate", "fields"), *known_keys.read()["named"]["converted"]}
        | {f"{section}.{key}" for section, keys in known_keys.accelerate_sections().items() for key in keys},
        "json": {*known_keys.read()["named"]["top"], *known_keys.json_sections()}
        | {f"{section}.{key}" for section, known in known_keys.json_sections().items() for key in known.keys},
    }
    inside = ("optimizer.params.", "scheduler.params.")  # which DeepSpeed hands on as they are
    for place, names in known.items():
        examined = {rule.key for rule in findings.rules(place) if rule.entry.get("error") != "has been removed"}
        spoken_of = {*known_keys.accepted_values(place), *known_keys.read()["facts"][place]}
        spoken_of |= {*known_keys.read()["study"][place]["needed"]}
        examined -= {key for key in examined if key.startswith(inside)}
        nothing = {key for key in examined | spoken_of if not any(fnmatchcase(name, key) for name in names)}
        whole = {rule.key for rule in findings.rules(place) if rule.effect == "not examined"}
        assert nothing <= whole


def test_what_the_launcher_never_reads():
    """Of a file for two machines: the flags of these have defaults, which the file does not change."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    content = {
        "distributed_type": "MULTI_GPU", "num_processes": 4, "num_machines": 2, "main_process_ip": "10.0.0.1",
        "main_process_port": 29500, "rdzv_backend": "c10d", "same_network": True, "enable_cpu_affinity": True,
        "machine_rank": 1, "downcast_bf16": "yes",
    }  # fmt: skip
    findings = examined(content)
    arguments = launch_command_parser().parse_args(["--config_file", "mine.yaml", "train.py"])
    taken = vars(_validate_launch_command(arguments)[0])
    for key in ("rdzv_backend", "same_network", "enable_cpu_affinity"):
        assert findings[key].effect == "ignored"
        assert findings[key].engine_has == taken[key] != content[key]
    for key in ("num_processes", "num_machines", "main_process_ip", "main_process_port", "machine_rank"):
        assert findings[key].effect == "honoured"
        assert taken[key] == content[key]
    assert findings["rdzv_backend"].remedy == "Pass --rdzv_backend c10d on the command line."


# ---------------------------------------------------------------- what engines had


@pytest.fixture(scope="module")
def verdicts():
    return doctor_observed.judged()


def test_claims_are_what_the_engines_had(verdicts):
    wrong = {name: [f and f.key for f, v in result if v == "wrong"] for name, result in verdicts.items()}
    assert {name: keys for name, keys in wrong.items() if keys} == {name: [None] for name in MISSED}
    counts = Counter(verdict for result in verdicts.values() for _, verdict in result)
    assert counts["right"] > 500


def test_every_trap_is_seen(verdicts):
    """What the file of one trap does is what doctor says of it; some do what no engine can be asked."""
    for name in (name for name in verdicts if name.startswith("trap ")):
        matter = [(f, verdict) for f, verdict in verdicts[name] if f is not None and (f.matters or f.is_note)]
        own_fault = name.removeprefix("trap ") in ("clipping_zero_in_json", "optimizer_twice")
        assert own_fault or "right" in {verdict for _, verdict in matter}, name


def test_mended_files_start(verdicts):
    """What doctor mends is what it then finds nothing in, and what an engine takes."""
    observed = doctor_observed.committed()
    for name in (name for name in verdicts if name.startswith("mended ")):
        assert not [f for f, _ in verdicts[name] if f is not None and f.matters and f.mend is not KEEP]
        noted = [f.error for f, _ in verdicts[name] if f is not None and f.is_note and f.error]
        error = observed[name].get("error")
        assert error is None or any(text in error for text in noted) or name in MISSED, error


@pytest.mark.nightly
@pytest.mark.launches
def test_what_traps_did_they_do_again():
    """All of them, in forks of one process: each setting of which doctor says something, as it was once observed."""
    cases = [case for name, case in doctor_observed.cases().items() if name.startswith("trap ")]
    result = doctor_observed.observe_alone(cases)
    for name, seen in result.items():
        before, now = doctor_observed.committed()[name].get("values"), seen.get("values")
        assert (before is None) == (now is None), name
        if now is not None:  # of a misspelt key doctor says less than of two keys before
            assert now == {key: before[key] for key in now}, name


@pytest.mark.slow
@pytest.mark.launches
def test_what_a_real_file_did_it_does_again():
    """By `accelerate launch`: dynamo and use of the CPU's Adam, on two processes."""
    name = "open_r1_traffic.yaml"
    assert doctor_observed.observe(doctor_observed.cases()[name]) == doctor_observed.committed()[name]


@pytest.mark.launches
def test_a_real_file_trains_as_a_strategy():
    """TRL's for ZeRO-1 in bf16, with a precision that agrees with it."""
    file = doctor_observed.FILES / "trl_zero1.yaml"
    proof = launching.run(file, precision="bf16", max_steps=3, num_train_examples=24).record.proof
    assert (proof.zero_stage, proof.precision) == (1, "bf16")


# ---------------------------------------------------------------- keys that depend on others


@pytest.mark.parametrize(
    ("content", "key", "effect"),
    [
        (deepspeed(zero_stage=2, offload_param_device="cpu"), "deepspeed_config.offload_param_device", "ignored"),
        (deepspeed(zero_stage="3", offload_param_device="cpu"), "deepspeed_config.offload_param_device", "honoured"),
        (deepspeed(zero_stage=3, zero3_init_flag=False), "deepspeed_config.zero3_init_flag", "ignored"),
        (deepspeed(zero_stage=0) | {"mixed_precision": "bf16"}, "mixed_precision", "means something else"),
        (deepspeed(zero_stage=1) | {"mixed_precision": "bf16"}, "mixed_precision", "honoured"),
        (deepspeed(zero_stage=2) | {"num_machines": 2, "main_process_ip": "10.0.0.1"},
         "deepspeed_config.deepspeed_multinode_launcher", "means something else"),
        (deepspeed(zero_stage=2) | {"fsdp_config": {"fsdp_version": 2}}, "fsdp_config", "ignored"),
        (deepspeed(zero_stage=2) | {"ipex_config": {"ipex": True}}, "ipex_config", "crashes"),
        (deepspeed(deepspeed_config_file="gone.json"), "deepspeed_config.deepspeed_config_file", "crashes"),
        ({"distributed_type": "XLA", "num_processes": 8}, "distributed_type", "not examined"),
        ({"distributed_type": "TPU", "num_processes": 8}, "distributed_type", "crashes"),
        ({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"version": 2, "offload_params": True}},
         "fsdp_config.fsdp_version", "honoured"),
        ({"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2},
          "parallelism_config": {"parallelism_config_dp_shard_size": 3}}, "parallelism_config", "crashes"),
    ],
)  # fmt: skip
def test_keys_of_an_accelerate_file(content, key, effect):
    assert examined(content)[key].effect == effect


def test_traps_of_adapters_are_explained():
    fsdp1 = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 1}}
    key = "fsdp_config.fsdp_use_orig_params"
    output = {}
    for value in (False, True):
        content = {**fsdp1, "fsdp_config": {**fsdp1["fsdp_config"], "fsdp_use_orig_params": value}}
        output[value] = examined(content)[key].message
    assert "LoRA" in output[False]
    assert "LoRA" not in output[True]
    assert "LoRA" in examined(deepspeed(zero_stage=3))["deepspeed_config.zero3_save_16bit_model"].message


@pytest.mark.parametrize(
    ("content", "has_trap"),
    [
        ({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 1}}, True),
        ({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_offload_params": False}}, True),
        ({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}, False),
        ({"distributed_type": "MULTI_GPU", "num_processes": 2, "fsdp_config": {"fsdp_version": 1}}, False),
        (deepspeed(zero_stage=3), False),
    ],
)
def test_only_fsdp1_refuses_adapters_of_another_type_than_the_weights(content, has_trap):
    result = {key for key, finding in examined(content).items() if "uniform dtype" in finding.message}
    assert result == ({"fsdp_config.fsdp_version"} if has_trap else set())


def test_a_deepspeed_file_of_another_name_is_one():
    """It was read as accelerate's, of which every key is unknown; open-instruct calls its files .conf."""
    content = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    result = {}
    for name in ("mine.json", "mine.conf"):
        Path(name).write_text(json.dumps(content))
        result[name] = {(one.key, one.effect, one.message) for one in examine.examine(Path(name)).findings}
    assert result["mine.conf"] == result["mine.json"]


def test_bert_under_fsdp2s_default_wrapping():
    section = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    result = examined({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": section})
    finding = result["fsdp_config.fsdp_transformer_layer_cls_to_wrap"]
    assert "For BERT, these classes" in finding.message
    assert "BertLayer" in finding.remedy


def test_a_json_that_is_named_is_examined_too():
    result = examined(deepspeed(deepspeed_config_file="zero.json"), zero={"zero_optimization": {"stage": 2}})
    assert result["zero_optimization.stage"].file == "zero.json"
    assert result["train_micro_batch_size_per_gpu"].effect == "crashes"


def test_a_precision_that_is_left_open_is_not_asked():
    """With it the engine's accumulation of gradients would be in 16 bits."""
    key = "data_types.grad_accum_dtype"
    for enabled, is_found in ((True, True), ("auto", False)):
        requested = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4, "bf16": {"enabled": enabled}}
        assert (key in examined(requested, "mine.json")) == is_found


# ---------------------------------------------------------------- the command


def test_shipped_files_have_nothing_to_change(monkeypatch):
    """Launched by zero-study, which fills in what they leave open; a copy of one that it does not launch is told so."""
    monkeypatch.chdir(CONFIGS.parent)
    shipped = [str(path) for path in sorted(CONFIGS.rglob("*")) if path.is_file()]
    assert len(shipped) > 30
    assert {name: status for name in shipped if (status := cli.run(["doctor", name]))} == {}


def test_of_a_key_that_is_written_twice_the_engine_has_the_last(capsys):
    rest = '"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1'
    Path("twice.json").write_text(f'{{"zero_optimization": {{"stage": 1, "stage": 3}}, {rest}}}')
    Path("names_it.yaml").write_text(yaml.safe_dump(deepspeed(deepspeed_config_file="twice.json")))
    for name in ("twice.json", "names_it.yaml"):
        assert cli.run(["doctor", name, "--json"]) == 1
        (file,) = json.loads(capsys.readouterr().out)["files"]
        (result,) = (each for each in file["findings"] if each["effect"] == "overridden")
        assert (result["key"], result["value"], result["engine_has"]) == ("zero_optimization.stage", 1, 3)
    assert cli.run(["doctor", "twice.json", "--fix", "mended.json"]) == 1
    assert json.loads(Path("mended.json").read_text())["zero_optimization"]["stage"] == 3
    assert cli.run(["doctor", "mended.json"]) == 0


def test_fix_writes_a_file_in_which_nothing_is_left_to_change(capsys):
    Path("mine.yaml").write_text(yaml.safe_dump(deepspeed(zero_stag=3, gradient_clipping="auto") | {"use_cpu": True}))
    before = Path("mine.yaml").read_bytes()
    assert cli.run(["doctor", "mine.yaml", "--fix", "mended.yaml"]) == 1
    assert Path("mine.yaml").read_bytes() == before
    assert yaml.safe_load(Path("mended.yaml").read_text()) == {
        "distributed_type": "DEEPSPEED", "num_processes": 2, "use_cpu": False,
        "deepspeed_config": {"zero_stage": 3, "gradient_clipping": "auto"},
    }  # fmt: skip
    assert cli.run(["doctor", "mended.yaml"]) == 0
    reasons = {"mended.yaml": "exists", "mended.json": "ends in .yaml", "gone/mended.yaml": "cannot be written"}
    for out, expected in reasons.items():
        message = refusal(cli.run, ["doctor", "mine.yaml", "--fix", out])
        assert message.startswith(f"--fix {out}: ")
        assert expected in message


def test_what_is_no_file_of_settings_is_refused():
    Path("a.json").write_text("[1]")
    Path("a.yaml").write_text("1: 2")
    output = {
        "a.json": "the file has no keys",
        "a.yaml": "cannot be read as YAML",
        "gone.yaml": "cannot be read as YAML",
    }
    for name, expected in output.items():
        assert refusal(cli.run, ["doctor", name]).startswith(f"{name}: {expected}")
    Path("train.py").write_text("import torch\n")
    message = refusal(cli.run, ["doctor", "train.py"])
    assert "Python script" in message
    assert "zero-study prove train.py" in message


def test_odd_content_is_no_traceback():
    odd = [None, True, [], {}, {"a": None}, 1e99, "", 10**18]
    for key in ("zero_optimization", "fp16", "optimizer", "scheduler", "aio", "train_batch_size", "gradient_clipping"):
        for value in odd:
            examined({"zero_optimization": {"stage": 2}} | {key: value}, "odd.json")
            assert text.text(examine.examine(Path("odd.json")), everything=True)
            Path("mine.yaml").write_text(yaml.safe_dump(deepspeed(deepspeed_config_file="odd.json")))
            with suppress(Refusal):
                read_strategy(Path("mine.yaml"))
    for key in ("distributed_type", "deepspeed_config", "fsdp_config", "num_machines", "mixed_precision", "gpu_ids"):
        for value in odd:
            examined(deepspeed(zero_stage=2) | {key: value})
            assert examine.mended(examine.examine(Path("mine.yaml")))
            with suppress(Refusal):
                read_strategy(Path("mine.yaml"))


# ---------------------------------------------------------------- this machine: what would bite, with its remedy


@pytest.mark.parametrize("name", ["RANK", "ACCELERATE_MIXED_PRECISION"])
def test_inherited_variables_that_a_run_would_refuse_bite(name, monkeypatch):
    assert checkup._inherited().verdict == "ok"
    monkeypatch.setenv(name, "1")
    check = checkup._inherited()
    assert (check.verdict, name in check.message, "unset" in check.remedy.lower()) == ("bites", True, True)


def test_a_taken_port_is_noted():
    with checkup.socket.socket() as holder:
        with suppress(OSError):  # somebody else has it, which is as good
            holder.bind(("127.0.0.1", checkup.PORT))
        holder.listen()
        assert checkup._port().verdict == "note"


def test_a_disk_is_measured_and_a_folder_that_is_none_bites(tmp_path, monkeypatch):
    monkeypatch.setattr(checkup, "DISK_BYTES", 1 << 21)
    (check,) = checkup._disk(tmp_path)
    assert check.verdict == "ok"
    assert "GB/s" in check.message
    assert not list(tmp_path.iterdir())
    (check,) = checkup._disk(tmp_path / "none")
    assert check.verdict == "bites"


@pytest.mark.computes  # imports torch
@pytest.mark.parametrize(
    ("release", "torch_cuda", "verdict"),
    [
        (None, "13.0", "note"),
        ("13.0", "13.0", "ok"),
        ("13.1", "13.0", "note"),  # DeepSpeed 0.19.8 lists no compatible releases of CUDA 13
        ("12.8", "12.6", "ok"),
        ("12.8", "13.0", "note"),
        ("13.0", None, "bites"),
    ],
    ids=["no toolkit", "same", "minor release", "compatible release", "major release", "a torch for CPUs"],
)
def test_the_cuda_toolkit_must_fit_torch(release, torch_cuda, verdict, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(checkup.this_machine, "find", lambda: Machine((80 << 30,), 500 << 30))
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if release is not None:
        compiler = tmp_path / "bin" / "nvcc"
        compiler.parent.mkdir()
        compiler.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.48'\n")
        compiler.chmod(0o755)
        other = tmp_path / "other" / "nvcc"  # torch takes the one of CUDA_HOME
        other.parent.mkdir()
        other.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 9.0, V9.0.1'\n")
        other.chmod(0o755)
        monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
    (check,) = checkup._cuda()
    assert check.verdict == verdict


def test_without_a_gpu_no_cuda_toolkit_is_needed(monkeypatch):
    monkeypatch.setattr(checkup.this_machine, "find", lambda: Machine((), 500 << 30))
    monkeypatch.setattr(extensions, "sees_gpu", lambda: False)
    (check,) = checkup._cuda()
    assert (check.verdict, check.remedy) == ("note", "")


def test_a_compiler_is_looked_for_as_torch_compile_does(tmp_path, monkeypatch):
    assert checkup._compile().verdict == "ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    for gpus, package in (((80 << 30,), "gcc"), ((), "g++")):
        monkeypatch.setattr(checkup.this_machine, "find", lambda gpus=gpus: Machine(gpus, 500 << 30))
        check = checkup._compile()
        assert check.verdict == "bites"
        assert f"apt-get install {package}`" in check.remedy


def test_extensions_are_judged_as_a_run_finds_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    unbuilt = {check.name: check for check in checkup._extensions()}
    assert unbuilt["DeepSpeed's cpu_adam"].verdict == "note"  # a run builds it
    library = extensions.folder() / "cpu_adam" / "cpu_adam.so"
    library.parent.mkdir(parents=True)
    library.touch()
    built = {check.name: check for check in checkup._extensions()}
    assert built["DeepSpeed's cpu_adam"].verdict == "ok"
    monkeypatch.setenv("CXX", "no-such-compiler")
    (without,) = [check for check in checkup._extensions() if check.verdict == "bites"]
    assert (without.name, "g++" in without.remedy) == ("DeepSpeed's async_io", True)


@pytest.mark.launches
def test_the_command_says_all_of_it(monkeypatch, tmp_path):
    completed = launching.command_line(["doctor", "--json"], env={"RANK": "3", "PYTHONPATH": str(launching.ROOT)})
    assert completed.returncode == 1, completed.stderr
    checks = {check["name"]: check for check in json.loads(completed.stdout)["checks"]}
    assert checks["environment"]["verdict"] == "bites"
    assert checks["two gloo ranks"]["verdict"] == "ok"
    assert checks["packages"]["verdict"] == "ok"


@pytest.mark.parametrize(
    "path",
    sorted(path for path in (launching.ROOT / "accelerate_configs").rglob("*") if path.suffix in (".yaml", ".json")),
)
def test_the_projects_own_files_have_no_finding(path, monkeypatch):
    monkeypatch.chdir(launching.ROOT)
    assert [finding for finding in examine.examine(path).findings if finding.matters] == []


@pytest.mark.parametrize(
    ("key", "value", "crashes"),
    [
        ("reduce_bucket_size", "5e8", True),  # each as DeepSpeed 0.19.8 reads it
        ("reduce_bucket_size", "500000000", False),
        ("reduce_bucket_size", 5e8, False),
        ("reduce_bucket_size", 5.5, True),
        ("stage3_max_live_parameters", 1e9, False),
        ("overlap_comm", "true", False),
        ("overlap_comm", "perhaps", True),
        ("memory_efficient_linear", False, False),
        ("offload_param", True, True),
        ("offload_param", False, True),
    ],
)
def test_a_value_is_judged_as_deepspeed_reads_it(key, value, crashes, tmp_path):
    (path := tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, key: value}}))
    (result,) = [one for one in examine.examine(path).findings if one.key == f"zero_optimization.{key}"]
    assert (result.effect == "crashes", result.matters) == (crashes, crashes)


def test_a_typo_is_one_finding(tmp_path):
    (path := tmp_path / "ds.json").write_text(json.dumps({"gradient_cliping": 1.0, "zero_optimization": {"stage": 2}}))
    (result,) = [one for one in examine.examine(path).findings if "clip" in one.key and one.matters]
    assert result.key == "gradient_cliping"
    assert result.remedy == "Write gradient_clipping."
    assert "1.0" in result.message  # what DeepSpeed does without the right one


def test_an_unknown_section_is_one_finding(tmp_path):
    content = {"train_batch_size": 8, "monitoring": {"enabled": True, "stage": 3, "inner": {"a": 1}}}
    (path := tmp_path / "ds.json").write_text(json.dumps(content))
    found = [one for one in examine.examine(path).findings if one.key.startswith("monitoring")]
    assert [(one.key, one.matters) for one in found] == [("monitoring", True)]


@pytest.mark.parametrize(
    ("optimizer", "stage", "clipping", "is_found"),
    [
        ("Muon", 2, None, True),
        ("MUON", 2, None, True),
        ("Muon", "2", 1.0, True),
        ("Muon", 2, "auto", True),
        ("Muon", 2, 0.0, False),
        ("Muon", 0, None, False),
        ("Muon", 0, 1.0, False),
        ("AdamW", 2, None, False),
        ("AdamW", 2, 1.0, False),
    ],
)
def test_clipping_acts_on_the_update_of_muon(tmp_path, optimizer, stage, clipping, is_found):
    content = {"optimizer": {"type": optimizer, "params": {"lr": 0.02}}, "zero_optimization": {"stage": stage}}
    content |= {} if clipping is None else {"gradient_clipping": clipping}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    findings = examine.examine(tmp_path / "ds.json").findings
    clipping_findings = [finding for finding in findings if finding.key == "gradient_clipping" and finding.matters]
    assert len(clipping_findings) == is_found
    assert all(finding.mend is KEEP for finding in clipping_findings)  # a Trainer with another norm would stop


@pytest.mark.parametrize(
    ("schedule", "rate", "maximum", "effect"),
    [
        ("WarmupDecayLR", 2e-5, None, "overridden"),
        ("WarmupDecayLR", "auto", None, "overridden"),
        ("WarmupDecayLR", 1e-3, None, "honoured"),
        ("WarmupDecayLR", 2e-5, 2e-5, "honoured"),
        ("WarmupLR", 2e-5, None, "honoured"),
        ("WarmupCosineLR", 2e-5, None, "honoured"),
    ],
)
def test_a_schedule_with_a_rate_of_its_own_overrides_that_of_the_optimizer(schedule, rate, maximum, effect):
    """As DeepSpeed's own lr_schedules.py: only WarmupDecayLR has a default for warmup_max_lr."""
    params = {"total_num_steps": 9, "warmup_num_steps": 2} | ({} if maximum is None else {"warmup_max_lr": maximum})
    content = {"optimizer": {"params": {"lr": rate}}, "scheduler": {"type": schedule, "params": params}}
    assert examined(content, "ds.json")["optimizer.params.lr"].effect == effect
    of_maximum = examined({"scheduler": content["scheduler"]}, "ds.json").get("scheduler.params.warmup_max_lr")
    assert (of_maximum is not None and of_maximum.is_note) == (schedule == "WarmupDecayLR" and maximum is None)


@pytest.mark.parametrize(
    ("typo", "right_key"), [("gradient_cliping", "gradient_clipping"), ("zero_stag", "zero_stage")]
)
def test_a_typo_in_an_accelerate_file_is_one_finding(typo, right_key):
    values = {"gradient_clipping": 1.0, "zero_stage": 2}
    section = {typo if key == right_key else key: value for key, value in values.items()}
    Path("mine.yaml").write_text(yaml.safe_dump(deepspeed(**section)))
    (finding,) = [finding for finding in examine.examine(Path("mine.yaml")).findings if finding.matters]
    assert finding.key == f"deepspeed_config.{typo}"
    assert right_key in finding.remedy
    assert "Without deepspeed_config." in finding.message


# A file with findings of most kinds, and a long path and snippets of JSON in its messages.
FAULTY = {
    "zero_optimization": {"stage": "3", "offload_param": False, "stage3_max_live_parameters": "1e9"},
    "bf16": {"enabled": True}, "gradient_cliping": 1.0, "gradient_accumulation_steps": 4,
    "train_batch_size": 64, "optimizer": {"type": "AdamW", "params": {"betas": "auto", "max_grad_norm": 1.0}},
    "pipeline": {"stages": 2},
}  # fmt: skip


@pytest.mark.parametrize("columns", [80, 60])
def test_findings_fit_the_terminal_and_the_answers_come_first(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    Path("mine.json").write_text(json.dumps(FAULTY))
    assert cli.run(["doctor", "mine.json", "--all", "--for", "deepspeed==0.18.1", "--fix", "fixed.json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    of_release, summary = (next(place for place, line in enumerate(lines) if line.startswith(begin))
                           for begin in ("deepspeed==0.18.1", "mine.json"))  # fmt: skip
    assert of_release == 0
    assert summary < lines.index("Fails at start-up:")
    assert re.match(r"mine\.json: \d+ of \d+ keys do not work as written", " ".join(lines[summary : summary + 2]))
    assert [line for line in lines if line == "Fails at start-up:"]
    assert '    {"device": "cpu"}' in lines or any('{"device": "cpu"}' in line for line in lines)


def test_fix_says_what_it_changed_and_where_it_wrote(capsys):
    Path("mine.json").write_text(json.dumps(FAULTY))
    assert cli.run(["doctor", "mine.json", "--fix", "fixed.json"]) == 1
    written = capsys.readouterr().out.partition("--fix wrote fixed.json with ")[2]
    assert 'zero_optimization.stage: 3 (it was "3")' in written
    assert "gradient_cliping: removed (it was 1.0)" in written
    assert "gradient_clipping: 1.0 (it was missing)" in written
    assert "zero_optimization.stage3_max_live_parameters" in written.partition("You must decide")[2]
    assert cli.run(["doctor", "mine.json", "--json", "--fix", "again.json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert "--fix wrote again.json" in captured.err


@pytest.mark.parametrize(("stage", "expected"), [("auto", 2), ("3", 3), (1, 1), (None, 0), (7, 0)])
def test_the_stage_of_a_json_is_read_as_the_engine_reads_it(stage, expected):
    content = {} if stage is None else {"zero_optimization": {"stage": stage}}
    assert config_files.DeepSpeedFile(content).stage == expected


def test_checks_of_a_machine_fit_the_terminal_and_the_summary_comes_first(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    checks = [*checkup._packages(), *checkup._known_faults(), *checkup._extensions(), checkup._port()]
    checks.append(
        checkup.Check("a", "bites", "The first thing is wrong, which takes many words to explain. " * 2, "Do.")
    )
    lines = checkup.text(checks).splitlines()
    assert lines[0].startswith("This machine: ")
    assert max(map(len, lines)) <= 80
    assert "Stops a run:" in lines
