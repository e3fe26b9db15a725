"""`zero-study saved`: values, tokens and types that no training can leave, in tiny folders without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from zero_study import cli  # noqa: E402
from zero_study import saved as saving  # noqa: E402
from zero_study.saved import content, deepspeed_zero, text, vocabulary  # noqa: E402

Tensors = dict[str, torch.Tensor]


def model() -> Tensors:
    """Return the weights of four layers, with norms that were trained."""
    torch.manual_seed(0)
    layers = {f"layers.{at}.{name}.weight": torch.randn(32, 32) * 0.1 for at in range(4) for name in ("up", "down")}
    norms = {f"layers.{at}.norm.weight": 1 + torch.randn(32) * 0.1 for at in range(4)}
    biases = {f"layers.{at}.norm.bias": torch.randn(32) * 0.1 for at in range(4)}
    return {**layers, **norms, **biases, "bn.running_var": torch.rand(8) + 0.1, "bn.running_mean": torch.randn(8)}


def lora() -> Tensors:
    torch.manual_seed(0)
    shapes = {"A.weight": (4, 32), "B.weight": (32, 4)}
    names = [f"base_model.model.layers.{at}.q_proj.lora_" for at in range(4)]
    tensors = {name + kind: torch.randn(shape) for name in names for kind, shape in shapes.items()}
    return {**tensors, **{f"{name}magnitude_vector": torch.rand(32) + 1 for name in names}}


def matrices(edit: Callable[[torch.Tensor], Any], part: str = "") -> Callable[[Tensors], Tensors]:
    """Return what replaces each matrix whose name contains a text."""
    return lambda tensors: {
        name: edit(value.clone()) if value.ndim > 1 and part in name else value for name, value in tensors.items()
    }


def fill(begin: float, end: float, source: float | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what replaces a part of a matrix by zeros, or by the elements from another place on."""

    def edit(value: torch.Tensor) -> torch.Tensor:
        flat = value.view(-1)
        start, stop = int(len(flat) * begin), int(len(flat) * end)
        first = None if source is None else int(len(flat) * source)
        flat[start:stop] = 0 if first is None else flat[first : first + stop - start].clone()
        return value

    return edit


def repeat_layer(tensors: Tensors) -> Tensors:
    copies = {name.replace(".1.", ".2."): value.clone() for name, value in tensors.items() if ".1." in name}
    return {**tensors, **copies}


