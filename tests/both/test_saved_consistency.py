"""`zero-study saved` on checkpoints whose files contradict one another, and on those in which only that seems so."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from saved_fuzz import damage, outcome  # noqa: E402

from zero_study import cli  # noqa: E402
from zero_study import saved as saving  # noqa: E402
from zero_study.errors import Refusal  # noqa: E402
from zero_study.saved import consistency, foreign, text  # noqa: E402

STEPS = 4


class Model(torch.nn.Module):
    """Three layers, of which a batch may leave out one, and a frozen one."""

    def __init__(self, middle: str) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.add_module(middle, torch.nn.Linear(3, 3))
        self.last, self.name = torch.nn.Linear(3, 2), middle
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor, uses_middle: bool = True) -> torch.Tensor:
        x = self.first(x)
        return self.frozen(self.last(getattr(self, self.name)(x) if uses_middle else x))


class Trained:
    """A training that made STEPS updates, and its parts."""

    def __init__(
        self, middle: str = "middle", optimizer: Any = torch.optim.AdamW, unused: tuple[int, ...] = (), skipped: int = 0
    ) -> None:
        torch.manual_seed(0)
        self.model = Model(middle)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optimizer(trained, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        for step in range(STEPS - skipped):
            self.model(torch.randn(4, 3), step not in unused).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)

    def trainer(self, folder: Path, num_ranks: int = 1) -> Path:
        """Save as transformers' Trainer does, and return the folder of the checkpoint."""
        folder = folder / f"checkpoint-{STEPS}"
        folder.mkdir(parents=True)
        save_file(self.model.state_dict(), folder / "model.safetensors")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")
        state = {"global_step": STEPS, "epoch": 0.5, "log_history": []}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        for rank in range(num_ranks):
            name = "rng_state.pth" if num_ranks == 1 else f"rng_state_{rank}.pth"
            torch.save({"python": random.getstate(), "cpu": torch.get_rng_state()}, folder / name)
        return folder

    def accelerate(self, folder: Path, num_ranks: int = 1, batches: int = STEPS) -> Path:
        """Save as accelerate's `save_state` does."""
        folder.mkdir(parents=True)
        save_file(self.model.state_dict(), folder / "model.safetensors")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.bin")
        torch.save(self.scheduler.state_dict(), folder / "scheduler.bin")
        for rank in range(num_ranks):
            states = {"step": batches, "numpy_random_seed": np.random.get_state(), "torch": torch.get_rng_state()}
            torch.save(states, folder / f"random_states_{rank}.pkl")
        return folder


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


def wrong(folder: Path) -> list[saving.Finding]:
    return [finding for each in saving.read(folder) for finding in each.findings if finding.is_wrong]


def set_step(step: float, *numbers: int) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        for number in numbers or content["state"]:
            content["state"][number]["step"] = torch.tensor(step)

    return edit


def rewrite(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# ---------------------------------------------------------------- sound


SOUND: dict[str, Callable[[Path], Path]] = {
    "Trainer": lambda f: Trained().trainer(f),
    "Trainer on two processes": lambda f: Trained().trainer(f, 2),
    "SGD without states": lambda f: Trained(optimizer=torch.optim.SGD).trainer(f),
    "an optimizer without counters": lambda f: Trained(
        optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)
    ).trainer(f),
    "RMSprop": lambda f: Trained(optimizer=torch.optim.RMSprop).trainer(f),
    "amsgrad": lambda f: Trained(optimizer=lambda p, lr: torch.optim.AdamW(p, lr, amsgrad=True)).trainer(f),
    "NAdam": lambda f: Trained(optimizer=torch.optim.NAdam).trainer(f),
    "Adam of other betas": lambda f: Trained(optimizer=lambda p, lr: torch.optim.Adam(p, lr, (0.98, 0.9))).trainer(f),
    "Adam without a first moment": lambda f: Trained(
        optimizer=lambda p, lr: torch.optim.Adam(p, lr, (0.0, 0.9))
    ).trainer(f),
    "Adafactor of torch": lambda f: Trained(optimizer=torch.optim.Adafactor).trainer(f),
    "an expert without a gradient yet": lambda f: Trained("experts", unused=tuple(range(STEPS))).trainer(f),
    "an expert that some steps left out": lambda f: Trained("experts", unused=(1, 2)).accelerate(f / "x"),
    "a layer that some steps left out": lambda f: Trained("middle", unused=(1, 2)).accelerate(f / "x"),
    "accelerate": lambda f: Trained().accelerate(f / "x"),
    "accelerate, in the middle of an accumulation": lambda f: Trained().accelerate(f / "x", 2, 2 * STEPS + 1),
}


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_if_files_agree(name, tmp_path, capsys):
    folder = SOUND[name](tmp_path)
    assert wrong(folder) == []
    assert cli.run(["saved", str(folder)]) == 0


