"""What an engine's parameter is: names under all wrappers, shapes and values; and that one module knows it."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from zero_study import saved  # noqa: E402
from zero_study.engines.readback import facts, parameters  # noqa: E402
from zero_study.engines.readback.parameters import base_name, plain_name, wrapper_of  # noqa: E402

TOOLS = Path(saved.__file__).resolve().parents[1]
PEFT = "base_model.model."
INSIDE = ["_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."]
WRAPPERS = ["module.", *INSIDE]
NESTED = [*WRAPPERS, *map("".join, itertools.product(WRAPPERS, repeat=2))]


# ---------------------------------------------------------------- names


def test_the_cases_have_all_wrappers():
    assert {f"{wrapper}." for wrapper in parameters.WRAPPERS} == set(WRAPPERS)


@pytest.mark.parametrize("prefix", NESTED)
def test_wrappers_in_any_nesting_are_removed_from_a_name(prefix: str):
    name = "layers.0.weight"
    assert plain_name(prefix + name) == base_name(prefix + name) == name
    assert plain_name(prefix + PEFT + name) == plain_name(PEFT + prefix + name) == PEFT + name
    assert base_name(prefix + PEFT + name) == base_name(PEFT + prefix + name) == base_name(PEFT * 2 + name) == name
    assert wrapper_of(prefix + name)[0] in prefix  # type: ignore[index]
    assert wrapper_of(PEFT + prefix + name)[0] in prefix  # type: ignore[index]


@pytest.mark.parametrize("wrappers", list(itertools.permutations(WRAPPERS, 3)), ids="".join)
def test_wrappers_in_any_order_are_removed(wrappers: tuple[str, ...]):
    assert plain_name("".join(wrappers) + "a.weight") == "a.weight"


@pytest.mark.parametrize("wrapper", INSIDE)
@pytest.mark.parametrize("outer", ["", *WRAPPERS, PEFT])
def test_wrappers_of_a_part_are_removed(outer: str, wrapper: str):
    name = f"{outer}layers.0.{wrapper}weight"
    assert base_name(name) == "layers.0.weight"
    assert wrapper_of(name) is not None


@pytest.mark.parametrize(
    "name", ["layers.0.weight", "layers.0.module.weight", "my_module.weight", "a._orig_mode.weight"]
)
def test_a_models_own_names_are_kept(name: str):
    assert (plain_name(name), base_name(name), wrapper_of(name)) == (name, name, None)


@pytest.mark.parametrize(
    ("name", "in_file"),
    [
        (f"{PEFT}q_proj.lora_A.default.weight", "q_proj.lora_A.weight"),
        (f"module.{PEFT}q_proj.lora_B.default.weight", "q_proj.lora_B.weight"),
        (f"{PEFT}score.modules_to_save.default.weight", "score.weight"),
        (f"{PEFT}score.original_module.weight", None),
        ("default.weight", "default.weight"),
    ],
)
def test_names_in_the_file_of_an_adapter(name: str, in_file: str | None):
    assert parameters.adapter_name(name) == in_file


def test_names_that_peft_changes():
    assert parameters.without_base_layers("experts.base_layer.base_layer") == "experts"
    assert parameters.without_base_layers("my_base_layer.base_layers") == "my_base_layer.base_layers"
    assert parameters.name_of_copied("score.modules_to_save.default.weight") == "score.weight"
    assert parameters.name_of_copied("score.original_module.weight") == "score.weight"


def test_a_name_is_looked_up_without_inner_parts_only_if_it_is_not_known():
    assert parameters.name_among("a.module.weight", {"a.weight"}) == "a.weight"
    assert parameters.name_among("a.module.weight", {"a.weight", "a.module.weight"}) == "a.module.weight"
    assert parameters.name_among("a.module.weight", set()) == "a.module.weight"


# ---------------------------------------------------------------- live models

# FSDP1 warns about its age and about one rank, and the first import of torch.compile about TorchScript.


class Residual(torch.nn.Module):
    """A model's own module with an inner one called "module", as LeViT has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.module = torch.nn.Linear(3, 3)

    def forward(self, values: Any) -> Any:
        return self.weight * values + self.module(values)


def _model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), Residual())


