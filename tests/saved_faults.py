"""Faults that tests plant in checkpoints which engines wrote: what is changed in a copy, and what has to be found."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file


class Fault(NamedTuple):
    """A fault: the intact folder, what damages a copy of it, and the kind of finding that has to be there."""

    name: str
    source: str
    damage: Callable[[Path], None]
    kind: str


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Load a file of torch.save, edit its content, and save it again."""
    content = torch.load(path, weights_only=False)
    edited = edit(content)
    torch.save(content if edited is None else edited, path)


def change_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edit the tensors of a safetensors file."""
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def cut(path: Path, share: float = 0.6) -> None:
    """Truncate a file."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def flip(path: Path) -> None:
    """Change one byte of the largest tensor in a file of torch.save."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + 200] ^= 0x10
    path.write_bytes(content)


def shard_with(folder: Path, name: str) -> Path:
    """Return the shard that has a tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def in_shard(name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """Return what replaces one tensor of a sharded model."""
    return lambda folder: change_tensors(
        shard_with(folder, name), lambda tensors: tensors.update({name: edit(tensors[name])})
    )


UP, NORM, EMBED = "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
STEP = "global_step2"


def in_model(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder / "model.safetensors", edit)


def in_adapter(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder / "adapter_model.safetensors", edit)


def optimizer_file(folder: Path, rank: int) -> Path:
    (path,) = (folder / STEP).glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return path


def in_optimizer(edit: Callable[[dict[str, Any]], Any], rank: int = 1) -> Callable[[Path], None]:
    """Return what edits the ZeRO optimizer's part of one rank."""
    return lambda folder: change(optimizer_file(folder, rank), lambda content: edit(content["optimizer_state_dict"]))


def in_model_file(edit: Callable[[dict[str, Any]], Any], name: str = "mp_rank_00") -> Callable[[Path], None]:
    return lambda folder: change(folder / STEP / f"{name}_model_states.pt", edit)


def in_metadata(edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        edit(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return damage


def remap(folder: Path) -> None:
    """Write a wrong file for one tensor into the index."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][UP] = next(file for file in files if file != index["weight_map"][UP])
    path.write_text(json.dumps(index))


def drop_listed(folder: Path) -> None:
    """Remove a tensor from a shard and from the index."""
    change_tensors(shard_with(folder, UP), lambda tensors: tensors.pop(UP))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][UP]
    path.write_text(json.dumps(index))


def other_type(folder: Path) -> None:
    in_shard(UP, lambda tensor: tensor.bfloat16())(folder)


def untie(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors[EMBED] + 0.01


def to_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def truncated_bin(folder: Path) -> None:
    to_bin(folder)
    cut(folder / "pytorch_model.bin")


def rotten_bin(folder: Path) -> None:
    to_bin(folder)
    flip(folder / "pytorch_model.bin")


def zero_all(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor.zero_()


def without(part: str) -> Callable[[dict[str, Any]], None]:
    """Return what removes the tensors whose names contain a text."""

    def remove(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return remove


def take(source: str, pattern: str, name: str = "") -> Callable[[Path], None]:
    """Return what copies files of another intact checkpoint into the folder."""

    def damage(folder: Path) -> None:
        found = sorted((folder.parent.parent / "saved_folders" / source).glob(pattern))
        assert found, pattern
        for path in found:
            place = folder / (STEP if (folder / STEP).is_dir() else "")
            shutil.copy(path, place / (name or path.name))

    return damage


def shorten(states: dict[str, Any], key: str) -> None:
    states[key][0] = states[key][0][:-50].clone()


def step_back(states: dict[str, Any]) -> None:
    for state in states["base_optimizer_state"]["state"].values():
        state["step"] = state["step"] - 1


def lose_moment(states: dict[str, Any]) -> None:
    del states["base_optimizer_state"]["state"][0]["exp_avg"]


def other_shapes(content: dict[str, Any]) -> None:
    content["param_shapes"][0][UP] = torch.Size([15, 24])


def shift(content: dict[str, Any]) -> None:
    for tensor in content["module"].values():
        tensor.add_(0.05)


def untie_module(content: dict[str, Any]) -> None:
    content["module"]["lm_head.weight"] = content["module"][EMBED] * 2


def lose_fragment(content: dict[str, Any]) -> None:
    del content["frozen_param_fragments"][next(iter(content["frozen_param_fragments"]))]


def empty_fragment(content: dict[str, Any]) -> None:
    name = next(iter(content["frozen_param_fragments"]))
    content["frozen_param_fragments"][name] = torch.empty(0, dtype=torch.bfloat16)


def no_stop(states: dict[str, Any]) -> None:
    states["fp32_flat_groups"][0].data[3] = float("nan")


def rewrite(folder: Path, name: str, edit: Callable[[Any], Any]) -> None:
    change(folder / STEP / "zero" / name, edit)


def halve(content: Any) -> Any:
    tensor = content["param"] if isinstance(content, dict) else content
    return tensor[: len(tensor) // 2].clone()


def swap_ranks(kind: str) -> Callable[[Path], None]:
    """Return what exchanges the files of two ranks."""

    def damage(folder: Path) -> None:
        first, second = sorted((folder / STEP).glob(f"*zero_pp_rank_*_{kind}_states.pt"))
        first.rename(first.with_suffix(".swapped"))
        second.rename(first)
        first.with_suffix(".swapped").rename(second)

    return damage


def save_again(folder: Path) -> None:
    """Load and save the optimizer files, so that nothing but their contents tells their ranks."""
    for rank in (0, 1):
        change(optimizer_file(folder, rank), lambda content: None)


def copy_rank(folder: Path) -> None:
    shutil.copy(optimizer_file(folder, 0), optimizer_file(folder, 1))


def both_ranks(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for rank in (0, 1):
            in_optimizer(edit, rank)(folder)

    return damage


def later_states(content: dict[str, Any]) -> None:
    for state in content["optimizer"]["state"].values():
        state["step"] = state["step"] + 5


def later_group(states: dict[str, Any]) -> None:
    states["base_optimizer_state"]["state"][1]["step"] += 3


def no_states(states: dict[str, Any]) -> None:
    states.get("optimizer_state_dict", states.get("base_optimizer_state"))["state"].clear()


def far_step(states: dict[str, Any]) -> None:
    for state in states.get("optimizer_state_dict", states.get("base_optimizer_state"))["state"].values():
        state["step"] = state["step"] + 5


def rename_step(folder: Path) -> None:
    (folder / STEP).rename(folder / "global_step7")
    (folder / "latest").write_text("global_step7")


def flip_in_item(folder: Path) -> None:
    """Change one bit in the values of a tensor of a distributed checkpoint."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entry = max(metadata.storage_data.values(), key=lambda entry: entry.length)
    path = folder / entry.relative_path
    content = bytearray(path.read_bytes())
    content[entry.offset + entry.length // 2] ^= 0x10
    path.write_bytes(content)


def other_counter(folder: Path) -> None:
    path = next((folder / STEP / "zero" / UP).glob("step*"))
    change(path, lambda content: torch.tensor(9.0))


def lose_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata[f"model.{UP}"].chunks.pop()


def overlap(metadata: Any) -> None:
    first, second = metadata.state_dict_metadata[f"model.{UP}"].chunks
    metadata.state_dict_metadata[f"model.{UP}"].chunks = [first, type(second)(first.offsets, second.sizes)]


def lose_state(metadata: Any) -> None:
    (name,) = [name for name in metadata.state_dict_metadata if f"{UP}.exp_avg" in name and not name.endswith("sq")]
    del metadata.state_dict_metadata[name]


def rename_weight(metadata: Any) -> None:
    entries = metadata.state_dict_metadata
    metadata.planner_data[f"model.{UP}"] = ("model", "another.weight")
    assert f"model.{UP}" in entries


def swap_files(folder: Path) -> None:
    a, b = folder / "__0_0.distcp", folder / "__1_0.distcp"
    kept = a.read_bytes()
    a.write_bytes(b.read_bytes() + bytes(len(kept)))
    b.write_bytes(kept + bytes(len(kept)))


def fewer_states(content: dict[str, Any]) -> None:
    for state in content["state"].values():
        state["exp_avg"] = torch.zeros(7, 7)


def both_models(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for rank in (0, 1):
            in_model_file(edit, f"zero_pp_rank_{rank}_mp_rank_00")(folder)

    return damage


def zero_second_moments(states: dict[str, Any]) -> None:
    for state in states["base_optimizer_state"]["state"].values():
        state["exp_avg_sq"].zero_()


def lose(part: str) -> Callable[[Any], None]:
    """Return what removes the entries of a distributed checkpoint whose names contain a text."""
    return lambda metadata: without(part)(metadata.state_dict_metadata)


def same_moments(metadata: Any) -> None:
    places = metadata.storage_data
    for index in [index for index in places if index.fqn.endswith(f"{UP}.exp_avg")]:
        second = next(i for i in places if i.fqn == f"{index.fqn}_sq" and i.offset == index.offset)
        places[index] = places[second]


FAULTS = [
    # ---- folders of transformers
    Fault("a shard is missing", "pretrained", lambda f: shard_with(f, UP).unlink(), "shards"),
    Fault("a shard of another save", "pretrained", lambda f: shutil.copy(
        shard_with(f, UP), f / "model-00009-of-00009.safetensors"), "shards"),
    Fault("the index names the wrong shard", "pretrained", remap, "missing"),
    Fault("a tensor was not saved", "pretrained", drop_listed, "missing"),
    Fault("no index", "pretrained", lambda f: (f / "model.safetensors.index.json").unlink(), "shards"),
    Fault("a shard is cut off", "pretrained", lambda f: cut(shard_with(f, UP)), "unreadable"),
    Fault("rows are missing", "pretrained", in_shard(UP, lambda t: t[:10].clone()), "partial"),
    Fault("one tensor has another type", "pretrained", other_type, "dtype"),
    Fault("another type than the configuration's", "base", lambda f: change_json(f / "config.json", dtype="bfloat16"),
          "dtype"),
    Fault("the head is untied", "base", in_model(untie), "untied"),
    Fault("a matrix is zero", "base", in_model(lambda t: t[UP].zero_()), "zero"),
    Fault("a NaN", "base", in_model(lambda t: t[UP][3].fill_(float("nan"))), "not finite"),
    Fault("an infinity", "base", in_model(lambda t: t[NORM][:1].fill_(float("inf"))), "not finite"),
    Fault("an empty tensor", "base", in_model(lambda t: t.update({UP: torch.empty(0)})), "empty"),
    Fault("a tensor of no module", "base", in_model(lambda t: t.update({"value_head.weight": t[NORM] * 2})),
          "unexpected"),
    Fault("a configuration of another model", "base", lambda f: change_json(f / "config.json", intermediate_size=32),
          "partial"),
    Fault("a configuration with more layers", "base", lambda f: change_json(f / "config.json", num_hidden_layers=3),
          "missing"),
    Fault("a configuration that ties nothing", "base", lambda f: change_json(
        f / "config.json", tie_word_embeddings=False), "missing"),
    Fault("the configuration is damaged", "base", lambda f: cut(f / "config.json"), "unreadable"),
    Fault("no weights", "base", lambda f: (f / "model.safetensors").unlink(), "missing"),
    Fault("pytorch_model.bin is cut off", "base", truncated_bin, "unreadable"),
    Fault("a flipped bit", "base", rotten_bin, "unreadable"),
    Fault("save_16bit_model without gathering", "zero3-16bit", lambda f: None, "missing"),
    # ---- accelerate and Trainer
    Fault("the optimizer of another model", "accelerate-ddp", lambda f: change(f / "optimizer.bin", fewer_states),
          "optimizer"),
    Fault("the optimizer is cut off", "accelerate-ddp", lambda f: cut(f / "optimizer.bin"), "unreadable"),
    Fault("weights of another step beside the engine's", "trainer-zero3/checkpoint-2", in_model(
        lambda t: [tensor.add_(0.05) for tensor in t.values()]), "different"),
    Fault("an adapter of another step beside the engine's", "trainer-lora-zero2/checkpoint-2", in_adapter(
        lambda t: [tensor.mul_(1.5) for tensor in t.values()]), "different"),
    # ---- adapters
    Fault("PEFT under ZeRO-3 without gathering", "adapter-zero3-empty", lambda f: None, "empty"),
    Fault("an adapter without tensors", "adapter-plain", in_adapter(lambda t: t.clear()), "empty"),
    Fault("no B", "adapter-plain", in_adapter(lambda t: t.pop(QUERY.format("B"))), "missing"),
    Fault("another rank", "adapter-plain", lambda f: change_json(f / "adapter_config.json", r=8), "partial"),
    Fault("A is zero", "adapter-plain", in_adapter(lambda t: t[QUERY.format("A")].zero_()), "zero"),
    Fault("not trained", "adapter-plain", in_adapter(zero_all), "untrained"),
    Fault("a weight of the base model", "adapter-plain", in_adapter(
        lambda t: t.update({"base_model.model." + UP: torch.ones(24, 15)})), "unexpected"),
    Fault("a trained module is missing", "adapter-plain", in_adapter(without("model.norm")), "missing"),
    Fault("a target has no matrices", "adapter-plain", in_adapter(without("down_proj")), "missing"),
    Fault("matrices of no target", "adapter-plain", lambda f: change_json(
        f / "adapter_config.json", target_modules=["q_proj"]), "unexpected"),
    Fault("an adapter of a larger base", "adapter-plain", in_adapter(lambda t: t.update(
        {QUERY.format("A"): torch.ones(4, 30)})), "partial"),
    Fault("one module of a layer is missing", "adapter-plain", in_adapter(without("layers.1.self_attn.q_proj")),
          "missing"),
    # ---- DeepSpeed
    Fault("ZeRO-1: a rank is missing", "zero1", lambda f: optimizer_file(f, 1).unlink(), "shards"),
    Fault("ZeRO-3: a model file is missing", "zero3", lambda f: (
        f / STEP / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink(), "shards"),
    Fault("ZeRO-2: a rank of another step", "zero2", in_optimizer(step_back), "shards"),
    Fault("ZeRO-1: a rank of stage 3", "zero1", take(
        "zero3", f"{STEP}/*rank_1_*optim_states.pt"), "shards"),
    Fault("ZeRO-2: a third rank", "zero2", take(
        "zero2", f"{STEP}/*rank_1_*optim_states.pt", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"), "shards"),
    Fault("ZeRO-2: cut off", "zero2", lambda f: cut(optimizer_file(f, 0)), "unreadable"),
    Fault("ZeRO-2: elements are missing", "zero2", in_optimizer(
        lambda s: shorten(s, "single_partition_of_fp32_groups")), "partial"),
    Fault("ZeRO-3: elements are missing", "zero3", in_optimizer(lambda s: shorten(s, "fp32_flat_groups")), "partial"),
    Fault("`latest` names nothing", "zero1", lambda f: (f / "latest").write_text("global_step9"), "missing"),
    Fault("ZeRO-1: a moment of one rank is missing", "zero1", in_optimizer(lose_moment), "optimizer"),
    Fault("ZeRO-1: weights of another step", "zero1", in_model_file(shift), "different"),
    Fault("ZeRO-0: no optimizer", "zero0", in_model_file(lambda c: c.update(optimizer=None)), "optimizer"),
    Fault("ZeRO-0: weights of another step", "zero0-bf16", in_model_file(shift), "different"),
    Fault("ZeRO-3: another model on one rank", "zero3", in_model_file(other_shapes, "zero_pp_rank_1_mp_rank_00"),
          "shards"),
    Fault("ZeRO-3: another step on one rank", "zero3", in_model_file(
        lambda c: c.update(global_steps=4), "zero_pp_rank_1_mp_rank_00"), "shards"),
    Fault("ZeRO-3: a NaN", "zero3", in_optimizer(no_stop), "not finite"),
    Fault("ZeRO-2: a flipped bit", "zero2", lambda f: flip(optimizer_file(f, 1)), "unreadable"),
    Fault("ZeRO-1: the head is untied", "zero1", in_model_file(untie_module), "untied"),
    Fault("ZeRO-3: a frozen weight is missing", "lora-zero3", in_model_file(
        lose_fragment, "zero_pp_rank_1_mp_rank_00"), "missing"),
    Fault("ZeRO-2: a frozen weight is empty", "lora-zero2", in_model_file(empty_fragment), "empty"),
    Fault("ZeRO-1: a tensor without master weight", "zero1", in_model_file(
        lambda c: c["module"].update({"extra.weight": torch.ones(3, dtype=torch.bfloat16)})), "missing"),
    Fault("ZeRO-3: two ranks are swapped", "zero3", swap_ranks("optim"), "shards"),
    Fault("ZeRO-3: the model files of two ranks are swapped", "zero3", swap_ranks("model"), "shards"),
    Fault("ZeRO-3: two ranks are swapped and saved again", "zero3", lambda f: (
        swap_ranks("optim")(f), save_again(f)), "shards"),
    Fault("ZeRO-3: a copy of another rank", "zero3", copy_rank, "shards"),
    Fault("ZeRO-3: a copy of another rank, saved again", "zero3", lambda f: (copy_rank(f), save_again(f)), "shards"),
    Fault("ZeRO-2: a copy of another rank, saved again", "zero2", lambda f: (copy_rank(f), save_again(f)), "shards"),
    Fault("ZeRO-3: another number of ranks", "zero3", both_models(lambda c: c.update(dp_world_size=8)), "shards"),
    Fault("ZeRO-1: a learning rate that is NaN", "zero1", in_optimizer(
        lambda s: s["base_optimizer_state"]["param_groups"][0].update(lr=float("nan"))), "optimizer"),
    Fault("ZeRO-1: no second moments on a rank", "zero1", in_optimizer(zero_second_moments), "optimizer"),
    Fault("ZeRO-2: no `latest`", "zero2", lambda f: (f / "latest").unlink(), "missing"),
    Fault("ZeRO-2: `latest` is older than a whole checkpoint", "zero2", lambda f: shutil.copytree(
        f / STEP, f / "global_step9"), "missing"),
    Fault("DCP: no groups", "fsdp2-dcp", in_metadata(lose("param_groups")), "optimizer"),
    Fault("DCP: no counters", "fsdp2-dcp", in_metadata(lose(".step")), "optimizer"),
    Fault("DCP: no second moments", "fsdp2-dcp", in_metadata(lose("exp_avg_sq")), "optimizer"),
    Fault("DCP: a first moment is the second one", "fsdp2-dcp", in_metadata(same_moments), "optimizer"),
    Fault("ZeRO-2: two ranks are swapped", "zero2", swap_ranks("optim"), "shards"),
    Fault("ZeRO-3: the optimizer is of another step", "zero3", both_ranks(far_step), "optimizer"),
    Fault("ZeRO-1: the optimizer is of another step", "zero1", both_ranks(far_step), "optimizer"),
    Fault("ZeRO-1: a group is of another step", "zero1", both_ranks(later_group), "optimizer"),
    Fault("ZeRO-3: the optimizer has no states", "zero3", both_ranks(no_states), "optimizer"),
    Fault("ZeRO-2: the folder has another step", "zero2", rename_step, "shards"),
    Fault("ZeRO-0: the optimizer is of another step", "zero0", in_model_file(later_states), "optimizer"),
    Fault("Trainer: the engine is of another step", "trainer-zero3/checkpoint-2", lambda f: (
        f / "trainer_state.json").write_text('{"global_step": 6, "epoch": 0.5}'), "shards"),
    Fault("Trainer: no random states", "trainer-zero3/checkpoint-2", lambda f: (f / "rng_state_1.pth").unlink(),
          "missing"),
    Fault("Trainer: no scheduler", "trainer-ddp/checkpoint-2", lambda f: (f / "scheduler.pt").unlink(), "missing"),
    # ---- universal checkpoints
    Fault("universal: a weight of another step", "universal-zero1", other_counter, "optimizer"),
    Fault("universal: a weight is missing", "universal-zero1", lambda f: shutil.rmtree(f / STEP / "zero" / UP),
          "missing"),
    Fault("universal: a moment is missing", "universal-zero3", lambda f: (
        f / STEP / "zero" / UP / "exp_avg.pt").unlink(), "optimizer"),
    Fault("universal: half a weight", "universal-zero3", lambda f: rewrite(f, f"{UP}/fp32.pt", halve), "partial"),
    Fault("universal: half a moment", "universal-zero1", lambda f: rewrite(f, f"{UP}/exp_avg_sq.pt", halve),
          "optimizer"),
    Fault("universal: an unknown weight", "universal-zero1", lambda f: shutil.copytree(
        f / STEP / "zero" / UP, f / STEP / "zero" / "other.weight"), "unexpected"),
    Fault("universal: cut off", "universal-zero1", lambda f: cut(f / STEP / "zero" / UP / "fp32.pt"), "unreadable"),
    # ---- DCP
    Fault("DCP: a flipped bit", "fsdp2-dcp", flip_in_item, "unreadable"),
    Fault("accelerate, FSDP2: the weights are lost", "fsdp2-accelerate", lambda f: shutil.rmtree(
        f / "pytorch_model_fsdp_0"), "missing"),
    Fault("DCP: a file is missing", "fsdp2-dcp", lambda f: (f / "__1_0.distcp").unlink(), "shards"),
    Fault("DCP: a file is cut off", "fsdp2-dcp", lambda f: cut(f / "__1_0.distcp"), "unreadable"),
    Fault("DCP: no metadata", "fsdp2-dcp", lambda f: (f / ".metadata").unlink(), "shards"),
    Fault("DCP: metadata are damaged", "fsdp2-dcp", lambda f: cut(f / ".metadata"), "unreadable"),
    Fault("DCP: a part is missing", "fsdp2-dcp", in_metadata(lose_chunk), "partial"),
    Fault("DCP: parts overlap", "fsdp2-dcp", in_metadata(overlap), "partial"),
    Fault("DCP: a file of another save", "fsdp2-dcp", lambda f: shutil.copy(
        f / "__1_0.distcp", f / "__2_0.distcp"), "shards"),
    Fault("DCP: a state is missing", "fsdp2-dcp", in_metadata(lose_state), "optimizer"),
    Fault("DCP: states of an unknown weight", "fsdp2-dcp", in_metadata(rename_weight), "optimizer"),
    Fault("DCP: files are swapped", "fsdp2-dcp", swap_files, "unreadable"),
]  # fmt: skip

# Folders in which nothing is wrong, with what `zero-study saved` gets besides.
# What `saved_program.py FOLDER quick` writes.
QUICK = {
    "zero0", "zero1", "zero2", "zero3", "zero3-16bit", "lora-zero3", "adapter-zero3", "adapter-zero3-empty",
    "adapter-plain", "base", "fsdp2-dcp", "fsdp2-accelerate", "accelerate-ddp", "pretrained",
}  # fmt: skip
INTACT = [
    "zero0", "zero1", "zero2", "zero3", "zero1-fp32", "universal-zero1", "universal-zero3",
    "zero2-from-universal-zero1", "zero3-from-universal-zero3", "lora-zero2", "lora-zero3", "adapter-zero2",
    "adapter-zero3", "adapter-plain", "adapter-fsdp2", "base", "pretrained", "accelerate-ddp", "fsdp2-dcp",
    "fsdp2-accelerate", "zero0-bf16", "zero2-offload", "zero3-subgroups", "trainer-ddp", "trainer-zero3",
    "trainer-lora-zero2",
]  # fmt: skip
