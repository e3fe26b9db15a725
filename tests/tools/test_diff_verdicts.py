"""What `zero-study diff` compared: steps and tensors, runs with noise, rows without padding, and hostile recordings."""

from __future__ import annotations

import copy
import gzip
import json
import math
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from zero_study import cli  # noqa: E402
from zero_study.diff import padding, sketch  # noqa: E402
from zero_study.diff.__main__ import main  # noqa: E402
from zero_study.diff.compare import Result, compare  # noqa: E402
from zero_study.diff.padding import Filling, kept_positions  # noqa: E402
from zero_study.diff.recorded import FORMAT, READABLE, Recording  # noqa: E402
from zero_study.diff.text import content, text  # noqa: E402
from zero_study.engines.hooks import wrap_function  # noqa: E402
from zero_study.errors import Refusal  # noqa: E402


def put(folder: Path, steps: int = 2, *, first: int = 0, rate: float = 1.0, rows: int = 2, **changes: Any) -> Path:
    """Write a recording of one rank and one weight, which begins after step `first` of a longer training.

    `rate` is the change of each element of the weight in a step. `rows` is the number of rows of each batch.
    """
    facts = {
        "format": FORMAT, "rank": 0, "world_size": 1, "token": "a", "of": None, "engine": "", "versions": {},
        "asked": steps, "steps": steps, "completed": steps, "raised": None, "backward": ["w"],
        "entries": [
            [step, kind, name, 0, 1, "float32", [1 + (first + step) * speed] * size, shape]
            for step in range(steps + 1)
            for kind, name, size, shape, speed in (
                ("weights", "w", sketch.SIZE, [], rate), ("batch", "", rows, [], 1.0), ("unpadded", "", rows, [7], 1.0),
                ("forward", "", sketch.SIZE, [2, 7], 1.0), ("gradient", "w", sketch.SIZE, [], 1.0),
                ("norm", "", 1, [], 1.0),
            )
            if step or kind == "weights"
        ],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{changes.get('rank', 0)}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(facts | changes).encode()))
    return path


def status_of(*words: Any) -> int:
    try:
        return cli.run(["diff", *map(str, words)])
    except Refusal:
        return 2


# ---------------------------------------------------------------- steps and tensors


def test_a_recording_of_one_step_is_only_compared_in_that_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    put(tmp_path / "one", steps=1)
    put(tmp_path / "three", steps=3)
    output = tmp_path / "diff.json"
    assert status_of(tmp_path / "three", tmp_path / "one", "--output", output) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "in step 1, the only one in both recordings." in printed
    assert "Not compared: steps 2 and 3 (only A has them)" in printed
    assert "buffers" in printed
    written = json.loads(output.read_text())
    assert (written["same"], written["verdict"], written["steps_compared"]) == (True, "sound", 1)
    assert {"number": 1, "what": "1 gradient"} in written["checked"]


@pytest.mark.parametrize(("changes", "status"), [({}, 0), ({"rate": 1.5}, 1), ({"first": 7}, 1)])
def test_a_resumed_training_is_compared_with_the_later_steps_of_a_whole_one(changes, status, tmp_path, capsys):
    put(tmp_path / "whole", steps=4)
    put(tmp_path / "resumed", **{"first": 2, **changes})
    for pair in (("whole", "resumed"), ("resumed", "whole")):
        assert status_of(*(tmp_path / name for name in pair)) == status
        printed = " ".join(capsys.readouterr().out.split())
        assert ("after step 2" in printed) == (changes == {})


