"""Export the model of a run from a checkpoint, unsharded and in fp32, for `from_pretrained` on any machine.

Every engine has a different layout for its states. Reading them needs neither the engine nor a GPU.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from study.config import build_config
from study.errors import Refusal
from study.training import manifest, weights
from study.training.engine_state import LAYOUT, STATES, subgroup_file
from study.training.manifest import ENGINE, MODEL, Checkpoint
from study.workloads import WORKLOADS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from study.workloads.sources import Splits


def export(checkpoint: Checkpoint, folder: Path) -> PreTrainedModel:
    """Write the model of a checkpoint and its tokenizer to a folder, and return the model.

    Raises Refusal if the folder exists already, or if the checkpoint contains another model.
    """
    import transformers

    if folder.exists():
        raise Refusal(f"{folder}: the folder already exists. Use another one, or delete it.")
    described = transformers.AutoConfig.from_pretrained(checkpoint.folder / MODEL, local_files_only=True)
    with weights.unpartitioned():
        model: PreTrainedModel = getattr(transformers, described.architectures[0])(described)
    missing, unknown = model.load_state_dict(read_parameters(checkpoint), strict=False)
    model.tie_weights()
    own_names = {name for name, _ in model.named_parameters()}  # tied parameters appear once
    if unknown or own_names & {*missing}:
        names = ", ".join(sorted({*unknown, *(own_names & {*missing})}))
        raise Refusal(
            f"{checkpoint.folder}: contains another model, as its parameters {names} show. Use another checkpoint"
        )
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    for path in (checkpoint.folder / MODEL).iterdir():
        if not (part / path.name).exists():
            shutil.copy(path, part)
    part.rename(folder)
    return model


def read_parameters(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the parameters of the unsharded model as fp32: name -> tensor.

    They are the master weights if the engine has any.
    """
    readers = {"plain": _plain, "fsdp": _fsdp, "zero": _deepspeed, "subgroups": _subgroups}
    reader = next(reader for kind, reader in readers.items() if checkpoint.manifest.engine.startswith(kind))
    state = reader(checkpoint.folder / ENGINE)
    return {name.replace("_orig_mod.", "").removeprefix("module."): tensor.float() for name, tensor in state.items()}


def _plain(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _fsdp(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(folder / "pytorch_model_fsdp_0", f"{scratch}/whole.pt")
        state: dict[str, torch.Tensor] = torch.load(f"{scratch}/whole.pt", weights_only=True)["model"]
    return state


def _deepspeed(folder: Path) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    states = folder / STATES
    if not any(states.glob("*zero_pp_rank_*optim_states.pt")):  # stage 0 does not shard the model
        whole = torch.load(states / "mp_rank_00_model_states.pt", weights_only=False, map_location="cpu")["module"]
        return {name: tensor for name, tensor in whole.items() if tensor.is_floating_point()}
    return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder), STATES))


def _subgroups(folder: Path) -> dict[str, torch.Tensor]:
    """Return the whole parameters of a checkpoint that has states per sub-group: name -> tensor.

    The parts of each parameter are joined in the order of the ranks.
    """
    parameters = {}
    for index, group in enumerate(json.loads((folder / LAYOUT).read_text())):
        ranks = sorted(
            folder.glob(subgroup_file(Path(), "*", index).name), key=lambda path: int(path.name.split("-")[1])
        )
        masters = [load_file(path)["master"] for path in ranks]
        start = 0
        for parameter in group:
            end = start + parameter["partition"]
            whole = torch.cat([master[start:end] for master in masters])
            shape = torch.Size(parameter["shape"])
            parameters[parameter["name"]] = whole[: shape.numel()].view(shape)
            start = end
    return parameters


# ---------------------------------------------------------------- is it the model that the run had?


def check(model: PreTrainedModel, checkpoint: Checkpoint, data_dir: Path | None) -> str:
    """Return a text that compares the exported model's loss on the held-out examples with the loss of the run."""
    own = next((line["loss"] for line in _evaluations(checkpoint) if line["step"] == checkpoint.manifest.step), None)
    comparison = "the run recorded none at this step" if own is None else f"the run recorded {own:.6f}"
    try:
        return f"loss on the held-out examples {held_out_loss(model, checkpoint, data_dir):.6f}, {comparison}"
    except Refusal as refusal:
        return f"not evaluated: {refusal}"


def _evaluations(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    evaluation: list[dict[str, Any]] = json.loads((checkpoint.folder / "progress.json").read_bytes())["evaluation"]
    return evaluation


def held_out_loss(model: PreTrainedModel, checkpoint: Checkpoint, data_dir: Path | None) -> float:
    """Return the loss of an exported model on the run's held-out examples, in fp32.

    Raises Refusal if the examples are not available.
    """
    # the texts may be in another folder now
    config = build_config(**{**checkpoint.manifest.identity.config, "data_dir": data_dir})
    workload = WORKLOADS[config.workload]
    splits: Splits = workload.load(config)
    model.train(False)
    losses = []
    with torch.no_grad():
        for start in range(0, len(splits.evaluation), 8):
            rows: dict[str, Any] = {name: t[start : start + 8] for name, t in splits.evaluation.tensors.items()}
            losses.append(workload.sequence_losses(model(**workload.inputs(rows)), rows))
    return float(torch.cat(losses).double().mean())


def newest(folder: Path) -> Checkpoint:
    """Return the newest complete checkpoint of a run directory.

    If `folder` is itself a checkpoint, that one is returned.

    Raises Refusal if there is none.
    """
    if (folder / manifest.MANIFEST).exists():
        return manifest.whole(folder)
    for path in reversed(manifest.in_order(folder / "checkpoints")):
        try:
            return manifest.whole(path)
        except Refusal as refusal:
            print(f"not used: {refusal}", flush=True)
    raise Refusal(f"{folder}: there is no checkpoint. Train with --checkpoint-every, or with --save-model.")