def test_only_the_model_may_be_saved(tmp_path):
    folder = Trained().trainer(tmp_path)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).unlink()
    assert wrong(folder) == []  # and without training_args.bin, it is a note
    for is_set in (True, False):
        arguments = _Arguments()
        arguments.save_only_model = is_set
        torch.save(arguments, folder / "training_args.bin")
        assert bool(wrong(folder)) != is_set


class _Arguments:
    """A stand-in for TrainingArguments, which are pickled."""

    save_only_model = False


def test_steps_that_fp16_skipped_are_no_fault(tmp_path):
    folder = Trained(skipped=1).trainer(tmp_path)
    assert {finding.kind for finding in wrong(folder)} == {"optimizer"}
    torch.save({"scale": 1024.0, "growth_tracker": 0}, folder / "scaler.pt")
    assert wrong(folder) == []


@pytest.mark.parametrize("num_steps", [1, STEPS, 2 * STEPS])
def test_schedulers_of_accelerate_count_processes_or_epochs(num_steps, tmp_path):
    folder = Trained().accelerate(tmp_path / "x", 2)
    change(folder / "scheduler.bin", lambda content: content.update(last_epoch=num_steps))
    assert wrong(folder) == []


def test_a_scheduler_that_counts_evaluations_is_not_compared(tmp_path):
    folder = Trained().trainer(tmp_path)
    change(folder / "scheduler.pt", lambda content: content.update(last_epoch=1, num_bad_epochs=0))
    assert wrong(folder) == []


# ---------------------------------------------------------------- contradictions

NAN, INF = float("nan"), float("inf")


