"""An adapter trains alike under every strategy, goes on exactly, and can be loaded and merged afterwards."""

from __future__ import annotations

import json
from types import SimpleNamespace

import peft
import pytest
import torch
from launching import run
from safetensors.torch import load_file
from test_checkpoints import FLAGS as UNINTERRUPTED
from test_parity import kinds
from transformers import AutoModelForCausalLM

from study.compare import facts, predicted
from study.config import build_config
from study.run import make_run
from study.running import checks
from study.training import adapters, export, optimizer_steps, weights
from study.workloads import WORKLOADS
from zero_study.errors import Refusal
from zero_study.strategy.file import read_by_name

WORKLOAD_NAMES = ("bert-imdb", "gpt-wikitext")
SHARDED = ("zero0", "zero1", "zero2", "zero3", "zero1_cpu_offload", "zero3_cpu_offload", "fsdp2")
FLAGS = {
    "workload": "gpt-wikitext", "lora_rank": 4, "lora_dropout": 0.1, "max_steps": 6, "num_train_examples": 48,
    "num_eval_examples": 8, "timing_warmup_steps": 1,
}  # fmt: skip
CHECKPOINTED = {"checkpoint_every": 3, "save_model": True}
SAVED = {**FLAGS, **CHECKPOINTED, "measure": False}
# Fixes what engines may order differently. One run of a strategy serves the tests of bits, memory and resuming.
PINNED = {**FLAGS, **CHECKPOINTED, "fixed_order": "all", "lora_dropout": 0.0, "dropout": 0.0}


def adapted(workload: str = "gpt-wikitext", **flags):
    """A tiny model with an adapter, and the configuration of its run."""
    config = build_config(workload=workload, **{"lora_rank": 4, **flags})
    module = WORKLOADS[workload]
    return adapters.add(module.build_model(config, module.load(config)), config), config


# ---------------------------------------------------------------- the adapter


@pytest.mark.computes
@pytest.mark.parametrize(
    ("workload", "targets", "trained"),
    [
        ("bert-imdb", None, 2 * 2 * 4 * 2 * 128 + 2 * 128 + 2),  # query and value of two blocks, and the new head
        ("gpt-wikitext", None, 2 * 4 * (128 + 3 * 128)),  # the one matrix for query, key and value
        ("gpt-wikitext", "c_proj", 2 * 4 * (128 + 128) + 2 * 4 * (4 * 128 + 128)),  # of attention, and of the MLP
    ],
)
def test_only_the_adapter_is_trained(workload, targets, trained):
    model, config = adapted(workload, lora_target=targets)
    assert weights.num_params(model, only_trainable=True) == trained
    assert weights.num_params(model) > 300 * 4096
    groups = weights.parameter_groups(model, config.weight_decay)
    assert sum(p.numel() for group in groups for p in group["params"]) == trained
    assert [group["weight_decay"] for group in groups] == ([0.01, 0.0] if workload == "bert-imdb" else [0.01])


@pytest.mark.computes
def test_the_first_weights_depend_only_on_the_seed():
    same, other = adapted(seed=3)[0].state_dict(), adapted(seed=4)[0].state_dict()
    torch.manual_seed(11)
    again = adapted(seed=3)[0].state_dict()
    lora = [name for name in same if "lora_A" in name]
    assert lora
    assert all(torch.equal(same[name], again[name]) and not torch.equal(same[name], other[name]) for name in lora)


@pytest.mark.computes
@pytest.mark.parametrize("workload", WORKLOAD_NAMES)
def test_frozen_weights_have_no_products_of_their_gradients(workload):
    module = WORKLOADS[workload]
    whole, adapter = (build_config(workload=workload, lora_rank=rank) for rank in (None, 4))
    counts = [optimizer_steps.model_flops_per_sequence(module, c, module.load(c)) for c in (whole, adapter)]
    assert 0.6 < counts[1] / counts[0] < 0.67


@pytest.mark.parametrize("flags", [{"lora_target": "query"}, {"lora_dropout": 0.1}, {"load_in_4bit": True}])
def test_an_adapter_needs_a_rank(flags):
    with pytest.raises(Refusal, match="lora-rank"):
        build_config(**flags)


