"""Equal to the bit: strategies of one arithmetic leave the same weights and moments once orders of additions are fixed.

And a training that is wrong is told apart at its first wrong step, with the pins as without them.
"""

from __future__ import annotations

import math
from pathlib import Path

import launching
import pytest
import torch

from study.compare import bits
from study.config import PINS, build_config
from study.records import find, schema
from study.training import fixed_order
from zero_study.errors import Failed, Refusal

BERT = {"workload": "bert-imdb", "dropout": 0, "digest_every": 1, "measure": False, "max_steps": 4}
GPT = {**BERT, "workload": "gpt-wikitext"}
FIXED = {**BERT, "gradient_clipping": 0.5, "fixed_order": "all"}


def parts(run: launching.Run, other: launching.Run) -> int | None:
    return bits.first_differing_step(run.record, other.record)


# ---------------------------------------------------------------- trainings


@pytest.mark.launches
@pytest.mark.parametrize(
    "name", ["zero1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero3", "zero2", "fsdp2"))]
)
def test_strategies_leave_the_same_bits_once_orders_are_fixed(name):
    """With clipping, and of BERT, where as shipped each of these trains other bits than DDP."""
    run, reference = launching.run(name, **FIXED), launching.run("ddp", **FIXED)
    assert [digest.step for digest in run.record.digests] == [1, 2, 3, 4]
    assert all(digest.first_moments and digest.second_moments for digest in run.record.digests)
    assert parts(run, reference) is None
    assert run.record.final_parameters == reference.record.final_parameters


@pytest.mark.slow
@pytest.mark.launches
def test_as_shipped_stage_3_groups_additions_otherwise_and_the_view_names_it(tmp_path):
    shipped = {**BERT, "gradient_clipping": 0}
    runs = [launching.run(name, **shipped) for name in ("ddp", "zero3", "fsdp2")]
    assert parts(runs[1], runs[0]) == 1
    assert parts(runs[2], runs[0]) is None
    output = bits.BITS.page([run.run_dir for run in runs])
    (row,) = (line for line in output.splitlines() if line.startswith("| zero3"))
    assert "grouping" in row
    assert "from step 1" in row
    pairs = bits.pairs_by_outcome(find.find([run.run_dir for run in runs]))
    assert (len(pairs["same"]), pairs["broken"], len(pairs["named"])) == (1, [], 2)


@pytest.mark.launches
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(FIXED, marks=pytest.mark.slow),
        pytest.param({**GPT, "gradient_clipping": 0}, marks=pytest.mark.slow),
        pytest.param({**GPT, "gradient_clipping": 0, "fixed_order": "all"}, marks=pytest.mark.slow),
    ],
    ids=["fixed order and clipping", "as shipped", "fixed order"],
)
def test_a_planted_fault_is_told_apart_at_its_first_step(flags):
    """With every pin on as well: no pin hides a wrong gradient."""
    sound = launching.run("ddp", **flags)
    assert parts(launching.run("ddp", **flags, perturb="scaled-gradient"), sound) == 1
    lost = launching.run("ddp", **flags, perturb="lost-moment")
    assert parts(lost, sound) == 2  # halfway, and before the digest of that step


@pytest.mark.slow
@pytest.mark.launches
def test_a_plain_loop_of_one_process_leaves_the_same_bits(monkeypatch, capsys):
    """It shares no code with the trainer: what all strategies have in common is checked too."""
    monkeypatch.syspath_prepend(str(launching.ROOT / "tools" / "measure"))
    import plain_loop

    cut = {**GPT, "micro_batch_size": 2, "fixed_order": "all"}
    assert plain_loop.main([str(launching.run("ddp", **cut).run_dir)]) == 0
    reduced_each = launching.run("zero2", **cut).run_dir
    assert plain_loop.main([str(reduced_each), "--ranks-first"]) == 0
    assert plain_loop.main([str(reduced_each)]) == 1
    assert "first moments from step 1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.launches
def test_diff_records_the_trainer_and_names_a_planted_fault(tmp_path):
    """The launcher starts the recorder, and that the trainer."""
    flags = [
        "--workload",
        "gpt-wikitext",
        "--dropout",
        "0",
        "--no-measure",
        "--max-steps",
        "3",
        "--gradient-clipping",
        "0",
    ]
    for name, fault in {"sound": [], "wrong": ["--perturb", "scaled-gradient"]}.items():
        launch = ["accelerate", "launch", "--config_file", launching.ROOT / "accelerate_configs" / "ddp.yaml"]
        launch += ["--num_processes", "2", "--main_process_port", "0", "-m", "zero_study.diff"]
        script = [
            "--output",
            tmp_path / name,
            launching.ROOT / "study" / "train.py",
            "--output-dir",
            tmp_path / f"of_{name}",
        ]
        completed = launching.attempt([*launch, *script, *flags, *fault])
        assert completed.returncode == 0, completed.stderr[-2000:]
    completed = launching.command_line(["diff", tmp_path / "sound", tmp_path / "wrong"])
    assert completed.returncode == 1
    assert "0.98 times as large" in completed.stdout