def of_states(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    """Return what edits the state of each weight."""
    return lambda content: [edit(state) for state in content["state"].values()]


FAULTS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "an optimizer of another step": ("optimizer", lambda f: change(f / "optimizer.pt", set_step(2.0))),
    "an optimizer of a later step": ("optimizer", lambda f: change(f / "optimizer.pt", set_step(9.0))),
    "an optimizer without states": ("optimizer", lambda f: change(f / "optimizer.pt", lambda c: c["state"].clear())),
    "one weight of another step": ("optimizer", lambda f: change(f / "optimizer.pt", set_step(2.0, 3))),
    "weights of a later step": ("optimizer", lambda f: change(f / "optimizer.pt", set_step(6.0, 3, 4))),
    "a scheduler of another epoch": (
        "optimizer", lambda f: change(f / "scheduler.pt", lambda c: c.update(last_epoch=2)),
    ),
    "another step in trainer_state.json": ("shards", lambda f: rewrite(f / "trainer_state.json", global_step=9)),
    "no trainer_state.json": ("missing", lambda f: (f / "trainer_state.json").unlink()),
    "no step": ("unreadable", lambda f: (f / "trainer_state.json").write_text("{}")),
    "a number that is none": ("unreadable", lambda f: rewrite(f / "trainer_state.json", global_step="four")),
    "no optimizer": ("missing", lambda f: (f / "optimizer.pt").unlink()),
    "no scheduler": ("missing", lambda f: (f / "scheduler.pt").unlink()),
    "no random states": ("missing", lambda f: [path.unlink() for path in f.glob("rng_state*")]),
    "no random states of a rank": ("missing", lambda f: (f / "rng_state_0.pth").unlink()),
    "random states of another rank": ("shards", lambda f: shutil.copy(f / "rng_state_0.pth", f / "rng_state_1.pth")),
    **{
        f"a group's {key} is {value}": ("optimizer", lambda f, key=key, value=value: change(
            f / "optimizer.pt", lambda c: c["param_groups"][0].update({key: value})))
        for key, value in (("lr", NAN), ("lr", -0.1), ("weight_decay", INF), ("betas", (1.0, 0.9)), ("initial_lr", 0.0),
                           ("lr", 0.7), ("lr", torch.tensor(NAN)))
    },
    "base rates of zero": ("optimizer", lambda f: change(f / "scheduler.pt", lambda c: c.update(base_lrs=[0.0]))),
    "a rate that is NaN": ("optimizer", lambda f: change(f / "scheduler.pt", lambda c: c.update(_last_lr=[NAN]))),
    **{
        f"a loss scale of {scale}": ("optimizer", lambda f, scale=scale: torch.save(
            {"scale": scale, "growth_factor": 2.0, "backoff_factor": 0.5}, f / "scaler.pt"))
        for scale in (0.0, INF, NAN)
    },
    "a counter that is NaN": ("optimizer", lambda f: change(f / "optimizer.pt", set_step(NAN, 3))),
    "no counters": ("optimizer", lambda f: change(f / "optimizer.pt", of_states(lambda s: s.pop("step")))),
    "second moments of zero": ("optimizer", lambda f: change(
        f / "optimizer.pt", of_states(lambda s: s["exp_avg_sq"].zero_()))),
    "second moments that are too small": ("optimizer", lambda f: change(
        f / "optimizer.pt", of_states(lambda s: s["exp_avg_sq"].mul_(1e-3)))),
    "second moments are first moments": ("optimizer", lambda f: change(
        f / "optimizer.pt", of_states(lambda s: s.update(exp_avg_sq=s["exp_avg"].abs_().clone())))),
    "first moments of zero": ("optimizer", lambda f: change(
        f / "optimizer.pt", of_states(lambda s: s["exp_avg"].zero_()))),
    "all moments are zero": ("optimizer", lambda f: change(
        f / "optimizer.pt", of_states(lambda s: (s["exp_avg"].zero_(), s["exp_avg_sq"].zero_())))),
    "no second moments": ("optimizer", lambda f: change(
        f / "optimizer.pt", of_states(lambda s: s.pop("exp_avg_sq")))),
    "a number is lost in a group": ("optimizer", lambda f: change(
        f / "optimizer.pt", lambda c: c["param_groups"][0]["params"].pop())),
    "numbers in another order": ("optimizer", lambda f: change(
        f / "optimizer.pt", lambda c: c["param_groups"][0]["params"].reverse())),
    "empty random states": ("partial", lambda f: torch.save({}, f / "rng_state_1.pth")),
    "no random states of the CPU": ("partial", lambda f: change(
        f / "rng_state_1.pth", lambda c: c.update(cpu=torch.empty(0, dtype=torch.uint8)))),
    "an older step is empty": ("unreadable", lambda f: (
        shutil.copytree(f, f.parent / "checkpoint-2"),
        (f.parent / "checkpoint-2" / "model.safetensors").write_bytes(b""))),
    "a damaged scheduler": ("unreadable", lambda f: (f / "scheduler.pt").write_bytes(b"PK\x03\x04")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_files_of_trainer_that_contradict_one_another(name, tmp_path, capsys):
    folder = Trained().trainer(tmp_path, num_ranks=2)
    kind, edit = FAULTS[name]
    edit(folder)
    assert kind in {finding.kind for finding in wrong(tmp_path)}
    assert cli.run(["saved", str(tmp_path)]) == 1


OF_ACCELERATE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "no optimizer": ("missing", lambda f: (f / "optimizer.bin").unlink()),
    "no random states": ("missing", lambda f: [path.unlink() for path in f.glob("random_states*")]),
    "no random states of a rank": ("missing", lambda f: (f / "random_states_0.pkl").unlink()),
    "random states of another rank": (
        "shards", lambda f: shutil.copy(f / "random_states_0.pkl", f / "random_states_1.pkl"),
    ),
    "empty random states": ("partial", lambda f: torch.save({}, f / "random_states_1.pkl")),
    "base rates that are NaN": ("optimizer", lambda f: change(
        f / "scheduler.bin", lambda c: c.update(base_lrs=[NAN]))),
    "random states of another step": (
        "shards", lambda f: change(f / "random_states_1.pkl", lambda c: c.update(step=2)),
    ),
    "a scheduler of a later step": (
        "optimizer", lambda f: change(f / "scheduler.bin", lambda c: c.update(last_epoch=99)),
    ),
    "one weight of another step": ("optimizer", lambda f: change(f / "optimizer.bin", set_step(2.0, 3))),
    "no states": ("optimizer", lambda f: change(f / "optimizer.bin", lambda c: c["state"].clear())),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ACCELERATE)
def test_files_of_accelerate_that_contradict_one_another(name, tmp_path):
    folder = Trained().accelerate(tmp_path / "state", num_ranks=2)
    kind, edit = OF_ACCELERATE[name]
    edit(folder)
    assert kind in {finding.kind for finding in wrong(folder)}


def test_states_that_every_weight_of_a_dense_model_has(tmp_path):
    folder = Trained().trainer(tmp_path)
    change(folder / "optimizer.pt", lambda content: content["state"].pop(3))
    assert wrong(folder) == []  # any model may have a weight without a gradient
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert [finding.names for finding in wrong(folder)] == [["weight 3"]]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_lost_weights_are_never_sound(name, tmp_path, capsys):
    folder = Trained().trainer(tmp_path)
    (folder / name).unlink()
    assert cli.run(["saved", str(folder)]) == 1
    assert "Nothing wrong" not in capsys.readouterr().out


def test_an_engine_may_lack_one_step_per_epoch(tmp_path):
    """deepspeedai/DeepSpeed 7405: checkpoint-800 has global_step799, because an epoch ends between two updates."""
    engine = saving.Saved(tmp_path / "global_step3", "DeepSpeed ZeRO-2", step=3)
    consistency._check_engine_step(engine, 3, 4, num_epochs=1)
    assert [finding.is_wrong for finding in engine.findings] == [False]
    consistency._check_engine_step(engine, 3, 6, num_epochs=1)
    assert [finding.is_wrong for finding in engine.findings] == [False, True]


# ---------------------------------------------------------------- the verdict


def test_a_folder_of_only_an_optimizer_is_unknown(tmp_path, capsys):
    import torch.distributed.checkpoint as dcp

    states = {"a.weight": {"exp_avg": torch.randn(8, 8), "exp_avg_sq": torch.ones(8, 8), "step": torch.tensor(3.0)}}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}]}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "state" / "optimizer_0", no_dist=True)
    assert cli.run(["saved", str(tmp_path / "state" / "optimizer_0")]) == 3
    assert cli.run(["saved", str(tmp_path / "state")]) == 1  # beside it, the weights are missing
    assert "Nothing wrong" not in capsys.readouterr().out