@pytest.mark.computes
def test_an_unknown_name_is_refused_even_beside_a_known_one():
    with pytest.raises(Refusal, match=r"c_atn.*c_attn"):
        adapted(lora_target="c_proj,c_atn")


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"lora_rank": None, "load_in_4bit": False}, []),
        ({"lora_rank": 16, "load_in_4bit": True}, ["LoRA of rank 16", "weights in 4 bits"]),
    ],
)
def test_headings_name_the_adapter(config, shown):
    assert facts.shown_adapter(SimpleNamespace(config=config)) == shown


def test_a_package_that_is_missing_is_named(monkeypatch, tmp_path):
    real = checks.importlib.util.find_spec
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None if name == "peft" else real(name))
    with pytest.raises(Refusal, match=r"pip install .*\[peft\]"):
        checks.check(make_run(build_config(lora_rank=4, output_dir=tmp_path / "run"), read_by_name("ddp"), 2))


@pytest.mark.computes
@pytest.mark.parametrize("target", ["LayerNorm", "classifier", "query,classifier", ","])
def test_a_target_that_can_have_no_adapter_is_refused(target):
    with pytest.raises(Refusal, match="all-linear"):
        adapted("bert-imdb", lora_target=target)


@pytest.mark.parametrize(
    ("strategy", "flags", "said"),
    [
        ("ddp", {"perturb": "rounding"}, "--perturb"),
        ("zero3_nvme_offload", {"save_model": True}, "--save-model"),
        ("single", {"load_in_4bit": True, "precision": "fp64", "measure": False}, "--load-in-4bit"),
    ],
)
def test_what_an_adapter_cannot_do_is_refused_before_the_start(strategy, flags, said, tmp_path):
    config = build_config(lora_rank=4, output_dir=tmp_path / "run", **flags)
    with pytest.raises(Refusal, match=said):
        checks.check(make_run(config, read_by_name(strategy), 1 if strategy == "single" else 2))


@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_weights_in_4_bits_are_not_sharded(strategy, tmp_path):
    config = build_config(lora_rank=4, load_in_4bit=True, output_dir=tmp_path / "run")
    with pytest.raises(Refusal, match="load-in-4bit"):
        checks.check(make_run(config, read_by_name(strategy), 2))


# ---------------------------------------------------------------- under the engines


@pytest.mark.launches
@pytest.mark.parametrize("strategy", kinds(SHARDED, ["zero3"], slow=["fsdp2"]))
def test_every_strategy_trains_the_same_bits(strategy):
    control, sharded = run("ddp", **PINNED).record, run(strategy, **PINNED).record
    assert control.final_parameters.sha256 != control.initial_parameters.sha256
    assert sharded.final_parameters == control.final_parameters
    assert sharded.num_trainable_params == control.num_trainable_params == 4096
    assert sharded.num_params == control.num_params


@pytest.mark.computes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_has_the_type_of_the_weights(dtype):
    config = build_config(workload="gpt-wikitext", lora_rank=4)
    module = WORKLOADS["gpt-wikitext"]
    model = adapters.add(module.build_model(config, module.load(config)).to(dtype), config)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@pytest.mark.slow
@pytest.mark.launches
def test_an_adapter_has_the_type_of_16_bit_weights():
    flags = {**FLAGS, "precision": "bf16", "lora_dropout": 0.0, "dropout": 0.0}
    whole, sharded = (run(name, **flags).record for name in ("zero2", "zero3"))
    assert whole.proof.parameter_dtypes == sharded.proof.parameter_dtypes == ["bfloat16"]
    assert whole.initial_parameters == sharded.initial_parameters


@pytest.mark.slow
@pytest.mark.launches
def test_zero_shards_only_the_states_of_the_adapter():
    whole, sharded = (run(name, **PINNED).record.model_state_bytes[0] for name in ("zero1", "zero3"))
    assert whole.optimizer_states == sharded.optimizer_states == 4096 / 2 * 12 + 4  # masters, moments, a step count
    assert whole.parameters > 1.9 * sharded.parameters - 4 * 20_000  # some stay whole


@pytest.mark.launches
@pytest.mark.parametrize("strategy", kinds(["ddp", "zero1", "zero3", "fsdp2"], ["zero3"], slow=["fsdp2"]))
def test_theory_knows_the_memory_of_an_adapter(strategy):
    record = run(strategy, **PINNED).record
    assert abs(predicted.states_error(record)) < 0.01
    assert abs(predicted.step_peak(record).error) < 0.02


