"""Does PyTorch's own sharding, FSDP2, run on a CPU as asked: sharded, proven, and training what DDP trains?"""

from __future__ import annotations

from pathlib import Path

import launching
import pytest
from refusing import refusal
from test_parity import CLIPPED, UNCLIPPED, UNEVEN_EVALUATION, assert_same_run, relative

from study.config import build_config
from study.records import find as records
from study.records.schema import Proof, Sharding
from study.run import make_run
from study.strategy.file import read_by_name
from study.training import proof

SMOKE = Path(__file__).parents[1] / "reports" / "cpu" / "records" / "smoke"
SHARDED = "bert-imdb-tiny-fsdp2-2x-seed0"


@pytest.mark.launches
def test_bert_is_sharded_block_by_block():
    """transformers names BertEmbeddings as a unit too, and accelerate shards its table once more: a TypeError."""
    run = launching.run("fsdp2", **CLIPPED)
    assert run.record.proof.sharding == Sharding(
        units={"BertForSequenceClassification": 1, "Embedding": 1, "BertLayer": 2}, reshard_after_forward=True,
        sharded_parameters=41, unsharded_parameters=0, mesh=[2], compute_dtypes=["float32"],
        reduce_dtypes=["float32"], offloads=False,
    )  # fmt: skip
    held = [states.model_states for states in run.record.model_state_bytes]
    assert held == pytest.approx([8 * run.record.num_params] * 2, rel=1e-3)  # 16 bytes a parameter, halved
    gathers, kept = (
        next(c for c in launching.run(name, **CLIPPED).record.collectives_per_step if c.kind == "all_gather")
        for name in ("fsdp2", "fsdp2_no_reshard")
    )
    assert gathers.bytes > 1.5 * kept.bytes
    assert launching.run("fsdp2_no_reshard", **CLIPPED).record.proof.sharding.reshard_after_forward is False


@pytest.mark.launches
def test_replicas_of_shards_train_the_same():
    run = launching.run("fsdp2_hybrid", 4, **UNCLIPPED)
    assert_same_run(run, launching.run("ddp", **UNCLIPPED))
    assert run.record.proof.sharding.mesh == [2, 2]
    assert run.record.proof.world_size == 4
    held = [states.model_states for states in run.record.model_state_bytes]
    assert held == pytest.approx([8 * run.record.num_params] * 4, rel=1e-3)  # of the two in a replica, not of four


@pytest.mark.launches
def test_accumulation_and_checkpointing_change_nothing():
    flags = {"workload": "bert-imdb", "gradient_clipping": 0.5, "dropout": 0, "global_batch_size": 8}
    flags |= UNEVEN_EVALUATION
    run = launching.run("fsdp2", micro_batch_size=2, activation_checkpointing=True, **flags)
    assert run.record.proof.gradient_accumulation_steps == 2
    assert_same_run(run, launching.run("single", num_processes=1, **flags))


@pytest.mark.launches
def test_bf16_is_of_fp32_shards():
    """DeepSpeed's class: fp32 masters that begin rounded, bf16 products. But gradients are reduced in fp32."""
    run = launching.run("fsdp2", precision="bf16", **UNCLIPPED)
    found = run.record.proof
    assert (found.precision, found.parameter_dtypes, found.moment_dtypes) == ("bf16", ["float32"], ["float32"])
    assert (found.sharding.compute_dtypes, found.sharding.reduce_dtypes) == (["bfloat16"], ["float32"])
    other = launching.run("zero3", precision="bf16", **UNCLIPPED)
    assert run.record.initial_parameters.sha256 == other.record.initial_parameters.sha256
    for mine, theirs in zip(run.steps, other.steps, strict=True):
        assert relative(mine["loss"], theirs["loss"]) < 1e-3, mine["step"]
    assert run.record.initial_parameters.sha256 != launching.run("fsdp2", **UNCLIPPED).record.initial_parameters.sha256


@pytest.fixture
def proved() -> Proof:
    return next(file for file in records.find([SMOKE]) if file.record.run_id == SHARDED).record.proof


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"units": {"BertForSequenceClassification": 1}}, "units: the run asks for 2 of BertLayer, the engine has"),
        ({"unsharded_parameters": 41}, "unsharded_parameters: the run asks for 0, the engine has 41; change "),
        ({"mesh": [1, 2]}, "mesh: the run asks for [2], the engine has [1, 2]; change parallelism_config in "),
        ({"reshard_after_forward": False}, "reshard_after_forward: the run asks for True, the engine has False;"),
        ({"compute_dtypes": ["bfloat16"]}, "compute_dtypes: the run asks for ['float32'], the engine has ['bfloat16'"),
        ({"reduce_dtypes": ["bfloat16"]}, "reduce_dtypes: the run asks for ['float32'], the engine has ['bfloat16'];"),
        ({"offloads": True}, "offloads: the run asks for False, the engine has True; change fsdp_offload_params in "),
    ],
)
def test_what_was_sharded_otherwise_is_refused(changed, expected, proved):
    run = make_run(build_config(), read_by_name("fsdp2"), 2)
    proof.verify(proved, run)
    other = proved.model_copy(update={"sharding": proved.sharding.model_copy(update=changed)})
    assert refusal(proof.verify, other, run).startswith(expected)