@pytest.mark.parametrize(("gradient", "status"), [(1.0, 0), (1 + 9e-7, 0), (1 + 1e-6, 1), (2.0, 1)])  # 16 units of fp32
def test_ranks_that_get_parts_of_each_row_are_judged_by_their_gradients(gradient, status, tmp_path, capsys):
    put(tmp_path / "whole")
    for rank in range(2):
        path = put(tmp_path / "parts", rank=rank, world_size=2)
        content = json.loads(gzip.decompress(path.read_bytes()))
        for entry in content["entries"]:
            if entry[1] in ("batch", "unpadded"):
                entry[6] = [0.25 + rank] * 2  # digests of halves
            if entry[1] == "gradient":
                entry[6] = [gradient * value for value in entry[6]]
        path.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert status_of(tmp_path / "whole", tmp_path / "parts") == status
    assert ("all gradients and updates agree" in " ".join(capsys.readouterr().out.split())) == (status == 0)


@pytest.mark.parametrize(("shape", "speed", "status"), [([7, 2], 3.0, 0), ([2, 7], 3.0, 1), ([2, 6], 3.0, 1)])
def test_an_output_in_another_shape_is_not_called_different(shape, speed, status, tmp_path, capsys):
    """Its recorded mean is over other rows. An output with another number of elements is a difference."""
    for folder in ("a", "b"):
        path = put(tmp_path / folder)
    content_of_b = json.loads(gzip.decompress(path.read_bytes()))
    for entry in content_of_b["entries"]:
        if entry[1] == "forward":
            entry[6:] = [[speed * value for value in entry[6]], shape]
    put(tmp_path / "b", entries=content_of_b["entries"])
    assert status_of(tmp_path / "a", tmp_path / "b") == status
    assert ("its shape is [2, 7] in A and [7, 2] in B" in " ".join(capsys.readouterr().out.split())) == (status == 0)


def test_weights_that_move_in_one_training_only_are_found_below_every_bound(tmp_path, monkeypatch):
    put(tmp_path / "a", rate=1e-3)
    put(tmp_path / "b", rate=0.0)
    monkeypatch.setattr("zero_study.diff.bounds.Bounds._bound", lambda *_: math.inf)
    for pair in (("a", "b"), ("b", "a")):
        (difference,) = compare(*(Recording.read(tmp_path / name) for name in pair)).differences
        assert (difference.step, difference.kind, difference.name) == (2, "update", "w")


def test_recordings_without_an_update_are_not_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("a", "b"):
        put(tmp_path / name, entries=[[s, "weights", "w", 0, 1, "float32", [1.0] * 32, []] for s in (0,)], steps=0,
            completed=0)  # fmt: skip
    assert status_of(tmp_path / "a", tmp_path / "b") == 3
    assert "not known" in capsys.readouterr().out
    put(tmp_path / "a")
    put(tmp_path / "b", completed=1)  # it ended in its second step
    assert status_of(tmp_path / "a", tmp_path / "b") == 3


# ---------------------------------------------------------------- noise of another training

SCRIPT = """
import os, sys, torch
from torch import nn
from {module} import SIZE
torch.manual_seed(int(os.environ.get("SEED", 0)))
model = nn.Sequential(nn.Linear(SIZE, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
options = dict(lr=float(os.environ.get("RATE", 0.1)), weight_decay=float(os.environ.get("DECAY", 0)))
optimizer = torch.optim.AdamW(model.parameters(), **options)
torch.manual_seed(0)
for step in range(3):
    optimizer.param_groups[0]["lr"] *= float(os.environ.get("SCHEDULE", 1))
    loss = model(torch.randn(8, SIZE)).square().mean() * float(os.environ.get("SCALE", 1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), float(os.environ.get("CLIP", 0.01)))
    optimizer.step()
    optimizer.zero_grad()
"""

MODULE = "sizes_of_this_test"  # which the script imports
Run = Callable[..., None]


