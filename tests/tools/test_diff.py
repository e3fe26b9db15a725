"""`zero-study diff`: trainings that differ by rounding alone, and faults that are named."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import launching
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from diff_program import FAULTS, QUICK, QUICK_SOUND, RARE, adapters, counterpart  # noqa: E402

from zero_study import cli, diff  # noqa: E402
from zero_study.diff import bounds, causes, rounding, sketch  # noqa: E402
from zero_study.diff.__main__ import main  # noqa: E402
from zero_study.diff.compare import Result, compare  # noqa: E402
from zero_study.diff.recorded import FORMAT, READABLE, Damaged, Recording  # noqa: E402
from zero_study.diff.text import text  # noqa: E402
from zero_study.errors import Refusal  # noqa: E402

PROGRAM = Path(__file__).parents[1] / "diff_program.py"


@pytest.mark.parametrize("shape", [(7,), (40, 30), (3, 50, 17)])
def test_a_sketch_is_linear_in_parts_too_and_tells_distances(shape, monkeypatch):
    draws = torch.Generator().manual_seed(0)
    one, other = (torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(2))
    ours, theirs = (torch.tensor(sketch.sketch(each)) for each in (one, other))
    monkeypatch.setattr(sketch, "PART", 64)
    torch.testing.assert_close(2 * ours - theirs, torch.tensor(sketch.sketch(2 * one - other)))
    assert float((ours - theirs).norm()) == pytest.approx(float((one - other).norm()), rel=1)


def test_a_hash_that_is_kept_gives_the_same_sketch(monkeypatch):
    tensor = torch.randn((7, 9), generator=torch.Generator().manual_seed(0))
    sketches = [sketch.sketch(tensor) for _ in range(2)]
    monkeypatch.setattr(sketch, "FEW", 0)  # none is kept
    assert sketches == [sketch.sketch(tensor)] * 2


def test_means_of_rows_do_not_ask_how_a_batch_is_cut():
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    counts, means = zip(*(sketch.of_rows(part) for part in (rows[5:], rows[:5])), strict=True)
    merged = sum(count / 8 * torch.tensor(mean) for count, mean in zip(counts, means, strict=True))
    assert merged.tolist() == pytest.approx(sketch.of_rows(rows)[1], abs=1e-7)


def test_rounding_moves_results_by_one_unit_and_no_copy():
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    with rounding.Rounding(1):
        assert torch.equal(values.clone().view(10, 100), values.view(10, 100))
        assert torch.equal(torch.zeros(5) * values[:5], torch.zeros(5))
        moved = values * 2
    units = (moved - values * 2) / (torch.nextafter(values * 2, torch.tensor(math.inf)) - values * 2)
    assert 0.5 < float(units.abs().mean()) <= 1


def recorded(world: int, how: str = "quick") -> Path:
    def make(folder: Path) -> None:
        completed = launching.script(PROGRAM, folder, ".", how, num_processes=world)
        assert completed.stderr.count("TRAINED") == world, completed.stderr

    return launching.once(f"diff_program-{world}-{how}", make)


@pytest.mark.parametrize(("away", "expected"), [(0.0, 2.0), (0.0005, 2.0), (0.05, None)])
def test_a_factor_is_named_only_if_nothing_else_differs(away, expected):
    ours, other = np.array([3.0, 4.0, 0.0]), np.array([0.0, 0.0, 5.0])
    assert bounds.factor(ours, 2 * ours + 2 * away * other, 0.0) == (expected and pytest.approx(expected))


def marked(name: str, how: str) -> Any:
    """Return a parameter of a test that is as slow as the set of trainings that it is of."""
    marks = {"quick": (), "more": pytest.mark.slow, "whole": pytest.mark.nightly}
    return pytest.param(name, marks=marks[how])


def set_of(fault: str) -> str:
    """Return the set of trainings that has a fault."""
    return "quick" if fault in QUICK else "whole" if fault in RARE else "more"


NUM_SOUND = {  # by set and precision; the whole is trained on one, two and four ranks
    "quick": {kind: sum(name.endswith(kind) for name in QUICK_SOUND) for kind in ("fp32", "bf16")},
    "more": {"fp32": 16, "bf16": 5},
    "whole": {"fp32": 37, "bf16": 37},
}


@pytest.mark.launches
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", [marked(how, how) for how in NUM_SOUND])
def test_sound_trainings_of_one_two_and_four_ranks_are_the_same(how, precision):
    launching.use()
    worlds, number = [1, 2, 4] if how == "whole" else [2], NUM_SOUND[how][precision]
    folders = [path for world in worlds for path in sorted(recorded(world, how).glob(f"*-{precision}"))]
    ones = sorted(map(Recording.read, folders), key=lambda one: not one.noise)  # those with a bound are A
    assert len(ones) == number
    assert [pair for pair in itertools.combinations(ones, 2) if not compare(*pair).is_same] == []


@pytest.mark.launches
@pytest.mark.parametrize("name", [marked(name, set_of(name)) for name in FAULTS])
def test_a_fault_is_named_with_its_factor(name):
    launching.use()
    folder, fault = recorded(2, set_of(name)), FAULTS[name]
    result = compare(Recording.read(folder / counterpart(name)), Recording.read(folder / name))
    assert not result.is_same
    if fault.kind == "replicas":
        assert fault.name in result.replicas[0]
        return
    first = result.differences[0]
    assert any(fault.cause in output for output in result.causes)
    assert first.kind == fault.kind
    assert first.name.startswith(fault.name)
    assert (first.missing == "B") == name.startswith("frozen")
    if fault.factor is not None:
        alike = [one for one in result.differences if one[:2] == first[:2]]
        found = causes.uniform_factor(alike) if fault.name == "" else first.factor
        assert found == pytest.approx(fault.factor, rel=2e-3, abs=2e-3)


@pytest.mark.launches
def test_the_command_says_and_writes_the_first_difference(tmp_path):
    launching.use()
    a, b = recorded(2) / "ddp-1-fp32", recorded(2) / "half_a_layer"
    completed = launching.command_line(["diff", a, b, "--output", tmp_path / "diff.json"])
    assert (completed.returncode, completed.stderr) == (1, "")
    assert "First difference: step 1, gradient of blocks.1.down.weight" in completed.stdout
    assert json.loads((tmp_path / "diff.json").read_text())["differences"][0]["factor"] == pytest.approx(0.5)
    assert launching.command_line(["diff", a, a]).returncode == 0
    assert launching.command_line(["diff", a, tmp_path]).returncode == 2  # no recording
    with pytest.raises(AssertionError, match=r"blocks\.1\.down\.weight"):
        diff.assert_same_training(a, b)


@pytest.fixture(scope="module")
def adapters_of_ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return recordings of adapters that this process has trained."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapters")
    for name, case in adapters().items():
        if case.engine == "ddp":
            for noise in (None, 1) if name == case.engine else (None,):
                case.train(str(folder / name), noise)
    return folder


def adapted(engine: str, folder: Path) -> Path:
    """Return the folder with recordings of adapters: two ranks trained them, but for DDP's, which need no other."""
    pytest.importorskip("peft")
    return folder if engine == "ddp" else recorded(2, "adapters")


