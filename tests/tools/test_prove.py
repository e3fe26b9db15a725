"""The proof for anybody's script: what it reads back, what it says, and that nothing of it is left."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import os
import re
import sys
import time
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launching
import pytest
import torch
import torch.distributed as dist
from prove_program import CASES
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import optimizer as optimizers
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from zero_study import prove
from zero_study.engines import scripts
from zero_study.engines.collective_probe import CollectiveProbe
from zero_study.engines.hooks import before_updates
from zero_study.engines.readback.states import count_states
from zero_study.prove import findings as prove_findings
from zero_study.prove import json_answer, norms, reference
from zero_study.prove.__main__ import main
from zero_study.prove.checksums import checksums, first_difference
from zero_study.prove.demands import by_json, by_launcher, processes_of
from zero_study.prove.mismatch import compare_with_request, known_wrong

LAUNCHED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_GRADIENT_CLIPPING": "auto",
    "ACCELERATE_MIXED_PRECISION": "no",
    "FSDP_OFFLOAD_PARAMS": "false",  # says nothing: FSDP is not used
    "WORLD_SIZE": "2",
}
STAGE_2: dict[str, Any] = {
    "engine": "DeepSpeed",
    "engine_class": "DeepSpeedEngine",
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "precision": "fp32",
    "accumulation_dtype": "float32",
    "world_size": 2,
    "device": "cpu",
    "settings": {"zero_optimization.stage": 2, "zero_optimization.overlap_comm": False, "fp16.loss_scale": None},
}


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path, few_objects):
    """No launcher's environment, a folder of the test's own, and no proof that another test has not ended."""
    monkeypatch.setenv("COLUMNS", "500")  # so that no line is wrapped
    monkeypatch.setattr(optimizers, "_global_optimizer_pre_hooks", OrderedDict())
    for name in (*LAUNCHED, "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_USE_FSDP", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters())


def train(model: Any, optimizer: Any, steps: int, accumulation: int = 1, clip: float | None = None) -> None:
    for _ in range(steps):
        for _ in range(accumulation):
            model(torch.ones(2, 8)).sum().backward()
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)  # an imported name, as many scripts have it
        optimizer.step()
        optimizer.zero_grad()


def proof(path: str = "proof.json") -> dict[str, Any]:
    """Read what a training of these tests wrote: its proof, whose findings all have ids, or an exception's text."""
    found: dict[str, Any] = json.loads(Path(path).read_text())
    findings = found["findings"] if isinstance(found, dict) else []
    assert [text for text in findings if json_answer.fault_id(text) == json_answer.OTHER_FAULT] == []
    return found


def replaced() -> list[Any]:
    """What a step's counting puts in the place of torch's own."""
    clipping = [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad._clip_grads_with_norm_]
    classes = (torch.nn.Sequential, DistributedDataParallel, torch.nn.Linear, torch.nn.Module)
    methods = [vars(kind).get("__call__") for kind in classes]
    methods += [torch.optim.AdamW._optimizer_step_code, dist.ProcessGroup.allreduce]
    return [*clipping, torch.autograd.backward, *methods]


