"""Export the model of a run from a checkpoint, unsharded and in fp32, for `from_pretrained` on any machine.

Every engine has a different layout for its states. Reading them needs neither the engine nor a GPU.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from study.config import RunConfig, build_config
from study.training import adapters, manifest, weights
from study.training.engine_state import LAYOUT, STATES, subgroup_file
from study.training.manifest import ENGINE, MODEL, Checkpoint
from study.workloads import WORKLOADS
from zero_study.engines.readback.parameters import plain_name
from zero_study.errors import Refusal
from zero_study.saved import dcp, deepspeed_zero, foreign, pickles
from zero_study.saved.content import Saved

ADAPTER = "adapter_config.json"

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from study.workloads.sources import Splits


def export(checkpoint: Checkpoint, folder: Path, merge: bool = False, data_dir: Path | None = None) -> PreTrainedModel:
    """Write the model of a checkpoint and its tokenizer to a folder, and return the model.

    If the run trained an adapter, the adapter is written, and the frozen model in the folder `base` below it, unless
    its weights are published ones. `merge` writes one model instead, with the adapter added to its weights. If the run
    kept the frozen weights in 4 bits, those that they were rounded from are written; `data_dir` may be needed to build
    them.

    Raises Refusal if the folder exists already, if the checkpoint contains another model, or if there is no adapter to
    merge.
    """
    if folder.exists():
        raise Refusal(f"{folder}: the folder already exists. Delete this folder, or name another one.")
    try:
        model: Any = _rebuilt(checkpoint, data_dir)
    except Refusal:
        raise
    except Exception as error:  # files of another machine may contain anything
        raise Refusal(
            f"{checkpoint.folder}: the model cannot be built from this checkpoint ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}). Check this checkpoint with `zero-study saved`, or use "
            "another checkpoint."
        ) from None
    is_adapter = hasattr(model, "peft_config")
    if merge and not is_adapter:
        raise Refusal(
            f"{checkpoint.folder}: this run trained all weights and has no adapter, so there is nothing to merge. "
            "Leave --merge out."
        )
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        if is_adapter and not merge:
            model = _write_adapter(model, checkpoint, part, folder)
        else:
            model = model.merge_and_unload() if merge else model
            model.save_pretrained(part)
        for path in (checkpoint.folder / MODEL).iterdir():
            if not (part / path.name).exists() and (path.name != ADAPTER or not merge):
                shutil.copy(path, part)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    exported: PreTrainedModel = model
    return exported


def _rebuilt(checkpoint: Checkpoint, data_dir: Path | None) -> Any:
    """Return the unsharded model of a checkpoint, with its adapter if the run trained one.

    Raises Refusal if the checkpoint contains another model, or if its files would run code.
    """
    import transformers

    for name in ("config.json", ADAPTER):
        if (path := checkpoint.folder / MODEL / name).exists():
            try:
                foreign.read_object(path)
            except foreign.Unusual as reason:
                raise Refusal(f"{path}: this file {reason}. Use another checkpoint.") from None
    parameters, is_in_4bit = read_parameters(checkpoint), _unchecked_config(checkpoint).load_in_4bit
    if is_in_4bit:  # only the adapter is whole in the checkpoint
        config = _config(checkpoint, data_dir)
        workload = WORKLOADS[config.workload]
        model: Any = weights.initial_model(workload, workload.load(config), config)
    else:
        described = transformers.AutoConfig.from_pretrained(checkpoint.folder / MODEL, local_files_only=True)
        model_class = getattr(transformers, (described.architectures or [""])[0], None)
        if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
            raise Refusal(
                f"{checkpoint.folder}: its config.json does not name a model of transformers. Use another checkpoint."
            )
        with weights.unpartitioned(), foreign.limited(600):
            model = model_class(described)
    if (checkpoint.folder / MODEL / ADAPTER).exists():
        import peft

        model = adapters.adapted(model, peft.PeftConfig.from_pretrained(str(checkpoint.folder / MODEL)))
    # Tied parameters appear once.
    own_names = {name for name, parameter in model.named_parameters() if parameter.requires_grad or not is_in_4bit}
    if is_in_4bit:
        parameters = {name: tensor for name, tensor in parameters.items() if name in own_names}
    missing, unknown = model.load_state_dict(parameters, strict=False)
    model.tie_weights()
    if unknown or own_names & {*missing}:
        names = ", ".join(sorted({*unknown, *(own_names & {*missing})}))
        raise Refusal(
            f"{checkpoint.folder}: this checkpoint contains a different model, because only one of the "
            f"two models has the parameters {names}. Use another checkpoint"
        )
    return model


def _write_adapter(adapted: Any, checkpoint: Checkpoint, part: Path, folder: Path) -> Any:
    """Write a model's adapter to the folder `part`, which will become `folder`. Return the model as loaded from there.

    The frozen model is written to `base` in the same folder, unless its weights are published ones.
    """
    config = _unchecked_config(checkpoint)
    adapted.eval()
    is_published = config.effective_init == "pretrained" and config.nudge_seed is None
    published = WORKLOADS[config.workload].PRETRAINED.get(config.size)
    base_name = published if is_published else str((folder / adapters.BASE).absolute())
    adapted.peft_config["default"].base_model_name_or_path = base_name
    adapted.save_pretrained(part, save_embedding_layers=False)
    (part / "README.md").unlink()  # a model card that says nothing
    for module in adapted.modules():
        trained = getattr(module, "modules_to_save", None)
        if isinstance(trained, torch.nn.ModuleDict):  # of a new head, of which `unload` would leave the trained weights
            trained["default"].load_state_dict(module.original_module.state_dict())
    base = adapted.unload()
    if not is_published:
        base.save_pretrained(part / adapters.BASE)
    return adapters.loaded(base, part)


def _config(checkpoint: Checkpoint, data_dir: Path | None) -> RunConfig:
    """Return the configuration of the run that wrote a checkpoint. Its texts may be in another folder now."""
    return build_config(**{**checkpoint.manifest.identity.config, "data_dir": data_dir})


def _unchecked_config(checkpoint: Checkpoint) -> RunConfig:
    """Return the configuration of the run that wrote a checkpoint, without the folder of its texts."""
    return RunConfig.model_construct(**checkpoint.manifest.identity.config)


def read_parameters(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the parameters of the unsharded model in fp32, by name.

    They are the master weights if the engine has any.
    """
    if not checkpoint.manifest.engine.startswith(("plain", "fsdp", "zero", "subgroups")):
        raise Refusal(
            f"{checkpoint.folder}: its engine {checkpoint.manifest.engine} is unknown. Use another checkpoint."
        )
    readers = {"plain": _plain, "fsdp": _fsdp, "zero": _deepspeed, "subgroups": _subgroups}
    reader = next(reader for kind, reader in readers.items() if checkpoint.manifest.engine.startswith(kind))
    try:
        state = reader(checkpoint.folder / ENGINE)
    except Refusal as refusal:  # `export` has no option that trusts a file
        reason = str(refusal).partition(" If you trust")[0]
        raise Refusal(
            f"{reason} Nothing was written. Use another checkpoint." if "run code" in reason else reason
        ) from None
    except pickles.Unreadable as reason:
        raise Refusal(f"{checkpoint.folder}: the checkpoint is damaged: {reason}. Use another checkpoint.") from None
    return {plain_name(name): tensor.float() for name, tensor in state.items()}


