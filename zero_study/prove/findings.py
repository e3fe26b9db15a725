"""Find training faults that raise no error, from the observations of one rank and from those of all ranks."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .. import terminal
from ..engines.readback.facts import ddp_of, inner_module, replicated_names
from ..engines.readback.parameters import is_partitioned, local, whole_size
from .checksums import Checksum, checksums, first_difference, total
from .loss_graph import scaled_loss
from .proved_step import NEAR, Gradients, Step, depends_on_mode
from .text import NOT_CHECKED

_AVERAGES = ("DDP", "FSDP1", "FSDP2", "DeepSpeed")  # the engines that average gradients by themselves
_SHARDED = ("FSDP1", "FSDP2")  # engines whose ranks have only shards of the gradients
HARD = 10.0  # Gradients are often divided by less in the first steps.
ZERO_RATES, SHARE_OF_ZERO_RATES = 2, 0.05  # updates at a rate of zero; the last update of many schedules has that rate
# Setting a larger fraction of the gradients' elements to zero needs a reason that prove cannot know.
ERASED = 0.01
_SETTINGS = ("lr", "weight_decay", "betas", "momentum", "eps")  # of a group of parameters
_OF_SHARDS = ("every gradient is zero", "no weight moved", "gradients were replaced")
# Attributes with the model's own parameters, which are not the master weights.
_OF_ZERO = ("bit16_groups", "fp16_groups", "bf16_groups")


def rank_report(
    model: Any, facts: dict[str, Any], optimizer: Any, step: Step, batches: list[Any], weights: dict[str, Checksum],
    at_start: dict[str, Checksum] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return this rank's observations of a step, for rank 0 to compare with those of the other ranks.

    `batches` has the checksums of the first inputs of two steps. `weights` has the checksums of the parameters as the
    step begins. `at_start` has those with which the training began, or is None. Issues no collective.
    """
    averager = gradient_averager(facts, step.traffic.reduced, [issued.kind for issued in step.traffic.collectives()])
    has_hook = bool(getattr(ddp_of(model), "_comm_hooks", None))
    beyond = step.traffic.probe.bytes_beyond(facts["data_parallel_ranks"] or [])
    if has_hook:
        averager = "engine"  # the hook may issue collectives in a thread of its own, where they are not observed
    names = step.replicated if step.weights else replicated_names(model)
    # DDP broadcasts rank 0's buffers before a forward pass.
    has_own = not getattr(ddp_of(model), "broadcast_buffers", False)
    return {
        "watched": [facts["engine"], facts["engine_class"], facts["num_params"], averager],
        "ranks": facts["data_parallel_ranks"],
        "weights": {name: pair for name, pair in weights.items() if name in names and facts["engine"] != "FSDP1"},
        "buffers": {name: checksums([buffer])[0] for name, buffer in model.named_buffers() if has_own},
        # It exchanges no gradients with ranks outside of its group.
        "is_separate": not has_hook and beyond < facts["num_trainable_params"],
        "totals": [None if at_start is None else total(at_start), total(weights)],
        # Weights that a script averages by itself may be parts of the model that each rank has for itself.
        "at_start": at_start if averager == "script" else None,
        "last_is_local": averager == "engine" and not has_hook and not step.traffic.last_backward,
        "batches": batches,
        "settings": [f"{key} {group[key]}" for group in optimizer.param_groups for key in _SETTINGS if key in group],
        "findings": check_rank(facts, step, averager),
        "scaled": step.gradients.factor if facts["engine"] in _SHARDED else None,
        "targets": step.losses.targets,
        # Only an engine is known to average over the ranks.
        "target_weights": None
        if facts["precision"] == "fp16" or (facts["world_size"] > 1 and (averager != "engine" or has_hook))
        else step.losses.weights,
        "random_state": step.random_state,
        "unchecked": _unchecked_gradients(step.gradients, averager),
    }