def left(model: Any, optimizer: Any) -> list[Any]:
    """What a proof has put on a model and an optimizer themselves, of which a script may make copies."""
    hooks = [hook for module in model.modules() for hook in (*module._forward_pre_hooks, *module._forward_hooks)]
    hooks += [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    return [*hooks, *({"__call__", "_call_impl", "step", "backward"} & set(vars(model)))]


NUM_PARAMS = 8 * 16 + 16 + 16 + 1


# ---------------------------------------------------------------- a loop


def test_a_plain_loop_is_read_back_one_step_counted_and_nothing_left_behind(capsys):
    model, optimizer = make()
    originals = replaced()
    watch = prove.watch(model, optimizer)
    train(model, optimizer, 2)
    assert replaced() != originals
    assert left(model, optimizer) == []
    train(model, optimizer, 1)
    watch.end()
    assert replaced() == originals
    assert not optimizers._global_optimizer_pre_hooks
    found = proof()
    assert (found["built"]["engine"], found["built"]["num_params"], found["step"]["number"]) == ("none", NUM_PARAMS, 3)
    states = found["step"]["model_states"]
    assert states["parameters"] == states["gradients"] == 4 * NUM_PARAMS
    assert states["optimizer_states"] == 8 * NUM_PARAMS + 4 * 4  # moments, and a step count a tensor
    assert found["step"]["collectives"] == []
    said = capsys.readouterr().out
    assert re.search(r"^proof  requested +unknown, .*config=", said, re.MULTILINE)
    assert re.search(r"^proof  step 3 +1 forward pass in fp32$", said, re.MULTILINE)
    assert len([line for line in said.splitlines() if line]) <= 11


def test_the_lines_of_a_proof_fit_the_terminal_and_the_result_comes_before_the_details(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    model, optimizer = make()
    prove.watch(model, optimizer, config={"gradient_clipping": 1.0})
    train(model, optimizer, 3)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    words = [line.split("  ")[1] for line in lines if line.startswith("proof  ")]
    assert words.index("result") < words.index("step 3") < words.index("memory") < words.index("communication")
    assert lines[-1] == "proof: written to proof.json"


def copies(model: Any) -> list[Any]:
    """A model, copied in the ways of scripts."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return [copy.deepcopy(model), AveragedModel(model), torch.load(file, weights_only=False)]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_copy_made_within_the_step_is_a_model_of_its_own(is_wrapped, group):
    model, optimizer = make()
    called = DistributedDataParallel(model) if is_wrapped else model
    prove.watch(called, optimizer)
    train(called, optimizer, 2)
    batch = torch.ones(2, 8)
    expected = model[1](model[0](batch))
    made, other = copies(model), copy.deepcopy(optimizer)
    train(called, optimizer, 1)
    for each in made:
        assert torch.equal(each(batch), expected)
        assert torch.equal(each.eval()(batch), expected)
    train(made[0], other, 2)  # its own steps are none of the proof's
    assert (proof()["step"]["number"], proof()["step"]["forward_passes"]) == (3, 1)


def test_of_two_proofs_the_last_puts_the_originals_back(group, capsys):
    """A generator and a discriminator, of which only the latter is clipped."""
    originals = replaced()
    (first, its), (second, other) = (make() for _ in range(2))
    first, second = DistributedDataParallel(first), DistributedDataParallel(second)
    watches = [prove.watch(first, its), prove.watch(second, other)]
    for _ in range(4):
        train(second, other, 1, accumulation=2, clip=0.5)
        train(first, its, 1)
    for watch in watches:
        watch.end()
    found = [proof(name)["step"] for name in ("proof.json", "proof-2.json")]
    found = [(step["number"], step["forward_passes"], step["clipped_at"]) for step in found]
    assert found == [(3, 1, None), (3, 2, 0.5)]
    assert replaced() == originals
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not optimizers._global_optimizer_pre_hooks
    assert "proof: written to proof-2.json\n" in capsys.readouterr().out


def test_a_compiled_model_has_its_graphs_again_after_the_step():
    model, optimizer = make()
    ran = []

    def note_runs(graph: Any, _: Any) -> Any:
        return lambda *given: ran.append(1) or graph.forward(*given)

    compiled = torch.compile(model, backend=note_runs, fullgraph=True)
    prove.watch(compiled, optimizer)
    train(compiled, optimizer, 5)
    assert (proof()["step"]["forward_passes"], len(ran)) == (1, 4)
    assert "the counted step ran without its compiled graphs" in proof()["notes"][0]


class Interrupted(torch.autograd.Function):
    """What raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError("the script's own fault")


def raise_in_backward(model: Any) -> None:
    Interrupted.apply(model(torch.ones(2, 8))).sum().backward()


def raise_in_clipping(model: Any) -> None:
    model(torch.full((2, 8), torch.inf)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def interrupt(model: Any) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model[0].register_forward_hook(stop)
    try:
        model(torch.ones(2, 8))
    finally:
        handle.remove()


@pytest.mark.parametrize("fault", [raise_in_backward, raise_in_clipping, interrupt])
def test_a_fault_within_the_step_takes_everything_back(fault):
    model, optimizer = make()
    originals = replaced()
    prove.watch(model, optimizer)
    train(model, optimizer, 2)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        fault(model)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert replaced() == originals
    assert left(model, optimizer) == []
    optimizer.zero_grad()
    train(model, optimizer, 3)  # the script goes on: the first whole step is the one that is counted
    assert (proof()["step"]["number"], proof()["step"]["forward_passes"]) == (4, 1)


def test_accumulation_clipping_and_autocast_are_seen_in_the_step(capsys):
    model, optimizer = make()
    forward = model.forward
    model.forward = torch.autocast("cpu", torch.bfloat16)(forward)  # as accelerate does
    prove.watch(model, optimizer)
    train(model, optimizer, 3, accumulation=2, clip=0.5)
    found = proof()
    assert (found["step"]["forward_passes"], found["step"]["clipped_at"]) == (2, 0.5)
    assert found["built"]["precision"] == "bf16-autocast"
    clipping, hard = found["notes"]
    assert clipping == "gradient_clipping: no file requests it, but the script clips at 0.5"
    assert hard.startswith("clipping at 0.5 divides the gradients of every examined step by")
    assert "2 forward passes in bf16-autocast, gradients clipped at 0.5" in capsys.readouterr().out


class RootWithParameter(torch.nn.Module):
    """As CLIP's root, which is called outside the autocast that accelerate puts around its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layer(given)


def test_autocast_is_seen_wherever_parameters_are():
    model = RootWithParameter()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    optimizer = torch.optim.AdamW(model.parameters())
    prove.watch(model, optimizer, config={"bf16": {"enabled": True}}, strict=True)
    train(model, optimizer, 3)
    assert proof()["built"]["precision"] == "bf16-autocast"


def nothing(model: Any, called: Any) -> None: ...


def evaluate(model: Any, called: Any) -> None:
    """A wrapper's own flag stays."""
    model.eval()
    with torch.no_grad():
        called(torch.ones(1, 8))
    model.train()


def evaluate_with_gradients(model: Any, called: Any) -> None:
    called(torch.ones(2, 8)).sum().backward()
    model.eval()(torch.ones(1, 8))
    model.train()


def set_to_evaluation(model: Any, called: Any) -> None:
    """As a library hands a model out."""
    model.eval()


@pytest.mark.parametrize(
    ("before_the_third", "wrapped", "number"),
    [(nothing, True, 3), (evaluate, False, 4), (evaluate_with_gradients, False, 4), (evaluate, True, 4),
     (set_to_evaluation, False, 3)],
)  # fmt: skip
def test_the_step_is_the_first_whole_one_of_training_from_the_third(before_the_third, wrapped, number, group):
    model, optimizer = make()
    if before_the_third is set_to_evaluation:
        model.eval()
    called = DistributedDataParallel(model) if wrapped else model
    prove.watch(called, optimizer)
    train(called, optimizer, 2)
    before_the_third(model, called)
    assert torch._C._len_torch_dispatch_stack() == 0
    train(called, optimizer, 2)
    assert (proof()["step"]["number"], proof()["step"]["forward_passes"]) == (number, 1)
    says_so = [note for note in proof()["notes"] if "trains in evaluation mode" in note]
    assert len(says_so) == (before_the_third is set_to_evaluation)


def test_another_clipping_than_asked_is_a_difference(capsys):
    model, optimizer = make()
    prove.watch(model, optimizer, config={"gradient_clipping": 1.0})
    train(model, optimizer, 3, clip=0.5)
    (difference,) = proof()["not_as_asked"]
    assert difference.startswith("gradient_clipping: config= requests 1.0, ")
    assert difference.endswith(" at 0.5")
    assert f"proof  NOT AS REQUESTED  {difference}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("optimizer", "config", "said"),
    [
        ("no optimizer", None, "ValueError: str is not an optimizer of torch"),
        (None, "absent.yaml", "FileNotFoundError"),
    ],
)
def test_an_error_of_its_own_ends_no_training(optimizer, config, said, capsys):
    model, own = make()
    prove.watch(model, optimizer or own, config=config)
    train(model, own, 4)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"proof: not made on rank 0: {said}")
    assert line.endswith("Training continues.")


def test_strict_raises_as_the_training_begins():
    model, optimizer = make()
    with pytest.raises(prove.ConfigMismatch) as raised:
        prove.watch(model, optimizer, config={"zero_optimization": {"stage": 3}}, strict=True)
    said = ["engine: config= requests DeepSpeed, but the script built a plain Sequential"]
    assert proof()["not_as_asked"] == [str(raised.value)] == said


def test_strict_raises_after_the_step_and_leaves_nothing():
    (model, optimizer), originals = make(), replaced()
    prove.watch(model, optimizer, config={"gradient_accumulation_steps": 4}, strict=True)
    train(model, optimizer, 4, accumulation=2)
    said = r"^gradient_accumulation_steps: config= requests 4, .*, the last one 2$"
    with pytest.raises(prove.ConfigMismatch, match=said):
        train(model, optimizer, 1, accumulation=2)
    assert (replaced(), [*optimizers._global_optimizer_pre_hooks]) == (originals, [])
    train(model, optimizer, 2)


# ---------------------------------------------------------------- Trainer's callback


def arguments() -> SimpleNamespace:
    """TrainingArguments, as far as the callback reads them."""
    defaults = {"output_dir": "out", "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "deepspeed": None}
    return SimpleNamespace(**defaults, bf16=False, fp16=False)


def planned(updates: int, already: int = 0) -> SimpleNamespace:
    """TrainerState, as far as the callback reads it."""
    return SimpleNamespace(max_steps=already + updates, global_step=already)


@pytest.mark.parametrize("already", [0, 100])
@pytest.mark.parametrize("kind", ["LinearLR", "LambdaLR", "CosineAnnealingLR"])
@pytest.mark.parametrize(("updates", "zero"), [(100, "update 21"), (20, ""), (21, "")])
def test_a_schedule_that_ends_before_the_trainers_last_update_is_found_in_the_third(kind, updates, zero, already):
    """It was found when the script ended."""
    model, optimizer = make()
    falling = {
        "LinearLR": (1.0, 0.0, 20),
        "LambdaLR": (lambda step: 1 - min(step, 20) / 20,),
        "CosineAnnealingLR": (20,),
    }
    schedule = getattr(torch.optim.lr_scheduler, kind)(optimizer, *falling[kind])
    made = prove.callback()
    made.on_train_begin(arguments(), planned(updates, already), None, model=model, optimizer=optimizer)
    for _ in range(4):
        train(model, optimizer, 1, clip=1.0)
        schedule.step()
    made.on_train_end(arguments(), None, None)
    findings = proof("out/proof.json")["findings"]
    assert [line.startswith("the schedule ends before the training") for line in findings] == [True] * bool(zero)
    assert all(zero in line and f"the training has {updates} updates" in line for line in findings)


@pytest.mark.parametrize("clip", [1.0, None])
def test_callback_finds_the_module_that_is_called(clip, group):
    model, optimizer = make()
    outermost = DistributedDataParallel(model)
    made = prove.callback()
    made.on_train_begin(arguments(), planned(4), None, model=model, optimizer=optimizer)
    train(outermost, optimizer, 4, clip=clip)
    made.on_train_end(arguments(), None, None)
    found = proof("out/proof.json")
    assert (found["built"]["engine"], found["built"]["backend"], found["not_as_asked"]) == ("DDP", "gloo", [])
    said = [
        note.partition(", but torch's clip_grad_norm_ was not called")[0] for note in found["notes"]
    ]  # there are other means of clipping
    assert said == ([] if clip else ["gradient_clipping: TrainingArguments requests 1.0"])
    assert {"kind": "all_reduce", "count": 1, "bytes": 4 * NUM_PARAMS} in found["step"]["collectives"]
    assert not torch.nn.modules.module._global_forward_pre_hooks


# ---------------------------------------------------------------- asked and built


def test_what_was_asked_is_held_against_what_was_built():
    held = compare_with_request(by_json({"zero_optimization": {"stage": 3, "overlap_comm": True}}, "ds.json"), STAGE_2)
    assert held.differences == [
        "zero_stage: ds.json requests 3, but the engine has 2",
        "zero_optimization.overlap_comm: ds.json requests True, but the engine has False",
    ]
    held = compare_with_request(by_launcher(LAUNCHED), STAGE_2)
    assert (held.differences, held.notes, held.num_agreed, held.unread) == ([], [], 6, [])
    assert by_launcher({}) == []
    held = compare_with_request(
        by_json({"optimizer": {"type": "Adam"}}, "ds.json"), STAGE_2
    )  # which nothing reads back
    assert (held.differences, held.unread) == ([], ["optimizer.type (ds.json)"])
    held = compare_with_request(by_launcher(LAUNCHED), {**STAGE_2, "engine": "DDP", "world_size": 1})
    assert held.differences == [
        "engine: the launcher requests DeepSpeed, but the script built DDP",
        "world_size: the launcher (WORLD_SIZE) requests 2, but the engine has 1",
    ]


def test_the_strongest_source_decides():
    demands = [*by_launcher(LAUNCHED), *by_json({"gradient_accumulation_steps": 4}, "ds.json")]
    held = compare_with_request(demands, {**STAGE_2, "gradient_accumulation_steps": 4})
    assert held.differences == []
    (note,) = held.notes
    assert note.startswith(
        "gradient_accumulation_steps: the launcher (ACCELERATE_GRADIENT_ACCUMULATION_STEPS) requests 1, "
    )
    assert compare_with_request(demands, STAGE_2).differences == [
        "gradient_accumulation_steps: ds.json requests 4, but the engine has 1"
    ]


TWICE = {"gradient_accumulation_steps": 2}
ON_CPU = {"zero_stage": 1, "precision": "bf16", "offload_optimizer_device": "cpu"}


@pytest.mark.parametrize(
    ("deepspeed", "facts", "of_all", "of_some"),
    [
        ("0.18.2", {}, False, False),
        ("0.18.2", TWICE, True, False),
        ("0.18.2", {**TWICE, "engine": "DDP"}, False, False),
        ("0.18.3", {**TWICE, "zero_stage": 3}, False, True),  # models of which a part is called outside: a note
        ("0.19.7", ON_CPU, True, False),
        ("0.19.7", {**ON_CPU, "offload_optimizer_device": "none"}, False, False),
        ("0.19.7", {**ON_CPU, "accumulation_dtype": "bfloat16"}, False, False),
    ],
)
def test_what_is_known_to_be_wrong_is_looked_up(deepspeed, facts, of_all, of_some, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=deepspeed))
    assert [bool(said) for said in known_wrong({**STAGE_2, **facts})] == [of_all, of_some]


@pytest.fixture
def wrong(monkeypatch):
    monkeypatch.setattr("zero_study.prove.mismatch.known_wrong", lambda facts: ("it is wrong", None))


def test_what_is_known_to_be_wrong_is_refused(wrong, capsys):
    model, optimizer = make()
    with pytest.raises(prove.KnownFault, match=r"^it is wrong\. .*allow_known_bad=True"):
        prove.watch(model, optimizer)
    assert proof()["known_wrong"] == ["it is wrong"]
    assert not optimizers._global_optimizer_pre_hooks
    made = prove.callback()
    made.on_train_begin(arguments(), planned(4), None, model=model, optimizer=optimizer)
    with pytest.raises(prove.KnownFault):
        train(model, optimizer, 1)


@pytest.mark.parametrize("given", [{"output": "/proc/nowhere/proof.json"}, {"config": "/nowhere/ds.json"}])
def test_no_error_hides_what_is_known_to_be_wrong(given, wrong, capsys):
    with pytest.raises(prove.KnownFault):
        prove.watch(*make(), **given)
    assert "proof: not " in capsys.readouterr().out


def test_masters_of_stage_0_in_16_bits_are_counted():
    model = make()[0].bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    for tensor in (*model.parameters(), *masters):
        tensor.grad = torch.ones_like(tensor)
    unfused = SimpleNamespace(fp32_groups=[masters], optimizer=torch.optim.AdamW(masters))
    unfused.optimizer.step()
    counts = count_states(model, unfused)
    assert counts["gradients"] == (2 + 4) * NUM_PARAMS
    assert counts["optimizer_states"] == (4 + 8) * NUM_PARAMS + 4 * 4


def test_quantized_states_are_counted():
    """As torchao's low-bit optimizers keep them: tensors that consist of others, and have no memory of their own."""
    model, optimizer = make()
    train(model, optimizer, 1)
    before = count_states(model, optimizer)["optimizer_states"]
    for state in optimizer.state.values():
        state["exp_avg"] = TwoTensor(state["exp_avg"], state["exp_avg"].clone())
    assert count_states(model, optimizer)["optimizer_states"] == before + 4 * NUM_PARAMS


# ---------------------------------------------------------------- real launches


@pytest.mark.slow
@pytest.mark.launches
def test_it_needs_torch_alone():
    unwanted = ["pydantic", "click", "yaml", "psutil", "accelerate", "deepspeed", "transformers"]
    code = f"import sys; from zero_study import prove; print('LOADED', *(n for n in {unwanted} if n in sys.modules))"
    completed = launching.attempt(["python", "-c", code])
    assert completed.stdout.split() == ["LOADED"], completed.stderr


# ---------------------------------------------------------------- what trains wrongly

NOT_AVERAGED = "gradients were not averaged: DDP on 2 of 2 ranks reduced 0 bytes"
DIFFER = "ranks differ: the weights of ranks 0 and 1 are not the same"
WRONG = {
    "module_bypass": [NOT_AVERAGED, DIFFER],
    "no_sync_always": [NOT_AVERAGED, DIFFER],
    "no_sync_at_the_wrong_one": [DIFFER],
    "half_a_bypass": [DIFFER],
    "drawn_anew": [f"{DIFFER} (2 of 4 tensors, the first is module.0.weight"],
    "no_sampler": ["every rank trains on the same batch"],
    "no_zero_grad": ["zero_grad is missing"],
    "clipped_while_scaled": [
        "clipped before unscaling: gradients were clipped at 0.05 while GradScaler had multiplied them by 1024"
    ],
    "stepped_beside_the_scaler": ["not unscaled: the update used gradients that GradScaler had multiplied by 1024"],
    "clipped_too_early": ["clipped too early: 1 backward call added"],
    "clipped_each_time": [
        "clipped too often: 1 of 2 backward calls added to gradients that had already been clipped at 0.05"
    ],
    "erased": [
        "no weight moved: none of the watched updates changed a weight, at learning rates [0.001]",
        "clipped nothing: ",
    ],
    "rate_of_zero": ["no weight moved: none of the watched updates changed a weight, at learning rates [0.0]"],
    "rates_by_rank": ["ranks 0 and 1 have different optimizer settings: lr 0.001 and lr 1.001"],
    "infinite_batch": ["weights are not finite after the step: 4 of 4 tensors, for example module.0.weight"],
    "clipped_by_own_norm": ["gradients of ranks [0, 1] are multiplied by different numbers before the update"],
    "optimizer_before_sharding": ["212 of 212 parameters are not trained, for example 0.weight"],
    "optimizer_of_a_copy": ["212 of 212 parameters are not trained, for example module.0.weight"],
    "optimizer_of_a_part": ["144 of 212 parameters are not trained"],
    "layer_replaced": ["68 of 212 parameters are not trained, for example module.2.weight"],
    "zero_gradients": ["every gradient is zero"],
    "two_plain_models": ["ranks 0 and 1 train separately"],
    "by_hand_but_drawn_apart": [DIFFER],
    "orthogonalized_by_shard": ["the update is not Muon's: the update of "],
    "states_of_ranks_differ": ["ranks keep different kinds of optimizer states for 1 parameter, for example 0.weight"],
}


@pytest.fixture(scope="module")
def proofs() -> Any:
    """The proofs of prove_program.py's trainings, by name. None of them changed a bit of the weights."""

    def make(folder: Path) -> None:
        completed = launching.script(Path(__file__).parents[1] / "prove_program.py", folder)
        assert completed.stderr.count("TRAINED") == 2, completed.stderr

    folder = launching.once("prove_program", make)
    return lambda name: proof(str(folder / f"{name}.json"))


@pytest.mark.launches
@pytest.mark.parametrize("name", CASES)
def test_what_is_planted_is_found_and_nothing_in_sound_trainings(name, proofs):
    launching.use()
    found = proofs(name)["findings"]
    assert len(found) == len(WRONG.get(name, []))
    for finding, expected in zip(found, WRONG.get(name, []), strict=True):
        assert finding.startswith(expected)


@pytest.mark.launches
def test_the_cause_of_different_ranks_is_named_if_the_last_micro_step_is_not_averaged(proofs):
    launching.use()
    named = {name for name, kinds in WRONG.items() if DIFFER in kinds and "no_sync" in proofs(name)["findings"][-1]}
    assert named == {"no_sync_at_the_wrong_one", "half_a_bypass"}


@pytest.mark.launches
def test_the_update_is_checked_on_all_ranks_together(proofs):
    launching.use()
    for name in ("ddp", "accumulation", "clipped_once", "scaler", "fsdp1", "fsdp2", "fsdp2_clipped", "zero_redundancy"):
        update = proofs(name)["update"]
        assert (update["num_not_checked"], [*update["rules"]]) == (0, ["AdamW"]), name
    assert proofs("muon_sharded")["update"]["rules"]["Muon"]["num_checked"] == 2
    assert any(note.startswith("sharding changes the kind") for note in proofs("states_by_size")["notes"])
    assert not any(note.startswith("sharding changes") for note in proofs("fsdp2")["notes"])


@pytest.mark.launches
def test_false_statements_are_mended(proofs):
    launching.use()
    for found, built in ((found, found["built"]) for found in map(proofs, ("fsdp1", "fsdp2"))):
        assert (found["not_as_asked"], built["num_params"], built["num_trainable_params"]) == ([], 212, 212)
    states = {rank: proofs(rank)["step"]["model_states"]["optimizer_states"] for rank in ("ddp", "zero_redundancy")}
    assert 0 < states["zero_redundancy"] < states["ddp"]
    assert proofs("around_ddp")["built"]["engine"] == "DDP"
    assert "differences between ranks, because one rank is" in proofs("one_rank_evaluates")["notes"][-1]


@pytest.mark.launches
def test_strict_raises_the_same_on_every_rank(proofs):
    launching.use()
    assert proofs("raised-0") == proofs("raised-1") == " ".join(proofs("strict")["findings"])


DEEPSPEED = """
import os
import torch, deepspeed
torch._dynamo.config.disable = True  # DeepSpeed compiles Muon, which takes a minute
from accelerate import Accelerator, InitProcessGroupKwargs
from zero_study import prove
from zero_study.engines import extensions
extensions.use_own_folder()
extensions.use_built()  # or DeepSpeed compiles for half a minute
# Without a GPU accelerate finds no backend for DeepSpeed by itself.
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
batches = torch.utils.data.DataLoader(torch.ones(16, 64), batch_size=2)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
prove.watch(model, optimizer)
for batch in batches:
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()

def train(stage, num_backwards, is_watched):
    torch.manual_seed(int(os.environ["RANK"]))
    model = torch.nn.Linear(8, 1)
    asked = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
             "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=asked)
    if is_watched:
        prove.watch(engine, output=f"{stage}-{num_backwards}.json")
    for step in range(3):
        for _ in range(num_backwards):
            engine.backward(engine(torch.randn(2, 8)).sum())
        engine.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

for stage, num_backwards in ((1, 1), (2, 2), (3, 2)):
    assert torch.equal(*(train(stage, num_backwards, is_watched) for is_watched in (False, True))), stage

def train_with_muon(stage, clipping):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 12))
    zero = {"stage": stage, "reduce_scatter": False, "stage3_param_persistence_threshold": 0}
    settings = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "zero_optimization": zero,
                "gradient_clipping": clipping,
                "optimizer": {"type": "Muon", "params": {"lr": 0.02, "torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    prove.watch(engine, output=f"muon-{stage}-{clipping}.json")
    for step in range(6):
        torch.manual_seed(2 * step + int(os.environ["RANK"]) + 100)
        engine.backward(engine(torch.randn(8, 12)).pow(2).sum())
        engine.step()

for stage, clipping in ((0, 1.0), (1, 0.0), (2, 1.0), (3, 0.0)):
    train_with_muon(stage, clipping)
"""


@pytest.mark.launches
def test_what_deepspeed_built_is_read_back_and_gradients_that_it_loses_are_found(tmp_path):
    (tmp_path / "script.py").write_text(DEEPSPEED)
    completed = launching.script(tmp_path / "script.py", tmp_path, strategy="zero2")
    assert completed.returncode == 0, completed.stderr
    found = proof(str(tmp_path / "proof.json"))
    assert found["not_as_asked"] == []
    assert "gradient_clipping was not requested, but gradients are clipped at 1.0" in found["notes"]
    num_params = 64 * 65
    assert found["built"]["num_params"] == num_params
    each = {part: found["step"]["model_states"][part] / num_params for part in ("parameters", "optimizer_states")}
    assert each["parameters"] == pytest.approx(4, rel=0.05)
    assert each["optimizer_states"] == pytest.approx(6, rel=0.05)  # half of the masters and moments
    assert {"all_gather", "all_reduce"} <= {one["kind"] for one in found["step"]["collectives"]}
    (found,) = proof(str(tmp_path / "2-2.json"))["findings"]
    assert found.startswith(
        "gradients were lost: under ZeRO stage 2, the last micro batch of the step had 2 backward calls"
    )
    assert [proof(str(tmp_path / name))["findings"] for name in ("1-1.json", "3-2.json")] == [[], []]
    assert proof(str(tmp_path / "3-2.json"))["built"]["num_params"] == 9  # of whole parameters
    for name in ("proof", "1-1", "2-2", "3-2"):
        update = proof(str(tmp_path / f"{name}.json"))["update"]
        assert (update["num_checked"], update["num_not_checked"]) == (2, 0), name
    for name in ("0-1.0", "1-0.0", "3-0.0"):
        found = proof(str(tmp_path / f"muon-{name}.json"))
        assert (found["findings"], found["update"]["rules"]["Muon"]["num_checked"]) == ([], 2), name
        assert found["update"]["rules"]["Adam"]["num_checked"] == 2
    # ZeRO clips what it has orthogonalized (DeepSpeed #8439).
    (found,) = proof(str(tmp_path / "muon-2-1.0.json"))["findings"]
    assert found.startswith("the update is not Muon's: the update of ")


NORMS = """
import os
import torch, deepspeed
from deepspeed.accelerator import get_accelerator
from zero_study import prove
from zero_study.engines import extensions
extensions.use_own_folder()
extensions.use_built()
get_accelerator().is_fp16_supported = lambda: True
deepspeed.init_distributed("gloo")
OF = {"fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}, "bf16": {"bf16": {"enabled": True}},
      "autocast": {"torch_autocast": {"enabled": True, "dtype": "float16"}}}

def train(precision, stage, clipping):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": clipping, **OF[precision],
                "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    prove.watch(engine, output=f"{precision}-{stage}-{clipping}.json", allow_known_bad=True)
    torch.manual_seed(int(os.environ["RANK"]))
    for _ in range(4):
        inputs = torch.randn(2, 8, dtype={"fp16": torch.half, "bf16": torch.bfloat16}.get(precision))
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
    engine.destroy()

for case in (("fp16", 0, 1.0), ("fp16", 2, 0.01), ("fp16", 3, 0.0), ("bf16", 1, 0.01), ("autocast", 2, 1.0)):
    train(*case)
"""


@pytest.mark.launches
def test_a_norm_that_is_not_that_of_the_gradients_is_a_fault(tmp_path):
    """In DeepSpeed 0.19.8, fp16 at stage 0 and torch_autocast in float16 use gradients that are too small."""
    (tmp_path / "script.py").write_text(NORMS)
    completed = launching.torchrun(["script.py"], tmp_path)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    findings = {path.stem: proof(str(path))["findings"] for path in tmp_path.glob("*.json")}
    for name in ("fp16-2-0.01", "fp16-3-0.0", "bf16-1-0.01"):
        assert findings.pop(name) == []
    assert findings.keys() == {"fp16-0-1.0", "autocast-2-1.0"}
    assert [json_answer.fault_id(text) for (text,) in findings.values()] == ["prove/wrong-norm"] * 2
    assert ["torch_autocast" in text for (text,) in findings.values()] == [name[0] == "a" for name in findings]


@pytest.mark.parametrize(
    ("used", "reported", "limit", "stage", "num_findings"),
    [
        ([3.0, 4.0], 5.0, 0.0, 1, 0),
        ([3.0, 4.0], 5.0, 0.0, 0, 1),  # without ZeRO, every rank has all gradients
        ([5.0, 5.0], 5.0, 0.0, 0, 0),
        ([0.06, 0.08], 100.0, 0.1, 3, 0),  # clipped strongly
        ([0.06, 0.08], 100.0, 0.1 * 65536, 3, 1),
        ([3.0, 4.0], 10.0, 0.0, 2, 1),  # half of the gradient
        ([3.0, 4.0], 10.0, 20.0, 2, 1),
        ([3.0, 4.0], None, 1.0, 2, 0),
        ([3.0, 4.0], math.inf, 1.0, 2, 0),
    ],
)
def test_the_norm_of_the_update_is_the_reported_one_or_the_limit(used, reported, limit, stage, num_findings):
    facts = {**STAGE_2, "gradient_clipping": limit, "zero_stage": stage, "num_trainable_params": 10}
    facts |= {"data_parallel_ranks": [0, 1]}
    elements = 5 if stage else 10
    reports = [norms.NormReport(reported=reported, squares=each**2, elements=elements) for each in used]
    assert len(norms.judge(reports, facts).findings) == num_findings
    unseen = [{**report, "elements": elements - 1} for report in reports]
    for case in (
        (unseen, facts),
        (reports, {**facts, "data_parallel_ranks": [0]}),
        (reports, {**facts, "engine": "DDP"}),
    ):
        assert norms.judge(*case) == ([], [])


def test_a_norm_with_the_loss_scale_in_it_is_a_note_if_nothing_is_clipped():
    facts = {**STAGE_2, "precision": "fp16-autocast", "num_trainable_params": 10, "data_parallel_ranks": [0, 1]}
    reports = [norms.NormReport(reported=65536.0, squares=0.5, elements=5)] * 2
    findings, notes = norms.judge(reports, {**facts, "gradient_clipping": 0.0})
    assert (len(findings), len(notes)) == (0, 1)


def test_the_padding_of_a_shard_is_no_weight(group):
    """Stage 3 leaves it as it was in memory: NaN by chance, and the weights were said to be not finite."""
    weight = torch.nn.Parameter(torch.empty(0))
    weight.ds_tensor, weight.ds_shape = torch.tensor([1.0, math.nan]), torch.Size([1])
    weight.ds_process_group = dist.group.WORLD
    assert checksums([weight]) == [(1.0, 1.0)]


def test_a_closure_is_given_on_as_it_is_and_ends_before_the_look():
    class Evaluating(torch.optim.SGD):
        def step(self, evaluate, factor):
            return evaluate("given", named=1), factor

    looks = []
    handle = before_updates(looks.append)
    found = Evaluating(make()[0].parameters(), 0.1).step(lambda given, named: (given, named, len(looks)), 0.5)
    handle.remove()
    assert (found, len(looks)) == ((("given", 1, 0), 0.5), 1)


def test_an_optimizer_that_steps_later_is_a_note():
    model, _ = make()
    first, later = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[1].parameters())
    prove.watch(model, first, strict=True)
    train(model, first, 3)
    (note,) = proof()["notes"]
    assert note == "17 of 161 parameters are not trained, for example 1.weight: their optimizer has not stepped yet."
    assert later