OF_SEVERAL_RANKS = [pytest.mark.slow, pytest.mark.launches]
ADAPTED = ["ddp", *(pytest.param(engine, marks=OF_SEVERAL_RANKS) for engine in ("zero3", "fsdp2"))]
EQUAL = [("zero3", "zero3-repeated"), ("fsdp2", "fsdp2-repeated"), ("ddp", "zero3"), ("ddp", "fsdp2"),
         ("zero3", "fsdp2")]  # fmt: skip


def compared(folder: Path, *names: str) -> Result:
    return compare(*(Recording.read(folder / name) for name in names))


def test_equal_trainings_of_adapters_are_the_same(adapters_of_ddp: Path):
    result = compared(adapters_of_ddp, "ddp", "ddp-repeated")
    assert result.is_same
    assert result.num_alike > 350  # of one rank


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize(("name", "other"), EQUAL)
def test_equal_trainings_of_adapters_are_the_same_under_each_engine(name: str, other: str):
    pytest.importorskip("peft")
    result = compared(recorded(2, "adapters"), name, other)
    assert result.is_same
    assert result.num_alike > 500


@pytest.mark.parametrize("engine", ADAPTED)
def test_a_doubled_lora_alpha_is_named_with_its_factor(engine: str, adapters_of_ddp: Path):
    """The matrices B begin with zeros, so the outputs and the gradients of the matrices A are the same at first."""
    result = compared(adapted(engine, adapters_of_ddp), engine, f"{engine}-doubled")
    first = [each for each in result.differences if each[:2] == result.differences[0][:2]]
    assert (first[0].step, first[0].kind, len(first)) == (1, "gradient", 6)
    assert all("lora_B" in each.name for each in first)
    assert causes.uniform_factor(first) == pytest.approx(2, rel=2e-3)
    assert any("lora_alpha" in cause for cause in result.causes)


