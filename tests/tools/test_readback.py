"""The comparison of requests with what was read back from an engine, and the names of number types."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from zero_study.engines.readback import dtypes, facts
from zero_study.engines.readback.demands import Demand, compare
from zero_study.prove.proved_step import scale_between

FACTS = {
    "zero_stage": 2,
    "gradient_clipping": None,
    "settings": {"zero_optimization.overlap_comm": True, "zero_optimization.cpu_offload": None},
}


@pytest.mark.parametrize(
    ("demands", "outcomes"),
    [
        ([Demand("zero_stage", 2, "a file")], ["agreed"]),
        ([Demand("zero_optimization.stage", 2, "a JSON")], ["agreed"]),  # a key with a fact of its own
        ([Demand("zero_optimization.overlap_comm", False, "a JSON")], ["contradicted"]),
        ([Demand("zero_optimization.cpu_offload", None, "a JSON")], ["agreed"]),  # read back, and nothing
        ([Demand("gradient_clipping", 1.0, "a file")], ["unread"]),
        ([Demand("zero_stage", 1, "a launcher"), Demand("zero_stage", 2, "a file")], ["overridden", "agreed"]),
        ([Demand("zero_stage", 2, "a launcher"), Demand("zero_stage", 3, "a file")], ["agreed", "contradicted"]),
        ([Demand("zero_stage", 1, "a launcher"), Demand("zero_optimization.stage", 3, "a JSON")],
         ["overridden", "contradicted"]),
    ],
)  # fmt: skip
def test_demands_are_compared_with_facts(demands, outcomes):
    judged = compare(demands, FACTS)
    assert [each.outcome for each in judged] == outcomes
    assert all(each.decisive == demands[-1] for each in judged)


def test_a_comparison_may_have_an_equality_of_its_own():
    (judged,) = compare(
        [Demand("zero_stage", "2", "a file")], FACTS, lambda demand, actual: demand.value == str(actual)
    )
    assert (judged.outcome, judged.actual) == ("agreed", 2)


def test_names_of_types():
    assert dtypes.dtype_names([torch.float32, torch.bfloat16, torch.float32]) == ["bfloat16", "float32"]
    assert dtypes.precision_of(["bfloat16", "float32", "float64"]) == "bf16+fp32+fp64"
    assert dtypes.precision_of(["float8_e4m3fn"]) == "float8_e4m3fn"
    assert all(getattr(torch, name) for name in dtypes.TORCH_NAMES.values())


def test_a_plain_model_is_read_back():
    model = torch.nn.Linear(2, 3).double()
    model.bias.requires_grad = False
    built = facts.read_back(model, torch.optim.SGD(model.parameters()))
    assert (built["engine"], built["engine_class"], built["optimizer_class"]) == ("none", "Linear", "SGD")
    assert (built["num_params"], built["num_trainable_params"], built["parameter_dtypes"]) == (9, 6, ["float64"])
    assert (built["zero_stage"], built["precision"], built["backend"]) == (None, None, None)


@pytest.mark.parametrize(
    ("before", "after", "factor"),
    [
        ([(1.0, 2.0), (0.0, 0.0)], [(2.0, 4.0), (0.0, 0.0)], 2.0),
        ([(1.0, 2.0), (-3.0, 4.0)], [(-1.0, 2.0), (3.0, 4.0)], -1.0),
        ([(1.0, 2.0), (-3.0, 4.0)], [(1.0, 2.0), (3.0, 4.0)], None),  # one is turned
        ([(1.0, 2.0), (1.0, 2.0)], [(1.0, 2.0), (3.0, 6.0)], None),
        ([(1.0, 2.0)], [(0.0, 0.0)], None),
        ([(1.0, 2.0)], [(float("nan"), float("nan"))], None),
        ([(0.0, 2.0)], [(0.0, 1.0)], 0.5),  # no sum tells the sign
        ([(1.0, 2.0)], [], None),
        ([], [], None),
    ],
)
def test_the_common_factor_of_gradients(before, after, factor):
    assert scale_between(before, after) == factor


def test_fsdp2_is_read_back_from_groups_of_every_release(monkeypatch):
    """Since torch 2.15 only the parameters of a group have its policy. Before 2.13, a module has at most one group."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parameters = [SimpleNamespace(mp_policy=policy)]
    group = SimpleNamespace(modules=[], post_forward_mesh_info=None, offload_policy=None, fsdp_params=parameters)
    monkeypatch.setattr(facts, "_parameter_groups", lambda _: [group])
    built = facts.facts_of_fsdp2(torch.nn.Linear(2, 3), None)
    assert (built["compute_dtypes"], built["reduce_dtypes"]) == (["bfloat16"], ["float32"])
    older, empty, newer = {"_fsdp_param_group": group}, {"_fsdp_param_group": None}, {"_fsdp_param_groups": [group]}
    for state, groups in ((older, [group]), (empty, []), (newer, [group])):
        module = SimpleNamespace(_get_fsdp_state=partial(SimpleNamespace, **state))
        assert facts.groups_of_module(module) == groups