@pytest.mark.parametrize(
    ("values", "others", "is_same"),
    [([1.0, 2.0], [1.0, 2.0], True), ([1.0, 2.0], [2.0, 1.0], True), ([1.0], [1.0 + 1e-7], False),
     ([torch.nan], [torch.nan], True), ([torch.nan], [1.0], False), ([1e-30], [-1e-30], False)],
)  # fmt: skip
def test_checksums_tell_weights_apart(values, others, is_same):
    one, other = ({"w": checksums([torch.tensor(each, dtype=torch.float64)])[0]} for each in (values, others))
    assert (first_difference(one, other) is None) == is_same
    kinds = [torch.ones(3, dtype=kind) for kind in (torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn)]
    sparse = torch.sparse_coo_tensor([[0, 0, 1]], torch.ones(3), (2,), check_invariants=True)
    assert checksums([*kinds, sparse, torch.empty(0)]) == [(3.0, 3.0)] * 5 + [(0.0, 0.0)]
    assert math.isnan(checksums([torch.empty(2, device="meta")])[0][0])


SCRIPT = """
import sys, torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
optimizer.optim = torch.optim.AdamW(model.parameters())  # as a ZeroRedundancyOptimizer has one
optimizer.register_step_post_hook(lambda *_: optimizer.optim.step())
for _ in range(int(sys.argv[1])):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("steps", "said"), [("5", "proof  WRONG             zero_grad is missing"), ("1", "proof: not made")]
)
def test_a_script_is_proven_without_a_line_in_it(steps, said, monkeypatch, capsys):
    Path("train.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    main(["train.py", steps])
    assert said in capsys.readouterr().out
    assert not Path("proof-2.json").exists()
    assert not optimizers._global_optimizer_pre_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


LEAVES = """
import sys, torch
class Left:
    def __del__(self):
        print("freed")
