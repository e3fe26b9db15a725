"""`zero-study saved`: what transformers and PEFT load of a folder, in small models and adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from zero_study import saved as saving  # noqa: E402

# PEFT 0.21 asks transformers 5.23 for an attribute that is deprecated, and says that it saves embeddings.
pytestmark = [
    pytest.mark.computes,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
]

SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 40, "head_dim": 8,
}  # fmt: skip
UP, QUERY = "model.layers.0.mlp.up_proj.weight", "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
PROBE = "base_model.model."


def _model(name: str = "LlamaForCausalLM", **more: Any) -> Any:
    import transformers

    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**{**SMALL, **more}))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "base"
    _model().save_pretrained(folder)
    return folder


def _kinds(folder: Path, model: Path | None = None) -> set[str]:
    """Return the kinds of the faults in a folder."""
    return {each.kind for one in saving.read(folder, model=model) for each in one.findings if each.is_wrong}


def _edited(folder: Path, edit: Callable[[dict[str, Any]], Any], file: str = "model.safetensors") -> Path:
    tensors = load_file(folder / file)
    tensors = edit(tensors) or tensors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})
    return folder


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _renamed(change: Callable[[str], str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


# ---------------------------------------------------------------- names


def test_names_that_transformers_loads_under_another_prefix_are_right(base, tmp_path):
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    _edited(folder, _renamed(lambda name: name.removeprefix("model.")))
    assert _kinds(folder) == set()


def test_a_model_with_the_names_of_an_adapters_base_is_wrong(base, tmp_path):
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    _edited(folder, _renamed(lambda name: name.replace("q_proj.weight", "q_proj.base_layer.weight")))
    assert _kinds(folder) == {"missing", "unexpected"}


# ---------------------------------------------------------------- which file is loaded


@pytest.mark.parametrize("other", ["shards", "bin"])
@pytest.mark.parametrize("is_same", [True, False])
def test_a_second_model_in_the_folder_is_compared(other, is_same, base, tmp_path):
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    second = _model()
    if not is_same:
        torch.nn.init.normal_(second.model.norm.weight)
    if other == "bin":
        torch.save(second.state_dict(), folder / "pytorch_model.bin")
    else:
        second.save_pretrained(tmp_path / "second", max_shard_size="4KB")
        for path in (tmp_path / "second").glob("model*"):
            shutil.copy(path, folder)
    assert _kinds(folder) == (set() if is_same else {"different"})
    (read,) = saving.read(folder)
    assert {tensor.file for tensor in read.tensors.values()} == {"model.safetensors"}


def test_the_file_that_is_loaded_is_checked(base, tmp_path):
    folder = tmp_path / "model"
    _model().save_pretrained(folder, max_shard_size="4KB")
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in _model().state_dict().items()}
    save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})
    assert "not finite" in _kinds(folder)


@pytest.mark.parametrize("size", ["1GB", "4KB"])
def test_a_variant_is_read(size, tmp_path):
    _model().save_pretrained(tmp_path, variant="fp16", max_shard_size=size)
    (read,) = saving.read(tmp_path)
    assert (len(read.tensors), _kinds(tmp_path)) == (21, set())
    assert "fp16" in read.findings[0].text


def test_settings_of_another_program_are_no_model(tmp_path):
    (tmp_path / "config.json").write_text('{"strategy": "zero2"}')
    shutil.copytree(_saved(tmp_path / "checkpoints" / "model"), tmp_path / "x")
    assert _kinds(tmp_path) == set()


def _saved(folder: Path) -> Path:
    _model().save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- types and values


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "int64", "float8_e4m3fn", "float8_e5m2", "complex64"])
def test_types_that_loading_converts_without_a_scale(dtype, base, tmp_path):
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    _edited(folder, lambda tensors: {**tensors, UP: (tensors[UP] * 100).to(getattr(torch, dtype))})
    assert _kinds(folder) == {"dtype"}


def _halve(tensors: dict[str, Any]) -> None:
    for tensor in tensors.values():
        tensor.view(-1)[tensor.numel() // 2 :] = 0


def _clear_columns(tensors: dict[str, Any]) -> None:
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor[:, : tensor.shape[1] // 4] = 0


def _clear_norms(tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.zero_()


@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        (_halve, "zero"),
        (_clear_columns, "zero"),
        (_clear_norms, "zero"),
        (lambda tensors: {**tensors, UP: torch.full_like(tensors[UP], 3e38)}, "not finite"),
        (lambda tensors: {**tensors, UP: torch.full(tensors[UP].shape, complex("nan"))}, "not finite"),
    ],
)
def test_values_that_no_training_leaves(edit, kind, base, tmp_path):
    assert kind in _kinds(_edited(Path(shutil.copytree(base, tmp_path / "model")), edit))


def test_norms_that_start_at_zero_may_be_zero(tmp_path):
    _model("GemmaForCausalLM").save_pretrained(tmp_path)
    assert not load_file(tmp_path / "model.safetensors")["model.norm.weight"].any()
    assert _kinds(tmp_path) == set()


# ---------------------------------------------------------------- tokens


def _tokenizer(folder: Path, words: list[str]) -> None:
    vocab = {word: at for at, word in enumerate(words)}
    added = [{"id": at, "content": word} for word, at in vocab.items() if word.startswith("<")]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        (40 * ["w"], set()),
        (41 * ["w"], {"partial"}),
        ([*(40 * ["w"]), "<pad>"], {"partial"}),
        ([*(40 * ["w"]), "<image_soft_token>"], set()),  # as Gemma 3 has, whose model of texts has no embedding for it
    ],
)
def test_each_token_needs_an_embedding(words, kinds, base, tmp_path):
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    _tokenizer(folder, [f"w{at}" if word == "w" else word for at, word in enumerate(words)])
    assert _kinds(folder) == kinds


@pytest.mark.parametrize("value", [40, [2, 99]])
def test_generation_needs_tokens_that_exist(value, base, tmp_path):
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    _change(folder / "generation_config.json", eos_token_id=value)
    assert _kinds(folder) == {"partial"}


def test_a_number_that_the_model_cannot_be_built_with(base, tmp_path):
    folder = Path(shutil.copytree(base, tmp_path / "model"))
    _change(folder / "config.json", pad_token_id=40)
    (folder / "generation_config.json").unlink()
    assert _kinds(folder) == {"partial"}


# ---------------------------------------------------------------- adapters


def _adapter(folder: Path, base: Path, name: str = "LlamaForCausalLM", **settings: Any) -> Path:
    """Save an adapter with random values, and return its folder."""
    import peft
    import transformers

    model = getattr(transformers, name).from_pretrained(base)
    values = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], **settings}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**values))
    torch.manual_seed(0)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(folder)
    return folder


def _without_base(folder: Path) -> None:
    _change(folder / "adapter_config.json", base_model_name_or_path="nobody/nothing")


FILE = "adapter_model.safetensors"
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    "change",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: PROBE + name,
        lambda name: name.removeprefix(PROBE),
        lambda name: name.replace(PROBE, f"{PROBE}_orig_mod.", 1),
        lambda name: name.replace("self_attn", "_fsdp_wrapped_module.self_attn"),
    ],
)
@pytest.mark.parametrize("has_base", [True, False])
def test_names_that_peft_does_not_load(change, has_base, base, tmp_path):
    folder = _edited(_adapter(tmp_path / "adapter", base), _renamed(change), FILE)
    if not has_base:
        _without_base(folder)
    assert "unexpected" in _kinds(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"modules_to_save": ["norm"]},  # the end of the names of other norms, too
        {"trainable_token_indices": [1, 2, 3]},
        {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [3]}},
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}},
        {"target_modules": r".*layers\.1.*(q_proj|v_proj)"},
        {"target_modules": ["q_proj", "lm_head"]},
        {"init_lora_weights": "olora"},
    ],
)
@pytest.mark.parametrize("has_base", [True, False])
def test_intact_adapters(settings, has_base, base, tmp_path):
    folder = _adapter(tmp_path / "adapter", base, **settings)
    if not has_base:
        _without_base(folder)
    assert _kinds(folder) == set()
    (read,) = saving.read(folder)
    assert has_base == (read.unchecked == [])


def test_an_intact_classifier(base, tmp_path):
    # PEFT names both "classifier" and "score" in modules_to_save
    folder = _adapter(tmp_path / "adapter", base, "LlamaForSequenceClassification", task_type="SEQ_CLS")
    assert _kinds(folder) == set()
    _without_base(folder)
    assert _kinds(folder) == set()
    _edited(folder, lambda tensors: {name: tensors[name] for name in tensors if "score" not in name}, FILE)
    assert _kinds(folder) == {"missing"}


def test_tokens_of_tied_embeddings_are_saved_once(tmp_path):
    _model(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    assert _kinds(_adapter(tmp_path / "adapter", tmp_path / "base", trainable_token_indices=[1, 2])) == set()


def test_an_adapter_of_more_tokens_than_its_base(base, tmp_path):
    _model(vocab_size=44).save_pretrained(tmp_path / "larger")
    folder = _adapter(tmp_path / "adapter", tmp_path / "larger", modules_to_save=["embed_tokens", "lm_head"])
    (read,) = saving.read(folder, model=base)
    assert [(each.kind, each.is_wrong) for each in read.findings] == [("partial", False)]


@pytest.mark.parametrize(
    ("settings", "lost", "change"),
    [
        ({"use_dora": True}, "lora_magnitude", {}),
        ({"use_dora": True}, None, {"use_dora": False}),
        ({"modules_to_save": ["lm_head"]}, "lm_head", {}),
        ({"trainable_token_indices": [1, 2]}, "token_adapter", {}),
        ({"trainable_token_indices": [1, 2]}, None, {"trainable_token_indices": None}),
        ({"trainable_token_indices": [1, 2]}, None, {"trainable_token_indices": [1, 2, 3]}),
    ],
)
@pytest.mark.parametrize("has_base", [True, False])
def test_lost_parts_of_adapters(settings, lost, change, has_base, base, tmp_path):
    folder = _adapter(tmp_path / "adapter", base, **settings)
    _edited(folder, lambda tensors: {n: t for n, t in tensors.items() if lost is None or lost not in n}, FILE)
    _change(folder / "adapter_config.json", **change)
    if not has_base:
        _without_base(folder)
    assert _kinds(folder) != set()


@pytest.mark.parametrize("has_base", [True, False])
def test_matrices_of_fused_experts(has_base, tmp_path):
    _model("Qwen3MoeForCausalLM", **MIXTURE).save_pretrained(tmp_path / "base")
    folder = _adapter(tmp_path / "adapter", tmp_path / "base", "Qwen3MoeForCausalLM", **EXPERTS)
    if not has_base:
        _without_base(folder)
    assert _kinds(folder) == set()
    for lost in ("base_layer", "experts"):
        _edited(folder, lambda tensors, lost=lost: {n: t for n, t in tensors.items() if lost not in n}, FILE)
        assert _kinds(folder) == {"missing"}


def test_a_base_model_without_the_adapters_modules(base, tmp_path):
    _model("BertModel").save_pretrained(tmp_path / "other")
    assert _kinds(_adapter(tmp_path / "adapter", base, task_type=None), tmp_path / "other") == {"unexpected"}


@pytest.mark.parametrize("kind", ["IA3Config", "PromptTuningConfig", "VBLoRAConfig"])
def test_other_methods_than_lora(kind, base, tmp_path):
    import peft
    import transformers

    settings = {
        "IA3Config": {"target_modules": ["k_proj"], "feedforward_modules": []},
        "PromptTuningConfig": {"num_virtual_tokens": 4},
        "VBLoRAConfig": {"target_modules": ["q_proj"], "num_vectors": 8, "vector_length": 8},
    }[kind]
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **settings)).save_pretrained(tmp_path)
    assert _kinds(tmp_path) == set()
    _edited(tmp_path, _renamed(lambda name: f"module.{name}"), FILE)
    assert "unexpected" in _kinds(tmp_path) or kind == "PromptTuningConfig"
    assert _kinds(tmp_path) != set()
