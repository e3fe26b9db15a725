"""The check of the update: right updates are no fault, and wrong ones, planted into PyTorch's functions, are found."""

from __future__ import annotations

import functools
import importlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.optim import optimizer as optimizers
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_study import prove
from zero_study.engines.optimizer_formulas import orthogonalized
from zero_study.prove import json_answer, rules
from zero_study.prove import muon as muon_module
from zero_study.prove.findings import check_ranks, uneven_targets
from zero_study.prove.muon import packed, unpacked
from zero_study.prove.update import Update, judge

ADAM, SGD, MUON = (importlib.import_module(f"torch.optim.{name}") for name in ("adam", "sgd", "_muon"))
Make = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path, few_objects):
    """No launcher's environment, a folder of the test's own, and no proof that another test has not ended."""
    monkeypatch.setattr(optimizers, "_global_optimizer_pre_hooks", OrderedDict())
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "500")  # so that no line is wrapped
    monkeypatch.chdir(tmp_path)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.norm = nn.Embedding(20, 8), nn.Linear(8, 24), nn.LayerNorm(24)
        self.head = nn.Linear(24, 20)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.norm(torch.tanh(self.up(self.table(ids)))))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parts = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    return [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.1, 0.0), strict=True)]


def muon(model: Any, **options: Any) -> torch.optim.Optimizer:
    """Muon of the matrices; the rest is frozen."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], 0.02, **options)


def train(
    make: Make,
    dtype: torch.dtype = torch.float32,
    *,
    accumulation: int = 1,
    clip: float = 0.0,
    autocast: bool = False,
    scaler: bool = False,
    schedule: bool = False,
    skipped: int | None = None,
    change: Callable[[Any], Any] = lambda model: None,
) -> dict[str, Any]:
    """Return the proof of a training with strict=True, which raises if something is wrong."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    change(model)
    optimizer = make(model)
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaler)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) if schedule else None
    prove.watch(model, optimizer, strict=True)
    for step in range(5):
        for _ in range(accumulation):
            ids = torch.randint(0, 20, (8, 6))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
            scaling.scale(loss).backward()
        if step == skipped:
            next(p for p in model.parameters() if p.grad is not None).grad.fill_(torch.inf)  # type: ignore[union-attr]
        if clip:
            scaling.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()
        if rates:
            rates.step()
    proof: dict[str, Any] = json.loads(Path("proof.json").read_text())
    return proof


RIGHT: dict[str, Make] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 1e-3),
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), 1e-3, fused=True),
    "AdamW foreach": lambda model: torch.optim.AdamW(model.parameters(), 1e-3, foreach=True),
    "AdamW groups": lambda model: torch.optim.AdamW(groups(model), 1e-3),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), 1e-3, weight_decay=0.1, amsgrad=True),
    "Adam maximize": lambda model: torch.optim.Adam(model.parameters(), 1e-3, maximize=True, betas=(0.7, 0.9)),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.01, weight_decay=0.01),
    "SGD momentum": lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, dampening=0.3),
    "SGD nesterov": lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), 0.01, weight_decay=0.01),
    "Muon": muon,
    "Muon other": lambda model: muon(model, adjust_lr_fn="match_rms_adamw", nesterov=False),
}
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped and accumulated": {"clip": 0.1, "accumulation": 2},
    "autocast": {"autocast": True},
    "scaled": {"scaler": True},
    "scaled and clipped": {"scaler": True, "clip": 0.5},
    "a skipped step": {"scaler": True, "skipped": 1},
    "schedule": {"schedule": True},
    "float64": {"dtype": torch.float64},
    "tied": {"change": lambda model: setattr(model.head, "weight", nn.Parameter(model.up.weight.new_ones(20, 24)))},
    "frozen": {"change": lambda model: model.norm.requires_grad_(False)},
}