left = Left()
sys.exit(*map(int, sys.argv[1:]))
"""


@pytest.mark.parametrize("status", [[], ["3"]])
def test_what_a_script_leaves_lives_on(status, monkeypatch, capsys):
    """DDP and its group were freed as the script ended: they wait for threads, which may wait for Python's lock."""
    Path("train.py").write_text(LEAVES if status else LEAVES.replace("sys.exit", "print"))
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    scripts._globals.clear()
    gc.collect()
    capsys.readouterr()
    with pytest.raises(SystemExit) if status else nullcontext():
        main(["train.py", *status])
    gc.collect()
    assert "freed" not in capsys.readouterr().out
    scripts._globals.clear()  # here, so that no later test gets this output
    gc.collect()


SAME_BATCH = """
import sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def forward(self, *, given):
        return self.layer(given)
torch.manual_seed(0)
which, model = sys.argv[1], torch.nn.parallel.DistributedDataParallel(Net())
torch.manual_seed(0 if which == "the same" else rank)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    batch = torch.ones(4, 8) if which == "made up" else torch.randn(4, 8)
    called = model.module if which == "bare" else model
    called(given=batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
OF_ONE_BATCH = "every rank trains on the same batch: in two steps, the inputs of ranks [0, 1] were equal"
BARE = "gradients were not averaged: DDP on 2 of 2 ranks reduced 0 bytes"


@pytest.mark.launches
@pytest.mark.parametrize(
    ("which", "found"), [("the same", [OF_ONE_BATCH]), ("others", []), ("made up", []), ("bare", [BARE, DIFFER])]
)
def test_two_ranks_of_a_script_as_it_is(which, found):
    """The counted step was the only one with inputs; and a DDP whose module is called was none."""
    Path("train.py").write_text(SAME_BATCH)
    completed = launching.torchrun(["-m", "zero_study.prove", "train.py", which], Path.cwd())
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert proof()["built"]["engine"] == "DDP"
    assert [line.startswith(expected) for line, expected in zip(proof()["findings"], found, strict=True)] == [
        True
    ] * len(found)


@pytest.mark.parametrize("steps", [3, 5])
def test_steps_are_counted_from_the_scripts_first(steps, monkeypatch):
    """Watching begins with the second; the third is counted, and a script of three has one."""
    Path("train.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    main(["train.py", str(steps)])
    assert proof()["step"]["number"] == 3


# ---------------------------------------------------------------- what could not be checked


ASKED = {
    "absent.yaml": None, "absent.json": None, "broken.json": "{", "broken.yaml": "a: [", "list.json": "[]",
    "word.yaml": "zero3", "empty.yaml": "", "other.txt": "{}",
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_strict_fails_where_the_file_that_was_asked_for_cannot_be_read(name):
    if ASKED[name] is not None:
        Path(name).write_text(ASKED[name])
    with pytest.raises(prove.Unverified):
        prove.watch(*make(), config=name, strict=True)


UNCHECKED = {
    "a misspelt key": {"gradient_cliping": 1.0},
    "a misspelt key in a section": {"zero_optimization": {"stage": 0, "overlap_com": True}},
    "a setting of another engine": {"communication_data_type": "fp32"},
}


@pytest.mark.parametrize("name", UNCHECKED)
def test_strict_fails_where_a_request_cannot_be_checked_and_says_it_otherwise(name, capsys):
    with pytest.raises((prove.Unverified, prove.ConfigMismatch)):
        prove.watch(*make(), config=UNCHECKED[name], strict=True)
    capsys.readouterr()
    model, optimizer = make()
    prove.watch(model, optimizer, config=UNCHECKED[name])
    assert re.search("not checked |NOT AS REQUESTED", capsys.readouterr().out)


def test_strict_fails_if_faults_of_the_step_could_not_be_checked(monkeypatch):
    def fails(*_: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(prove_findings, "not_trained", fails)
    model, optimizer = make()
    prove.watch(model, optimizer, strict=True)
    with pytest.raises(prove.Unverified, match=r"faults of the step .*planted"):
        train(model, optimizer, 4)
    model, optimizer = make()
    prove.watch(model, optimizer)
    train(model, optimizer, 4)
    assert any("faults of the step" in note for note in proof()["notes"])


def test_weights_whose_memory_fsdp1_has_freed_are_not_read():
    """PyTorch crashes if it compares such tensors."""
    module = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False))
    module[0].weight.data.copy_(module[1].weight.data)
    assert len(prove_findings.equal_embeddings(module)) == 1
    for part in module:
        part.weight.untyped_storage().resize_(0)
    assert prove_findings.equal_embeddings(module) == []


@pytest.mark.parametrize("config", [{"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}])
def test_strict_fails_where_another_precision_was_asked(config):
    model, optimizer = make()
    prove.watch(model, optimizer, config=config, strict=True)
    with pytest.raises(prove.ConfigMismatch, match=r"precision: config= requests .*, but the engine has fp32"):
        train(model, optimizer, 4)


def test_an_older_proof_does_not_answer_for_a_script_that_ends_early():
    Path("proof.json").write_text("{}")
    prove.watch(*make(), config="absent.yaml")
    assert not Path("proof.json").exists()


ENDS_EARLY = """
import sys, torch
from zero_study import prove
from zero_study.engines import torch_locks
from zero_study.doctor import checkup
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if sys.argv[1] == "watched":
    prove.watch(model, optimizer, strict=True)