def test_a_doubled_lora_alpha_of_trained_adapters_is_found_in_the_first_adapted_output(adapters_of_ddp: Path):
    first = compared(adapters_of_ddp, "ddp-trained", "ddp-trained-doubled").differences[0]
    assert (first.step, first.kind, first.name) == (1, "forward", "base_model.model.blocks.0.qkv")


@pytest.mark.parametrize("engine", ADAPTED)
def test_adapters_of_another_base_are_found_in_its_weight(engine: str, adapters_of_ddp: Path):
    first = compared(adapted(engine, adapters_of_ddp), engine, f"{engine}-other-base").differences[0]
    assert (first.step, first.kind, first.name) == (0, "weights", "base_model.model.blocks.1.up.weight")
    assert first.factor == pytest.approx(1.01, rel=1e-3)


SETTINGS = {"odd": "", "deep": 0, "eps": 1e-5, "parts": 1, "rate": 0.1, "seed": 0, "steps": 5, "inf": 9, "last": 9}
SCRIPT = """
import torch
from torch import inf, nn
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inner = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)
        self.mask, self.mix = nn.Threshold(0, -inf), nn.Parameter(torch.ones(4, dtype=torch.complex64))
    def forward(self, x):
        return (self.mask(torch.func.vmap(self.inner)(self.table(x.argsort()))).exp() * self.mix).abs()
torch.manual_seed(0)
layers = nn.Linear(4, 4), nn.BatchNorm1d(4, eps={eps}), nn.Tanh(), nn.Linear(4, 1), *map(nn.Linear, [1] * {deep}, [1])
model = Odd() if {odd!r} else nn.Sequential(*layers)
[each.register_hook(lambda got, on=name == {odd!r}: got * (1 + on)) for name, each in model.named_parameters()]
optimizers = [torch.optim.SGD(list(model.parameters())[part::{parts}], lr={rate}) for part in range({parts})]
scaler = torch.amp.GradScaler("cpu", enabled=not {odd!r})
torch.manual_seed({seed})
for step in range(1, 1 + {steps}):
    model.train(step <= {last})
    scaler.scale(model(torch.randn(8, 4)).square().mean() / (step != {inf})).backward()
    [(scaler.step(each), scaler.update(), each.zero_grad()) for each in optimizers]
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: Any) -> Any:
    def made(name: str, *words: str, **changes: Any) -> Recording:
        (script := tmp_path / f"{name}.py").write_text(SCRIPT.format(**SETTINGS | changes))
        main(["--output", str(tmp_path / name), "--whole", "3", *words, str(script)])
        return Recording.read(tmp_path / name)

    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return made


def test_a_script_is_recorded_without_a_line_in_it(record: Any):
    a, b, c = (record(name, rate=rate) for name, rate in (("a", 0.1), ("b", 0.01), ("c", math.inf)))
    assert (result := compare(a, b)).is_marked
    assert text(result).count("Largest element: ") > 0
    for one, other, broken in ((a, c, "B"), (c, a, "A"), (c, c, "A and B")):
        assert compare(one, other).differences[0].broken == broken
    assert torch.nn.Module.__call__.__name__ != "by"


INNER = """
import torch
from torch import nn
class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.module, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
    def forward(self, x):
        return x * self.weight + self.module(x)
