"""Doctor recognizes the kind of a file, and examines only what accelerate, DeepSpeed or FSDP read."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import shutil
import tomllib
from pathlib import Path

import launching
import pytest
import yaml
from refusing import refusal

from zero_study import cli, terminal
from zero_study.doctor import checkup, examine, kinds, several, text
from zero_study.doctor.findings import Finding
from zero_study.strategy.file import CONFIGS

FILES = launching.ROOT / "tests" / "tool_files"  # sound files of each kind, written after the tools' documentation
NAMED_ONLY = "ds_for_trainer.json"  # for Trainer, which replaces more values than accelerate alone

KINDS = {
    "accelerate_alst.yaml": "accelerate", "accelerate_multi_gpu.yaml": "accelerate",
    "accelerate_names_json.yaml": "accelerate", "axolotl_fsdp1.yml": "axolotl", "axolotl_fsdp2.yaml": "axolotl",
    "axolotl_zero2.yaml": "axolotl", "ds_for_trainer.json": "deepspeed", "ds_plain_zero1.json": "deepspeed",
    "ds_zenflow.json": "deepspeed", "llamafactory_full_sft.yaml": "llamafactory",
    "llamafactory_lora_dpo.yaml": "llamafactory", "llamafactory_v1_deepspeed.yaml": "llamafactory",
    "run_clm.yaml": "training_arguments", "swift_fsdp2.json": "training_arguments", "swift_sft.json": "ms_swift",
    "swift_sft.yaml": "ms_swift", "titan_hsdp.toml": "torchtitan", "titan_llama3_8b.toml": "torchtitan",
    "trainer_arguments.yaml": "training_arguments", "trainer_arguments_deepspeed.yaml": "training_arguments",
    "trainer_arguments_legacy_fsdp.yaml": "training_arguments", "trainer_deepspeed_inline.json": "training_arguments",
    "trainer_fsdp1.json": "fsdp_config", "trainer_fsdp2.json": "fsdp_config",
    "trainer_fsdp2_offload.json": "fsdp_config", "trainer_fsdp_by_size.json": "fsdp_config",
    "trl_dpo_zero2.yaml": "trl", "trl_grpo.yaml": "trl", "trl_sft.yaml": "trl",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with copies of the sound files."""
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(name: str) -> dict:
    content = Path(name).read_text()
    if name.endswith(".toml"):
        return tomllib.loads(content)
    return json.loads(content) if name.endswith(".json") else yaml.safe_load(content)


def write(name: str, content: dict) -> Path:
    Path(name).write_text(json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content))
    return Path(name)


def changed(name: str, changes: dict) -> list[Finding]:
    """Return the findings that matter in a sound file in which these dotted keys are changed."""
    content = read(name)
    for key, value in changes.items():
        *sections, last = key.split("/")
        inner = content
        for section in sections:
            inner = inner[section]
        inner[last] = value
    examined = examine.examine(write(f"changed{Path(name).suffix}", content))
    assert examined.kind == KINDS[name]
    return [finding for finding in examined.findings if finding.matters]


# ---------------------------------------------------------------- sound files


def test_each_file_is_listed():
    assert {path.name for path in FILES.iterdir()} == KINDS.keys()
    assert set(KINDS.values()) == set(kinds.TITLES) - {"ddp", "job"}


@pytest.mark.parametrize("name", KINDS)
def test_a_sound_file_is_recognized_and_has_no_finding(name):
    examined = examine.examine(Path(name))
    assert examined.kind == KINDS[name]
    assert [finding for finding in examined.findings if finding.matters] == [] or name == NAMED_ONLY
    assert examined.verdict.num_checked > 0
    assert "Remove the key" not in text.text(examined, everything=True)


def test_files_that_are_named_are_found_from_any_folder(monkeypatch, folder):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    for name in ("llamafactory_full_sft.yaml", "accelerate_names_json.yaml", "trainer_arguments.yaml"):
        examined = examine.examine(folder / name)
        assert examined.verdict.result == "sound"
        assert len({Path(finding.file).name for finding in examined.findings}) == 2