for _ in range(int(sys.argv[2])):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.launches
@pytest.mark.parametrize(("how", "steps", "status"), [("watched", 2, 3), ("watched", 3, 0), ("-m", 2, 3), ("-m", 3, 0)])
def test_strict_fails_where_the_script_ends_before_the_counted_step(how, steps, status, tmp_path):
    Path("train.py").write_text(ENDS_EARLY)
    Path("proof.json").write_text("{}")
    program = ["-m", "zero_study.prove", "--strict", "train.py"] if how == "-m" else ["train.py"]
    completed = launching.python([*program, how, str(steps)], Path.cwd())
    assert completed.returncode == status, completed.stdout + completed.stderr
    assert ("before a step could be counted" in completed.stdout) == bool(status)
    assert (proof()["step"] is None) == bool(status)  # and not the one of before


LOOP = """
import sys, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
class Own(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
torch.optim.AdamW(net.parameters())
after_backward = after = lambda: None
def hook(module, change): module.register_forward_hook(change)
def detach(index): hook(net[index], lambda module, inputs, output: output.detach())
{fault}
for number in range(12):
    net(torch.randn(8, 32)).square().mean().backward()
    after_backward()
    optimizer.step()
    after()
    optimizer.zero_grad()
"""
GATHERED = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def gather(result):
    parts = [torch.empty_like(result)]
    dist.all_gather(parts, result)
    return parts[0]
