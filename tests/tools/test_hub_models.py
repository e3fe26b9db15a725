"""Test the configurations of well-known models of the Hugging Face hub."""

from __future__ import annotations

import csv
from pathlib import Path

import hub_models
import hub_table
import pytest

from zero_study.theory import shapes
from zero_study.theory.shapes.counts import from_content

MODELS = hub_models.read()
# Their code reads the values of tensors, or needs long sequences (tools/derive/hub_table.py says why).
NOT_TRACED = {"deberta-base", "hubert-base", "longformer-base", "wav2vec2-base"}
KNOWN_MODELS = Path(__file__).parents[2] / "zero_study/theory/shapes/known_models.csv"


def test_names_and_hub_ids_are_unique_and_sorted():
    names = [model["name"] for model in MODELS]
    assert names == sorted(set(names))
    ids = [hub_id for model in MODELS for hub_id in model["hub_ids"]]
    assert len(ids) == len(set(ids))
    assert len(MODELS) >= 150


def test_entries_are_complete():
    for model in MODELS:
        assert set(model) - {"note"} == {"name", "hub_ids", "source", "parameters", "config"}, model["name"]
        assert model["hub_ids"], model["name"]
        assert model["source"], model["name"]
        assert model["parameters"] > 0, model["name"]
        assert isinstance(model["config"]["model_type"], str), model["name"]
        assert len(model["config"]["architectures"]) == 1, model["name"]


def test_known_models_keep_their_names():
    by_name = {model["name"]: model for model in MODELS}
    with KNOWN_MODELS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["hub_ids"]:
                assert set(row["hub_ids"].split()) <= set(by_name[row["name"]]["hub_ids"]), row["name"]


# One of each kind: dense, tied, mixture of experts, encoder, encoder-decoder, speech, vision, text with vision.
@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "qwen2.5-0.5b",
        "gpt-oss-20b",
        "bert-base",
        "t5-small",
        "whisper-tiny",
        "vit-base",
        "convnext-tiny",
        "clip-vit-base-patch32",
        "qwen3-vl-2b",
    ],
)
@pytest.mark.filterwarnings("ignore")  # transformers and torch warn of what they will change
def test_parameters_are_those_of_transformers(name):
    model = next(model for model in MODELS if model["name"] == name)
    assert hub_models.count(model["config"]) == model["parameters"]


def test_unknown_name_is_refused(capsys):
    assert hub_models.main(["bert-huge"]) == 2
    assert "bert-huge" in capsys.readouterr().err


def test_the_table_has_the_configurations_and_their_numbers_of_parameters():
    """Where this fails: python tools/derive/hub_table.py --write, with the names of the models that changed."""
    described = {model["name"]: model for model in MODELS}
    table = hub_table.read()
    assert set(table) == set(described) - NOT_TRACED
    for name, entry in table.items():
        assert entry["config"] == described[name]["config"], name
        assert entry["hub_ids"] == described[name]["hub_ids"], name
        counts = entry.get("counts")
        result = from_content(counts) if counts else shapes.from_config(entry["config"], name)
        assert result.num_params == described[name]["parameters"], name