@pytest.fixture(scope="module")
def recorded_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the script and its recording `a`, of which each test takes a copy."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / f"{MODULE}.py").write_text("SIZE = 4\n")
    (folder / "train.py").write_text(SCRIPT.format(module=MODULE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [*sys.path])
        main(["--output", str(folder / "a"), str(folder / "train.py")])
    del sys.modules[MODULE]
    return folder


@pytest.fixture
def run(recorded_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that records the script again in the folder `a` of this test."""
    monkeypatch.setattr("sys.path", [*sys.path])
    shutil.copytree(recorded_once, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))

    def record(*words: str, arguments: tuple[str, ...] = (), change: tuple[str, str] = ("", ""), **settings: str):
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            path = tmp_path / (f"{MODULE}.py" if change[0].startswith("SIZE") else "train.py")
            before = path.read_text()
            path.write_text(before.replace(*change) if change[0] else before)
            try:
                main(["--output", str(tmp_path / "a"), *words, str(tmp_path / "train.py"), *arguments])
            finally:
                path.write_text(before)
                sys.modules.pop(MODULE, None)

    return record


NOISE_OF_OTHERS = {
    "another line": {"change": ("step in range(3)", "step in range(1 + 2)")},
    "another module": {"change": ("SIZE = 4", "SIZE = 2 + 2")},
    "another argument": {"arguments": ("--lr", "1")},
    "another learning rate": {"RATE": "0.11"},
    "another weight decay": {"DECAY": "0.1"},
    "another schedule": {"SCHEDULE": "0.9"},
    "other initial weights": {"SEED": "1"},
    "another loss": {"SCALE": "1.05"},
    "other clipping": {"CLIP": "0.02"},
}


@pytest.mark.parametrize("name", NOISE_OF_OTHERS)
def test_noise_of_another_training_is_no_bound(name: str, run: Run, tmp_path: Path):
    """Rounding explained all deviations, because the bound was the distance to another training."""

    def record_and_compare() -> None:
        run("--noise", "1", **NOISE_OF_OTHERS[name])
        compare(*2 * [Recording.read(tmp_path / "a")])

    with pytest.raises(Refusal, match="not repeat the training"):
        record_and_compare()


@pytest.mark.parametrize("settings", [{}, {"change": ("import os, sys, torch", "import os, sys, torch  # a comment")}])
def test_noise_of_the_same_training_is_a_bound(settings: dict[str, Any], run: Run, tmp_path: Path):
    run("--noise", "1", **settings)
    run("--noise", "2")
    result = compare(*2 * [Recording.read(tmp_path / "a")])
    assert (result.is_same, result.is_marked, result.verdict.status) == (True, False, 0)
    assert "2 buffers of the model (not recorded: 1.running_mean, 1.running_var)" in " ".join(text(result).split())


def test_a_rate_of_zero_is_named_on_either_side(run: Run, tmp_path: Path):
    run(RATE="0.0")
    (tmp_path / "a").rename(tmp_path / "b")
    run(RATE="0.1")
    a, b = (Recording.read(tmp_path / name) for name in ("a", "b"))
    assert compare(a, b).causes[0] == "the learning rate of B is 0 in step 1."
    assert compare(b, a).causes[0] == "the learning rate of A is 0 in step 1."


def test_noise_of_an_old_recording_cannot_be_checked(run: Run, tmp_path: Path):
    run("--noise", "1")
    for path in (tmp_path / "a").rglob("rank-0.json.gz"):
        facts = json.loads(gzip.decompress(path.read_bytes()))
        for name in ("script", "arguments", "optimizers", "rates", "buffers"):
            del facts[name]
        facts["entries"] = [entry for entry in facts["entries"] if entry[1] != "unpadded"]
        path.write_bytes(gzip.compress(json.dumps(facts | {"format": READABLE[0]}).encode()))
    result = compare(*2 * [Recording.read(tmp_path / "a")])
    assert result.is_same
    assert any("code and arguments" in each.why for each in result.not_checked)


# ---------------------------------------------------------------- rows without padding

PADDED = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 30)
        self.pooled = nn.Linear(8, 2)
    def forward(self, input_ids, attention_mask=None, labels=None, position_ids=None, token_type_ids=None):
        kept = (input_ids != 0) if attention_mask is None else attention_mask
        x = self.table(input_ids) * kept[..., None]
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum") / 40
        return loss + self.pooled(x.sum(1) / 9).square().mean(1).sum() / 8
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(2):
    draws = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 9, (8,), generator=draws).tolist()
    rows = [torch.randint(1, 30, (length,), generator=draws) for length in lengths]
    rows[{other}] = rows[{other}] + ({other} >= 0)
    for part in torch.arange(8).split({size}):
        longest = max(len(rows[row]) for row in part) + {more}
        def pad(values, fill):
            spare = longest - len(values)
            filled = torch.full((spare,), fill)
            return torch.cat([filled, values] if {left} else [values, filled])
        ids = torch.stack([pad(rows[row], 0) for row in part])
        labels = torch.stack([pad(rows[row], -100) for row in part])
        if {masked}:
            more = {{"attention_mask": torch.stack([pad(torch.ones_like(rows[row]), 0) for row in part])}}
            more["position_ids"] = torch.stack([pad(torch.arange(len(rows[row])), {position}) for row in part])
            more["token_type_ids"] = torch.stack([pad(torch.ones_like(rows[row]), 0) for row in part])
        else:
            more = {{}}
        labels = torch.where(labels == -100, {label}, labels)
        model(ids, labels=labels, **more).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Recording]]:
    """Return a function that records the script with some changes. Each is recorded once for all tests."""
    folder, recordings = tmp_path_factory.mktemp("padded"), {}

    def record(**changes: Any) -> Recording:
        settings = {"size": 8, "more": 0, "left": 0, "masked": 1, "other": -9, "position": 1, "label": -100} | changes
        name = "".join(map("_{}".format, settings.values()))
        if name not in recordings:
            script = PADDED.format(**settings).replace("rows[-9] = rows[-9] + (-9 >= 0)", "")
            (folder / f"{name}.py").write_text(script)
            main(["--output", str(folder / name), "--steps", "2", str(folder / f"{name}.py")])
            recordings[name] = folder / name
        return Recording.read(recordings[name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.path", [*sys.path])
        yield record


def gradients(result: Result) -> int:
    return result.num_compared["gradient"]


SAME_ROWS = [{"size": 4}, {"size": 2}, {"more": 3}, {"left": 1}, {"left": 1, "size": 4, "more": 5}, {"position": 0}]


@pytest.mark.parametrize("changes", SAME_ROWS)
@pytest.mark.parametrize("masked", [0, 1])
def test_rows_that_differ_only_in_padding_are_the_same_rows(changes: Any, masked: int, padded: Any):
    """Every collator of transformers pads to the longest row of a micro batch: `diff` said "other rows"."""
    result = compare(padded(masked=masked), padded(masked=masked, **changes))
    assert result.differences == []
    assert (result.is_same, gradients(result), result.num_compared["update"]) == (True, 10, 10)
    is_padded = changes != {"position": 0} or masked
    assert any("padded differently" in note for note in result.notes) == is_padded


@pytest.mark.parametrize("changes", [{"size": 4}, {"left": 1, "more": 2}, {}])
@pytest.mark.parametrize("masked", [0, 1])
def test_other_rows_are_found_under_other_padding(changes: Any, masked: int, padded: Any):
    result = compare(padded(masked=masked), padded(masked=masked, other=5, **changes))
    assert result.differences[0][:2] == (1, "batch")
    assert result.differences[0].name.startswith(("different argument 1, labels", "different rows"))


@pytest.mark.parametrize("changes", [{}, {"size": 4}, {"more": 2}])
def test_labels_that_count_at_padded_positions_are_found(changes: Any, padded: Any):
    """The loss of the padding is a real difference."""
    assert compare(padded(), padded(label=0, **changes)).differences


KEPT = {  # inputs by name, and the kept positions of each row
    "a mask": ({"input_ids": [[5, 6, 0]], "attention_mask": [[1, 1, 0]], "labels": [[5, 6, -100]]}, {"labels": "110"}),
    "a mask of the left": ({"input_ids": [[0, 5, 6]], "attention_mask": [[0, 1, 1]]}, {"input_ids": "011"}),
    "a mask in a dictionary": ({"argument 1.input_ids": [[5, 9]], "argument 1.attention_mask": [[1, 0]]},
                               {"argument 1.input_ids": "10"}),
    "a padding mask": ({"x": [[5, 6, 7]], "key_padding_mask": [[False, False, True]]}, {"x": "110"}),
    "labels of a prompt": ({"input_ids": [[4, 5, 6, 0]], "labels": [[-100, -100, 6, -100]]}, {"input_ids": "1110"}),
    "an end token that pads": ({"input_ids": [[4, 0, 0, 0]], "labels": [[4, 0, -100, -100]]}, {"input_ids": "1100"}),
    "a label at a padded position": ({"input_ids": [[4, 0]], "attention_mask": [[1, 0]], "labels": [[4, 7]]},
                                     {"input_ids": "10", "labels": "11"}),
    "a decoder": ({"input_ids": [[4, 0]], "attention_mask": [[1, 0]], "decoder_input_ids": [[0, 4, 5, 0]]},
                  {"input_ids": "10", "decoder_input_ids": "0110"}),
    "no tokens": ({"pixel_values": [[0.0, 1.0]]}, {}),
    "labels of classes": ({"input_ids": [[4, 0]], "attention_mask": [[1, 0]], "labels": [3]}, {"input_ids": "10"}),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_the_padding_of_a_batch(name: str):
    inputs, expected = KEPT[name]
    kept = kept_positions({key: torch.tensor(values) for key, values in inputs.items()}, Filling(0, False))
    for key, positions in expected.items():
        assert "".join(str(int(one)) for one in kept[key][0]) == positions
    assert bool(kept) == bool(expected)


def test_the_padding_token_of_a_model():
    assert padding.filling(torch.nn.Sequential(torch.nn.Embedding(9, 2, padding_idx=3))) == Filling(3, False)
    assert padding.filling(torch.nn.Linear(2, 2)) == Filling(None, False)


# ---------------------------------------------------------------- hostile recordings

ODD = [
    None, True, -1, 0, 1.5, 1e308, -1e308, float("nan"), float("inf"), 10**400, 1 << 52, 2**63, "", "\x1b[2J", "a\nb",
    "\ud800", [], {}, [[]], ["\x1b"], {"torch": "\x1b[31m\n"}, [1e308] * 32, [float("nan")] * 32, [10**309] * 32,
    [0.0] * 32, [1 << 52], [0, 0], "forward", "whole", "update", "batch", "bfloat16",
]  # fmt: skip


def mutated(facts: dict[str, Any], draws: random.Random) -> dict[str, Any]:
    """Return facts in which one to three values, or values of entries, are odd, missing or exchanged."""
    facts = copy.deepcopy(facts)
    for _ in range(draws.randint(1, 3)):
        if draws.random() < 0.15:
            facts[draws.choice(list(facts))] = draws.choice(ODD)
            continue
        entries = facts["entries"]
        if not (
            isinstance(entries, list)
            and all(isinstance(e, list) and len(e) > 7 and isinstance(e[6], list) for e in entries)
        ):
            continue
        if not entries:
            continue
        entry = draws.choice(entries)
        action = draws.random()
        if action < 0.3:
            entry[6] = [draws.choice([0.0, -1.0, 1e308, 1e-320, float("nan"), float("inf"), 2**1023]) for _ in entry[6]]
        elif action < 0.5:
            entry[draws.choice([0, 3, 4])] = draws.choice([0, 1, 2, 3, 1 << 52])
        elif action < 0.6:
            entry[1:3] = draws.choice(["gradient", "clipped", "weights", "held", "norm", "forward"]), draws.choice("wv")
        elif action < 0.65:
            entry[7] = draws.choice([[], [0], [2, 0], [1 << 52, 3], [2, 7, 7]])
        elif action < 0.7:
            entry[draws.randrange(len(entry))] = draws.choice(ODD)
        elif action < 0.85:
            entries.remove(entry)
        else:
            entries.append([draws.choice(ODD) for _ in entry])
    return facts


def fuzzed(tmp_path: Path, seed: int, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    draws = random.Random(seed)
    path = put(tmp_path / "a")
    put(tmp_path / "b")
    facts = json.loads(gzip.decompress(path.read_bytes()))
    for _ in range(number):
        path.write_bytes(gzip.compress(json.dumps(mutated(facts, draws)).encode()))
        for pair in (("a", "b"), ("b", "a")):
            status = status_of(*(tmp_path / name for name in pair), "--output", tmp_path / "diff.json")
            printed = capsys.readouterr()
            assert status in (0, 1, 2, 3)
            assert (status != 3 or printed.out) or printed.err.count("zero-study:") == 1
            assert all(letter.isprintable() or letter == "\n" for letter in printed.out + printed.err)


def test_odd_recordings_end_in_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fuzzed(tmp_path, 0, 150, capsys)


@pytest.mark.nightly
def test_many_odd_recordings_end_in_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for seed in range(1, 11):
        fuzzed(tmp_path, seed, 500, capsys)


def test_a_number_of_steps_that_no_entry_has_is_damage(tmp_path: Path):
    """`diff` counted to 10^15."""
    put(tmp_path / "a")
    path = put(tmp_path / "b")
    facts = json.loads(gzip.decompress(path.read_bytes()))
    facts["entries"][-1][0] = facts["steps"] = facts["asked"] = 10**15
    path.write_bytes(gzip.compress(json.dumps(facts).encode()))
    assert status_of(tmp_path / "a", tmp_path / "b") == 3


def test_noise_in_noise_is_not_followed(tmp_path: Path):
    put(tmp_path / "a")
    put(tmp_path / "a" / "noise-1", token="n", of="a")
    (tmp_path / "a" / "noise-1" / "noise-1").symlink_to(tmp_path / "a" / "noise-1")
    assert [each.noise for each in Recording.read(tmp_path / "a").noise] == [[]]


WHOLE: list[Any] = [{"key": torch.ones(2)}, {(1, "a", "b", 0): 3}, [1], {(1, "forward", "\x1b[2J", 0): torch.ones(2)}]


@pytest.mark.parametrize("place", range(len(WHOLE)))
def test_odd_whole_tensors_are_damage(place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("a", "b"):
        put(tmp_path / name)
        torch.save(WHOLE[place], tmp_path / name / "rank-0.pt")
    assert status_of(tmp_path / "a", tmp_path / "b") == (0 if place == 3 else 3)
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err


def test_the_json_has_the_verdict(tmp_path: Path):
    put(tmp_path / "a")
    written = content(compare(*2 * [Recording.read(tmp_path / "a")]))
    assert (written["exit_status"], written["same"]) == (0, True)
    json.dumps(written, allow_nan=False)


def test_a_hook_of_a_class_calls_the_later_hook_of_its_base():
    """A recording missed the calls of a Sequential while another check watched this class."""
    calls = []

    def listen(name: str) -> Callable[..., Any]:
        def listener(call: Callable[..., Any], *arguments: Any) -> Any:
            calls.append(name)
            return call(*arguments)

        return listener

    class Model(torch.nn.Module):
        def forward(self, inputs: int) -> int:
            return inputs

    with wrap_function(Model, "__call__", listen("class")):
        with wrap_function(torch.nn.Module, "__call__", listen("base")):
            Model()(1)
        Model()(1)
    assert calls == ["class", "base", "class"]
    assert "__call__" not in vars(Model)
