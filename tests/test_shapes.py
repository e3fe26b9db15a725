"""Are parameters counted as transformers builds them, in its order, and are models found by all their names?"""

from __future__ import annotations

import dataclasses
import json
import sys
from types import SimpleNamespace

import config_defaults
import pytest
import torch
from test_architectures import GROUPED, sizes_of
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from study.theory import shapes
from study.theory.shapes import config_json

LLAMA_FILE = {"model_type": "llama", **GROUPED, "num_hidden_layers": 2, "hidden_act": "silu"}


# Of the published checkpoints; bert with the two-class head instead of its own. Each known model, layer by layer, was
# also compared once with transformers' model on the meta device.
PUBLISHED = {
    "bert-tiny": 4_386_178,
    "bert-base": 109_483_778,
    "bert-large": 335_143_938,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
    "gpt-j-6b": 6_050_882_784,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    # Those of LLM Foundry's benchmark tables give the published MFU: test_step_time.py.
    "mpt-7b": 6_658_859_008,
}


def test_known_models_have_their_published_number_of_parameters():
    assert {name: shapes.KNOWN[name].num_params for name in PUBLISHED} == PUBLISHED


def test_another_hub_id_is_asked_of_the_hub(monkeypatch):
    asked, config = [], AutoConfig.for_model("gpt2", n_embd=24, n_head=4)
    of_hub = SimpleNamespace(from_pretrained=lambda hub_id: asked.append(hub_id) or config)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoConfig=of_hub))
    assert shapes.find("somebody/Some-GPT").hidden == 24
    assert asked == ["somebody/Some-GPT"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gtp2-xl", "near are gpt2-xl"),
        ("#", "known are bert-tiny"),
        ("a/b/c", "unknown model"),
        ("nowhere/config.json", "No such file"),
    ],
)
def test_an_unknown_model_is_refused_in_one_line(text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says) as refused:
        shapes.find(text)
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("written", "says"),
    [(b"\xff\xfe", "not JSON"), (b"[1]", "no JSON object"), (None, "a folder without a config.json")],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, written, says):
    path = tmp_path
    if written is not None:
        path = tmp_path / "x.json"
        path.write_bytes(written)
    with pytest.raises(ValueError, match=says):
        shapes.find(str(path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "falcon"}, "model_type 'falcon'; give a config.json of bert, gpt2"),
        ({"model_type": None}, "no model_type"),
        ({"vocab_size": None}, "vocab_size is None; give a whole number"),
        ({"hidden_size": 24.0}, "hidden_size is 24.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"intermediate_size": None}, "intermediate_size is None"),
        ({"hidden_size": 26}, "hidden_size 26 is not a multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; give true or false"),
        ({"hidden_act": 3}, "hidden_act is 3; give its name"),
        ({"attention_bias": True}, "attention_bias is True, which is not counted; only False is"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads is None"),
        ({"model_type": "gemma2", "head_dim": None}, "head_dim is None"),
        ({"model_type": "gpt2", "n_embd": 48}, "n_embd is 48 and hidden_size 24, which are one setting; leave one out"),
        ({"num_hidden_layers": 10**5}, "num_hidden_layers is 100000, more than any model's"),
    ],
)
def test_a_bad_config_is_refused_in_one_line_that_names_the_key(change, says):
    with pytest.raises(ValueError, match=says) as refused:
        shapes.from_config(LLAMA_FILE | change, "some/config.json")
    assert str(refused.value).startswith("some/config.json: ")
    assert "\n" not in str(refused.value)


def test_what_real_files_leave_out_is_as_in_transformers():
    for left_out in ("num_key_value_heads", "tie_word_embeddings", "head_dim", "intermediate_size", "vocab_size"):
        content = {key: value for key, value in LLAMA_FILE.items() if key != left_out}
        shape = shapes.from_config(content, "x")
        config = AutoConfig.for_model(**content, bos_token_id=0, eos_token_id=1)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert shape.parameters.groups == sizes_of(model)
    for none in ("num_key_value_heads", "head_dim"):  # as where it is left out
        left_out = {key: value for key, value in LLAMA_FILE.items() if key != none}
        assert shapes.from_config(LLAMA_FILE | {none: None}, "x") == shapes.from_config(left_out, "x")


def test_defaults_are_those_of_the_classes_in_transformers():
    """All that a shape is read from; where a new version of the library differs, tools/config_defaults.py mends it."""
    classes = config_defaults.classes()
    assert json.loads(config_json.DEFAULTS_FILE.read_text()) == classes
    for name, model_type in config_json.MODEL_TYPES.items():
        fields = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[name])}
        # Qwen2 takes head_dim, and has no field for it.
        assert {*model_type.keys.values()} - {*classes[name]["defaults"]} <= {"head_dim"}
        counted = {**config_json.COUNTED, **model_type.counted}
        assert {key: fields.get(key, value) or value for key, value in counted.items()} == counted


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "gptj"])
def test_the_usual_keys_are_understood_in_every_file(name):
    """As the class's attribute_map has it: unread they would leave the default in their place."""
    usual = {"model_type": name, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = shapes.from_config(usual | {"max_position_embeddings": 32}, "x")
    assert (shape.hidden, shape.layers, shape.heads, shape.positions) == (24, 2, 4, 32)
