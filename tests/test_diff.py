"""`zero-study diff`: trainings that differ by rounding alone, and faults that are named."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import launching
import pytest

torch = pytest.importorskip("torch")

from diff_program import FAULTS  # noqa: E402

from study.engines import diff  # noqa: E402
from study.engines.diff import causes, rounding, sketch  # noqa: E402
from study.engines.diff.__main__ import main  # noqa: E402
from study.engines.diff.compare import compare  # noqa: E402
from study.engines.diff.recorded import Recording  # noqa: E402
from study.engines.diff.text import text  # noqa: E402


@pytest.mark.parametrize("shape", [(7,), (40, 30), (3, 50, 17)])
def test_a_sketch_is_linear_and_tells_distances(shape):
    draws = torch.Generator().manual_seed(0)
    one, other = (torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(2))
    ours, theirs, both = (torch.tensor(sketch.sketch(each)) for each in (one, other, 2 * one - other))
    torch.testing.assert_close(2 * ours - theirs, both)
    assert float((ours - theirs).norm()) == pytest.approx(float((one - other).norm()), rel=1)


def test_a_sketch_is_the_same_in_parts(monkeypatch):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = sketch.sketch(values)
    monkeypatch.setattr(sketch, "PART", 64)
    assert sketch.sketch(values) == pytest.approx(whole, rel=1e-12)


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


def recorded(world: int) -> Path:
    def make(folder: Path) -> None:
        done = launching.script(Path(__file__).with_name("diff_program.py"), folder, num_processes=world)
        assert done.stderr.count("TRAINED") == world, done.stderr

    return launching.once(f"diff_program-{world}", make)


@pytest.mark.launches
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("worlds", "number"), [([2], 16), pytest.param([1, 2, 4], 37, marks=pytest.mark.slow)])
def test_sound_trainings_of_one_two_and_four_ranks_are_the_same(worlds, number, precision):
    launching.use()
    folders = [path for world in worlds for path in sorted(recorded(world).glob(f"*-{precision}"))]
    ones = sorted(map(Recording.read, folders), key=lambda one: not one.noise)  # those with a bound are A
    assert len(ones) == number
    assert [pair for pair in itertools.combinations(ones, 2) if not compare(*pair).is_same] == []


@pytest.mark.launches
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_factor(name):
    launching.use()
    folder, fault = recorded(2), FAULTS[name]
    beside = next(other for other, one in FAULTS.items() if one.sound is fault.sound)
    result = compare(Recording.read(folder / f"beside-{beside}"), Recording.read(folder / name))
    assert not result.is_same
    if fault.kind == "replicas":
        assert fault.name in result.replicas[0]
        return
    first = result.differences[0]
    assert any(fault.cause in said for said in result.causes)
    assert first.kind == fault.kind
    assert first.name.startswith(fault.name)
    assert (first.missing == "B") == name.startswith("frozen")
    if fault.factor is not None:
        alike = [one for one in result.differences if one[:2] == first[:2]]
        found = causes.uniform(alike) if fault.name == "" else first.factor
        assert found == pytest.approx(fault.factor, rel=2e-3, abs=2e-3)


@pytest.mark.launches
def test_the_command_says_and_writes_the_first_difference(tmp_path):
    launching.use()
    a, b = recorded(2) / "ddp-1-fp32", recorded(2) / "half_a_layer"
    done = launching.command_line(["diff", a, b, "--output", tmp_path / "diff.json"])
    assert (done.returncode, done.stderr) == (1, "")
    assert "FIRST  step 1, gradient of blocks.1.down.weight" in done.stdout
    assert json.loads((tmp_path / "diff.json").read_text())["differences"][0]["factor"] == pytest.approx(0.5)
    assert launching.command_line(["diff", a, a]).returncode == 0
    assert launching.command_line(["diff", a, tmp_path]).returncode == 2  # no recording
    with pytest.raises(AssertionError, match=r"blocks\.1\.down\.weight"):
        diff.assert_same_training(a, b)


def test_the_guide_has_the_limits_that_were_measured():
    record, guide = ((launching.ROOT / path).read_text() for path in ("reports/diff/limits.json", "docs/diff.md"))
    for kind, sizes in json.loads(record)["smallest_seen"].items():
        assert f"{kind:<24}{sizes['fp32']:.0e}  {sizes['bf16']:.0e}\n" in guide
    times = json.loads(record)["times_of_a_step"]
    assert ", ".join(f"{kind.replace('_', ' ')} x {ratio}" for kind, ratio in times.items()) in guide


SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float('{rate}'))
for step in range(5):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_is_recorded_without_a_line_in_it(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    for name, rate in (("a", 0.1), ("b", 0.01), ("c", math.inf)):
        script = tmp_path / f"{name}.py"
        script.write_text(SCRIPT.format(rate=rate))
        main(["--output", str(tmp_path / name), "--whole", "2", str(script)])
    a, b, c = (Recording.read(tmp_path / name) for name in "abc")
    result = compare(a, b)
    assert result.is_marked
    first = result.differences[0]
    assert (first.step, first.kind, first.factor) == (1, "update", pytest.approx(0.1, rel=1e-3))
    assert text(result).count("whole  ") > 0
    for one, other, broken in ((a, c, "B"), (c, a, "A"), (c, c, "A and B")):
        assert compare(one, other).differences[0].broken == broken
    assert torch.nn.Module.__call__.__name__ != "by"