def missing_processes(requested: int | None, world_size: int) -> list[str]:
    """Return a finding if the launch command requests several processes, but only one was started."""
    if requested is None or requested <= 1 or world_size > 1:
        return []
    return [
        f"only one process trains, but the launch command requests {requested} (accelerate starts a single process "
        "for distributed_type MULTI_CPU). Write torchrun --nproc-per-node "
        f"{requested} in place of accelerate launch and its options."
    ]


# ---------------------------------------------------------------- of one rank


def gradient_averager(facts: dict[str, Any], reduced: dict[str, int], sent: list[str]) -> str | None:
    """Return who averages the gradients over the ranks: "engine", "script" or "nobody".

    None if that is unknown. `reduced` has the bytes that were reduced in each phase of the step. `sent` has the kinds
    of the collectives that the rank issued.

    The result is None for a plain model that reduces in its forward or backward passes, because it may be
    tensor-parallel. A script counts as averaging if it reduces at least one byte per trainable parameter. A script that
    only logs its loss reduces less.
    """
    # If there are several ranks and this one issues no collective, it trains alone.
    if len(facts["data_parallel_ranks"] or [0]) == 1:
        return "nobody" if facts["data_parallel_ranks"] and facts["world_size"] > 1 and not sent else None
    by_hand = facts["num_trainable_params"]
    if facts["engine"] in _AVERAGES:
        outside_backward = sum(reduced.values()) - reduced["backward"]
        return "engine" if reduced["backward"] else "script" if outside_backward >= by_hand else "nobody"
    if reduced["script"] >= by_hand:
        return "script"
    is_unknown = reduced["forward"] or reduced["backward"] or any(kind.endswith(("send", "recv")) for kind in sent)
    return None if is_unknown else "nobody"


def check_rank(facts: dict[str, Any], step: Step, averager: str | None) -> list[str]:
    """Return the faults of a step that can be found on one rank, without the other ranks.

    `averager` is the result of `gradient_averager`.
    """
    return [
        *_not_averaged(facts, averager),
        *_wrong_clipping(facts, step),
        *_wrong_accumulation(facts, step),
        *_wrong_gradients(facts, step),
    ]


def _not_averaged(facts: dict[str, Any], averager: str | None) -> Iterator[str]:
    if facts["engine"] in _AVERAGES and averager == "nobody":
        yield (
            f"gradients were not averaged: {facts['engine']} on {len(facts['data_parallel_ranks'])} of "
            f"{facts['world_size']} ranks reduced 0 bytes in the backward passes of the step. Call the wrapped model "
            "instead of its .module, and run the last micro step outside of no_sync."
        )


def _wrong_clipping(facts: dict[str, Any], step: Step) -> Iterator[str]:
    """Yield faults of clipping: before GradScaler unscales the gradients, too early, too often, or without effect."""
    clipping = step.clipping
    if clipping.scale is not None:
        yield (
            f"clipped before unscaling: gradients were clipped at {clipping.limit} while GradScaler had multiplied "
            f"them by {clipping.scale:g}. Call scaler.unscale_(optimizer) before clip_grad_norm_."
        )
    if clipping.num_backwards_after:
        yield (
            f"clipped too early: {_backward_calls(clipping.num_backwards_after)} added to the gradients after they "
            "were clipped. Clip after the last backward call of the step."
        )
    elif clipping.num_backwards_onto:
        yield (
            f"clipped too often: {clipping.num_backwards_onto} of {step.gradients.num_backwards} backward calls added "
            f"to gradients that had already been clipped at {clipping.limit}. Clip once, after the last backward call "
            "of the step."
        )
    elif not clipping.num_gradients and clipping.limit not in (None, facts["gradient_clipping"]):
        yield (
            f"clipped nothing: there was no gradient to clip at {clipping.limit}. Under ZeRO, set gradient_clipping "
            "instead."
        )