"""
MOMENTS = "[s['exp_avg'].zero_() for s in optimizer.state.values()]"
BETWEEN = {  # what is planted -> the findings and, if nothing is found, the checks that could not be made
    f"after = lambda: {MOMENTS}": ["optimizer states are not those of the last update"],
    "after = optimizer.state.clear": ["optimizer states are not those of the last update"],
    f"optimizer.register_step_post_hook(lambda *_: {MOMENTS})": ["optimizer states are not those of the last update"],
    f"optimizer._optimizer_step_code = lambda: {MOMENTS} and None": ["optimizer states are not what the formula gives"],
    "after = optimizer.step": ["the same gradients are used twice"],
    "after_backward = lambda: [p.grad.normal_() for p in net.parameters()]": ["gradients were replaced"],
    "detach(1)": ["2 of 4 parameters take part in the forward pass but get no gradient, for example 0.weight"],
    "net[0].forward = torch.no_grad()(net[0].forward)": ["2 of 4 parameters take part in the forward pass"],
    f"{GATHERED}\nhook(net[1], lambda module, inputs, output: gather(output))": ["2 of 4 parameters take part in"],
    f"{GATHERED}\nhook(net[1], lambda module, inputs, output: output + 0 * gather(output))": [],  # as CLIP does
    f"{GATHERED}\nhook(net[1], lambda module, inputs, output: (gather(output), output)[1])": [],  # for a metric
    "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    "after = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 6).step": ["the schedule ends before the training"],
    "net = torch.nn.ModuleDict({'a': torch.nn.Linear(32, 32), 'b': torch.nn.Linear(32, 32)})\n"
    "net['b'].weight = net['a'].weight\n"
    "net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)\n"
    "net.forward = lambda x: net['b'](net['a'](x).tanh())\n"
    "optimizer = torch.optim.AdamW(net.parameters())": ["a.weight and b.weight are no longer tied"],
    "": [],
    "net[1].register_forward_hook(lambda *given: print(given[2].detach().mean()))": [],
    "after = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 12).step": [],
    "net[1].head = torch.nn.Linear(64, 9); hook(net[1], lambda module, x, out: (module.head(out), out)[1])\n"
    "optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)": [],  # a pooler that the loss does not use
    "after_backward = lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)": [],
    "after_backward = lambda: torch.nn.utils.clip_grad_value_(net.parameters(), 1e-5)": [],
    "after_backward = lambda: [p.grad.sign_() for p in net.parameters()]": [],
    "after_backward = lambda: [p.grad.add_(p.detach(), alpha=0.01) for p in net.parameters()]": [],
    "optimizer = Own(net.parameters(), lr=1e-3)": [],
    "optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)": [],
}


@pytest.mark.parametrize("fault", BETWEEN)
def test_an_update_starts_from_what_the_steps_before_it_left(fault, monkeypatch, capsys):
    Path("train.py").write_text(LOOP.format(fault=fault))
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    status = 3 if "Own(" in fault else 1 if BETWEEN[fault] else 0
    with pytest.raises(SystemExit) if status else nullcontext() as ended:
        main(["--strict", "train.py"])
    if dist.is_initialized():
        dist.destroy_process_group()
    assert status == (ended.value.code if ended else 0)
    found = proof()
    assert [line.startswith(said) for line, said in zip(found["findings"], BETWEEN[fault], strict=True)] == [
        True
    ] * len(BETWEEN[fault])
    assert (found["verdict"], found["exit_status"]) == ({0: "sound", 1: "found", 3: "unknown"}[status], status)
    unchecked = r"no fault found in optimizer step \d; 1 check could not be made: the update"
    assert bool(re.search(unchecked, capsys.readouterr().out)) == (status == 3)


SMALL = "net = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.LayerNorm(8))\n"
OF_SMALL = "optimizer = torch.optim.AdamW({}, lr={})\n"
EACH = "after_backward = lambda: [p.grad.{} for p in net.parameters()]"
CHANGED = {  # what is planted -> the exit status with --strict
    EACH.format("mul_(1000)"): 1,
    "after_backward = lambda: net[2].weight.grad.mul_(1000)": 1,
    EACH.format("mul_(2)"): 0,
    EACH.format("div_(1000)"): 0,
    EACH.format("reshape(-1)[::2].zero_()"): 3,
    "after_backward = lambda: net.zero_grad() if number == 2 else None": 3,
    SMALL + OF_SMALL.format("net.parameters()", 1e-3) + EACH.format("normal_()"): 3,
    SMALL + OF_SMALL.format("net.parameters()", 1e-3): 0,
    SMALL + OF_SMALL.format("net.parameters()", 1e-6): 0,  # a warm-up, in which rounding hides the norm's update
    SMALL + OF_SMALL.format("[{'params': net[0].parameters()}, {'params': net[1].parameters(), 'lr': 1e-12}]", 1e-3): 3,
}


@pytest.mark.parametrize("fault", CHANGED)
def test_what_changes_gradients_or_loses_updates_is_no_all_clear(fault, monkeypatch):
    Path("train.py").write_text(LOOP.format(fault=fault))
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(SystemExit) if CHANGED[fault] else nullcontext():
        main(["--strict", "train.py"])
    assert proof()["exit_status"] == CHANGED[fault]
    assert {json_answer.fault_id(text) for text in proof()["findings"]} <= {"prove/grown-gradients"}


OF_ONE_PROCESS = """
import torch
from torch.nn import functional as F
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = torch.nn.LSTM(8, 16, batch_first=True), torch.nn.Linear(16, 6)
        self.drop, self.norm = torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(16)
    def forward(self, x, labels=None):
        logits = self.head(self.drop(self.norm(self.rnn(x)[0].flatten(0, 1))))
        return logits if labels is None else {{"loss": F.cross_entropy(logits, labels.flatten()), "logits": logits}}
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
def entropy(x, y, **how): return F.cross_entropy(net(x), y.flatten(), **how)
def loss(x, y, number): return {loss}
for step in range(4):
    for number in range(2):
        x, y = torch.randn(4, 5, 8), torch.randint(0, 6, (4, 5))
        y[0, : 4 * number * {uneven}] = -100
        loss(x, y, number).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