def _ddp(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


def _fsdp1(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def _fsdp2(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))


def _checkpointed(model: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(model)


class Fabric(torch.nn.Module):
    """A module as Lightning Fabric returns it, which is not installed for the tests."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._forward_module = model


LIVE: dict[str, Any] = {
    "plain": lambda model: model,
    "DDP": _ddp,
    "torch.compile": torch.compile,
    "checkpoint": _checkpointed,
    "FSDP1": _fsdp1,
    "FSDP2": _fsdp2,
    "DDP of compiled": lambda model: _ddp(torch.compile(model)),
    "compiled DDP": lambda model: torch.compile(_ddp(model)),
    "compiled FSDP1": lambda model: torch.compile(_fsdp1(model)),
    "FSDP1 of checkpointed": lambda model: _fsdp1(_checkpointed(model)),
    "Fabric of DDP": lambda model: Fabric(_ddp(model)),
    "DataParallel": torch.nn.DataParallel,
}
EACH_PART = ["DDP", "torch.compile", "checkpoint", "FSDP1", "FSDP2", "DDP of compiled", "DataParallel"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", LIVE)
def test_a_wrapped_model_has_the_names_and_sizes_of_the_plain_one(how: str, group: None):
    wrapped = LIVE[how](_model())
    sizes = {plain_name(name, wrapped): parameters.whole_shape(p) for name, p in wrapped.named_parameters()}
    assert sizes == {name: p.shape for name, p in _model().named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", EACH_PART)
def test_a_model_with_wrapped_parts_has_the_names_of_the_plain_one(how: str, group: None):
    parts = torch.nn.Sequential(*(LIVE[how](part) for part in _model()))
    assert [plain_name(name, parts) for name, _ in parts.named_parameters()] == [
        name for name, _ in _model().named_parameters()
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", [how for how in LIVE if "FSDP1" not in how])
def test_full_values_are_those_of_the_plain_model(how: str, group: None):
    wrapped = LIVE[how](_model())
    for (name, parameter), plain in zip(wrapped.named_parameters(), _model().parameters(), strict=True):
        value = parameters.full_value(parameter)
        assert torch.equal(value, plain), name
        with parameters.gathered(parameter) as gathered:
            assert torch.equal(gathered, plain), name
        assert torch.equal(parameters.local_shard(parameter), plain), name
        with torch.no_grad():
            value.zero_()  # a copy, but for FSDP2's that is gathered
        assert how == "FSDP2" or torch.equal(parameters.full_value(parameter), plain), name


@pytest.mark.filterwarnings("ignore")
def test_a_flat_parameter_of_fsdp1_has_its_whole_size(group: None):
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(_model(), use_orig_params=False, device_id=torch.device("cpu"))
    (flat,) = wrapped.parameters()
    size = sum(p.numel() for p in _model().parameters())
    flat.data = flat.data[:5]  # as on a rank with a shard
    assert (parameters.whole_shape(flat), parameters.whole_size(flat)) == ((size,), size)


def test_a_parameter_of_stage_3_has_its_whole_size_and_a_shard_without_padding(monkeypatch: pytest.MonkeyPatch):
    parameter: Any = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    parameter.ds_id, parameter.ds_shape, parameter.ds_tensor = 0, torch.Size([3, 3]), torch.arange(5.0)
    parameter.ds_process_group = "group"
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    assert parameters.is_partitioned(parameter)
    assert (parameters.whole_shape(parameter), parameters.whole_size(parameter)) == ((3, 3), 9)
    assert parameters.whole_bytes(parameter) == 18
    assert parameters.local_shard(parameter).tolist() == [0, 1, 2, 3]


def test_a_packed_parameter_has_the_size_of_its_values():
    parameter: Any = torch.nn.Parameter(torch.empty(6, 1, dtype=torch.uint8), requires_grad=False)
    parameter.quant_state = SimpleNamespace(shape=torch.Size([3, 4]))
    assert (parameters.whole_shape(parameter), parameters.whole_size(parameter)) == ((3, 4), 12)
    assert parameters.whole_bytes(parameter) == 6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["DDP", "DDP of compiled", "compiled DDP", "Fabric of DDP"])
def test_what_ddp_ignores_is_not_replicated_under_any_wrapper(how: str, group: None):
    wrapped = LIVE[how](_model())
    inner = facts.ddp_of(wrapped)
    inner.parameters_to_ignore = {next(name for name, _ in inner.module.named_parameters())}
    replicated = {plain_name(name, wrapped) for name in facts.replicated_names(wrapped)}
    assert replicated == {name for name, _ in _model().named_parameters()} - {"0.weight"}


# ---------------------------------------------------------------- folders for from_pretrained

SMALL = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 16, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "base"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(folder)
    return folder


def _renamed(folder: Path, change: Any) -> dict[str, Any]:
    """Rename the tensors in a folder, and return them by their right names."""
    tensors = load_file(folder / "model.safetensors")
    save_file({change(name): t for name, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def _is_wrong(folder: Path, model: Path | None = None) -> bool:
    return any(finding.is_wrong for part in saved.read(folder, model=model) for finding in part.findings)


def _change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.computes
@pytest.mark.parametrize(
    "prefix", ["", PEFT, *NESTED, *(PEFT + wrapper for wrapper in WRAPPERS), *(wrapper + PEFT for wrapper in WRAPPERS)]
)
def test_a_folder_is_wrong_if_from_pretrained_would_not_load_it(prefix: str, pretrained: Path, tmp_path: Path):
    import transformers

    folder = Path(shutil.copytree(pretrained, tmp_path / "model"))
    right = _renamed(folder, lambda name: prefix + name)
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    is_loaded = all(torch.equal(loaded[name], tensor) for name, tensor in right.items())
    assert is_loaded == (not prefix)
    assert _is_wrong(folder) == (not is_loaded)
    (folder / "config.json").unlink()  # as accelerate's save_state, whose names are those of the wrapped model
    assert not _is_wrong(folder, pretrained)


@pytest.mark.computes
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_folder_with_a_wrapped_block_is_wrong(wrapper: str, pretrained: Path, tmp_path: Path):
    folder = Path(shutil.copytree(pretrained, tmp_path / "model"))
    _renamed(folder, lambda name: name.replace("layers.0.", f"layers.0.{wrapper}"))
    assert _is_wrong(folder)


@pytest.mark.computes
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
@pytest.mark.parametrize("reason", ["zero3", "quantized", "own code", "unknown"])
def test_a_wrapped_folder_is_wrong_where_transformers_cannot_be_asked(
    reason: str, prefix: str, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = Path(shutil.copytree(pretrained, tmp_path / "model"))
    if reason == "zero3":
        monkeypatch.setattr("zero_study.saved.loading._is_under_zero3", lambda: True)
    elif reason == "quantized":
        _change(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    elif reason == "own code":
        _change(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    else:
        _change(folder, architectures=["NobodysModel"], model_type="nobodys")
    assert not _is_wrong(folder)
    _renamed(folder, lambda name: prefix + name)
    # A model with code of its own may have a module that is called "module".
    assert _is_wrong(folder) == (reason != "own code" or "_orig_mod" in prefix)


def test_the_settings_of_another_library_say_nothing_of_names(pretrained: Path, tmp_path: Path):
    folder = Path(shutil.copytree(pretrained, tmp_path / "model"))
    _renamed(folder, lambda name: f"module.{name}")
    (folder / "config.json").write_text(json.dumps({"width": 8}))
    assert not _is_wrong(folder)


# ---------------------------------------------------------------- one place

PART_OF_A_NAME = re.compile(
    r"_orig_mod|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer|base_model\.|"
    r"original_module|\.modules_to_save|modules_to_save\.|^\.?module\.|\.module\.?$"
)


def _strings(path: Path) -> list[str]:
    """Return the strings in the code of a file, without its docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


def test_no_other_module_knows_the_parts_that_wrappers_add_to_names():
    """`modules_to_save` alone is an option of PEFT's configuration, and `module` a key in DeepSpeed's files."""
    own = TOOLS / "engines" / "readback" / "parameters.py"
    assert any(map(PART_OF_A_NAME.search, _strings(own)))
    result = {
        f"{path.relative_to(TOOLS)}: {text[:60]}"
        for path in TOOLS.rglob("*.py")
        for text in _strings(path)
        if path != own and PART_OF_A_NAME.search(text)
    }
    assert result == set()