def test_every_flipped_bit_of_dcp_is_found(tmp_path):
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": {"a.weight": torch.randn(16, 16)}, "step": 3}, checkpoint_id=tmp_path / "d", no_dist=True)
    (file,) = (tmp_path / "d").glob("*.distcp")
    content = file.read_bytes()
    (read,) = saving.read(tmp_path / "d")
    assert (read.findings, read.step) == ([], 3)
    place = content.find(read.tensors["a.weight"].read().numpy().tobytes())
    draw = random.Random(0)
    for _ in range(20):
        at = place + draw.randrange(16 * 16 * 4)
        file.write_bytes(content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :])
        assert [finding.kind for finding in saving.read(tmp_path / "d")[0].findings] == ["unreadable"]


def test_the_verdict_says_what_was_compared(tmp_path, capsys):
    folder = Trained().accelerate(tmp_path / "x")
    assert cli.run(["saved", str(folder), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["verdict"], content["status"], content["exit_status"]) == ("sound", 0, 0)
    assert content["checked"][0]["number"] == 8
    assert [entry["requested"] for entry in content["could_not_check"]] == [False]
    assert cli.run(["saved", str(folder), "--strict"]) == 3
    saved = saving.read(folder)
    empty = saving.Comparison("another folder", unchecked=["the values, because no name is the same"])
    assert text.verdict(saved, [empty], is_strict=False).status == 3


# ---------------------------------------------------------------- content that nobody expects


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", {"architectures": "LlamaForCausalLM"}),
        ("config.json", {"num_hidden_layers": 10**9}),
        ("config.json", {"text_config": {"num_hidden_layers": 1e300}}),
        ("adapter_config.json", {"target_modules": "(((", "peft_type": "LORA"}),
        ("adapter_config.json", {"r": "four"}),
        ("adapter_config.json", {"rank_pattern": {"*": 4}}),
        ("model.safetensors.index.json", {"weight_map": ["a"]}),
        ("trainer_state.json", {"global_step": None}),
        ("config.json", [1]),
    ],
)
def test_a_value_that_a_key_cannot_have(name, content, tmp_path):
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(foreign.Unusual):
        foreign.read_object(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"1" * 6000, b"{} {}"])