model = nn.Sequential(nn.Linear(4, 4), Residual())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).square().mean().backward()
optimizer.step()
"""


def test_a_models_own_part_called_module_is_not_taken_for_a_wrapper(tmp_path: Path):
    (script := tmp_path / "script.py").write_text(INNER)
    main(["--output", str(tmp_path / "a"), str(script)])
    entries = Recording.read(tmp_path / "a").ranks[0]
    assert {entry.name for entry in entries if entry.kind == "forward"} >= {"0", "1", "1.module"}
    assert {entry.name for entry in entries if entry.kind == "weights"} >= {"1.weight", "1.module.weight"}


CHANGES = [
    ({"steps": 1}, {"rate": 0.01}, [(1, "update", "3.weight")]),
    ({"inf": 1}, {"rate": 0.01}, [(2, "update", "3.weight")]),
    ({"steps": 1}, {"parts": 0}, [(1, "whole", "")]),
    ({}, {"parts": 2}, []),
    ({}, {"eps": 0.1}, [(1, "forward", "1")]),
    ({}, {"inf": 2}, [(2, "gradient", "3.bias")]),
    ({}, {"last": 1}, [(2, "batch", "different rows")]),
    ({}, {"deep": 1}, [(0, "weights", "4.weight")]),
    ({"odd": "as it is"}, {"odd": "table.weight"}, [(1, "gradient", "table.weight")]),
    ({"odd": "as it is"}, {"odd": "mix"}, [(1, "gradient", "mix")]),
]


@pytest.mark.parametrize(("both", "changes", "first"), CHANGES)
def test_a_change_of_a_script_is_named_without_noise(record: Any, both: Any, changes: Any, first: Any):
    result = compare(record("a", **both), record("b", **both | changes))
    assert [one[:3] for one in result.differences[:1]] == first


def test_a_noise_run_is_of_the_same_training_and_the_same_as_it(record: Any, tmp_path: Path):
    a = record("a")
    record("b"), record("b", "--noise", "1")
    assert compare(a, Recording.read(tmp_path / "b" / "noise-1")).is_same
    for changes in ({"steps": 2}, {"seed": 1}, {"parts": 0}):
        with pytest.raises(Refusal, match="noise-1"):
            record("b", "--noise", "1", **changes)


# ---------------------------------------------------------------- a batch that is cut otherwise

CUT = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.ones(6))  # used first, and of no module of its own
        self.table, self.state, self.norm = nn.Embedding(9, 6), nn.GRU(6, 6, 2, batch_first=True), nn.LayerNorm(6)
        self.head = nn.Linear(6, 9)
    def forward(self, ids, attention_mask, labels, items):
        x = (self.table(ids) + self.position) * attention_mask[..., None]
        x, state = self.state(x)
        logits = self.head(self.norm(x)) * {scale}
        routed = logits.flatten(0, 1)
        loss = nn.functional.cross_entropy(routed, labels.flatten(), reduction="sum") / items
        return {{"loss": loss, "logits": logits, "state": state, "routed": routed, "auxiliary": logits.square().mean()}}
torch.manual_seed(0)
model = Net()
for name in {doubled}:
    model.get_parameter(name).register_hook(lambda got: got * 2)
others = [each for name, each in model.named_parameters() if name != "norm.weight"]
optimizer = torch.optim.Adam([{{"params": others}}, {{"params": [model.norm.weight], "lr": 1e-3 * {rate}}}], 1e-3)
for step in range(4):
    draws = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, 9, (4, 5), generator=draws) for _ in range(2))
    mask = torch.ones(4, 5)
    mask[-1, {masked}:] = 0
    for rows in torch.arange(4).split({rows}):
        model(ids[rows], attention_mask=mask[rows], labels=labels[rows], items=20)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def cut(tmp_path: Path, monkeypatch: Any) -> Any:
    def made(name: str, *words: str, **changes: Any) -> Recording:
        settings = {"scale": 1, "doubled": [], "rate": 1, "masked": 3, "rows": 4}
        (script := tmp_path / f"{name}.py").write_text(CUT.format(**settings | changes))
        main(["--output", str(tmp_path / name), "--steps", "4", *words, str(script)])
        return Recording.read(tmp_path / name)

    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return made


@pytest.mark.parametrize("noise", [(), ("--noise", "1")])
def test_what_has_no_row_per_sequence_is_left_out_where_a_batch_is_cut_otherwise(cut: Any, noise: Any):
    """A scalar, and a state of (layers, rows, width), were compared as if they had rows: six of ten errors."""
    a = cut("a")
    a = cut("a", *noise) if noise else a
    assert compare(a, cut("whole")).is_same
    for rows in (1, 2):
        result = compare(a, b := cut(f"parts-{rows}", rows=rows))
        assert result.differences == []
        (left_out,) = [note for note in result.notes if "one row per row of the batch" in note]
        assert sorted(left_out.partition("compared: ")[2].split(", ")) == [
            "state:1", "the model", "the model:2", "the model:4"
        ]  # fmt: skip
        assert b.cut == [[rows] * (4 // rows)]
    faulty = compare(a, cut("faulty", rows=2, scale=1.5))
    assert faulty.differences[0][:2] == (1, "forward")


def test_the_first_gradient_is_the_first_in_the_order_of_the_backward_pass(cut: Any):
    """A parameter of the model itself, which a forward pass uses first, was taken for the last one used."""
    result = compare(cut("a"), cut("b", doubled=["position", "head.weight"]))
    assert [one.name for one in result.differences if one[:2] == (1, "gradient")] == ["head.weight", "position"]


@pytest.mark.parametrize("rate", [0.5, 0.9, 1.2])
def test_another_rate_of_a_single_small_norm_is_seen(cut: Any, rate: float):
    """One element whose step rounding may turn round was half of what six elements move."""
    a = cut("a")
    result = compare(cut("a", "--noise", "1"), cut("b", rate=rate))
    assert a.facts["steps"] == 4
    assert [one[:3] for one in result.differences[:1]] == [(1, "update", "norm.weight")]
    assert result.differences[0].factor == pytest.approx(rate, rel=1e-3)


def test_it_is_said_which_part_of_the_batches_differs(cut: Any):
    a = cut("a")
    for rows in (4, 2):
        first = compare(a, cut("b", masked=2, rows=rows)).differences[0]
        assert first[:3] == (1, "batch", "different attention_mask, but the same argument 1, labels")


# ---------------------------------------------------------------- one recording has one identity


def put(folder: Path, *, of_rank: int = 0, **changes: Any) -> Path:
    """Write the file of one rank: two steps of one weight, with some facts changed."""
    facts = {
        "format": FORMAT, "rank": of_rank, "world_size": 1, "token": "a", "of": None, "engine": "", "versions": {},
        "asked": 2, "steps": 2, "completed": 2, "raised": None, "backward": [],
        "entries": [[step, "weights", "w", 0, 1, "float32", [1.0 + step] * sketch.SIZE, []] for step in (0, 1, 2)],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{of_rank}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(facts | changes).encode()))
    return path


def diff_command(*words: Any) -> int:
    return cli.run(["diff", *map(str, words)])


ENTRY = [1, "weights", "w", 0, 1, "float32", [1.0] * sketch.SIZE, []]
DAMAGE = {
    **{f"no {name}": {name: None} for name in ("rank", "world_size", "token", "engine", "versions", "entries")},
    **{f"{name} of 10^12": {name: 10**12} for name in ("steps", "completed", "world_size")},
    **{f"{name} is {value!r}": {name: value} for name in ("steps", "rank") for value in (-1, 1.5, True, "1", math.nan)},
    "a world of nobody": {"world_size": 0}, "another rank": {"rank": 1}, "a part of a world": {"world_size": 2},
    "a version that is a number": {"versions": {"torch": 2}}, "an empty token": {"token": ""},
    "entries are a mapping": {"entries": {}}, "an entry is too short": {"entries": [ENTRY[:-1]]},
    "an entry is twice there": {"entries": [ENTRY, ENTRY, [2, *ENTRY[1:]]]},
    "an unknown kind": {"entries": [[1, "weight", *ENTRY[2:]], [2, *ENTRY[1:]]]},
    "a sketch is too short": {"entries": [[2, *ENTRY[1:-2], [1.0], []]]},
    "a sketch of words": {"entries": [[2, *ENTRY[1:-2], ["1"] * sketch.SIZE, []]]},
    "a shape of words": {"entries": [[2, *ENTRY[1:-1], ["4"]]]}, "no backward": {"backward": None},
    "more completed than begun": {"completed": 3, "asked": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_recording_is_neither_the_same_nor_different(name: str, tmp_path: Path, capsys: Any):
    put(tmp_path / "a")
    put(tmp_path / "b", **DAMAGE[name])
    for pair in (("a", "b"), ("b", "a"), ("b", "b")):
        assert diff_command(*(tmp_path / one for one in pair)) == 3
        out, err = capsys.readouterr()
        assert (out, err.count("zero-study:")) == ("", 1)
        assert str(tmp_path / "b") in err


WRITTEN = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "no gzip": lambda path: path.write_bytes(b"{}"),
    "no JSON": lambda path: path.write_bytes(gzip.compress(b"{")),
    "a list": lambda path: path.write_bytes(gzip.compress(b"[]")),
    "nested": lambda path: path.write_bytes(gzip.compress(b"[" * 100_000)),
    "not UTF-8": lambda path: path.write_bytes(gzip.compress(b"\xff")),
    "empty": lambda path: path.write_bytes(b""),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_that_is_no_recording_is_damage(name: str, tmp_path: Path, capsys: Any):
    put(tmp_path / "a")
    WRITTEN[name](put(tmp_path / "b"))
    assert diff_command(tmp_path / "a", tmp_path / "b") == 3
    assert capsys.readouterr().err.count("zero-study:") == 1


def test_ranks_and_noise_of_another_recording_are_damage(tmp_path: Path):
    for rank, token in enumerate(("a", "b")):
        put(tmp_path / "mixed", of_rank=rank, world_size=2, token=token)
    put(tmp_path / "noisy")
    put(tmp_path / "noisy" / "noise-1", token="n", of="another")
    for name in ("mixed", "noisy"):
        with pytest.raises(Damaged):
            Recording.read(tmp_path / name)
    put(tmp_path / "noisy" / "noise-1", token="n", of="a")
    assert len(Recording.read(tmp_path / "noisy").noise) == 1


def test_a_recording_of_another_release_is_refused(tmp_path: Path):
    put(tmp_path, format=READABLE[0] - 1)
    with pytest.raises(Refusal, match="another release") as refused:
        Recording.read(tmp_path)
    assert not isinstance(refused.value, Damaged)


def test_names_do_not_steer_the_terminal(tmp_path: Path, capsys: Any):
    name = "w\x1b[2J\n"
    entries = [[step, "weights", name, 0, 1, "float32", [1.0 + step] * sketch.SIZE, []] for step in (0, 1, 2)]
    put(tmp_path / "a", entries=entries)
    put(tmp_path / "b", entries=[*entries[:2], [*entries[2][:-2], [9.0] * sketch.SIZE, []]])
    assert diff_command(tmp_path / "a", tmp_path / "b") == 1
    assert "\x1b" not in capsys.readouterr().out


ENDINGS = [  # facts of A and of B, and the exit status
    ({}, {}, 0),
    ({"raised": "ValueError", "completed": 0}, {}, 3),
    ({"raised": "ValueError", "completed": 0}, {"raised": "ValueError", "completed": 0}, 3),
    ({"completed": 1}, {}, 3),  # it ended by itself, before the other one
    ({"asked": 3}, {"asked": 3}, 0),  # both scripts train two steps
    ({"asked": 3}, {"asked": 2}, 0),  # all that was asked of the shorter one
]


@pytest.mark.parametrize(("of_a", "of_b", "status"), ENDINGS)
def test_a_training_that_ended_early_is_not_equal_to_a_whole_one(of_a, of_b, status, tmp_path: Path):
    put(tmp_path / "a", **of_a)
    put(tmp_path / "b", **of_b)
    assert diff_command(tmp_path / "a", tmp_path / "b") == status
    if status:
        with pytest.raises(AssertionError):
            diff.assert_same_training(tmp_path / "a", tmp_path / "b")


def test_a_script_that_dies_leaves_no_recording_of_yesterday(record: Any, tmp_path: Path):
    record("a"), record("a", "--noise", "1")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    (script := tmp_path / "dies.py").write_text("import no_such_module")
    with pytest.raises(ModuleNotFoundError):
        main(["--output", str(tmp_path / "a"), str(script)])
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["notes.txt"]
    with pytest.raises(Refusal, match="has no rank-0"):
        Recording.read(tmp_path / "a")


def test_a_script_that_raises_in_its_second_step_is_not_whole(record: Any, tmp_path: Path):
    whole = record("a", steps=3)
    (script := tmp_path / "b.py").write_text(SCRIPT.format(**SETTINGS | {"steps": 3}) + "    if step == 2: 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        main(["--output", str(tmp_path / "b"), str(script)])
    broken = Recording.read(tmp_path / "b")
    assert (broken.facts["completed"], broken.facts["raised"]) == (2, "ZeroDivisionError")
    result = compare(whole, broken)
    assert (result.differences, result.is_same) == ([], False)


def test_a_script_that_leaves_by_the_system_call_is_recorded(record: Any, tmp_path: Path):
    """As trainers do that fear the end of the interpreter."""
    whole = record("a", steps=2)
    (script := tmp_path / "b.py").write_text(SCRIPT.format(**SETTINGS | {"steps": 2}) + "import os\nos._exit(0)\n")
    with pytest.raises(SystemExit) as left:
        main(["--output", str(tmp_path / "b"), "--whole", "3", str(script)])
    assert left.value.code == 0
    assert compare(whole, Recording.read(tmp_path / "b")).is_same


COUNTS_FLOPS = """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    nn.Linear(4, 4)(torch.randn(2, 4)).sum().backward()
"""


def test_passes_without_values_are_no_part_of_a_step(record: Any, tmp_path: Path):
    """A script that counts its FLOPs with fake tensors, which have no loss to be read."""
    whole = record("a", steps=2)
    (script := tmp_path / "b.py").write_text(SCRIPT.format(**SETTINGS | {"steps": 2}) + COUNTS_FLOPS)
    main(["--output", str(tmp_path / "b"), "--whole", "3", str(script)])
    assert compare(whole, Recording.read(tmp_path / "b")).is_same


def test_a_new_recording_replaces_noise_and_ranks_of_the_older_one(record: Any, tmp_path: Path):
    record("a"), record("a", "--noise", "1")
    put(tmp_path / "a", of_rank=1, world_size=2)
    again = record("a", rate=0.2)
    assert (len(again.ranks), again.noise) == (1, [])


def test_noise_goes_with_a_recording(tmp_path: Path):
    (script := tmp_path / "script.py").write_text(SCRIPT.format(**SETTINGS))
    with pytest.raises(Refusal, match="without --noise first"):
        main(["--output", str(tmp_path / "a"), "--noise", "1", str(script)])


AGREES = """
import os, sys, torch.distributed as dist
from pathlib import Path
from zero_study.diff import recording
if "group" in sys.argv:
    dist.init_process_group("gloo")
for _ in range(2):
    recording._num_recordings[Path("a")] += 1
    Path(f"token-{os.environ['RANK']}").open("a").write(recording._shared_token(Path("a")) + " ")
if dist.is_initialized():
    dist.barrier()
    os._exit(0)
"""


@pytest.mark.launches
@pytest.mark.parametrize("how", ["group", "no group"])
def test_the_ranks_of_a_launch_agree_on_what_no_other_launch_has(how: str, tmp_path: Path):
    (script := tmp_path / "script.py").write_text(AGREES)
    for _ in range(2):
        completed = launching.torchrun([script, how.partition(" ")[0]], tmp_path)
        assert completed.returncode == 0, completed.stderr
    tokens = [(tmp_path / f"token-{rank}").read_text().split() for rank in (0, 1)]
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) == 4
