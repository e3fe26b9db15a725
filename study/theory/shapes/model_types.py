"""Which models of `transformers` are counted, and what does a config.json call the parts of their shape?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from study.theory.shapes.sizes import Architecture, Head

# How most files call the parts of a shape.
_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "positions": "max_position_embeddings",
    "feed_forward": "intermediate_size",
    "activation": "hidden_act",
    "vocabulary": "vocab_size",
    "tied": "tie_word_embeddings",
}
# These are understood in every file (its class's attribute_map).
_EVERYWHERE = {part: _KEYS[part] for part in ("hidden", "layers", "heads", "positions")} | {"experts": "num_experts"}
_LLAMA_KEYS = {**_KEYS, "kv_heads": "num_key_value_heads", "head_size": "head_dim"}
_EXPERT_KEYS = {**_LLAMA_KEYS, "experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
_GPT2_KEYS = {
    **_KEYS,
    "hidden": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "positions": "n_positions",
    "feed_forward": "n_inner",
    "activation": "activation_function",
}
_GPT_NEO_KEYS = {**_KEYS, "layers": "num_layers", "heads": "num_heads", "activation": "activation_function"}
# What the defaults of several types have in common.
_OF_7B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
_MISTRAL = {
    **_OF_7B, "vocab_size": 32000, "num_key_value_heads": 8, "head_dim": None, "intermediate_size": 14336,
    "max_position_embeddings": 131072,
}  # fmt: skip
_QWEN2 = {
    **_OF_7B, "vocab_size": 151936, "num_key_value_heads": 32, "intermediate_size": 22016,
    "max_position_embeddings": 32768,
}  # fmt: skip


@dataclass(frozen=True)
class ModelType:
    """What a model_type's config.json calls the parts of a shape, and what it means where it leaves one out."""

    architecture: Architecture
    classes: dict[str, Head]  # that `architectures` may name; the first is meant where it names none
    keys: dict[str, str]  # by part of a shape
    defaults: dict[str, Any]  # by key; of transformers 5.23, models/*/configuration_*.py
    derived: frozenset[str] = frozenset()  # parts that may be null: 4 hidden, as many as heads, hidden / heads
    counted: dict[str, Any] = field(default_factory=dict)  # beside COUNTED, or otherwise
    window_switch: str | None = None  # the setting without which its sliding_window is not meant

    @property
    def synonyms(self) -> dict[str, str]:
        """The usual key of what this type calls otherwise, with the type's own."""
        return {usual: self.keys[part] for part, usual in _EVERYWHERE.items() if self.keys.get(part, usual) != usual}


def _decoder(prefix: str, output: str = "ForCausalLM", labels_tokens: bool = True) -> dict[str, Head]:
    """Name a decoder's classes as most of them are named."""
    classes: dict[str, Head] = {
        f"{prefix}{output}": "tokens",
        f"{prefix}Model": "none",
        f"{prefix}ForSequenceClassification": "sequence classes",
    }
    return {**classes, f"{prefix}ForTokenClassification": "token classes"} if labels_tokens else classes