def test_what_is_no_json(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(foreign.Unusual):
        foreign.read_object(tmp_path / "config.json")


def test_a_check_that_never_ends_is_ended(tmp_path):
    import re

    with pytest.raises(foreign.OverLimit), foreign.limited(0.3):
        re.fullmatch("(a+)+b", "a" * 40)
    saved = saving.Saved(tmp_path, "any")
    with foreign.guarded(saved, "The names"):
        raise KeyError("name")
    assert [finding.kind for finding in saved.findings] == ["unreadable"]


@pytest.mark.parametrize("tag", ["..", "../..", "/", "", "\0", "x" * 5000])
def test_latest_names_a_folder_inside(tag, tmp_path, capsys):
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "latest").write_text(tag)
    assert cli.run(["saved", str(folder)]) == 1


@pytest.mark.parametrize("seed", range(30))
def test_damage_ends_in_a_verdict_or_a_refusal(seed, tmp_path, capsys):
    draw = random.Random(seed)
    folder = Trained().trainer(tmp_path) if seed % 2 else Trained().accelerate(tmp_path / "x", 2)
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    damaged = damage(folder, draw)
    assert outcome(folder, draw) == "", damaged


def test_a_refusal_of_a_model_folder_says_why(tmp_path):
    folder = Trained().accelerate(tmp_path / "x")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1000000000}')
    with pytest.raises(Refusal, match="num_hidden_layers"):
        cli.run(["saved", str(folder), "--model", str(tmp_path)])


# ---------------------------------------------------------------- `zero-study export`


class _Runs:
    """An object whose pickle runs a function."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("engine", ["zero0", "zero3", "fsdp"])
def test_export_runs_no_code_of_a_checkpoint(engine, tmp_path):
    from study.training import export
    from study.training.manifest import Checkpoint, Manifest

    folder, trace = tmp_path / "engine", tmp_path / "trace"
    if engine == "fsdp":
        (folder / "pytorch_model_fsdp_0").mkdir(parents=True)
        (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(_Runs(trace)))
    else:
        name = "mp_rank_00" if engine == "zero0" else "zero_pp_rank_0_mp_rank_00"
        (folder / "pytorch_model").mkdir(parents=True)
        torch.save({"module": {}, "more": _Runs(trace)}, folder / "pytorch_model" / f"{name}_model_states.pt")
    checkpoint = Checkpoint(tmp_path, Manifest.model_construct(engine=engine))
    with pytest.raises(Refusal, match="run code") as refused:
        export.read_parameters(checkpoint)
    assert "--trust-pickle" not in str(refused.value)
    assert not trace.exists()


def test_export_reads_stage_0(tmp_path):
    from study.training import export
    from study.training.manifest import Checkpoint, Manifest

    (tmp_path / "engine" / "pytorch_model").mkdir(parents=True)
    path = tmp_path / "engine" / "pytorch_model" / "mp_rank_00_model_states.pt"
    torch.save({"module": {"a.weight": torch.ones(2, 2, dtype=torch.bfloat16)}, "global_steps": 1}, path)
    checkpoint = Checkpoint(tmp_path, Manifest.model_construct(engine="zero0"))
    assert export.read_parameters(checkpoint)["a.weight"].dtype == torch.float32
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(Refusal, match="damaged"):
        export.read_parameters(checkpoint)