def _wrong_accumulation(facts: dict[str, Any], step: Step) -> Iterator[str]:
    """Yield faults of gradients that are scaled at the update, lost within the step, or left from earlier steps."""
    if step.scaling.scale_at_update not in (None, 1):
        yield (
            "not unscaled: the update used gradients that GradScaler had multiplied by "
            f"{step.scaling.scale_at_update:g}. Call scaler.step(optimizer)."
        )
    if facts["zero_stage"] in (1, 2) and step.engine_backwards > 1:
        yield (
            f"gradients were lost: under ZeRO stage {facts['zero_stage']}, the last micro batch of the step had "
            f"{step.engine_backwards} backward calls, of which only one counts. Add the losses, and call backward once."
        )
    if step.gradients.num_backwards and not step.gradients.began_clean:
        yield (
            "zero_grad is missing: gradients of earlier steps were still there before "
            f"{_backward_calls(step.gradients.num_backwards)}, so they were added up. Call optimizer.zero_grad() once "
            "per step."
        )


def _wrong_gradients(facts: dict[str, Any], step: Step) -> Iterator[str]:
    """Yield faults of gradients that have the wrong sign, are all zero, or come from no backward pass of the step."""
    factor = step.gradients.factor
    if step.gradients.are_replaced:
        yield (
            "gradients were replaced: the update used gradients that are unrelated to those of the step's "
            f"{_backward_calls(step.gradients.num_backwards)}. Look for code between backward and the update that "
            "overwrites gradients."
        )
    if step.losses.is_ascent:
        yield _ascent("backward is called on the negative of the cross-entropy")
    elif factor is not None and factor < 0:
        yield _ascent(f"gradients are multiplied by {factor:.4g} between backward and the update")
    growth = step.gradients.growth or 1.0
    if growth > HARD * facts["world_size"] and not step.scaling.is_in_use:
        yield (
            f"gradients are too large: code between backward and the update multiplied them by {growth:.4g}. A sum "
            "over ranks would be a smaller factor. Remove the factor, and change the learning rate if it is intended."
        )
    if 0 < step.gradients.number == step.gradients.num_zero:
        yield (
            f"every gradient is zero: at the update, all elements of {step.gradients.number} tensors were zero. Look "
            "for hooks that change gradients, and for a constant loss."
        )


def _unchecked_gradients(gradients: Gradients, averager: str | None) -> list[str]:
    """Return a note if code between backward and the update changed the gradients in a way that cannot be judged.

    If the script averages the gradients itself, that is why they changed, and nothing counts as not checked.
    """
    if gradients.erased_share > ERASED:
        reason = (
            f"{gradients.erased_share:.0%} of the gradient elements that backward computed were set to zero. To freeze "
            "parameters, use requires_grad_"
        )
    elif gradients.num_too_few:
        reason = (
            f"they changed after backward, and {gradients.num_too_few:,} elements are too few to find out whether they "
            "were replaced"
        )
    else:
        return []
    if averager == "script":
        return [f"the gradients of the update were not compared with those of backward: {reason}"]
    return [f"{NOT_CHECKED}the gradients of the update ({reason})"]


def repeated_update(number: int) -> str:
    """Return the finding that an update used the same gradients as the update before it."""
    return (
        f"the same gradients are used twice: update {number} got the gradients of update {number - 1}, and no backward "
        "call was made in between. Call optimizer.step() once per batch."
    )


def _ascent(cause: str) -> str:
    return f"gradient ascent: {cause}, so the loss grows. Remove the sign."


def _backward_calls(number: int) -> str:
    return terminal.count(number, "backward call")


def not_trained(model: Any, optimizer: Any, stepped: Iterable[Any], unchanged: set[str]) -> tuple[list[str], list[str]]:
    """Return findings and notes on trainable parameters that no optimizer has updated.

    The findings name parameters that no optimizer has. The notes name parameters whose optimizer has not stepped yet.
    `optimizer` is the one that holds the model states. `unchanged` has the names of the parameters that did not change.
    A parameter that changes although no optimizer has it is not reported, because it has master weights somewhere.
    Issues no collective.
    """
    trainable = {id(p): (name, p) for name, p in model.named_parameters() if p.requires_grad}
    groups = [group for name in _OF_ZERO for group in getattr(optimizer, name, ())]
    has = {id(p) for group in groups for p in group} or _updated(stepped)
    missing = [(key, name) for key, (name, _) in trainable.items() if key not in has and name in unchanged]
    if not missing:
        return [], []
    waiting = _updated(instance for instance in gc.get_objects() if issubclass(type(instance), torch.optim.Optimizer))
    strangers = len(has - set(map(id, model.parameters())))
    of_strangers = f" (the optimizers have {strangers} tensors of another model)" if strangers else ""
    lost, late = ([(key, name) for key, name in missing if (key in waiting) == is_late] for is_late in (False, True))
    reason = (
        f"no optimizer has them{of_strangers}. Create the optimizer from model.parameters() after the model is "
        "complete and wrapped."
    )
    return _untrained(lost, trainable, reason), _untrained(late, trainable, "their optimizer has not stepped yet.")