@pytest.mark.launches
@pytest.mark.parametrize("strategy", kinds(["ddp", "zero1", "zero3", "fsdp2"], ["zero3"]))
def test_the_adapter_goes_on_exactly_and_is_saved(strategy, tmp_path):
    saved = run(strategy, **PINNED)
    resumed = run(strategy, **{**PINNED, "checkpoint_every": None, "save_model": False},
                  resume=str(saved.run_dir / "checkpoints/step-00000003"))  # fmt: skip
    assert resumed.record.final_parameters == saved.record.final_parameters

    folder = saved.run_dir / "model"
    base = AutoModelForCausalLM.from_pretrained(folder / adapters.BASE)
    model = adapters.loaded(base, folder).eval()
    tokens = torch.arange(32).unsqueeze(0)
    with torch.no_grad():
        scores = model(input_ids=tokens).logits
        without = model.get_base_model()
        with model.disable_adapter():
            assert not torch.equal(without(input_ids=tokens).logits, scores)
    merged = export.export(export.newest(saved.run_dir), tmp_path / "merged", merge=True).eval()
    assert not (tmp_path / "merged" / export.ADAPTER).exists()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=tokens).logits, scores, atol=1e-5, rtol=1e-4)
    adapter = load_file(folder / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in adapter.values()) == saved.record.num_trainable_params
    assert peft.PeftConfig.from_pretrained(str(folder)).r == 4


@pytest.mark.slow
@pytest.mark.launches
def test_the_base_of_a_classifier_has_the_first_head_and_the_adapter_the_trained_one(tmp_path):
    saved = run("ddp", **{**SAVED, "workload": "bert-imdb"})
    base = load_file(saved.run_dir / "model" / adapters.BASE / "model.safetensors")
    adapter = load_file(saved.run_dir / "model/adapter_model.safetensors")
    trained = next(tensor for name, tensor in adapter.items() if name.endswith("classifier.weight"))
    first = WORKLOADS["bert-imdb"]
    config = build_config(**{**SAVED, "workload": "bert-imdb", "save_model": False, "checkpoint_every": None})
    initial = weights.initial_model(first, first.load(config), config)
    assert torch.equal(base["classifier.weight"], initial.classifier.weight)
    assert not torch.equal(base["classifier.weight"], trained)
    merged = export.export(export.newest(saved.run_dir), tmp_path / "merged", merge=True)
    assert torch.equal(merged.classifier.weight, trained)


@pytest.mark.slow
@pytest.mark.launches
def test_there_is_nothing_to_merge_without_an_adapter(tmp_path):
    whole = run("fsdp2", **UNINTERRUPTED)
    with pytest.raises(Refusal, match="merge"):
        export.export(export.newest(whole.run_dir), tmp_path / "merged", merge=True)


@pytest.mark.launches
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("ddp", "fp32"), ("zero2", "bf16-autocast"))),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("zero2", "fp32"), ("ddp", "bf16-autocast"))),
    ],
)
def test_weights_in_4_bits_train_and_go_on_exactly(strategy, precision):
    """Under autocast too, the adapter is in fp32: PEFT would make it in the type in which weights are multiplied."""
    flags = {**SAVED, "load_in_4bit": True, "precision": precision}
    saved = run(strategy, **flags)
    resumed = run(strategy, **{**flags, "save_model": False, "checkpoint_every": None},
                  resume=str(saved.run_dir / "checkpoints/step-00000003"))  # fmt: skip
    assert resumed.record.final_parameters == saved.record.final_parameters
    assert saved.record.proof.parameter_dtypes == ["float32", "uint8"]
    assert saved.record.num_params == weights.num_params(adapted()[0])
    assert saved.record.steps_done == 6
    config = json.loads((saved.run_dir / "model" / export.ADAPTER).read_text())
    assert config["r"] == 4


@pytest.mark.computes
def test_an_evaluation_leaves_weights_in_4_bits_as_they_are(tmp_path):
    config = build_config(workload="gpt-wikitext", lora_rank=4, load_in_4bit=True)
    module = WORKLOADS["gpt-wikitext"]
    splits = module.load(config)
    module.build_model(config, splits).save_pretrained(tmp_path)
    model = module.load_model(config, splits, tmp_path, **adapters.quantization(config))
    adapters.keep_scales(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert any("absmax" in name for name in before)
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(32).unsqueeze(0))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