"""
LOSSES: dict[str, Any] = {  # the loss of a micro batch of two -> what is found: a text, nothing, or "not checked"
    "entropy(x, y) / 2": None,
    "net(x, y)['loss'] / 2": None,
    "entropy(x, y, reduction='sum') / 40": None,
    "(F.log_softmax(net(x), -1).gather(-1, y.view(-1, 1)) * -1).mean() / 2": "not checked",
    "(entropy(x, y, reduction='none') * 0.5).mean()": None,
    "F.mse_loss(net(x), torch.ones(20, 6)) / 2": None,
    "entropy(x, y) / 2 + 0.1 * net.head.weight.square().sum()": "not checked",
    "entropy(x, y)": "it is 2 times as long (the number of micro batches)",
    "entropy(x, y) / 4": "it is 0.5 times as long (1 divided by the number of micro batches)",
    "net(x, y)['loss'] * 10": "it is 20 times as long",
    "entropy(x, y, reduction='sum')": "it is 40 times as long (the number of targets)",
    "-entropy(x, y) / 2": "it has the opposite direction",
    "entropy(x, y) * (1 + 9 * number) / 11": "a target in one micro batch counts up to 10 times as much",
    "entropy(x, y) + entropy(-x, y)": "not checked",  # as a GAN adds the losses of two passes
    "(optimizer.zero_grad() if number else entropy(x, y).backward()) or entropy(x, y)": None,  # the first is erased
    "F.mse_loss(net(x), torch.ones(20, 6))": "it is 2 times as long",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_compared_with_that_of_one_process(loss, monkeypatch):
    Path("train.py").write_text(OF_ONE_PROCESS.format(loss=loss, uneven=0))
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    main(["--reference", "train.py"])
    found, said = proof(), LOSSES[loss]
    others = [line for line in found["findings"] if "gradient is not that of one process" not in line]
    assert all("gradient ascent" in line for line in others)
    of_reference = [line for line in found["findings"] if "gradient is not that of one process" in line]
    assert [said in line for line in of_reference] == ([True] if said not in (None, "not checked") else [])
    assert any(line.startswith("not checked: the gradient of one process") for line in found["notes"]) == (
        said == "not checked"
    )
    assert found["verdict"] == {None: "sound", "not checked": "unknown"}.get(said, "found")
    if said is None:
        assert found["reference"]["difference"] < 1e-5


@pytest.mark.parametrize(("factor", "is_clipping"), [(0.3, True), (0.5, False)])  # two micro batches
def test_own_clipping_is_told_from_a_division_by_a_number_that_it_is_not(factor, is_clipping, monkeypatch):
    script = OF_ONE_PROCESS.format(loss="entropy(x, y) / 2", uneven=0)
    clipping = "torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)"
    Path("train.py").write_text(script.replace(clipping, f"[p.grad.mul_({factor}) for p in net.parameters()]"))
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    main(["--reference", "train.py"])
    assert (bool(proof()["findings"]), "factor_of_script" in proof()["reference"]) == (not is_clipping, is_clipping)


COMPILES_ITSELF = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(8, 8), torch.nn.Linear(8, 1)
    def forward(self, x):
        return self.head(self.table(x))
net = Net()
net.compile(backend="aot_eager")
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(5):
    net(torch.randint(0, 8, (4,))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained to the end")
"""


@pytest.mark.launches
def test_a_model_that_compiles_itself_is_trained_to_the_end():
    """The graph of its forward pass contains the hook that finds models."""
    Path("train.py").write_text(COMPILES_ITSELF)
    completed = launching.python(["-m", "zero_study.prove", "train.py"], Path.cwd())
    assert "trained to the end" in completed.stdout, completed.stderr


def test_a_reference_changes_no_weight(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    script = OF_ONE_PROCESS.format(loss="entropy(x, y) / 2", uneven=1) + "torch.save(net.state_dict(), 'net.pt')\n"
    Path("train.py").write_text(script)
    weights = []
    for run in (lambda: main(["--reference", "train.py"]), lambda: exec(compile(script, "train.py", "exec"), {})):
        run()
        weights.append(torch.load("net.pt", weights_only=True))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("ratio", "num_ranks", "num_passes", "expected"),
    [
        (2, 2, 2, " (the number of ranks, which is also the number of micro batches)"),
        (2, 2, 4, " (the number of ranks)"),
        (4, 2, 4, " (the number of micro batches)"),
        (0.25, 2, 2, " (1 divided by the number of ranks times micro batches)"),
        (0.5, 1, 2, " (1 divided by the number of micro batches)"),
        (3, 2, 2, ""),
        (0, 2, 2, ""),
    ],
)
def test_all_numbers_that_a_factor_may_be_are_named(ratio, num_ranks, num_passes, expected):
    reports = [{"weights": [(1.0, 5)] * num_passes} for _ in range(num_ranks)]
    assert reference._named_factor(ratio, reports) == expected


SHARDED = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
rank, right = dist.get_rank(), "--right" in sys.argv
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 17), nn.GELU(), nn.Linear(17, 6))
fully_shard(net[0]), fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(4):
    torch.manual_seed(10 * step + rank)
    x, y = torch.randn(8 + 4 * rank, 8), torch.randint(0, 6, (8 + 4 * rank,))
    loss = nn.functional.cross_entropy(net(x), y, reduction="sum")
    (loss / 10 if right else loss / 20).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.launches