def test_shipped_strategies_are_clean_wherever_they_are_copied(monkeypatch, folder):
    names = [path for path in CONFIGS.rglob("*") if path.suffix in (".yaml", ".json")]
    for number, path in enumerate(names):
        (folder / str(number)).mkdir()
        monkeypatch.chdir(folder / str(number))  # alone, without the JSON that it names
        shutil.copy(path, "copy" + path.suffix)
        assert not examine.examine(Path("copy" + path.suffix)).matters, path
    content = read(str(CONFIGS / "zero2.yaml")) | {
        "num_processes": 16,
        "num_machines": 2,
        "main_process_ip": "10.0.0.1",
    }
    assert not examine.examine(write("wide.yaml", content)).matters
    content["deepspeed_config"]["zero3_init_flag"] = True  # not a file of the project any more
    assert any(finding.is_note for finding in examine.examine(write("other.yaml", content)).findings)


# ---------------------------------------------------------------- files of no kind


UNKNOWN = {
    "pyproject.toml": "[project]\nname = 'mine'\n[tool.ruff]\nline-length = 100\n",
    "config.json": '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "model_type": "llama", "vocab_size": 9}',
    "ci.yaml": "name: tests\non:\n  push:\njobs:\n  test:\n    runs-on: ubuntu-latest\n",
    "hydra.yaml": "model: {name: gpt}\noptimizer: {lr: 1e-3}\ntrainer: {devices: 4}\n",
    "trainer_state.json": '{"epoch": 1.0, "global_step": 9, "max_steps": 9, "log_history": [], "save_steps": 500, '
    '"logging_steps": 5, "num_train_epochs": 1, "is_world_process_zero": true, "trial_name": null, "stateful": 1}',
    "merge.yaml": "base_model: a/b\nmerge_method: slerp\nmodels: [{model: c/d}]\ndtype: bfloat16\n",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_file_is_not_judged_and_not_fixed(name, capsys):
    Path(name).write_text(UNKNOWN[name])
    assert cli.run(["doctor", name]) == 3
    output = capsys.readouterr().out
    assert "a file of an unknown kind" in output
    assert "Remove" not in output
    assert cli.run(["doctor", name, "--json"]) == 3
    content = json.loads(capsys.readouterr().out)
    assert (content["verdict"], content["findings"]) == ("unknown", [])
    (finding,) = content["files"][0]["findings"]
    assert (finding["effect"], finding["matters"]) == ("not examined", False)
    assert "Nothing was written" in refusal(cli.run, ["doctor", name, "--fix", f"fixed{Path(name).suffix}"])
    assert not Path(f"fixed{Path(name).suffix}").exists()


def test_a_known_file_without_keys_of_the_engines_is_not_sound(capsys):
    write("trl.yaml", {"model_name_or_path": "a/b", "dataset_name": "c/d", "report_to": "none"})
    assert cli.run(["doctor", "trl.yaml"]) == 3
    assert "nothing was checked" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["trl_dpo_zero2.yaml", "trainer_arguments.yaml", "axolotl_zero2.yaml"])
def test_a_named_file_that_is_not_there_is_not_sound(name, capsys):
    Path(NAMED_ONLY).unlink()
    Path("trainer_fsdp2.json").unlink()
    assert cli.run(["doctor", name]) == 3
    assert "was not found" in " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------- faults in the parts of accelerate, DeepSpeed and FSDP