def _untrained(parameters: list[tuple[int, str]], trainable: dict[int, Any], reason: str) -> list[str]:
    num_untrained, num_trainable = (
        sum(whole_size(trainable[key][1]) for key in keys) for keys in (dict(parameters), trainable)
    )
    return (
        [f"{num_untrained:,} of {num_trainable:,} parameters are not trained, for example {parameters[0][1]}: {reason}"]
        if parameters
        else []
    )


def _updated(optimizers: Iterable[Any]) -> set[int]:
    return {
        id(p) for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()) for p in group["params"]
    }


def has_masters(facts: dict[str, Any]) -> bool:
    """Return whether the optimizer updates master weights, which may move although the model's own do not."""
    return facts["parameter_dtypes"] != ["float32"] and bool(facts.get("master_dtypes"))


def not_moved(model: Any, facts: dict[str, Any], optimizer: Any, before: Any, after: dict[str, Checksum]) -> list[str]:
    """Return a finding if weights are not finite after the watched updates, or if no update changed a weight.

    `before` and `after` have the checksums of the parameters before and after these updates. Weights that cannot be
    read are skipped. Issues no collective.
    """
    readable = {name: after[name] for name, p in model.named_parameters() if p.requires_grad and after[name][1]}
    broken = [name for name, pair in readable.items() if not math.isfinite(pair[1])]
    if broken:
        return [
            f"weights are not finite after the step: {len(broken)} of {len(readable)} tensors, for example {broken[0]}."
        ]
    if not readable or has_masters(facts) or any(pair != before.get(name) for name, pair in readable.items()):
        return []
    rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
    return [
        f"no weight moved: none of the watched updates changed a weight, at learning rates {rates}. Look for a "
        "scheduler that never steps, for gradients that are erased before the update, and for updates "
        "that are lost by rounding to 16 bits."
    ]


def reverted_weights(
    model: Any, facts: dict[str, Any], before: dict[str, Checksum], at_start: dict[str, Checksum], after: Any
) -> list[str]:
    """Return a finding if the step began with the weights from before an earlier update, which is then lost.

    The arguments are checksums of the weights: `before` that earlier update, `at_start` of the step's first forward
    pass, and `after` the step's own update. Issues no collective.
    """
    names = [name for name, p in model.named_parameters() if p.requires_grad and name in before and name in at_start]
    are_equal = all(before[name] == at_start[name] for name in names)
    moves = any(after[name] != at_start[name] for name in names)
    if not names or has_masters(facts) or not are_equal or not moves:
        return []
    return [
        "weights are put back: an update changes them, but the next step begins with the weights from before it. Look "
        "for weights that are loaded or copied inside the training loop."
    ]


def cut_from_graph(names: Sequence[str], num_trained: int) -> list[str]:
    """Return a finding on parameters that forward passes use, but that are detached from the autograd graph."""
    if not names:
        return []
    return [
        f"{len(names)} of {num_trained} parameters take part in the forward pass but get no gradient, "
        f"for example {names[0]}: their results are detached, or computed without gradients. Look for detach, .data, "
        "torch.no_grad, for checkpointing with inputs that need no gradient, and for collectives without a backward "
        "pass such as torch.distributed.all_gather, or freeze these parameters."
    ]