def save(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """Save weights, or an adapter if there are settings of one."""
    folder.mkdir(exist_ok=True)
    if config:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "adapter_model" if config else "model"
    whole = {name: value.contiguous() for name, value in tensors.items()}
    save_file(whole, folder / f"{name}.safetensors", metadata={"format": "pt"})
    return folder


def kinds(folder: Path, is_wrong: bool = True) -> set[str]:
    return {each.kind for one in saving.read(folder) for each in one.findings if each.is_wrong == is_wrong}


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_dora": True}
PARTS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "shard 3 of 16 is zero": ("zero", fill(2 / 16, 3 / 16)),
    "shard 31 of 32 is zero": ("zero", fill(30 / 32, 31 / 32)),
    "the second half is the first": ("shards", fill(1 / 2, 1, 0)),
    "shard 5 of 16 is shard 2": ("shards", fill(4 / 16, 5 / 16, 1 / 16)),
}
VALUES: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    **{name: (kind, matrices(edit)) for name, (kind, edit) in PARTS.items()},
    "a layer twice": ("shards", repeat_layer),
    "integers": ("dtype", matrices(lambda value: (value * 40).round())),
    "a negative variance": ("not finite", lambda t: {**t, "bn.running_var": t["bn.running_var"] - 0.5}),
    "no variance": ("zero", lambda t: {**t, "bn.running_var": torch.zeros(8)}),
    "8 bits without scales": ("partial", matrices(lambda value: value.to(torch.float8_e4m3fn))),
}
NOTES: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "a loss scale": ("dtype", matrices(lambda value: value * 65536)),
    "8 bits in a wider type": ("dtype", matrices(lambda value: value.to(torch.float8_e4m3fn).float())),
    "a norm that was not trained": ("untrained", lambda t: {**t, "layers.3.norm.weight": torch.ones(32)}),
    "weight and bias of a norm are exchanged": ("different", lambda t: {
        **t, "layers.0.norm.weight": t["layers.0.norm.bias"], "layers.0.norm.bias": t["layers.0.norm.weight"]}),
    "rows of one matrix are zero": ("zero", matrices(fill(0, 3 / 4), "layers.2.up")),
}  # fmt: skip
ADAPTERS: dict[str, tuple[str, Callable[[Tensors], Tensors], dict[str, Any]]] = {
    **{f"half of {kind} is {what}": (found, matrices(fill(1 / 2, 1, source), f"lora_{kind}"), {})
       for kind in "AB" for what, found, source in (("zero", "zero", None), ("a copy", "shards", 0))},
    "magnitudes are zero": (
        "zero", lambda t: {name: value * ("magnitude" not in name) for name, value in t.items()}, {}),
    "alpha is zero": ("zero", dict, {"lora_alpha": 0}),
    "alpha of a module is zero": ("zero", dict, {"alpha_pattern": {"q_proj": 0}}),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values_that_no_training_leaves(name, tmp_path):
    kind, edit = VALUES[name]
    assert kinds(save(tmp_path / "sound", model())) == kinds(tmp_path / "sound", is_wrong=False) == set()
    assert kind in kinds(save(tmp_path / "wrong", edit(model())))


@pytest.mark.parametrize("name", NOTES)
def test_values_that_are_unusual(name, tmp_path):
    kind, edit = NOTES[name]
    assert kinds(save(tmp_path, edit(model()))) == set()
    assert kind in kinds(tmp_path, is_wrong=False)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_that_change_nothing_or_lost_a_part(name, tmp_path):
    kind, edit, settings = ADAPTERS[name]
    assert kinds(save(tmp_path / "sound", lora(), **LORA)) == set()
    assert kind in kinds(save(tmp_path / "wrong", edit(lora()), **{**LORA, **settings}))


def test_equal_matrices_a_in_all_modules_are_a_note(tmp_path):
    first = lora()["base_model.model.layers.0.q_proj.lora_A.weight"]
    save(tmp_path, {name: first.clone() if "lora_A" in name else value for name, value in lora().items()}, **LORA)
    assert (kinds(tmp_path), kinds(tmp_path, is_wrong=False)) == (set(), {"shards"})


def test_an_adapter_next_to_a_whole_model(tmp_path):
    save(tmp_path, lora(), **LORA, base_model_name_or_path="elsewhere")
    save(tmp_path, model())
    assert kinds(tmp_path) == set()  # as accelerate saves both
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert kinds(tmp_path) == {"different"}


# ---------------------------------------------------------------- --against


@pytest.mark.parametrize("kind", ["int8", "int16", "int64", "bool", "float8_e4m3fn", "float8_e5m2"])
def test_another_type_is_no_rounding(kind, tmp_path):
    trained = {name: value * 9 for name, value in model().items()}
    save(tmp_path / "right", trained)
    folder = save(tmp_path / "cast", {name: value.to(getattr(torch, kind)) for name, value in trained.items()})
    assert cli.run(["saved", str(folder), "--against", str(tmp_path / "right")]) == 1
    (read,) = saving.read(folder)
    result = saving.compare(read, trained)
    assert (len(result.different), result.rounded) == (len(trained), [])


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64"])
def test_rounding_to_a_type_of_enough_bits(kind, tmp_path):
    (read,) = saving.read(save(tmp_path, {name: value.to(getattr(torch, kind)) for name, value in model().items()}))
    assert len(saving.compare(read, model()).rounded) == len(model())


def test_quantized_weights_with_scales_cannot_be_compared(tmp_path):
    scaled = {"up.weight": model()["layers.0.up.weight"].to(torch.int8), "up.weight_scale": torch.rand(32, 1)}
    (read,) = saving.read(save(tmp_path, scaled))
    result = saving.compare(read, {"up.weight": model()["layers.0.up.weight"]})
    assert (result.different, bool(result.unchecked)) == ({}, True)
    assert (text.status([read], [], False), text.status([read], [result], False)) == (0, 3)
    assert kinds(tmp_path) == set()


@pytest.mark.parametrize(("size", "status"), [(None, 3), (0, 3), (2, 0)])
def test_optimizer_states_without_weights_are_not_sound(size, status, tmp_path):
    read = content.Saved(tmp_path, "DeepSpeed")
    read.states["w/exp_avg"] = content.in_memory("w/exp_avg", torch.ones(2), "file")
    if size is not None:
        read.tensors["w"] = content.in_memory("w", torch.ones(size), "file")
    assert text.status([read], [], False) == status


def test_the_verdict_says_that_values_were_not_compared(tmp_path, capsys):
    folder = str(save(tmp_path / "a", model()))
    for words, is_said in (([folder], True), ([folder, "--against", folder], False)):
        assert cli.run(["saved", *words]) == 0
        assert ("--against" in capsys.readouterr().out) == is_said


# ---------------------------------------------------------------- the sizes of a ZeRO group


@pytest.mark.parametrize(
    ("size", "is_whole"), [(9, False), (10, True), (12, True), (13, True), (14, False), (16, False)]
)
def test_a_group_may_have_only_as_many_further_elements_as_deepspeed_aligns(size, is_whole):
    assert deepspeed_zero._has_size(size, need=10, num_ranks=2) == is_whole


# ---------------------------------------------------------------- settings


BASE = {
    "model_type": "llama", "num_attention_heads": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"], "hidden_size": 16, "intermediate_size": 32,
    "vocab_size": 50, "image_token_id": 5, "max_position_embeddings": 2048,
    "text_config": {"hidden_size": 8}, "use_cache": True, "dtype": "float32", "architectures": ["A"],
    "transformers_version": "5.0.0", "attention_dropout": 0.0,
}  # fmt: skip
OLD_ROPE = {key: value for key, value in BASE.items() if key not in ("rope_parameters", "hidden_act")}
SCALED = {"type": "linear", "factor": 2.0}
IMAGES = {**OLD_ROPE, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
UNKNOWN = {"model_type": "unknown", "num_attention_heads": 4}
PEFT = {**LORA, "use_rslora": False, "alpha_pattern": {}, "exclude_modules": ["a", "b"], "lora_dropout": 0.1}
# settings of one side -> whether they compute something else with the same tensors
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "heads": (BASE, {"num_attention_heads": 8}, True),
    "activation": (BASE, {"hidden_act": "gelu"}, True),
    "epsilon": (BASE, {"rms_norm_eps": 1e-5}, True),
    "base of RoPE": (BASE, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, True),
    "scaled RoPE": (BASE, {"rope_parameters": {**BASE["rope_parameters"], "factor": 2.0}}, True),
    "order of layers": (BASE, {"layer_types": ["sliding_attention", "full_attention"]}, True),
    "a part of a model": (BASE, {"text_config": {"hidden_size": 9}}, True),
    "nothing that is computed": (BASE, {
        "use_cache": False, "dtype": "bfloat16", "architectures": ["B"], "transformers_version": "4.57.0",
        "attention_dropout": 0.1, "_name_or_path": "a/b"}, False),
    "a key of another release": (BASE, {"rope_interleaved": False, "text_config": {"hidden_size": 8, "x": 1}}, False),
    "checkpointed activations": ({**BASE, "gradient_checkpointing": False}, {"gradient_checkpointing": True}, False),
    "a derived value": ({**BASE, "head_dim": 4}, {"head_dim": None}, False),
    "a key of RoPE's type": (
        {**OLD_ROPE, "rope_scaling": SCALED}, {"rope_scaling": {**SCALED, "rope_type": "linear"}}, False),
    "generation": ({**BASE, "num_beams": 1, "max_length": 20}, {"num_beams": 4, "max_length": 512}, False),
    "length with RoPE": (BASE, {"max_position_embeddings": 4096}, False),
    "length with dynamic RoPE": (
        {**OLD_ROPE, "rope_scaling": {**SCALED, "type": "dynamic"}}, {"max_position_embeddings": 4096}, True),
    "kind of loss": ({**BASE, "problem_type": None}, {"problem_type": "single_label_classification"}, False),
    **{f"RoPE of images in {kind}": ({**IMAGES, "model_type": kind}, {"rope_scaling": {
        "type": "default", "rope_type": "default", "mrope_section": [1, 1, 2]}}, False)
       for kind in ("llama", "qwen2_vl")},
    "RoPE that one side lacks": (OLD_ROPE, {"rope_parameters": {**SCALED, "rope_theta": 1e4}}, True),
    "scaled RoPE that one side lacks": (OLD_ROPE, {"rope_scaling": SCALED, "rope_parameters": None}, True),
    "activation that one side lacks": (OLD_ROPE, {"hidden_act": "gelu"}, True),
    "the default that one side lacks": (OLD_ROPE, {"hidden_act": "silu"}, False),
    "token of images": (BASE, {"image_token_id": 7}, True),
    "padding": (BASE, {"pad_token_id": 3}, True),
    "tokens of generation": (BASE, {"bos_token_id": 3, "eos_token_id": 4, "decoder_start_token_id": 5}, False),
    "an unknown model": (UNKNOWN, {"num_attention_heads": 8}, True),
    **{f"base changed by {kind}": (PEFT, {"init_lora_weights": kind}, True) for kind in ("pissa", "olora")},
    **{f"initial values of {kind}": (PEFT, {"init_lora_weights": kind}, False) for kind in ("gaussian", "orthogonal")},
    "DoRA that one side lacks": ({key: PEFT[key] for key in PEFT if key != "use_dora"}, {"use_dora": True}, True),
    "scale": (PEFT, {"lora_alpha": 64}, True),
    "kind of scale": (PEFT, {"use_rslora": True}, True),
    "scale of a module": (PEFT, {"alpha_pattern": {"q_proj": 32}}, True),
    "order of a set": (PEFT, {"exclude_modules": ["b", "a"], "lora_dropout": 0.0, "peft_version": "1"}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_compute_something_else_are_compared(name, tmp_path, capsys):
    settings, changes, is_wrong = SETTINGS[name]
    folders = [tmp_path / side for side in ("right", "changed")]
    for folder, values in zip(folders, (settings, settings | changes), strict=True):
        if "peft_type" in settings:
            save(folder, lora(), **values)
        else:
            save(folder, model())
            (folder / "config.json").write_text(json.dumps(values))
    sides = [saving.read(folder)[0] for folder in folders]
    result = saving.compare(sides[1], sides[0])
    assert [any(key in finding.text for key in changes) for finding in result.findings] == [True] * is_wrong
    assert result.num_settings > 0
    assert saving.compare(sides[0], sides[0]).findings == []
    assert cli.run(["saved", str(folders[1]), "--against", str(folders[0])]) == 1 or not is_wrong
    assert "settings compared with" in " ".join(capsys.readouterr().out.split())


def test_settings_without_defaults_that_one_file_lacks_are_not_checked(tmp_path):
    sides = [content.Saved(tmp_path, "Hugging Face", config=config) for config in (UNKNOWN, UNKNOWN | {"act": "gelu"})]
    for side in sides:
        side.tensors["w"] = content.in_memory("w", torch.ones(2), "file")
    result = saving.compare(*sides)
    assert (result.num_settings, result.findings) == (2, [])
    assert ["act" in sentence for sentence in result.unchecked] == [True]
    assert saving.compare(sides[1], sides[1]).unchecked == []


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("file", "settings", "is_wrong"),
    [
        ("added_tokens.json", {"<a>": 39}, False),
        ("added_tokens.json", {"<a>": 40}, True),
        ("vocab.json", {f"w{at}": at for at in range(41)}, True),
        ("tokenizer_config.json", {"added_tokens_decoder": {"40": {"content": "<a>"}}}, True),
        ("tokenizer_config.json", {"eos_token": "</s>"}, False),
        ("tokenizer_config.json", {"eos_token": {"content": "<a>"}}, True),
    ],
)
def test_tokens_of_all_files_of_a_tokenizer(file, settings, is_wrong, tmp_path):
    words = {"model": {"vocab": {"</s>": 2, "<a>": 3}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    (tmp_path / file).write_text(json.dumps(settings))
    saved = content.Saved(tmp_path, "Hugging Face")
    vocabulary.check(tmp_path, saved, 40, {"eos_token_id": 2})
    assert any(finding.is_wrong for finding in saved.findings) == is_wrong
