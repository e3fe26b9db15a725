"""Predicted records: what theory says of a study, once per configuration, and as committed."""

from __future__ import annotations

import json
from typing import Any

import launching
import pytest
import yaml

from study import files
from study.config import build_config
from study.errors import Refusal
from study.records import schema
from study.running import predictions, studies
from study.strategy import file, in_theory
from study.theory import hardware, on_box

COMMITTED = launching.ROOT / "reports" / "predicted"
FLAGS = "workload: gpt-wikitext, size: 124m, sequence_length: 512, init: scratch, global_batch_size: 16"


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(launching.ROOT)  # from where accelerate files name their JSON


def read_predictions(path):
    return schema.parse(path, files.load(path, "predicted records"), predictions.PredictedStudy)


def study_of(tmp_path, parts: str) -> studies.Study:
    path = tmp_path / "mine.yaml"
    path.write_text(f"question: Which?\ncontrol: zero2\ntext: real\nparts:\n{parts}\n")
    return studies.find(str(path))


def test_one_prediction_per_configuration(tmp_path):
    """Seeds, repeats, steps and a part's label change no memory and no time; batches and processes do."""
    study = study_of(
        tmp_path,
        f"""
  - {{flags: {{{FLAGS}}}, strategies: [single, ddp, zero2], world_sizes: [2, 4], seeds: [0, 1], repeats: 2}}
  - {{flags: {{{FLAGS}, max_steps: 3}}, strategies: [zero2, zero3], world_sizes: [2], label: short}}""",
    )
    found = predictions.predict_study(study, "a100-80gb", 4)
    assert [(one.strategy, one.world_size) for one in found.predictions] == [
        ("single", 1), ("ddp", 2), ("zero2", 2), ("ddp", 4), ("zero2", 4), ("zero3", 2),
    ]  # fmt: skip
    assert found.left_out == []
    assert [one.micro_batch_size for one in found.predictions] == [16, 8, 8, 4, 4, 8]


def test_is_what_the_planner_says(tmp_path):
    flags = f"{FLAGS}, precision: bf16, dropout: 0, activation_checkpointing: true, micro_batch_size: 4"
    study = study_of(tmp_path, f"  - {{flags: {{{flags}}}, strategies: [zero2]}}")
    (one,) = predictions.predict_study(study, "h100", 8).predictions
    config = build_config(**yaml.safe_load(f"{{{flags}}}"), data="hub")
    shape = in_theory.shape_of(config)
    engine = in_theory.engine_of(file.read_strategy(file.find_strategy("zero2")), 768, 2, "bf16")
    box = hardware.typical_box(hardware.find_gpu("h100-sxm"), 2)  # of two, though the box has eight
    expected = on_box.predict(shape, engine, in_theory.job_of(config, 2, "gpu"), box)
    assert shape.vocabulary == 50257  # the published tokenizer's, as the study trains with
    assert one.num_params == shape.num_params
    assert (one.micro_batch_size, one.gradient_accumulation_steps) == (4, 2)
    assert one.peak_bytes_per_gpu == pytest.approx(expected.peak.total, rel=1e-3)
    assert sum(one.parts.values()) == pytest.approx(expected.peak.total, rel=1e-3)
    assert one.free_bytes == pytest.approx(expected.free_bytes, rel=1e-3)
    assert one.seconds_low < one.seconds_per_step < one.seconds_high
    assert one.seconds_per_step == pytest.approx(expected.step.total, rel=1e-3)
    assert one.mfu == pytest.approx(expected.mfu, rel=1e-3)
    assert one.collective_bytes == pytest.approx(expected.communicated_bytes, rel=1e-3)


def test_a_file_is_read_as_it_was_written(tmp_path):
    study = study_of(tmp_path, f"  - {{flags: {{{FLAGS}, precision: bf16}}, strategies: [ddp, zero3]}}")
    made = predictions.predict_study(study, "a100-80gb", 2)
    path = predictions.write(tmp_path, made)
    assert path == tmp_path / "a100-80gb-2x" / "mine.json"
    assert read_predictions(path) == made
    assert len([line for line in path.read_text().splitlines() if '"workload"' in line]) == 2  # one line for each
    content = json.loads(path.read_text())
    assert content["status"] == "predicted"
    del content["predictions"][0]["fits"]
    path.write_text(json.dumps(content))
    with pytest.raises(Refusal, match=r"mine\.json: predictions\.0\.fits is missing"):
        read_predictions(path)
    with pytest.raises(Refusal, match=r"mine\.json"):  # and it is no measured record
        schema.read(path)


# ---------------------------------------------------------------- what is committed


def test_committed_are_all():
    expected = {f"{gpu}-{n}x/{name}.json" for gpu, n in predictions.BOXES for name in predictions.STUDIES}
    assert {str(path.relative_to(COMMITTED)) for path in COMMITTED.glob("*x/*.json")} == expected
    assert max(path.stat().st_size for path in COMMITTED.glob("*x/*.json")) < 200_000


@pytest.mark.parametrize(("gpu", "num_gpus", "name"), [("h100-sxm", 8, "multi-gpu"), ("a100-40gb", 1, "single-gpu")])
def test_committed_are_what_theory_says_today(gpu, num_gpus, name):
    """`zero-study predict` makes them anew; numbers may differ by rounding."""
    committed = read_predictions(COMMITTED / f"{gpu}-{num_gpus}x" / f"{name}.json")
    made = predictions.predict_study(studies.find(name), gpu, num_gpus)
    near = {
        place: pytest.approx(value, rel=1e-3) if isinstance(value, int | float) else value
        for place, value in flat(made.model_dump()).items()
    }
    assert flat(committed.model_dump()) == near


def flat(content: Any, where: str = "") -> dict[str, Any]:
    """What is said, by its places."""
    if not isinstance(content, dict | list):
        return {where: content}
    items = content.items() if isinstance(content, dict) else enumerate(content)
    return {place: value for key, inner in items for place, value in flat(inner, f"{where}.{key}").items()}