def ended_schedule(num_zero: int, number: int) -> str:
    """Return a finding if the learning rate was zero in the last `num_zero` of all updates. Empty if it was not."""
    if num_zero < max(ZERO_RATES, SHARE_OF_ZERO_RATES * number):
        return ""
    return (
        f"the schedule ends before the training: the learning rate was zero in the last {num_zero} of {number} "
        "updates, which changed nothing. Check the number of steps of the schedule, and how often it is stepped "
        "per update"
    )


def trains_in_evaluation_mode(step: Step, module: torch.nn.Module) -> list[str]:
    """Return a finding if a model with dropout or batch norm trains in evaluation mode."""
    if not step.passes.are_in_evaluation_mode or not depends_on_mode(module):
        return []
    return ["the model trains in evaluation mode, so dropout is off and batch norm is fixed. Call model.train()."]


def hard_clipping(cuts: Sequence[float], limit: float | None) -> list[str]:
    """Return a note if clipping divides the gradients of all watched steps by more than ten."""
    if len(cuts) < 2 or min(cuts) <= HARD:
        return []
    return [
        f"clipping at {limit} divides the gradients of every examined step by {min(cuts):.3g} to "
        f"{max(cuts):.3g}. With SGD, this lowers the learning rate by the same factor. Check whether the "
        "loss is a sum instead of a mean."
    ]


