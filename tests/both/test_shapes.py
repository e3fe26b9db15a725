"""Test that counted shapes equal those that transformers builds, in order, and that every name of a model is found."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import config_defaults
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from study.training.weights import parameter_groups
from zero_study.errors import Refusal
from zero_study.theory import communication, computation, shapes
from zero_study.theory.engine import Engine, StepConfig
from zero_study.theory.shapes import config_json

LENGTH = 16
# Model types of which models as small as `small` makes them can be built; test_formulas.py has all.
TYPES = (
    "bert", "gpt2", "gpt_neo", "gptj", "llama", "mistral", "qwen2", "gemma", "gemma2", "qwen3", "gemma3_text",
    "qwen3_moe", "mixtral", "gpt_neox", "opt",
)  # fmt: skip
CLASSES = [(model_type, name) for model_type in TYPES for name in config_json.MODEL_TYPES[model_type].classes]
# A head of labels is not tied, whatever the setting.
SETTINGS: dict[str, tuple[bool, ...]] = {"tokens": (True, False), "sequence classes": (True,)}
TIED = [
    (model_type, name, tied)
    for model_type, name in CLASSES
    for tied in SETTINGS.get(config_json.MODEL_TYPES[model_type].classes[name], (False,))
]


def first_of_each_type(cases: list[Any]) -> list[Any]:
    """Return the cases as parameters of a test, marked `slow` but for the first one of each model type."""
    first = {case[0]: case for case in reversed(cases)}
    return [pytest.param(*case, marks=[] if first[case[0]] is case else pytest.mark.slow) for case in cases]


TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}  # the default ones lie outside so few words


def small(
    model_type: str, hidden: int = 24, layers: int = 6, feed_forward: int = 40, words: int = 101, positions: int = 32
) -> dict[str, Any]:
    """Settings of a small model. No two widths are equal, so that no two parameters could be exchanged unseen."""
    widths = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": feed_forward,
        "max_position_embeddings": positions, "vocab_size": words,
    }  # fmt: skip
    grouped = {**widths, "num_key_value_heads": 2}
    gpt = {"n_embd": hidden, "n_layer": layers, "n_head": 4, "n_positions": positions, "n_inner": feed_forward}
    headed = {**grouped, "head_dim": hidden // 4 + 2}
    own = {
        "bert": widths,
        "gpt2": {**gpt, "vocab_size": words},
        "gpt_neo": {
            "hidden_size": hidden, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
            "intermediate_size": feed_forward, "max_position_embeddings": positions, "vocab_size": words,
        },
        "gptj": {**gpt, "vocab_size": words, "rotary_dim": 4},
        "gpt_neox": {**widths, "hidden_size": max(hidden, 32)},  # heads of 8, of which a quarter is rotated
        "opt": {key.replace("intermediate_size", "ffn_dim"): value for key, value in widths.items()},
        "mixtral": {**grouped, "num_local_experts": 5, "num_experts_per_tok": 2},
        "qwen3_moe": {
            **headed, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": feed_forward // 2,
        },
        **dict.fromkeys(("llama", "qwen2"), grouped),
    }  # fmt: skip
    return {**TOKENS, **own.get(model_type, headed)}


def config_of(model_type: str, **settings):
    return AutoConfig.for_model(model_type, **{**small(model_type), **settings})


def shape_of(config, name: str) -> shapes.ModelShape:
    return shapes.from_config({**config.to_dict(), "architectures": [name]}, name)


def sizes_of(model: torch.nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(p.numel() for p in group["params"]) for group in parameter_groups(model, weight_decay=0.1))


@pytest.mark.parametrize(("model_type", "name", "tied"), TIED)
def test_parameters_of_every_class_are_counted_in_their_order(model_type, name, tied):
    config = config_of(model_type, tie_word_embeddings=tied, num_labels=5)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    shape = shape_of(config, name)
    if model_type == "opt":  # declares its last norm before the blocks
        assert [sorted(group) for group in shape.parameters.groups] == [sorted(group) for group in sizes_of(model)]
    else:
        assert shape.parameters.groups == sizes_of(model)
    assert shape.num_params == model.num_parameters()
    block = next(module[0] for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    assert shape.block_params == sum(p.numel() for p in block.parameters())
    assert shape.outside_params == shape.num_params - shape.layers * shape.block_params
    assert shape.counts.buffers == sum(b.numel() * b.element_size() for b in model.buffers())


@pytest.mark.parametrize(("model_type", "name", "tied"), first_of_each_type(TIED))
def test_every_parameter_of_every_class_is_sent(model_type, name, tied):
    """By stage 3, which goes from module to module, forward and backward; and by DDP, in the order of gradients."""
    shape = shape_of(config_of(model_type, tie_word_embeddings=tied), name)
    sizes = {"reduce_bucket_size": 10**6, "prefetch_bucket_size": 10**6}  # and nothing is held on to
    stage_3 = Engine("deepspeed", 3, 2, "fp32", 4, **sizes)
    sent = {c.kind: c.bytes for c in communication.collectives(stage_3, shape, StepConfig(1, 4))}
    padded = sum(n + n % 2 for group in shape.parameters.groups for n in group)
    again = shape.vocabulary * shape.hidden if shape.has_tied_head else 0
    assert sent["reduce_scatter"] == 4 * padded
    assert sent["all_gather"] == 4 * 2 * (padded + again)
    sent = {c.kind: c.bytes for c in communication.collectives(Engine("ddp", 0, 2, "fp32", 4), shape, StepConfig(1, 4))}
    assert sent["all_reduce"] == 4 * shape.num_params


@pytest.mark.parametrize(("model_type", "name"), first_of_each_type(CLASSES))
def test_flops_of_every_class_are_those_that_pytorch_counts(model_type, name):
    """Of a mixture of experts: of those that a token is sent to, whichever they are."""
    config = config_of(model_type, attn_implementation="eager", use_cache=False)
    config._experts_implementation = "eager"  # the counter has no formula for a grouped product
    model = getattr(transformers, name)(config)
    with FlopCounterMode(display=False) as counter:
        found = model(input_ids=torch.arange(LENGTH)[None] + 2)
        # Of BertModel that is the pooler's, which reads one token.
        found = next(
            found[key] for key in ("logits", "start_logits", "pooler_output", "last_hidden_state") if key in found
        )
        found.sum().backward()
    shape = shape_of(config, name)
    assert computation.model_flops_per_sequence(shape, LENGTH) == counter.get_total_flops()


# The sizes of the config.json that the hub has under these ids, as github.com/Lightning-AI/litgpt quotes them
# (litgpt/config.py, commit 26857050). What is to come out is asked of transformers itself.
LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_theta": 500000.0,
}  # fmt: skip
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
    "num_key_value_heads": 8, "max_position_embeddings": 40960, "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip
QWEN_3_MOE = {
    **QWEN_3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
GEMMA_3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 256}


def sized(shared: dict, layers: int, hidden: int, heads: int, feed_forward: int, **own) -> dict:
    key = {"qwen3_moe": "moe_intermediate_size"}.get(shared["model_type"], "intermediate_size")
    widths = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, key: feed_forward}
    return {**shared, **widths, **own}


PUBLISHED = {
    "meta-llama/Llama-3.1-8B, saved by transformers 5": sized(
        {key: value for key, value in LLAMA_3.items() if key != "rope_theta"}, 32, 4096, 32, 14336,
        rope_parameters={**SCALING, "rope_theta": 500000.0},
    ),
    "meta-llama/Llama-3.2-1B": sized(
        LLAMA_3, 16, 2048, 32, 8192, head_dim=64, tie_word_embeddings=True, rope_scaling={**SCALING, "factor": 32.0}
    ),
    "Qwen/Qwen3-30B-A3B": sized(QWEN_3_MOE, 48, 2048, 32, 768),
    "mistralai/Mixtral-8x7B-v0.1": sized(MIXTRAL, 32, 4096, 32, 14336, vocab_size=32000, max_position_embeddings=32768),
    "google/gemma-3-4b-it, its text_config": sized(
        GEMMA_3, 34, 2560, 8, 10240, num_key_value_heads=4, vocab_size=262208, sliding_window=1024,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("hub_id", PUBLISHED)
def test_published_models_have_the_parameters_that_transformers_builds(hub_id):
    content = PUBLISHED[hub_id]
    settings = {key: value for key, value in content.items() if key not in ("model_type", "architectures")}
    config = AutoConfig.for_model(content["model_type"], **settings)
    with torch.device("meta"):
        model = getattr(transformers, content["architectures"][0])(config)
    shape = shapes.from_config(content, hub_id)
    assert shape.num_params == model.num_parameters()
    assert shape.parameters.groups == sizes_of(model)
    # And as transformers would write the same file today.
    assert shapes.from_config({**config.to_dict(), "architectures": content["architectures"]}, hub_id) == shape


# Total and active parameters, of which their model cards say 47B and 13B, 30.5B and 3.3B.
MIXTURES = {"mistralai/Mixtral-8x7B-v0.1": (46_702_792_704, 12_879_925_248)}
MIXTURES |= {"Qwen/Qwen3-30B-A3B": (30_532_122_624, 3_353_032_704)}


@pytest.mark.parametrize("hub_id", MIXTURES)
def test_a_mixture_has_total_and_active_parameters(hub_id):
    shape = shapes.from_config(PUBLISHED[hub_id], hub_id)
    assert (shape.num_params, shape.active_params) == MIXTURES[hub_id]


# ---------------------------------------------------------------- known models, and files of others

LLAMA_FILE = {"model_type": "llama", **small("llama", layers=2), "hidden_act": "silu"}
# Parameters of published checkpoints; bert with the two-class head instead of its own. Each was also compared once,
# layer by layer, with transformers' on the meta device. Of LLM Foundry's others test_step_time.py has the MFU.
KNOWN = {
    "bert-tiny": 4_386_178, "bert-base": 109_483_778, "bert-large": 335_143_938, "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200, "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808, "gpt-neo-2.7b": 2_651_307_520, "gpt-j-6b": 6_050_882_784,
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768, "qwen2-1.5b": 1_543_714_304, "qwen2.5-7b": 7_615_616_512, "qwen2-72b": 72_706_203_648,
    "gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320, "mpt-7b": 6_658_859_008,
}  # fmt: skip


def test_known_models_have_their_published_number_of_parameters():
    assert {name: shapes.KNOWN[name].num_params for name in KNOWN} == KNOWN


@pytest.mark.parametrize(
    ("text", "written", "says"),
    [
        ("gtp2-xl", None, "similar names are gpt2-xl"),
        ("#", None, "known names are llama-3.1-8b"),
        ("a/b/c", None, "unknown model"),
        ("nowhere/config.json", None, "No such file"),
        ("x.json", b"\xff\xfe", "not JSON"),
        ("x.json", b"[1]", "does not contain a JSON object"),
        (".", None, "this folder has no config.json"),
    ],
)
def test_an_unknown_model_is_refused_in_one_line(text, written, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if written is not None:
        (tmp_path / text).write_bytes(written)
    with pytest.raises(ValueError, match=says) as refused:
        shapes.find(text)
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "falcon"}, "model_type 'falcon'. There are formulas for bert, gpt2"),
        ({"model_type": None}, "no model_type"),
        ({"vocab_size": None}, "vocab_size is None. Use a whole number"),
        ({"hidden_size": 24.0}, "hidden_size is 24.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"intermediate_size": None}, "intermediate_size is None"),
        ({"hidden_size": 26}, "hidden_size 26 is not a multiple of num_attention_heads 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'. Use true or false"),
        ({"hidden_act": 3}, "hidden_act is 3. Use the name"),
        ({"mlp_bias": 1}, "mlp_bias is 1. Use true or false"),
        ({"attention_bias": True, "mlp_bias": True}, "no formulas for llama with attention_bias and mlp_bias"),
        ({"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu', but there are formulas for gelu"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types is .*for 2 blocks of the kinds"),
        ({"model_type": "gemma2", "layer_types": ["a", "b"]}, "layer_types is .*of the kinds sliding_attention"),
        ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads is None"),
        ({"model_type": "gemma2", "head_dim": None}, "head_dim is None"),
        (
            {"model_type": "gpt2", "n_embd": 48},
            "n_embd is 48 and hidden_size is 24, but the two keys are the same setting. Remove one of them",
        ),
        ({"num_hidden_layers": 10**5}, "num_hidden_layers is 100000, which is more than any model has"),
        ({"model_type": "gemma3", "text_config": {}}, r"no formulas for model_type 'gemma3'"),
        (
            {"model_type": "bert", "architectures": ["BertForPreTraining"]},
            r"'BertForPreTraining'\], but there are formulas for",
        ),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"architectures": ["LlamaModel", "LlamaForCausalLM"]}, "architectures is "),
        ({"architectures": [{}]}, "architectures is "),
        ({"num_labels": 0}, "num_labels is 0"),
        ({"id2label": ["a"]}, "id2label is "),
        ({"id2label": {"0": "a"}, "num_labels": 2}, "num_labels is 2, but id2label has 1 names"),
        (
            {"model_type": "opt", "word_embed_proj_dim": 512},
            "word_embed_proj_dim is 512, but .* 24 only",
        ),  # as in opt-350m
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before is False"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_local_experts 8"),
        ({"model_type": "mixtral", "num_local_experts": None}, "num_local_experts is None"),
        ({"model_type": "gpt_neox", "attention_bias": False}, "attention_bias is False"),
    ],
)
def test_a_config_that_is_bad_or_not_counted_is_refused_in_one_line_that_names_the_key(change, says):
    with pytest.raises(ValueError, match=says) as refused:
        shapes.from_config(LLAMA_FILE | change, "some/config.json")
    assert str(refused.value).startswith("some/config.json: ")
    assert "\n" not in str(refused.value)


def test_what_real_files_leave_out_is_as_in_transformers():
    for left_out in ("num_key_value_heads", "tie_word_embeddings", "head_dim", "intermediate_size", "vocab_size"):
        content = {key: value for key, value in LLAMA_FILE.items() if key != left_out}
        shape = shapes.from_config(content, "x")
        config = AutoConfig.for_model(**content)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert shape.parameters.groups == sizes_of(model)
    for none in ("num_key_value_heads", "head_dim"):  # as where it is left out
        left_out = {key: value for key, value in LLAMA_FILE.items() if key != none}
        assert shapes.from_config(LLAMA_FILE | {none: None}, "x") == shapes.from_config(left_out, "x")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("layers: gemma3", "layers: gemma4", ", gemma3_text: layers='gemma4': config_json.py has rules for gemma2, "),
        ("LlamaModel,", "LlamaBody,", ", llama: classes: LlamaBody must end with one of ForCausalLM, "),
        ("[kv_heads, head_size]", "[kv_head, head_size]", ", llama: derived names kv_head, for which keys has no key"),
        ("activations: [gelu_new]", "activations: [gelu]", ", gpt_neo: activations names 'gelu', which is no kind of "),
        ("vocabulary: vocab_size, ", "", ", bert: keys.vocabulary is missing"),
        ("layers: num_layers", "blocks: num_layers", ", gpt_neo: keys.blocks is no part of a shape"),
        ("    window_switch:", "    window:", ", qwen2: unknown key 'window'"),
        ("default_targets: [c_attn]", "default_targets: c_attn", ", gpt2: default_targets='c_attn': input should be "),
        ("w2: down_proj", "w2: down", ", mixtral: expert_names.w2='down': input should be 'gate', "),
        ("\nmodel_types:", "\ntypes:", ": `model_types` must have an entry for each model_type"),
        ("  phi3:\n", "  phi:\n", ": cannot be read as YAML (line "),
    ],
)
def test_a_wrong_model_type_is_refused_with_its_name(old, new, says, tmp_path):
    text, path = config_json.MODEL_TYPES_FILE.read_text(), tmp_path / "model_types.yaml"
    path.write_text(text.replace(old, new, 1))
    assert path.read_text() != text
    with pytest.raises(Refusal) as refused:
        config_json.read_model_types(path)
    assert str(refused.value).startswith(f"{path}{says}")


def test_defaults_are_those_of_the_classes_in_transformers():
    """All that a shape is read from. Where a new version differs, tools/derive/config_defaults.py mends it."""
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
