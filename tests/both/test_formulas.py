"""Test that the formulas of common architectures give the numbers of a trace, and answer without PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys

import architecture_formulas as tool
import pytest
from transformers import CONFIG_MAPPING

from zero_study.dryrun import count
from zero_study.theory import shapes
from zero_study.theory.shapes import config_json, formulas
from zero_study.theory.shapes.config_json import MODEL_TYPES

SEED = 1000  # of models that no formula was fitted to
# Relative errors that are accepted. A trace leaves out what comes from the weights, which kernels of the backward pass
# move too. Peaks in eager attention are not compared here, because a trace sees only those of its own lengths.
USUAL = {"moved_backward": 0.03, "moved_forward": 0.006, "kernels": 0.03}
LOOSE = {
    ("gemma2", "temporary"): 0.35, ("qwen2_moe", "temporary"): 0.1, ("gpt_neox", "temporary"): 0.01,
    ("gemma", "moved_forward"): 0.01, ("gemma3_text", "moved_forward"): 0.02, ("gemma3_text", "saved"): 0.005,
    ("modernbert", "moved_forward"): 0.1,
}  # fmt: skip


def content_of(name: str, class_name: str) -> dict:
    config = tool._config(name, tool.draw(name, SEED), "", bool(CONFIG_MAPPING[name]().tie_word_embeddings))
    return {**config.to_dict(), "architectures": [class_name]}


def tolerance(name: str, quantity: str) -> float:
    number = quantity.rpartition(" ")[2]
    return LOOSE.get((name, number), USUAL.get(number, 1e-4))


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.nightly] * (each != "llama")) for each in tool.NAMES]
)
def test_formulas_give_every_number_of_a_trace(name, monkeypatch):
    monkeypatch.setattr(tool, "LENGTHS", count.LENGTHS)
    monkeypatch.setattr(tool, "BOTH_LENGTHS", (count.LENGTHS, count.LENGTHS))
    class_name = next(each for each, head in MODEL_TYPES[name].classes.items() if head == "tokens")
    content = content_of(name, class_name)
    counts = shapes.from_config(content, name).counts
    numbers, traced = tool.Traces(None).sample(name, SEED, class_name, content["tie_word_embeddings"], "", True)
    for part in ("before", "after", "executed", "copies", "hidden", "output", "embedding", "tied", "buffers"):
        assert getattr(counts, part) == getattr(traced, part), part
    assert counts.num_params == traced.num_params
    assert counts.active_params == traced.active_params
    assert counts.logits.of(1, 2048) == pytest.approx(traced.logits.of(1, 2048))
    blocks = formulas.architectures()[name]["blocks"][""]
    for kind, part in zip(dict.fromkeys(tool.kinds_of(name)), traced.kinds, strict=True):
        errors = tool.part_errors(blocks[kind], numbers, part)
        wrong = {key: error for key, error in errors.items() if error > tolerance(name, key)}
        assert [key for key in wrong if not key.endswith("eager temporary")] == []


@pytest.mark.launches
@pytest.mark.parametrize(
    "names", [tool.NAMES[::6], pytest.param(tool.NAMES, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_configs_are_answered_without_torch(names, tmp_path):
    """Of every model type, with nothing in the file but its class."""
    for name in names:
        content = {"model_type": name, "architectures": [next(iter(MODEL_TYPES[name].classes))]}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from zero_study.cli import run\n"
        "for path in sys.argv[1:]:\n"
        "    assert run(['advise', '--model', path, '--gpu', 'h200', '--gpus', '8']) in (0, 1), path\n"
    )
    paths = sorted(map(str, tmp_path.glob("*.json")))
    result = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True, check=False)
    errors = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]  # progress on a slow machine
    assert (result.returncode, errors) == (0, [])
    assert result.stdout.count("GiB") > len(paths)


def test_a_changed_shape_is_that_of_the_changed_configuration():
    llama, wide = shapes.find("llama-2-7b"), {"layers": 3, "feed_forward": 13824, "vocabulary": 68762}
    content = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3,
        "intermediate_size": 13824, "vocab_size": 68762, "max_position_embeddings": 4096,
    }  # fmt: skip
    assert shapes.replace_parts(llama, name="x", **wide) == shapes.from_config(content, "x")
    assert shapes.replace_parts(llama, architecture="qwen3").num_params == 2 * 32 * 128 + llama.num_params


def test_every_model_type_has_formulas_for_its_classes():
    content = formulas.architectures()
    assert set(content) == set(tool.NAMES)
    for name in tool.NAMES:
        kind = config_json.MODEL_TYPES[name]
        tokens = [each for each, head in kind.classes.items() if head == "tokens"]
        assert set(content[name]["outsides"]) == {*kind.classes, *(f"{each} tied" for each in tokens)}
        assert set(content[name]["blocks"]) == set(tool.variants_of(name))