@pytest.mark.parametrize(("name", "how"), samples.each_once(pytest.mark.nightly, name=[*RIGHT], how=[*HOW]))
def test_a_right_update_is_right(name, how):
    proof = train(RIGHT[name], **HOW[how])
    assert proof["findings"] == []
    (values,) = proof["update"]["rules"].values()
    assert values["num_checked"] == proof["update"]["num_checked"] > 1
    assert values["lowest_norm_ratio"] == pytest.approx(1, rel=0.05)
    assert values["lowest_cosine"] > 0.99


def of(module: Any, name: str, **changed: Any) -> Callable[[Any], None]:
    """Give an optimizer's function other settings than those of the group."""
    call = getattr(module, name)

    def plant(monkeypatch: Any) -> None:
        monkeypatch.setattr(module, name, lambda *tensors, **inputs: call(*tensors, **inputs | changed))

    return plant


of_adam, of_sgd = functools.partial(of, ADAM, "adam"), functools.partial(of, SGD, "sgd")


def of_muon(iteration: Callable[..., torch.Tensor]) -> Callable[[Any], None]:
    def plant(monkeypatch: Any) -> None:
        monkeypatch.setattr(MUON, "_zeropower_via_newtonschulz", iteration)

    return plant


def clipped_after(matrix: torch.Tensor, *how: Any, call: Any = MUON._zeropower_via_newtonschulz) -> Any:
    update = call(matrix, *how)
    return update / update.norm()


def by_parts(matrix: torch.Tensor, *how: Any, call: Any = MUON._zeropower_via_newtonschulz) -> Any:
    return torch.cat([call(part, *how) for part in matrix.chunk(2)])