def _plain(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _fsdp(folder: Path) -> dict[str, torch.Tensor]:
    return _unsharded(dcp.read(folder / "pytorch_model_fsdp_0", trust=False))


def _deepspeed(folder: Path) -> dict[str, torch.Tensor]:
    states = folder / STATES
    unsharded: dict[str, torch.Tensor] = {}
    if (path := states / "mp_rank_00_model_states.pt").exists():  # stages 0, 1 and 2
        whole = pickles.load(path, trust=False)["module"]
        unsharded = {name: tensor for name, tensor in whole.items() if tensor.is_floating_point()}
    # Stage 1 of DeepSpeed 0.19.8 saves the frozen parameters only in the model's file.
    return unsharded | _unsharded(deepspeed_zero.read(states, trust=False))


def _unsharded(saved: Saved) -> dict[str, torch.Tensor]:
    """Return the weights of an engine's checkpoint by name. Raises Refusal if parts of them are missing or damaged."""
    incomplete = ("unreadable", "shards", "partial", "empty")
    for finding in saved.findings:
        if finding.is_wrong and finding.kind in incomplete:
            raise Refusal(f"{saved.folder}: this checkpoint is damaged. {finding.text} Use another checkpoint.")
    return {name: tensor.read() for name, tensor in saved.whole().items()}


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
    """Compare the exported model's loss on the held-out examples with the loss of the run, as text."""
    evaluations = json.loads((checkpoint.folder / "progress.json").read_bytes())["evaluation"]
    own = next((line["loss"] for line in evaluations if line["step"] == checkpoint.manifest.step), None)
    comparison = "the run recorded no such loss at this step" if own is None else f"the run recorded {own:.6f}"
    try:
        return (
            f"The loss on the held-out examples is {held_out_loss(model, checkpoint, data_dir):.6f}, and {comparison}"
        )
    except Refusal as refusal:
        return f"not evaluated: {refusal}"


def held_out_loss(model: PreTrainedModel, checkpoint: Checkpoint, data_dir: Path | None) -> float:
    """Return the loss of an exported model on the run's held-out examples, in fp32.

    Raises Refusal if the examples are not available.
    """
    config = _config(checkpoint, data_dir)
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
        return manifest.read_complete(folder)
    for path in reversed(manifest.in_order(folder / "checkpoints")):
        try:
            return manifest.read_complete(path)
        except Refusal as refusal:
            print(f"not used: {refusal}", flush=True)
    raise Refusal(f"{folder}: there is no checkpoint. Train with --checkpoint-every, or with --save-model.")