def lost_ties(model: Any) -> list[str]:
    """Return a finding if the model's configuration ties embedding and head, but they are two parameters."""
    inner = inner_module(model)
    if not getattr(getattr(inner, "config", None), "tie_word_embeddings", False):
        return []
    parts = [getattr(inner, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")]
    weights = [getattr(part, "weight", None) for part in parts]
    if any(weight is None or not weight.requires_grad for weight in weights) or weights[0] is weights[1]:
        return []
    # Under ZeRO stage 3, both are the same parameter.
    if len({getattr(weight, "ds_id", None) for weight in weights} - {None}) == 1:
        return []
    return [
        "embedding and head are not tied: config.tie_word_embeddings is true, but they are two parameters that are "
        "updated separately. Call model.tie_weights() after loading."
    ]


def equal_embeddings(module: torch.nn.Module) -> list[str]:
    """Return notes on embeddings and heads that have the same values but are two parameters.

    Their tie may have been lost.
    """
    kinds = (torch.nn.Embedding, torch.nn.Linear)
    tables, heads = ([(name, part.weight) for name, part in module.named_modules() if type(part) is kind]
                     for kind in kinds)  # fmt: skip
    return [
        f"{table}.weight and {head}.weight have the same values but are two parameters. If they should be tied, the "
        "tie was lost, perhaps when weights were loaded."
        for (table, a), (head, b) in itertools.product(tables, heads)
        if a is not b and a.numel() > 1 and a.shape == b.shape and a.device.type != "meta"
        and not is_partitioned(a) and _has_values(a) and _has_values(b) and torch.equal(a, b)
    ]  # fmt: skip


def _has_values(parameter: Any) -> bool:
    """Return whether the memory of a parameter is there. FSDP1 frees it between steps, and reading it would crash."""
    return bool(local(parameter).untyped_storage().nbytes())


# ---------------------------------------------------------------- of the data


def check_loader(loader: Any, num_ranks: int) -> list[str]:
    """Return a finding if a loader divides its rows among more ranks than exist, so that some rows are never used."""
    parts: dict[str, int] = {}
    layers: list[Any] = [loader]
    for component in layers:
        name = type(component).__name__
        if isinstance(component, torch.utils.data.DistributedSampler):
            parts[name] = component.num_replicas
        elif name == "BatchSamplerShard":  # accelerate's
            parts[name] = component.num_processes
        elif isinstance(component, torch.utils.data.Subset) and len(component) and num_ranks > 1:
            divided = len(component.dataset) / len(component)  # type: ignore[arg-type]
            if round(divided) == num_ranks and len(component.dataset) - len(component) * num_ranks < num_ranks:  # type: ignore[arg-type]
                parts[name] = num_ranks
        inner = [getattr(component, key, None) for key in ("batch_sampler", "sampler", "dataset")]
        layers += [part for part in inner if part is not None and not any(part is layer for layer in layers)]
    total = math.prod(parts.values())
    if total <= num_ranks:
        return []
    return [
        f"data is divided twice: it is divided by {total} ({' and '.join(parts)}), but only {num_ranks} "
        f"rank(s) need different data. {1 - num_ranks / total:.0%} of the rows are never "
        "used. Remove one of these divisions."
    ]


def uneven_targets(counts: Sequence[int]) -> list[str]:
    """Return a note if the losses of a step are means over different numbers of targets.

    `counts` has the number of targets of each loss. Differences of up to 1 % are ignored.
    """
    if len(counts) < 2 or max(counts) <= 1.01 * min(counts):
        return []
    return [
        f"losses of the step are means over {min(counts):,} to {max(counts):,} targets, so tokens in small batches "
        "count "
        "more. To weight all tokens equally, divide the sum of the losses by the number of targets of the whole step "
        "on all ranks."
    ]


# ---------------------------------------------------------------- of all ranks


Report = dict[str, Any]  # what `rank_report` returns


def check_ranks(reports: Sequence[Report]) -> tuple[list[str], list[str]]:
    """Compare the reports of all ranks, which are in rank order, and return findings and notes."""
    findings = _findings_of_single_ranks(reports)
    notes = list[str](next((report["unchecked"] for report in reports if report["unchecked"]), []))
    with_equal_weights = {tuple(report["ranks"]) for report in reports if report["ranks"] and report["watched"][-1]}
    for group in sorted(with_equal_weights):
        members = [reports[rank] for rank in group]
        first, *later_members = members
        if any((report["watched"], report["ranks"]) != (first["watched"], first["ranks"]) for report in later_members):
            notes.append(f"ranks {list(group)} are not compared, because they train different models.")
            continue
        findings += _first_divergence(group, members)
        differences = (first_difference(first["buffers"], member["buffers"]) for member in later_members)
        if difference := next(filter(None, differences), None):
            notes.append(
                f"buffers differ between ranks ({difference}). A checkpoint contains only the buffers of "
                "the rank that writes it."
            )
        findings += _different_scales(group, members)
        notes += uneven_targets([count for member in members for count in member["targets"]])
        of_loss, of_loss_notes = scaled_loss([member.get("target_weights") for member in members])
        findings += of_loss
        notes += of_loss_notes
        notes += _same_random_numbers(members)
        findings += _same_batch(group, members)
    findings += _replicas_apart(reports)
    return findings, notes


def _findings_of_single_ranks(reports: Sequence[Report]) -> list[str]:
    """Return the findings that single ranks made, without duplicates.

    Some findings count only if every rank makes them. For example, FSDP's shard of an embedding on one rank may contain
    no token of the batch, so that its gradient is zero.
    """
    distinct = dict.fromkeys(text for report in reports for text in report["findings"])
    rare = tuple(each for each in _OF_SHARDS if not all(each in str(report["findings"]) for report in reports))
    return [text for text in distinct if not text.startswith(rare)]


def _first_divergence(group: Sequence[int], members: Sequence[Report]) -> list[str]:
    """Return a finding on the first rank that differs from the first rank of its group.

    Ranks differ in their optimizer settings or in their weights. The list is empty if all ranks agree.
    """
    first, *later_members = members
    for rank, member in zip(group[1:], later_members, strict=True):
        pair = f"ranks {group[0]} and {rank}"
        unlike = [each for each in zip(first["settings"], member["settings"], strict=False) if len(set(each)) > 1]
        if unlike:
            return [
                f"{pair} have different optimizer settings: {' and '.join(unlike[0])}. Use the same settings on all "
                "ranks."
            ]
        own = _parts_of_ranks(first, member)
        weights, others = (
            {name: sums for name, sums in each["weights"].items() if name not in own} for each in (first, member)
        )
        if difference := first_difference(weights, others):
            return [_different_weights(first, pair, difference)]
    return []


def _parts_of_ranks(first: Report, second: Report) -> set[str]:
    """Return the parameters that differed as the training began, if others were equal: experts, for example."""
    starts = [report.get("at_start") or {} for report in (first, second)]
    own = {name for name, sums in starts[0].items() if starts[1].get(name) != sums}
    return own if len(own) < len(starts[0]) else set()


def _different_weights(report: Report, pair: str, difference: str) -> str:
    if report["watched"][0] not in _AVERAGES and report["watched"][-1] == "nobody":
        return (
            f"{pair} train separately: nothing averages their gradients, and their weights differ ({difference}). "
            "Pass the model to accelerator.prepare, or wrap it in DDP."
        )
    begin = f"ranks differ: the weights of {pair} are not the same ({difference})."
    if report["last_is_local"]:
        return (
            f"{begin} Earlier backward passes of the step averaged their gradients, but the last one reduced 0 bytes. "
            "Run the last micro step outside of no_sync, and call the wrapped model instead of the module inside it."
        )
    return (
        f"{begin} Look for weights that are changed or added after the model is wrapped, and for backward passes "
        "outside of the wrapped model."
    )


def _replicas_apart(reports: Sequence[Report]) -> list[str]:
    """Return a finding if groups of ranks began with the same model, never exchange gradients, and have diverged.

    The groups differ at the start under tensor or pipeline parallelism, and in trainings of several models.
    """
    groups = sorted({tuple(report["ranks"] or ()) for report in reports})
    if len(groups) < 2 or sorted(itertools.chain(*groups)) != list(range(len(reports))):
        return []
    kind, *_, averager = reports[0]["watched"]
    # An engine with a group of one rank has nothing to average with.
    is_averaged = averager == "engine" or (kind in _AVERAGES and len(groups) == len(reports))
    if len({len(group) for group in groups}) > 1 or not is_averaged:
        return []
    for shards in zip(*([reports[rank] for rank in group] for group in groups), strict=True):
        for first, second in itertools.pairwise(shards):
            is_same_model = all(first[key] == second[key] for key in ("watched", "settings"))
            starts, totals = ([report["totals"][i] for report in (first, second)] for i in (0, 1))
            if not is_same_model or None in starts or starts[0] != starts[1] or totals[0] == totals[1]:
                return []
    if not all(report["is_separate"] for report in reports):
        return []
    texts = " and ".join(f"{list(group)}" for group in groups)
    return [
        f"ranks {texts} train separately: {reports[0]['watched'][0]} averages gradients only within each of these "
        "groups. They began with the same weights, and now have different ones. Pass all ranks to the engine: for "
        "hybrid sharding, the mesh with both axes, replicas and shards."
    ]


def _different_scales(group: Sequence[int], members: Sequence[Report]) -> list[str]:
    factors = [member["scaled"] for member in members if member["scaled"] is not None]
    if not factors or max(factors) - min(factors) <= NEAR * max(map(abs, factors)):
        return []
    return [
        f"gradients of ranks {list(group)} are multiplied by different numbers before the update, "
        f"{min(factors):.4g} to {max(factors):.4g}, as if each rank clipped by the norm of its own shards. Clip with "
        "torch.nn.utils.clip_grad_norm_, which uses the norm of all shards."
    ]


def _same_random_numbers(members: Sequence[Report]) -> list[str]:
    states = {member.get("random_state") for member in members}
    if len(members) < 2 or len(states) > 1 or None in states:
        return []
    return ["all ranks draw the same random numbers, so the masks of dropout are equal on all of them"]


def _same_batch(group: Sequence[int], members: Sequence[Report]) -> list[str]:
    first, *later_members = members
    batches = first["batches"]
    # Synthetic data, which is the same in each step.
    is_made_up = len(batches) < 2 or not batches[0] or batches[0] == batches[1]
    if is_made_up or any(member["batches"] != batches for member in later_members):
        return []
    return [
        f"every rank trains on the same batch: in two steps, the inputs of ranks {list(group)} were equal. Give the "
        "DataLoader a DistributedSampler, or pass it to prepare."
    ]
