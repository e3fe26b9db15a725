"""Tables of predictions: all of them look predicted, and nothing that does not fit has a number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from reported import read as text_of
from reported import row_of
from synthetic import write_run

from study.compare import expected, table
from study.errors import Refusal
from study.files import write_json
from study.report import predicted_tables as pages
from study.running.predictions import PredictedBox, PredictedRun, PredictedStudy, UnpredictedRun

GIB = 2**30


def prediction(
    strategy: str = "zero2", world_size: int = 2, peak: float = 10, usable: float = 38, **other
) -> PredictedRun:
    """A prediction of round numbers; peak and usable are in GiB."""
    values = {
        "workload": "bert-imdb", "size": "large", "strategy": strategy, "world_size": world_size, "precision": "fp32",
        "global_batch_size": 16, "sequence_length": 128, "dropout": 0.0, "attention": "sdpa",
        "micro_batch_size": 8, "gradient_accumulation_steps": 1, "num_params": 1000, "fits": peak <= usable,
        "peak_bytes_per_gpu": int(peak * GIB), "usable_bytes": int(usable * GIB),
        "free_bytes": int((usable - peak) * GIB), "moment": "last block",
        "parts": {"parameters": GIB, "activations": int((peak - 1) * GIB)},
        "seconds_per_step": peak / 10, "seconds_low": peak / 15, "seconds_high": peak * 0.15,
        "tokens_per_second_per_gpu": 1000.0, "mfu": 0.4, "collective_bytes": 10,
    }  # fmt: skip
    return PredictedRun(**{**values, **other})


def left_out(**other) -> UnpredictedRun:
    shared = prediction(**other).model_dump(include=set(UnpredictedRun.model_fields))
    return UnpredictedRun(**shared, why="bf16: t4 has no unit for it")


def write(folder: Path, *ones, gpu: str = "a100-40gb", num_gpus: int = 2, study: str = "multi-gpu") -> Path:
    made = PredictedStudy(
        study=study, box=PredictedBox(gpu=gpu, num_gpus=num_gpus), made_with={"zero-study": "0"}, command=["x"],
        predictions=[one for one in ones if isinstance(one, PredictedRun)],
        left_out=[one for one in ones if isinstance(one, UnpredictedRun)],
    )  # fmt: skip
    path = folder / f"{gpu}-{num_gpus}x" / f"{study}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, made.model_dump(mode="json"))
    return path


@pytest.fixture
def several(tmp_path) -> pd.DataFrame:
    """Two boxes of two GPUs: on the smaller one zero3 does not fit, and of ddp nothing is known."""
    ones = [prediction("single", 1, 12), prediction("zero2"), prediction("zero3", peak=40, host_bytes=3 * GIB)]
    write(tmp_path, *ones, left_out(strategy="ddp"))
    write(tmp_path, *(prediction(one.strategy, one.world_size, one.peak_bytes_per_gpu / GIB, 78) for one in ones),
          gpu="a100-80gb")  # fmt: skip
    return expected.read_predicted([tmp_path])


# ---------------------------------------------------------------- reading


def test_refuses_what_is_no_prediction(tmp_path):
    path = write(tmp_path / "one", prediction())
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(Refusal, match=r"multi-gpu on 2 x A100-SXM4-40GB is predicted in .*one.* too; give one of them"):
        expected.read_predicted([tmp_path / "one", tmp_path / "two"])
    content = json.loads(path.read_text())
    for change, message in (
        ({"status": "ok"}, r"status='ok': input should be 'predicted'"),
        ({"schema_version": 9}, "schema_version 9"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"box": {"gpu": "a200", "num_gpus": 2}}, r"box\.gpu='a200' is unknown; known are t4"),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(Refusal, match=rf"multi-gpu\.json: {message}"):
            expected.read_predicted([tmp_path / "one"])
    path.write_text("{")
    with pytest.raises(Refusal, match=r"multi-gpu\.json: cannot be read as JSON"):
        expected.read_predicted([tmp_path / "one"])


def test_measured_and_predicted_do_not_mix(tmp_path):
    write(tmp_path / "predicted", prediction())
    write_run(tmp_path / "measured", strategy="ddp")
    assert table.read([tmp_path])["strategy"].tolist() == ["ddp"]
    with pytest.raises(Refusal, match="no record below"):
        table.read([tmp_path / "predicted"])
    with pytest.raises(Refusal, match=r"\.json: "):
        expected.read_predicted([tmp_path / "measured"])


# ---------------------------------------------------------------- tables


def test_memory_says_what_does_not_fit(several):
    shown = pages.predicted_memory(several[several["box"] == "2 x A100-SXM4-40GB"])
    assert row_of(shown, "zero2") == "≈ 10.0"
    assert row_of(shown, "single") == "≈ 12.0"
    assert row_of(shown, "zero3") == "does not fit (short of 2 GiB)"
    assert row_of(shown, "ddp") == "not predicted"
    text = text_of(shown)
    assert "Not predicted: 1 of 4 (bf16: t4 has no unit for it)" in text
    assert "Predicted peak memory of a rank, GiB: bert-imdb large, fp32, length 128" in text
    assert row_of(pages.predicted_memory(several[several["num_gpus"] == 2][4:]), "zero3") == "≈ 40.0"


def test_times_have_intervals(several):
    shown = pages.predicted_times(several)
    assert row_of(shown, "zero2") == "≈ 1.00 0.667 to 1.50"
    assert row_of(shown, "zero3") == "does not fit (short of 2 GiB)"