WRONG: dict[str, tuple[str, Any]] = {
    "rate doubled": ("AdamW", of_adam(lr=2e-3)),
    "rate 2 % too low": ("AdamW", of_adam(lr=0.98e-3)),
    "another first beta": ("AdamW", of_adam(beta1=0.5)),
    "another second beta": ("AdamW", of_adam(beta2=0.9)),
    "another eps": ("AdamW", of_adam(eps=1e-2)),
    "the decay of the other group": ("AdamW groups", of_adam(weight_decay=0.1)),
    "decay is not separate": ("AdamW groups", of_adam(decoupled_weight_decay=False)),
    "decay is lost": ("AdamW groups", of_adam(weight_decay=0.0)),
    "the wrong sign": ("Adam maximize", of_adam(maximize=False)),
    "less momentum": ("SGD momentum", of_sgd(momentum=0.8)),
    "without Nesterov": ("SGD nesterov", of_sgd(nesterov=False)),
    "not orthogonalized": ("Muon", of_muon(lambda matrix, *_: matrix)),
    "clipped after it is orthogonalized": ("Muon", of_muon(clipped_after)),
    "orthogonalized by parts": ("Muon", of_muon(by_parts)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_update_is_found(name, monkeypatch):
    optimizer, plant = WRONG[name]
    plant(monkeypatch)
    with pytest.raises(prove.TrainingFault):
        train(RIGHT[optimizer])
    (finding,) = json.loads(Path("proof.json").read_text())["findings"]
    assert finding.startswith(f"the update is not {optimizer.split()[0]}'s: the update of ")


def test_an_optimizer_without_its_states_is_found(monkeypatch):
    call = ADAM.adam
    model: list[torch.optim.Optimizer] = []

    def forgets(*tensors: Any, **inputs: Any) -> None:
        call(*tensors, **inputs)
        model[0].state.clear()

    def make(net: nn.Module) -> torch.optim.Optimizer:
        model.append(torch.optim.AdamW(net.parameters()))
        return model[0]

    monkeypatch.setattr(ADAM, "adam", forgets)
    with pytest.raises(prove.TrainingFault, match=r"^AdamW keeps no states for 7 of 7 tensors"):
        train(make)


def test_momentum_that_is_not_kept_is_found(monkeypatch):
    of_sgd(momentum=0.0)(monkeypatch)
    with pytest.raises(prove.TrainingFault, match=r"^SGD keeps no states for 7 of 7 tensors"):
        train(RIGHT["SGD momentum"])


class Own(torch.optim.AdamW):
    """Somebody's class, which may compute anything."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda model: Own(model.parameters()), "prove has no formula for Own"),
        (lambda model: torch.optim.RMSprop(model.parameters()), "prove has no formula for RMSprop"),
        (lambda model: torch.optim.AdamW(model.parameters(), 1e-12), "rounding is too large"),
    ],
)
def test_what_is_not_checked_is_said_and_is_no_fault(make, reason, capsys):
    with pytest.raises(prove.Unverified, match=reason):  # which only a strict proof raises, and not as a fault
        train(make)
    assert reason in capsys.readouterr().out


def test_rounding_of_weights_in_16_bits_is_no_fault():
    with pytest.raises(prove.Unverified, match=r"rounding is too large .*: \d parameters"):
        train(RIGHT["AdamW"], torch.bfloat16)


def test_an_error_of_the_check_fails_a_strict_proof_only(monkeypatch):
    monkeypatch.setattr(rules, "rule_of", lambda *_: 1 / 0)
    monkeypatch.setattr(Update, "__init__", _without_optimizer(Update.__init__))
    with pytest.raises(prove.Unverified, match=r"the update of the weights .*ZeroDivisionError"):
        train(RIGHT["AdamW"])


def _without_optimizer(call: Any) -> Any:
    """Let the check begin without a formula, so that the error comes with the update."""

    def begin(self: Update, model: Any, optimizer: Any, base: Any, has_states_on_disk: bool) -> None:
        groups, base.param_groups = base.param_groups, []
        call(self, model, optimizer, base, has_states_on_disk)
        base.param_groups = groups

    return begin


def test_a_large_model_is_sampled(monkeypatch):
    monkeypatch.setattr("zero_study.prove.update.MOST_ELEMENTS", 0)
    monkeypatch.setattr("zero_study.prove.update.LEAST_ELEMENTS", 3)
    assert train(RIGHT["AdamW"])["update"]["num_checked"] == 7


def test_large_matrices_are_left_out(monkeypatch):
    monkeypatch.setattr(muon_module, "LARGEST_MATRIX", 200)
    proof = train(muon)
    assert (proof["update"]["num_checked"], proof["update"]["num_not_checked"]) == (2, 1)


# ---------------------------------------------------------------- of several ranks


def report(**changed: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"compared": {}, "shards": {}, "unchecked": {}, "stateless": {}, "kinds": {}, "changed": []}
    return {**empty, "reason": None, "error": None, "without_muon": [], "wrong_states": [], **changed}


def test_the_sums_of_the_shards_of_ranks_are_added():
    """A rank whose shard does not move by chance is no fault, and half of the length is one."""
    halves = [["SGD", 1e-3, 4.0, 4.0, 4.0, 0.0, 0.0], ["SGD", 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0]]
    judged = judge([report(compared={"w": half}) for half in halves])
    assert (judged.findings, judged.numbers["rules"]["SGD"]["lowest_norm_ratio"]) == ([], 1.0)
    judged = judge([report(compared={"w": ["SGD", 1e-3, 1.0, 4.0, 2.0, 1.0, 0.0]})] * 2)
    assert "is 0.5 times as long" in judged.findings[0]


@pytest.mark.parametrize(
    ("tolerance", "rounding", "difference", "counts"),  # the numbers of findings, and of checked and hidden parameters
    [
        (1e-3, 0.0, 3.9e-6, (0, 1, 0)),  # of a change of length 2: 0.1 % is 0.002
        (1e-3, 0.0, 4.1e-6, (1, 1, 0)),
        (1e-3, 0.039, 0.0, (0, 1, 0)),  # 10 % is 0.2
        (1e-3, 0.041, 0.0, (0, 0, 1)),
        (1e-3, 0.041, 0.1, (1, 1, 0)),  # larger than tolerance and rounding explain
        (0.1, 0.99, 0.0, (0, 1, 0)),  # Muon: five tolerances are 1
        (0.1, 1.01, 0.0, (0, 0, 1)),
    ],
)
def test_how_much_rounding_hides_an_update(tolerance, rounding, difference, counts):
    judged = judge([report(compared={"w": ["SGD", tolerance, 4.0, 4.0, 4.0, difference, rounding]})])
    assert (len(judged.findings), judged.numbers["num_checked"], judged.numbers["num_not_checked"]) == counts
    assert bool(judged.not_checked) == (counts[2] > 0)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"weights": {"a": (1.0, 2.0), "b": (3.0, 5.0)}}, "prove/ranks-differ"),
        ({"settings": ["lr 0.2"]}, "prove/ranks-have-other-settings"),
        ({"scaled": 1.0009}, None),
        ({"scaled": 1.0011}, "prove/ranks-scale-differently"),
        ({"targets": [100, 101]}, None),
    ],
)
def test_ranks_that_do_not_train_the_same_model_are_found(changes, fault):
    same = {
        "watched": ["FSDP2", "Net", 100, "engine"], "ranks": [0, 1, 2], "settings": ["lr 0.1"], "buffers": {},
        "weights": {"a": (1.0, 2.0), "b": (3.0, 4.0)}, "batches": [], "findings": [], "scaled": 1.0, "targets": [],
        "unchecked": [], "is_separate": False, "totals": [None, None], "last_is_local": False,
    }  # fmt: skip
    found, notes = check_ranks([same, same, {**same, **changes}])
    assert ([json_answer.fault_id(text) for text in found], notes) == ([fault] * bool(fault), [])
    assert uneven_targets([100, 102])


def test_ranks_with_other_kinds_of_states_are_found():
    kinds = [["exp_avg: OptimState8bit"], ["exp_avg: float32"]]
    judged = judge([report(kinds={"w": kind, "b": kinds[1]}) for kind in kinds])
    (finding,) = judged.findings
    assert "different kinds of optimizer states for 1 parameter, for example w: (exp_avg: OptimState8bit)" in finding
    assert judge([report(kinds={"w": kinds[0]})] * 2).findings == []


def test_a_matrix_is_put_together_from_the_shards_of_ranks():
    matrix = torch.randn(6, 4)
    parts = [packed(matrix[start:end], 4 * start) for start, end in ((0, 4), (4, 6))]
    whole = unpacked(parts, (6, 4))
    assert whole is not None
    assert torch.equal(whole, matrix.double())
    assert unpacked(parts[1:], (6, 4)) is None


def test_muon_makes_singular_values_equal():
    values = torch.linalg.svdvals(orthogonalized(torch.randn(12, 5).double()))
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert math.isclose(float(orthogonalized(torch.zeros(3, 3)).norm()), 0.0)


@pytest.mark.parametrize(("placement", "checked"), [(Replicate(), 1), (Shard(0), 1), (Partial(), 0)])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_gradient_may_be_whole_on_each_rank_where_its_weight_is_sharded(placement, checked, wrong):
    """Tensor parallelism leaves the gradient of a vocabulary-parallel embedding so. Partial needs a collective."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Module()
        model.weight = nn.Parameter(DTensor.from_local(torch.randn(3, 4), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        whole, rows = torch.randn(6, 4), slice(3, 6)
        gradient = DTensor.from_local(whole[rows] if placement == Shard(0) else whole, mesh, [placement])
        model.weight.grad = gradient
        update = Update(model, optimizer, optimizer, has_states_on_disk=False)
        update.note_before(optimizer)
        with torch.no_grad():
            model.weight.to_local().sub_(0.1 * whole[slice(0, 3) if wrong else rows])
        judgment = judge([update.report()])
    finally:
        dist.destroy_process_group()
    assert judgment.numbers["num_checked"] == checked
    assert len(judgment.findings) == (wrong and checked == 1)
    assert not judgment.errors