@pytest.mark.parametrize("words", [["--right"], []])
def test_the_gradient_of_shards_is_compared_with_that_of_one_process(words):
    Path("train.py").write_text(SHARDED)
    completed = launching.torchrun(["-m", "zero_study.prove", "--reference", "train.py", *words], Path.cwd())
    assert completed.returncode == 0, completed.stdout + completed.stderr
    found = proof()
    assert ["0.5 times as long (1 divided by the number of ranks)" in line for line in found["findings"]] == (
        [] if words else [True]
    )
    assert found["reference"]["cosine"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("accelerate launch --num_processes 2 -m zero_study.prove train.py --num_processes 4", 2),
        ("python accelerate launch --num-processes=3 train.py", 3),
        ("accelerate launch --config_file multi.yaml -m zero_study.prove train.py", 2),
        ("accelerate launch train.py", None),
        ("bash run.sh --num_processes 2", None),
    ],
)
def test_the_number_of_processes_is_read_from_the_launcher(words, number):
    Path("multi.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    assert processes_of(words.split()) == number
    assert [len(prove_findings.missing_processes(number, world_size)) for world_size in (1, 2)] == [
        int(bool(number)),
        0,
    ]


NEVER_MOVES = {
    "no step": "model(x).sum().backward()",
    "nothing": "model(x)",
    "every step overflows": (
        "scaler.scale(model(x).sum() * float('inf')).backward(); scaler.step(optimizer); scaler.update()"
    ),
}
TRAINS = """
import torch
model, x = torch.nn.Linear(8, 1), torch.ones(2, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for _ in range(5):
    {}
"""


@pytest.mark.parametrize("name", NEVER_MOVES)
def test_a_script_that_never_trains_does_not_pass(name, monkeypatch, capsys):
    Path("train.py").write_text(TRAINS.format(NEVER_MOVES[name]))
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(SystemExit) as ended:
        main(["--strict", "train.py"])
    assert ended.value.code == (3 if name == "nothing" else 1)
    assert ("WRONG" in capsys.readouterr().out) == (name != "nothing")
    assert proof()["verdict"] == ("unknown" if name == "nothing" else "found")


OVERFLOWS = """
import deepspeed, sys, torch
from zero_study.engines import extensions
extensions.use_own_folder()
extensions.use_built()
deepspeed.init_distributed("gloo")
model = torch.nn.Linear(8, 8)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True},
          "zero_allow_untested_optimizer": True}
optimizer = torch.optim.AdamW(model.parameters())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for _ in range(4):
    model = engine.module if len(sys.argv) > 2 else engine
    engine.backward(model(torch.ones(2, 8, dtype=torch.bfloat16)).sum() * float(sys.argv[1]))
    engine.step()
"""


@pytest.mark.launches
@pytest.mark.parametrize(("factor", "status"), [("inf", 1), ("1", 0)])
def test_an_engine_whose_bare_module_is_called_is_recognized(factor, status, monkeypatch):
    Path("train.py").write_text(OVERFLOWS)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    program = ["-m", "zero_study.prove", "--strict", "train.py", factor, "bare"]
    completed = launching.python(program, Path.cwd(), {"DS_ACCELERATOR": "cpu", **alone})
    assert completed.returncode == status, completed.stdout + completed.stderr
    if status:
        assert "WRONG: all 4 optimizer steps were skipped" in completed.stdout
    else:
        assert [proof()["built"][key] for key in ("engine", "zero_stage")] == ["DeepSpeed", 2]
        assert proof()["step"]["forward_passes"] == 1


@pytest.mark.launches
@pytest.mark.parametrize(("factor", "status"), [("inf", 1), ("1", 0)])
def test_an_engine_that_skips_every_step_does_not_pass(factor, status):
    Path("train.py").write_text(OVERFLOWS)
    program = ["-m", "zero_study.prove", "--strict", "train.py", factor]
    completed = launching.torchrun(program, Path.cwd(), env={"DS_ACCELERATOR": "cpu"})
    assert completed.returncode == status, completed.stdout + completed.stderr
    assert ("no weight moved" in completed.stdout) == bool(status)


# ---------------------------------------------------------------- what a script does around the engine

AROUND = """
import copy, torch, types
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.config = types.SimpleNamespace(tie_word_embeddings=False)
    def get_input_embeddings(self): return self.table
    def get_output_embeddings(self): return self.head
    def forward(self, ids): return self.head(self.table(ids))
def entropy(ids, **how): return nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten(), **how)
net, sign, before, rows = Net(), 1, None, 4
data = TensorDataset(torch.randint(1, 16, (64, 6)))
loader = DataLoader(data, batch_size=rows)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
schedule, steps, sizes, how, after_backward, last = None, 1, 2, {{}}, lambda: None, 7
lower = torch.optim.lr_scheduler.LambdaLR
{fault}
schedule = schedule or lower(optimizer, lambda step: max(0.0, 1 - step / 16))
for step, (ids,) in enumerate(loader):
    for part in ids.split(sizes):
        (sign * entropy(part, **how) / 2).backward()
    after_backward()
    optimizer.step()
    optimizer.zero_grad()
    [schedule.step() for _ in range(steps)]
    if before:
        net.load_state_dict(before)
    if step == last:
        break
"""
CLIPS = "after_backward = lambda: nn.utils.clip_grad_norm_(net.parameters(), 0.01)"
NEGATES = "after_backward = lambda: [p.grad.neg_() for p in net.parameters()]"
TIED = "net.config.tie_word_embeddings = True"
SAMPLED = "loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, {}, 0))"
HALF = "loader = DataLoader(Subset(data, range(0, 64, {})), batch_size=4)"
AHEAD = "last, kinds = 5, torch.optim.lr_scheduler; steps, sizes, schedule = 2, 4, kinds.{}"
WARMED = (
    "SequentialLR(optimizer, [kinds.LinearLR(optimizer, 0.5, 1.0, 4), kinds.LinearLR(optimizer, 1.0, 0.0, {})], [4])"
)
OWN_SCHEDULE = """
class Own(torch.optim.lr_scheduler.LinearLR):
    def __deepcopy__(self, memo): raise RuntimeError("copied")
steps, sizes, schedule = 2, 4, Own(optimizer, 1.0, 0.0, 16)
schedule.net = net
"""
FAULTS = {  # what is planted -> what is said, and where: a finding, a note, nothing
    "sign = -1": ("findings", "gradient ascent: backward is called on the negative of the cross-entropy"),
    NEGATES: ("findings", "gradient ascent: gradients are multiplied by -1"),
    "before = copy.deepcopy(net.state_dict())": ("findings", "weights are put back"),
    TIED: ("findings", "embedding and head are not tied"),
    SAMPLED.format(2): ("findings", "data is divided twice: it is divided by 2 (DistributedSampler), but only 1"),
    "steps, sizes, last = 2, 4, 5": ("notes", "the learning rate is zero from update 9 on, but an epoch has 16"),
    "steps, sizes, last = 2, 4, 15": ("findings", "the schedule ends before the training"),
    "steps, sizes = 2, 4": None,  # the training ends with its schedule
    "net.head.weight.data.copy_(net.table.weight.data)": ("notes", "table.weight and head.weight have the same"),
    "sizes = [1, 3]": ("notes", "losses of the step are means over 6 to 18 targets"),
    AHEAD.format("CosineAnnealingLR(optimizer, 16)"): ("notes", "the learning rate is zero at update 9, and rises"),
    AHEAD.format("LinearLR(optimizer, 1.0, 0.0, 16)"): ("notes", "the learning rate is zero from update 9 on"),
    AHEAD.format("PolynomialLR(optimizer, 16, 2.0)"): ("notes", "the learning rate is zero from update 9 on"),
    AHEAD.format("OneCycleLR(optimizer, 0.01, 16)"): ("notes", "the learning rate is zero from update 9 on"),
    AHEAD.format(WARMED.format(14)): ("notes", "the learning rate is zero from update 10 on"),
    AHEAD.format(f"ChainedScheduler([kinds.{WARMED.format(14)}])"): ("notes", "the learning rate is zero from"),
    "": None,
    CLIPS: None,
    AHEAD.format("CosineAnnealingLR(optimizer, 32)"): None,
    AHEAD.format("LinearLR(optimizer, 1.0, 0.0, 32)"): None,
    AHEAD.format("PolynomialLR(optimizer, 32, 2.0)"): None,
    AHEAD.format("OneCycleLR(optimizer, 0.01, 32)"): None,
    AHEAD.format(WARMED.format(28)): None,
    AHEAD.format("ConstantLR(optimizer, 0.5, 4)"): None,
    AHEAD.format("CosineAnnealingWarmRestarts(optimizer, 4)"): None,
    OWN_SCHEDULE: None,  # with a model in it: it is not copied
    f"{TIED}; net.head.weight = net.table.weight; optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)": None,
    SAMPLED.format(1): None,
    HALF.format(2): None,  # a script may train on a part
    "schedule = lower(optimizer, lambda step: max(0.0, 1 - step / 8))": None,
    "schedule = lower(optimizer, lambda step: 0.0 if step < 2 else 1.0)": None,
    "steps, sizes, schedule = 2, 4, lower(optimizer, lambda step: max(0.0, 1 - step / 32))": None,
    "sizes, how = [1, 3], {'reduction': 'sum'}": None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_script_does_around_the_engine(fault, monkeypatch):
    Path("train.py").write_text(AROUND.format(fault=fault))
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    main(["train.py"])
    found = proof()
    assert not [line for line in found["notes"] if line.startswith("not checked: ")]
    where, said = FAULTS[fault] or ("", "nothing")
    assert [line.startswith(said) for line in found["findings"]] == ([True] if where == "findings" else [])
    assert any(line.startswith(said) for line in found["notes"]) == (where == "notes")
    others = ("the learning rate", "table.weight", "losses of the step")
    assert sum(line.startswith(others) for line in found["notes"]) == (where == "notes")


@pytest.mark.launches
def test_the_lock_of_a_killed_build_is_removed(monkeypatch, capsys):
    """Every script that loads the extension would wait for it without a line."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(Path("extensions").absolute()))
    for name, age in (("shm", 3600), ("fresh", 1)):
        Path("extensions", name).mkdir(parents=True)
        Path("extensions", name, "lock").touch()
        os.utime(Path("extensions", name, "lock"), (time.time() - age,) * 2)
    launching.use()
    Path("train.py").write_text("")
    monkeypatch.setattr(sys, "argv", ["prove"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    main(["train.py"])
    said = capsys.readouterr().err
    assert re.search(r"Removed .*shm/lock: .* 60 min ago", said)
    assert "fresh" not in said
    assert [path.parent.name for path in Path("extensions").glob("*/lock")] == ["fresh"]


@pytest.mark.launches
@pytest.mark.parametrize(("words", "status"), [pytest.param([], 0, marks=pytest.mark.slow), (["--status"], 7)])
def test_prove_is_a_command(words, status, tmp_path):
    """With the exit status of the script, and without this project's `study` in the script's process."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "study.py").write_text("NUMBER = 7\n")
    (script := tmp_path / "mine" / "train.py").write_text(
        "import sys, torch\n"
        "from study import NUMBER\n"
        "net = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.AdamW(net.parameters())\n"
        "for _ in range(4):\n"
        "    net(torch.randn(2, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "sys.exit(NUMBER if '--status' in sys.argv else 0)\n"
    )
    completed = launching.attempt(["zero-study", "prove", "--strict", str(script), *words], cwd=tmp_path)
    assert completed.returncode == status, completed.stderr
    assert "no fault found in optimizer step 3" in completed.stdout
    assert json.loads((tmp_path / "proof.json").read_text())["step"]["number"] == 3


@pytest.mark.launches
def test_prove_without_a_script_is_refused(tmp_path):
    for words in (["gone.py"], []):
        completed = launching.command_line(["prove", *words], cwd=tmp_path)
        assert (completed.returncode, completed.stdout) == (2, "")
        assert completed.stderr.startswith("zero-study: ")


def replica(ranks, start=1.0, now=2.0, is_separate=True, rate="lr 0.1", averager="engine"):
    """Return what a rank of a sharded model reports."""
    return {
        "watched": ["FSDP2", "FSDPNet", 100, averager], "ranks": ranks, "weights": {}, "buffers": {}, "batches": [],
        "settings": [rate], "findings": [], "scaled": None, "targets": [], "unchecked": [], "is_separate": is_separate,
        "totals": [start and [start, start], [now, now]],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "is_found"),
    [
        ({}, True),
        ({"now": 2.0}, False),  # replicas that agree
        ({"is_separate": False}, False),  # they exchange their gradients in another way
        ({"start": 5.0}, False),  # another part of the model, or another model
        ({"start": None}, False),
        ({"rate": "lr 0.2"}, False),  # a search for settings
    ],
)
def test_replicas_that_never_exchange_gradients_are_found(changes, is_found):
    reports = [*(replica([0, 1]) for _ in range(2)), *(replica([2, 3], **({"now": 3.0} | changes)) for _ in range(2))]
    found, _ = prove_findings.check_ranks(reports)
    assert [json_answer.fault_id(text) for text in found] == ["prove/ranks-train-separately"] * is_found
    assert not prove_findings.check_ranks([replica([0, 1, 2, 3]) for _ in range(4)])[0]


def test_collectives_with_other_ranks_are_counted():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        part = dist.new_group([0, 1])
        with CollectiveProbe(waits=False) as probe:
            dist.all_reduce(torch.ones(3), group=part)
            dist.all_reduce(torch.ones(5))
    finally:
        dist.destroy_process_group()
    assert [probe.bytes_beyond(ranks) for ranks in ([0, 1, 2, 3], [0, 1], [0])] == [0, 20, 32]