@pytest.mark.parametrize(
    ("name", "changes", "keys"),
    [
        ("trainer_fsdp2.json", {"reshard_after_forward": "full_shard"}, ["reshard_after_forward"]),
        ("trainer_fsdp2.json", {"state_dict_type": "LOCAL_STATE_DICT"}, ["state_dict_type"]),
        ("trainer_fsdp2.json", {"auto_wrap_policy": "transformer_based_wrap"}, ["auto_wrap_policy"]),
        ("trainer_fsdp2.json", {"offload_params": True}, ["offload_params"]),
        ("trainer_fsdp2.json", {"sharding_strategy": "SHARD_GRAD_OP"}, ["sharding_strategy"]),
        ("trainer_fsdp2.json", {"transformer_layer_to_wrap": ["X"]}, ["transformer_layer_to_wrap"]),
        ("trainer_fsdp2.json", {"cpu_ram_efficient_loading": "perhaps"}, ["cpu_ram_efficient_loading"]),
        ("trainer_fsdp2.json", {"version": 3}, ["version"]),
        ("trainer_fsdp1.json", {"reshard_after_forward": True}, ["reshard_after_forward"]),
        ("trainer_arguments.yaml", {"fp16": True}, ["bf16", "fp16"]),
        ("trainer_arguments.yaml", {"deepspeed": NAMED_ONLY}, ["deepspeed"]),
        ("trainer_arguments.yaml", {"fsdp": False}, ["fsdp_config"]),
        ("trainer_arguments.yaml", {"fsdp": "full_shrd"}, ["fsdp"]),
        ("trainer_arguments_legacy_fsdp.yaml", {"fsdp": "hybrid_shard"}, ["fsdp"]),
        ("trainer_arguments_legacy_fsdp.yaml", {"gradient_checkpointing": True}, ["fsdp_config"]),
        ("trainer_arguments_legacy_fsdp.yaml", {"use_cpu": True}, ["fsdp"]),
        ("trainer_arguments_legacy_fsdp.yaml", {"fsdp_config/reshard_after_forwrd": False},
         ["fsdp_config.reshard_after_forwrd"]),
        ("trainer_deepspeed_inline.json", {"deepspeed/zero_optimization/offload_param": False},
         ["deepspeed.zero_optimization.offload_param"]),
        ("trainer_deepspeed_inline.json", {"deepspeed/gradient_accumulation_steps": 4},
         ["deepspeed.gradient_accumulation_steps"]),
        ("axolotl_fsdp2.yaml", {"fsdp_config/state_dict_type": "FULL"}, ["fsdp_config.state_dict_type"]),
        ("axolotl_fsdp2.yaml", {"fsdp_config/cpu_offload": True}, ["fsdp_config.cpu_offload"]),
        ("axolotl_fsdp2.yaml", {"fsdp_version": 5}, ["fsdp_version"]),
        ("ds_zenflow.json", {"zero_optimization/zenflow/enabled": True}, ["zero_optimization.zenflow.enabled"]),
        ("ds_zenflow.json", {"zero_optimization/zenflow/select_strategy": "layer"},
         ["zero_optimization.zenflow.select_strategy"]),
        ("accelerate_alst.yaml", {"parallelism_config/parallelism_config_sp_attn_implementation": "eager"},
         ["parallelism_config.parallelism_config_sp_attn_implementation"]),
        ("accelerate_alst.yaml", {"parallelism_config/parallelism_config_sp_attn_implementation": "xformers"},
         ["parallelism_config.parallelism_config_sp_attn_implementation"]),
        ("accelerate_alst.yaml", {"parallelism_config/parallelism_config_sp_backend": "torch"},
         ["parallelism_config.parallelism_config_sp_backend"]),
    ],
)  # fmt: skip
def test_a_fault_is_found(name, changes, keys):
    assert [finding.key for finding in changed(name, changes)] == keys


def test_arguments_as_trainer_writes_them_have_no_finding():
    section = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}
    unused = {"fsdp": [], "fsdp_config": section, "deepspeed": None, "use_cpu": False, "fp16": False}
    assert changed("trl_sft.yaml", unused) == []


def test_a_deepspeed_file_in_yaml_is_not_sound():
    """Trainer and accelerate read it as JSON."""
    Path("ds.yaml").write_text(yaml.safe_dump(read("ds_plain_zero1.json")))
    examined = examine.examine(write("mine.yaml", read("trl_sft.yaml") | {"deepspeed": "ds.yaml"}))
    assert examined.verdict.status == 3


def test_faults_of_torchtitan_are_found():
    file = Path("titan_llama3_8b.toml")
    right = file.read_text()
    for old, new in {
        'fsdp_reshard_after_forward = "default"': 'fsdp_reshard_after_forward = "sometimes"',
        "tensor_parallel_degree = 1": "tensor_parallel_degree = -1",
        "data_parallel_shard_degree = -1": "data_parallel_shard_dgree = -1",
        'mode = "selective"': 'mode = "some"',
    }.items():
        file.write_text(right.replace(old, new))
        assert sum(finding.matters for finding in examine.examine(file).findings) == 1, new
    assert "TOML" in refusal(cli.run, ["doctor", str(file), "--fix", "fixed.toml"])