MODEL_TYPES = {
    "bert": ModelType(
        "bert",
        {
            "BertForSequenceClassification": "sequence classes", "BertForMaskedLM": "tokens", "BertModel": "none",
            "BertForTokenClassification": "token classes", "BertForQuestionAnswering": "token classes",
        },
        _KEYS,
        {
            "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
            "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": ModelType(
        "gpt2",
        _decoder("GPT2", "LMHeadModel"),
        _GPT2_KEYS,
        {
            "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": None,
            "activation_function": "gelu_new", "tie_word_embeddings": True,
        },
        derived=frozenset({"feed_forward"}),
    ),
    "gpt_neo": ModelType(
        "gpt-neo",
        _decoder("GPTNeo"),
        _GPT_NEO_KEYS,
        {
            "vocab_size": 50257, "hidden_size": 2048, "num_layers": 24, "num_heads": 16,
            "max_position_embeddings": 2048, "intermediate_size": None, "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
        derived=frozenset({"feed_forward"}),
    ),
    "gptj": ModelType(
        "gpt-j",
        _decoder("GPTJ", labels_tokens=False),
        _GPT2_KEYS,
        {
            "vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "n_inner": None,
            "activation_function": "gelu_new", "tie_word_embeddings": False,
        },
        derived=frozenset({"feed_forward"}),
    ),
    "llama": ModelType(
        "llama",
        _decoder("Llama"),
        _LLAMA_KEYS,
        {
            **_OF_7B, "vocab_size": 32000, "num_key_value_heads": None, "head_dim": None, "intermediate_size": 11008,
            "max_position_embeddings": 2048,
        },
        derived=frozenset({"kv_heads", "head_size"}),
    ),
    "mistral": ModelType(
        "mistral",
        _decoder("Mistral"),
        _LLAMA_KEYS,
        _MISTRAL,
        derived=frozenset({"head_size"}),
    ),
    "qwen2": ModelType(
        "qwen2",
        _decoder("Qwen2"),
        _LLAMA_KEYS,
        _QWEN2,
        derived=frozenset({"kv_heads", "head_size"}),
        window_switch="use_sliding_window",
    ),
    "gemma2": ModelType(
        "gemma2",
        _decoder("Gemma2"),
        {**_LLAMA_KEYS, "activation": "hidden_activation"},
        {
            "vocab_size": 256000, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
            "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "tie_word_embeddings": True,
        },
    ),
    "qwen3": ModelType(
        "qwen3",
        _decoder("Qwen3"),
        _LLAMA_KEYS,
        {**_QWEN2, "head_dim": 128},
        derived=frozenset({"kv_heads"}),
        window_switch="use_sliding_window",
    ),
    "gemma3_text": ModelType(
        "gemma3",
        {
            "Gemma3ForCausalLM": "tokens", "Gemma3TextModel": "none",
            "Gemma3TextForSequenceClassification": "sequence classes",
        },
        {**_LLAMA_KEYS, "activation": "hidden_activation"},
        {
            "vocab_size": 262208, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
            "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "tie_word_embeddings": True,
        },
        counted={"use_bidirectional_attention": False},
    ),
    "mixtral": ModelType(
        "mixtral",
        _decoder("Mixtral"),
        _EXPERT_KEYS,
        {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2},
        derived=frozenset({"kv_heads", "head_size"}),
    ),
    "qwen3_moe": ModelType(
        "qwen3-moe",
        _decoder("Qwen3Moe"),
        {**_EXPERT_KEYS, "feed_forward": "moe_intermediate_size"},
        {
            "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
            "num_key_value_heads": 4, "moe_intermediate_size": 768, "hidden_act": "silu",
            "max_position_embeddings": 32768, "tie_word_embeddings": False, "num_local_experts": 128,
            "num_experts_per_tok": 8,
        },
        derived=frozenset({"head_size"}),
        counted={"decoder_sparse_step": 1, "mlp_only_layers": []},
        window_switch="use_sliding_window",
    ),
    "gpt_neox": ModelType(
        "gpt-neox",
        _decoder("GPTNeoX"),
        _KEYS,
        {
            "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
            "intermediate_size": 24576, "hidden_act": "gelu", "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
        counted={"attention_bias": True},
    ),
    "opt": ModelType(
        "opt",
        _decoder("OPT", labels_tokens=False),
        {**_KEYS, "feed_forward": "ffn_dim", "activation": "activation_function"},
        {
            "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
            "ffn_dim": 3072, "activation_function": "relu", "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        counted={
            "do_layer_norm_before": True, "_remove_final_layer_norm": False, "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
    ),
}  # fmt: skip
# Settings that add parameters, or change what is multiplied, with the one value of each that is counted: the default.
COUNTED = {"type_vocab_size": 2, "add_cross_attention": False, "attention_bias": False, "mlp_bias": False}
# What is asked for and not counted, with what to say of it.
REFUSED = {
    "t5": "an encoder and a decoder, which are not counted",
    "modernbert": "an encoder whose blocks differ, which is not counted",
    "gemma3": "text and images in one model, which is not counted; its text alone is: make a config.json of its "
    'text_config, with model_type "gemma3_text"',
}
