"""Is every key that a strategy's JSON may hold read back from the engine, and held against what was asked?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import launching
import pytest
from launching import ROOT
from refusing import refusal
from test_strategy import FOUND, beside

from study import files
from study.compare import facts
from study.compare import table as runs_table
from study.config import build_config
from study.engines.keys import engine_settings, known_keys
from study.records import schema
from study.records.schema import Record
from study.run import Run
from study.strategy.file import read_strategy
from study.training import proof


def test_every_key_that_a_file_may_set_is_read_from_the_engine():
    """Any other key is refused as unknown when the file is read."""
    unread = {key for key, paths in known_keys.read()["read"].items() if not paths}
    assert set(known_keys.taken("json")) == set(engine_settings.readers()) | unread


ZERO2 = {"stage": 2, "reduce_bucket_size": "auto"}


@pytest.mark.parametrize(
    ("content", "key", "wanted", "actual"),
    [
        ({"communication_data_type": "bf16"}, "communication_data_type", "bfloat16", "float32"),
        ({"zero_optimization": {**ZERO2, "reduce_scatter": False}}, "zero_optimization.reduce_scatter", False, True),
        ({"aio": {"queue_depth": 16}}, "aio.queue_depth", 16, 8),
        ({"zero_optimization": {**ZERO2, "offload_param": {"device": "none", "pin_memory": False}}},
         "zero_optimization.offload_param.pin_memory", False, None),
    ],
)  # fmt: skip
def test_an_engine_with_another_setting_is_refused(content, key, wanted, actual, tmp_path, monkeypatch):
    path = beside(tmp_path, monkeypatch, "zero2_tuned", json.dumps({"zero_optimization": ZERO2, **content}))
    run = Run(build_config(), read_strategy(path), 2, tmp_path)
    everything = dict.fromkeys(engine_settings.readers()) | dict(engine_settings.asked(run.strategy.deepspeed_json))
    found = FOUND.model_copy(update={"zero_stage": 2, "partitioned_parameters": None, "settings": everything})
    proof.verify(found, run)
    said = refusal(proof.verify, found.model_copy(update={"settings": {**everything, key: actual}}), run)
    assert said.startswith(f"{key}: the run asks for {wanted}, the engine has {actual}; change the JSON of ")


ENGINE = """
import dataclasses, sys
from pathlib import Path
from study.config import build_config
from study.errors import Refusal
from study.engines import extensions
from study.run import make_run
from study.strategy.file import read_by_name
from study.training import built, proof
extensions.use_own_folder()  # or DeepSpeed compiles for minutes
run = make_run(build_config(output_dir=Path(sys.argv[1])), read_by_name("zero2"), 2)
accelerator = built.start(run)
engine = built.build(run, accelerator)
for other in (
    dataclasses.replace(run, strategy=read_by_name("zero1")),
    dataclasses.replace(run, strategy=read_by_name("zero2_cpu_offload")),
    dataclasses.replace(run, config=run.config.model_copy(update={"micro_batch_size": 2})),
    run,
):
    try:
        proof.verify(proof.read_back(accelerator, engine.model, engine.optimizer, other), other)
        accelerator.print("AS ASKED", flush=True)
    except Refusal as refusal:
        accelerator.print("REFUSED", refusal, flush=True)
"""


@pytest.mark.launches
def test_a_real_engine_is_held_against_what_others_would_have_asked(tmp_path):
    """The engine of one run, read back for another one: what is proven is what was built, whatever is asked."""
    script = tmp_path / "script.py"
    script.write_text(ENGINE)
    words = ["accelerate", "launch", "--config_file", "accelerate_configs/zero2.yaml", "--main_process_port", "0"]
    done = launching.attempt([*words, script, tmp_path / "run"])
    said = [line for line in done.stdout.splitlines() if line.startswith(("REFUSED", "AS ASKED"))]
    assert [line.partition(";")[0] for line in said] == [
        "REFUSED zero_stage: the run asks for 1, the engine has 2",
        "REFUSED offload_optimizer_device: the run asks for cpu, the engine has none",
        "REFUSED gradient_accumulation_steps: the run asks for 2, the engine has 1",
        "AS ASKED",
    ], done.stderr


# ---------------------------------------------------------------- what is one strategy

TEMPLATE = json.loads((ROOT / "tests" / "fixtures" / "records" / "auto-zero2" / "record.json").read_text())
DEFAULTS = {**dict.fromkeys(engine_settings.readers(), 1), "communication_data_type": "float32"}


def write(folder: Path, name: str, proven: dict[str, Any] | None, **changes: Any) -> Record:
    steps = (ROOT / "tests" / "fixtures" / "records" / "auto-zero2" / "steps.jsonl").read_bytes()
    (folder / name).mkdir()
    (folder / name / "steps.jsonl").write_bytes(steps)
    (folder / name / "config.json").write_text("{}\n")
    facts = {**TEMPLATE, "run_id": name, "proof": {**TEMPLATE["proof"], "settings": proven}, **changes}
    files.write_json(folder / name / "record.json", facts)
    return schema.read(folder / name)


def test_runs_of_one_name_whose_engines_differ_are_not_repeats(tmp_path):
    """Half the bytes and another arithmetic, by one key of the JSON: under one name they were pooled as repeats."""
    other = {**DEFAULTS, "communication_data_type": "bfloat16", "zero_optimization.reduce_scatter": False}
    write(tmp_path, "a", DEFAULTS, started_at="2026-11-21T10:00:00+00:00")
    write(tmp_path, "b", DEFAULTS, started_at="2026-11-21T10:01:00+00:00")
    write(tmp_path, "c", other, started_at="2026-11-21T10:02:00+00:00")
    runs = runs_table.read([tmp_path]).set_index("run_id")
    names = runs["strategy"].to_dict()
    assert names["a"] == names["b"] == f"{TEMPLATE['strategy']} (reduce_scatter 1, communication_data_type as computed)"
    assert names["c"] == f"{TEMPLATE['strategy']} (reduce_scatter False, communication_data_type bfloat16)"
    assert runs["repeat"].to_dict() == {"a": 0, "b": 1, "c": 0}


def test_a_strategy_is_the_same_whatever_it_trains_in_what_batches(tmp_path):
    tiny, mini = (
        {**DEFAULTS, "zero_optimization.reduce_bucket_size": hidden**2, "train_batch_size": batch}
        for hidden, batch in ((128, 8), (256, 16))
    )
    records = [
        write(tmp_path, "tiny", tiny, size="tiny"),
        write(tmp_path, "mini", mini, size="mini", config={**TEMPLATE["config"], "size": "mini"}),
    ]
    first, second = (facts.proven_strategy(record) for record in records)
    assert first == second
    assert first["zero_optimization.reduce_bucket_size"] == "auto"
    other = write(tmp_path, "other", {**tiny, "zero_optimization.overlap_comm": False})
    assert facts.proven_strategy(other) != first