def test_a_deepspeed_file_that_contradicts_the_arguments_is_found():
    """Trainer refuses the pair; each file alone is right."""
    write("ds.json", read(NAMED_ONLY) | {"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 2})
    found = changed("llamafactory_full_sft.yaml", {"deepspeed": "ds.json"})
    assert {finding.key for finding in found} == {"gradient_accumulation_steps", "train_micro_batch_size_per_gpu"}
    assert all(finding.file == "ds.json" and "auto" in finding.remedy for finding in found)


# name -> the keys of the JSON, and the number that the finding on train_batch_size states; None: no finding
PRODUCTS = {
    "right": ({"train_batch_size": 16, "gradient_accumulation_steps": 4}, None),
    "right without accumulation": ({"train_batch_size": 4}, None),
    "wrong": ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, "16"),
    "unknown": ({"train_batch_size": 16, "gradient_accumulation_steps": "auto"}, "product"),
    "fewer ranks with different data": (
        {"train_batch_size": 16, "gradient_accumulation_steps": 4, "tensor_parallel": {"autotp_size": 2}}, "product"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_train_batch_size_is_judged_by_the_product_that_it_must_be(name):
    """Of the two processes of accelerate_names_json.yaml, and two samples in a micro batch."""
    keys, stated = PRODUCTS[name]
    without = {key: v for key, v in read("ds_plain_zero1.json").items() if key != "gradient_accumulation_steps"}
    write("ds_plain_zero1.json", without | {"train_micro_batch_size_per_gpu": 2} | keys)
    found = [f for f in changed("accelerate_names_json.yaml", {}) if f.key == "train_batch_size"]
    assert [stated in finding.message for finding in found] == ([] if stated is None else [True])


# ---------------------------------------------------------------- --fix


@pytest.mark.parametrize("name", [name for name in KINDS if not name.endswith(".toml")])
def test_fix_changes_nothing_in_a_sound_file(name):
    if name == NAMED_ONLY:
        return
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    assert cli.run(["doctor", name, "--fix", f"fixed{Path(name).suffix}"]) == 0
    assert read(f"fixed{Path(name).suffix}") == read(name)
    assert {path: path.read_bytes() for path in before} == before


def test_fix_keeps_the_other_keys_of_a_file(capsys):
    content = read("trainer_arguments_legacy_fsdp.yaml")
    content["fsdp_config"] |= {"offload_params": True, "reshard_after_forwrd": False, "state_dict_type": "SHARDED"}
    write("mine.yaml", content)
    assert cli.run(["doctor", "mine.yaml", "--fix", "fixed.yaml"]) == 1
    fixed = read("fixed.yaml")
    assert fixed == content | {
        "fsdp_config": {
            "version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "activation_checkpointing": True,
            "cpu_offload": True, "reshard_after_forward": False, "state_dict_type": "SHARDED_STATE_DICT",
        }
    }  # fmt: skip
    assert "fsdp_config.cpu_offload: true" in capsys.readouterr().out


def test_fix_overwrites_nothing(monkeypatch):
    write("mine.json", {"zero_optimization": {"stage": 1}, "gradient_cliping": 1.0})
    Path("fixed.json.part").write_text("precious")
    Path("link.json").symlink_to("absent.json")
    assert "exists" in refusal(cli.run, ["doctor", "mine.json", "--fix", "link.json"])
    monkeypatch.setattr(examine.os.path, "lexists", lambda path: False)  # as if it appeared meanwhile
    Path("taken.json").write_text("precious")
    assert "cannot be written" in refusal(cli.run, ["doctor", "mine.json", "--fix", "taken.json"])
    assert cli.run(["doctor", "mine.json", "--fix", "fixed.json"]) == 1
    assert [Path(name).read_text() for name in ("fixed.json.part", "taken.json")] == ["precious", "precious"]
    assert not list(Path().glob(".zero-study-*"))


# ---------------------------------------------------------------- several files


def test_several_files_have_one_result_each_and_one_verdict(capsys):
    write("bad.json", read("ds_plain_zero1.json") | {"gradient_cliping": 2.0})
    Path("broken.json").write_text("{")
    names = ["trl_sft.yaml", "bad.json", "broken.json"]
    assert cli.run(["doctor", *names, "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert [each["file"] for each in content["files"]] == names
    assert [each["verdict"] for each in content["files"]] == ["sound", "found", "unknown"]
    assert (content["verdict"], content["exit_status"]) == ("found", 1)
    assert cli.run(["doctor", *names]) == 1
    output = capsys.readouterr().out
    assert output.startswith("3 files: 1 with findings, 1 without, 1 that could not be checked.")
    assert cli.run(["doctor", "trl_sft.yaml", "broken.json"]) == 3
    assert cli.run(["doctor", "trl_sft.yaml", "trl_grpo.yaml"]) == 0
    assert "one file" in refusal(cli.run, ["doctor", *names, "--fix", "fixed.json"])
    assert "--disk" in refusal(cli.run, ["doctor", *names, "--disk", "."])


def test_a_deepspeed_file_is_judged_as_the_trainer_reads_it_that_names_it():
    """Alone, its reader is unknown: accelerate does not replace all of its values."""

    def notes(*others: str) -> set[str]:
        result = several.examine([Path(NAMED_ONLY), *map(Path, others)]).results[Path(NAMED_ONLY)]
        assert not result.matters
        return {finding.key for finding in result.findings if finding.is_note}

    assert "gradient_clipping" in notes() == notes("trl_sft.yaml")
    assert notes("llamafactory_full_sft.yaml") == set()


def test_the_same_file_twice_is_one_result():
    assert len(several.examine([Path("trl_sft.yaml")] * 2).results) == 1


# ---------------------------------------------------------------- the verdict


def test_a_release_that_is_unknown_could_not_be_checked():
    assert cli.run(["doctor", "ds_plain_zero1.json", "--for", "deepspeed==0.18.9"]) in (0, 1)
    assert cli.run(["doctor", "ds_plain_zero1.json", "--for", "deepspeed==99.0"]) == 3


def test_a_key_that_is_not_examined_does_not_count_as_checked():
    verdict = examine.examine(write("tpu.yaml", {"distributed_type": "XLA", "num_processes": 8})).verdict
    assert (verdict.num_checked, verdict.status, [each.is_requested for each in verdict.not_checked]) == (1, 0, [False])


def test_the_verdict_on_a_machine():
    fine, open_check = checkup.Check("a", "ok", "Yes."), checkup.Check("two ranks", "unknown", "No torch.")
    known_fault = checkup.Check(f"{checkup.KNOWN_FAULTS} torch", "unknown", "Unknown release.")
    assert checkup.verdict([fine, known_fault]).status == 0
    assert checkup.verdict([fine, open_check]).status == 3
    assert checkup.verdict([fine, checkup.Check("b", "bites", "No.")]).status == 1


# ---------------------------------------------------------------- odd content


def test_odd_content_is_no_traceback():
    odd = [None, True, [], {}, {"a": None}, 1e99, "", 10**18, "\0", "x" * 5000, [1, {"a": 2}], "${X}", {"": {}}]
    for name in ("trainer_arguments.yaml", "axolotl_zero2.yaml", "swift_sft.yaml", "llamafactory_v1_deepspeed.yaml"):
        for key in ("fsdp", "fsdp_config", "deepspeed", "bf16", "gradient_accumulation_steps", "dist_config"):
            for value in odd:
                content = read(name) | {key: value}
                examined = examine.examine_content(Path("odd.yaml"), content, KINDS[name])
                assert text.text(examined, everything=True)
                assert examine.mended(examined) is not None
    for value in odd:
        examine.examine_content(Path("odd.json"), dict.fromkeys(kinds.FSDP_KEYS, value), "fsdp_config")
        examine.examine_content(Path("a.toml"), {"parallelism": {"x_degree": value}, "training": value}, "torchtitan")


def test_control_characters_of_a_file_do_not_reach_the_terminal(capsys):
    write(
        "ds.json",
        read("ds_plain_zero1.json") | {"a\x1b[2Jb\nc": "\x1b[31m\x9b0m", "bf16": {"enabled": True, "\x07": 1}},
    )
    write("train.yaml", {"model_name_or_path": "a", "dataset_name": "b", "deepspeed": "\x1b[2J.json", "\x1b[3m": 1})
    for name in ("ds.json", "train.yaml"):
        cli.run(["doctor", name, "--all"])
        cli.run(["doctor", "ds.json", name])
    output = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in output)
    assert "x1b[2Jb" in output


def test_aliases_that_multiply_are_refused():
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 30)]
    Path("bomb.yaml").write_text("distributed_type: 'NO'\n" + "\n".join(lines))
    assert "aliases" in refusal(cli.run, ["doctor", "bomb.yaml"])


# ---------------------------------------------------------------- the libraries that are installed


@pytest.mark.computes  # imports torch
def test_names_are_those_of_the_installed_transformers():
    from transformers import TrainingArguments

    assert {field.name for field in dataclasses.fields(TrainingArguments)} <= kinds.ARGUMENTS


@pytest.mark.computes  # imports torch
def test_keys_of_fsdp_config_are_those_that_trainer_reads():
    import inspect
    import re

    from transformers import TrainingArguments

    source = inspect.getsource(TrainingArguments._process_fsdp_args)
    read_keys = set(re.findall(r'self\.fsdp_config(?:\.get\(|\.setdefault\(|\[)"(\w+)"', source)) | {
        "limit_all_gathers"
    }
    assert read_keys == kinds.FSDP_KEYS


# ---------------------------------------------------------------- scripts that are not started as they expect


def test_a_deepspeed_file_says_what_scripts_need_on_cpus(monkeypatch, capsys):
    for sees_gpu in (False, True):
        monkeypatch.setattr(text.extensions, "sees_gpu", lambda found=sees_gpu: found)
        assert cli.run(["doctor", "accelerate_names_json.yaml"]) == 0
        assert ("backend=" in capsys.readouterr().out) == (not sees_gpu)
        assert cli.run(["doctor", "accelerate_multi_gpu.yaml"]) == 0
        assert "backend=" not in capsys.readouterr().out


def test_multi_cpu_without_mpirun_is_found():
    (found,) = changed("accelerate_multi_gpu.yaml", {"distributed_type": "MULTI_CPU"})[:1]
    assert "only one process" in found.message


@pytest.mark.computes  # imports torch
def test_a_script_that_was_not_started_as_it_expects_says_what_to_write(monkeypatch, capsys):
    from zero_study.engines import cpu_launch, scripts

    for name in ("RANK", "WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["prove"])
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    Path("train.py").touch()
    words = ["--strict", "train.py", "--name", "two words"]
    given = scripts.parse(argparse.ArgumentParser("python -m zero_study.prove"), words[1:])
    monkeypatch.setattr(scripts, "_module", ["-m", "zero_study.prove", *words[:1]])
    for line in ("dist.init_process_group('gloo')", "import os; os.environ['LOCAL_RANK']"):
        Path("train.py").write_text(f"import torch.distributed as dist\n{line}\n")
        with pytest.raises(SystemExit, match="1"):
            scripts.run(given.script, given.arguments)
        command = terminal.last_error(capsys.readouterr().err).split("`")[1]
        assert shlex.split(command)[-6:] == ["-m", "zero_study.prove", *words]
        assert shlex.split(command)[:2] == ["torchrun", "--standalone"]
    launched = {"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "2", "RANK": "0"}
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr(cpu_launch, "_num_processes", lambda: 1)  # as accelerate says if it has found no other
    assert cpu_launch.remedy(ValueError("a"), launched) == cpu_launch.DEEPSPEED
    assert cpu_launch.remedy(ValueError("a"), launched | {"WORLD_SIZE": "1"}) is None
    assert cpu_launch.remedy(ValueError("a"), {}) is None
    monkeypatch.setattr(cpu_launch, "_num_processes", lambda: 2)
    assert cpu_launch.remedy(ValueError("a"), launched) is None
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert cpu_launch.remedy(ValueError("a"), launched) is None