@pytest.mark.slow
@pytest.mark.launches
def test_in_fp64_a_difference_of_rounding_shrinks():
    fp64 = {**BERT, "gradient_clipping": 0.5, "precision": "fp64"}
    run, reference = launching.run("fsdp2", **fp64), launching.run("ddp", **fp64)
    assert run.record.proof.parameter_dtypes == ["float64"]
    mine, theirs = (each.record.evaluation[-1]["loss"] for each in (run, reference))
    assert math.isclose(mine, theirs, rel_tol=1e-13)


# ---------------------------------------------------------------- pins


def test_sums_are_added_in_the_order_of_the_ranks():
    large, one = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert fixed_order.sum_in_rank_order([large, one, one]).item() == 2.0**24  # each 1 is lost
    assert fixed_order.sum_in_rank_order([one, one, large]).item() == 2.0**24 + 2


def test_all_sums_of_a_group_pass_through_the_pin_and_change_nothing_of_one_rank(group, monkeypatch):
    from torch import distributed

    for module in (distributed, distributed.distributed_c10d):
        for name in ("all_reduce", "reduce", "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"):
            monkeypatch.setattr(module, name, getattr(module, name))  # so that the pin is taken back
    fixed_order.fix_collectives()
    value, received = torch.tensor([1.0, 2.0]), torch.empty(2)
    distributed.all_reduce(value)
    distributed.reduce(value, 0)
    assert distributed.reduce_scatter_tensor(received, value, async_op=True).is_completed()
    assert value.tolist() == received.tolist() == [1.0, 2.0]
    counts = torch.tensor([3])
    distributed.all_reduce(counts, op=distributed.ReduceOp.MAX)  # as it is
    assert counts.tolist() == [3]


def test_nodes_that_do_nothing_change_no_value():
    from study.training.weights import num_params

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    inputs = torch.randn(5, 3)
    model(inputs).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    fixed_order.fix_grouping(model)
    model(inputs).sum().backward()
    assert num_params(model) == 26
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


class Engine:
    """A ZeRO optimizer of stage 2 whose own norm is what a test says."""

    def __init__(self, own: float) -> None:
        self.cpu_offload, self._own, self.clipped_by = False, own, None
        self.averaged_gradients = {0: [torch.tensor([3.0]), torch.tensor([4.0])]}

    def scaled_global_norm(self) -> torch.Tensor:
        return torch.tensor(self._own)

    def unscale_and_clip_grads(self, gradients: object, total_norm: torch.Tensor) -> None:
        self.clipped_by = total_norm.item()


def test_an_engine_clips_by_the_exact_norm_unless_its_own_is_wrong(group):
    near, wrong = Engine(5.000001), Engine(5.1)
    for engine in (near, wrong):
        fixed_order.fix_norm_of_zero(engine, 2)
    assert near.scaled_global_norm().item() == 5.0
    near.unscale_and_clip_grads([], torch.tensor(5.000001))
    assert near.clipped_by == 5.0
    with pytest.raises(Failed, match=r"5\.09"):
        wrong.scaled_global_norm()


# ---------------------------------------------------------------- flags


def test_pins_are_named_or_all_and_a_wrong_name_is_refused():
    assert fixed_order.pins(build_config(fixed_order="all")) == {*PINS}
    assert fixed_order.pins(build_config(fixed_order="norm,linear")) == {"norm", "linear"}
    assert fixed_order.pins(build_config()) == frozenset()
    with pytest.raises(Refusal, match="norm"):
        build_config(fixed_order="nrom")
    with pytest.raises(Refusal, match="checkpoint-every"):
        build_config(digest_every=1, checkpoint_every=2)


@pytest.mark.launches
@pytest.mark.parametrize(
    ("strategy", "flags", "named"),
    [
        ("zero2", ["--precision", "fp64", "--no-measure"], "fp64"),
        ("ddp", ["--precision", "fp64"], "--no-measure"),
        pytest.param("zero3_nvme_offload", ["--fixed-order", "all"], "disk", marks=pytest.mark.slow),
        ("ddp", ["--fixed-order", "all", "--compile"], "--compile"),
    ],
)
def test_what_cannot_be_fixed_is_refused_before_anything_starts(strategy, flags, named, tmp_path):
    words = ["train", "--strategy", strategy, "--output-dir", str(tmp_path / "run"), *flags]
    completed = launching.command_line(["zero-study", *words][1:])
    assert completed.returncode == 2
    assert named in completed.stderr
    assert not (tmp_path / "run").exists()


def test_records_without_digests_are_not_the_same_bits():
    record = schema.read(Path(__file__).parents[1] / "fixtures" / "records" / "auto-ddp")
    assert record.digests is None
    assert bits.first_differing_step(record, record) == 0
