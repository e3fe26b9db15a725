"""Is every class of transformers that is counted built as counted: its parameters in their order, and its FLOPs?"""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from study.theory import communication, flops, shapes
from study.theory.case import Engine, Job
from study.theory.communication.buckets import buffer_bytes
from study.theory.shapes import config_json
from study.training.weights import parameter_groups

LENGTH = 16
# Widths that differ from each other, so that no two parameters could be exchanged unseen.
WIDTHS = {
    "hidden_size": 24, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 32, "vocab_size": 101,
}  # fmt: skip
GROUPED = {**WIDTHS, "num_key_value_heads": 2}
GPT = {"n_embd": 24, "n_layer": 6, "n_head": 4, "n_positions": 32, "n_inner": 40, "vocab_size": 101}
SMALL = {
    "bert": WIDTHS,
    "gpt2": GPT,
    "gpt_neo": {
        "hidden_size": 24, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "intermediate_size": 40, "max_position_embeddings": 32, "vocab_size": 101,
    },
    "gptj": {**GPT, "rotary_dim": 4},
    "gpt_neox": {**WIDTHS, "hidden_size": 32},  # heads of 8, of which a quarter is rotated
    "opt": {key.replace("intermediate_size", "ffn_dim"): value for key, value in WIDTHS.items()},
    "llama": GROUPED,
    "mistral": {**GROUPED, "head_dim": 8},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma2": {**GROUPED, "head_dim": 8},
    "gemma3_text": {**GROUPED, "head_dim": 8},
    "mixtral": {**GROUPED, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {**GROUPED, "head_dim": 8, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
}  # fmt: skip
CLASSES = [(model_type, name) for model_type, known in config_json.MODEL_TYPES.items() for name in known.classes]
# A head of labels is not tied, whatever the setting.
SETTINGS: dict[str, tuple[bool, ...]] = {"tokens": (True, False), "sequence classes": (True,)}
TIED = [
    (model_type, name, tied)
    for model_type, name in CLASSES
    for tied in SETTINGS.get(config_json.MODEL_TYPES[model_type].classes[name], (False,))
]


def config_of(model_type: str, **settings):
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}  # the default ones lie outside so few words
    return AutoConfig.for_model(model_type, **{**SMALL[model_type], **tokens, **settings})


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
    assert shape.parameters.groups == sizes_of(model)
    assert shape.num_params == model.num_parameters()
    block = next(module[0] for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    assert shape.block_params == sum(p.numel() for p in block.parameters())
    assert shape.outside_params == shape.num_params - shape.layers * shape.block_params
    if model_type != "gptj":  # whose 64 rotated dimensions are no setting here
        assert buffer_bytes(shape) == sum(b.numel() * b.element_size() for b in model.buffers())


@pytest.mark.parametrize(("model_type", "name", "tied"), TIED)
def test_every_parameter_of_every_class_is_sent(model_type, name, tied):
    """By stage 3, which goes from module to module, forward and backward; and by DDP, in the order of gradients."""
    shape = shape_of(config_of(model_type, tie_word_embeddings=tied), name)
    sizes = {"reduce_bucket_size": 10**6, "prefetch_bucket_size": 10**6}  # and nothing is held on to
    stage_3 = Engine("deepspeed", 3, 2, "fp32", 4, **sizes)
    sent = {c.kind: c.bytes for c in communication.collectives(stage_3, shape, Job(1, 4))}
    padded = sum(n + n % 2 for group in shape.parameters.groups for n in group)
    again = shape.vocabulary * shape.hidden if shape.has_tied_head else 0
    assert sent["reduce_scatter"] == 4 * padded
    assert sent["all_gather"] == 4 * 2 * (padded + again)
    ddp = Engine("ddp", 0, 2, "fp32", 4)
    assert {c.kind: c.bytes for c in communication.collectives(ddp, shape, Job(1, 4))}["all_reduce"] == 4 * (
        shape.num_params
    )


@pytest.mark.parametrize(("model_type", "name"), CLASSES)
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
    assert flops.model_flops_per_sequence(shape, LENGTH) == counter.get_total_flops()


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


@pytest.mark.parametrize(
    ("hub_id", "total", "active"),
    [  # of which their model cards say 47B and 13B, 30.5B and 3.3B
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704, 12_879_925_248),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624, 3_353_032_704),
    ],
)
def test_a_mixture_has_total_and_active_parameters(hub_id, total, active):
    shape = shapes.from_config(PUBLISHED[hub_id], hub_id)
    assert (shape.num_params, shape.active_params) == (total, active)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model_type": "gemma3", "text_config": {}}, r"model_type 'gemma3' is text and images in one model"),
        ({"model_type": "bert", "architectures": ["BertForPreTraining"]}, r"'BertForPreTraining'\], which is not"),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"model_type": "llama", "architectures": ["LlamaModel", "LlamaForCausalLM"]}, "architectures is "),
        ({"model_type": "llama", "architectures": [{}]}, "architectures is "),
        ({"model_type": "llama", "num_labels": 0}, "num_labels is 0"),
        ({"model_type": "llama", "id2label": ["a"]}, "id2label is "),
        ({"model_type": "llama", "id2label": {"0": "a"}, "num_labels": 2}, "num_labels is 2, id2label names 1"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "word_embed_proj_dim is 512, .* only 768 is"),  # opt-350m
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before is False"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_local_experts 8"),
        ({"model_type": "mixtral", "num_local_experts": None}, "num_local_experts is None"),
        ({"model_type": "gpt_neox", "attention_bias": False}, "attention_bias is False"),
    ],
)
def test_what_is_not_counted_is_refused_by_name_in_one_line(content, says):
    with pytest.raises(ValueError, match=says) as refused:
        shapes.from_config(content, "some/config.json")
    assert str(refused.value).startswith("some/config.json: ")
    assert "\n" not in str(refused.value)
