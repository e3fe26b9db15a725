"""What trains wrongly without an error: by what one rank saw of a step, and by what all ranks saw of it."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from . import read_back
from .checksums import Checksum, checksums, first_difference
from .proved_step import NEAR, Step

_AVERAGES = ("DDP", "FSDP1", "FSDP2", "DeepSpeed")  # engines
_SHARDED = ("FSDP1", "FSDP2")  # whose gradients a script can only see in part
_SETTINGS = ("lr", "weight_decay", "betas", "momentum", "eps")  # of a group of parameters
_OF_SHARDS = ("every gradient is zero", "no weight moved")
_OF_ZERO = ("bit16_groups", "fp16_groups", "bf16_groups")  # the model's own parameters; its masters are others


def posted(
    model: Any, facts: dict[str, Any], optimizer: Any, step: Step, batches: list[Any], weights: dict[str, Checksum]
) -> dict[str, Any]:
    """What a rank saw, for all to be compared. Rank-local.

    `batches`: checksums of the first inputs of two steps. `weights`: of the parameters, as the step begins.
    """
    kept_alike = by_whom(facts, step.reduced, [issued.kind for issued in step.collectives()])
    if getattr(read_back.ddp_of(model), "_comm_hooks", None):
        kept_alike = "engine"  # which may send from a thread of its own, unseen
    names = step.replicated if step.weights else read_back.replicated(model)
    has_own = not getattr(read_back.ddp_of(model), "broadcast_buffers", False)  # DDP sends rank 0's before it trains
    return {
        "watched": [facts["engine"], facts["engine_class"], facts["num_params"], kept_alike],
        "ranks": facts["data_parallel_ranks"],
        "weights": {name: pair for name, pair in weights.items() if name in names and facts["engine"] != "FSDP1"},
        "buffers": {name: checksums([buffer])[0] for name, buffer in model.named_buffers() if has_own},
        "batches": batches,
        "settings": [f"{key} {group[key]}" for group in optimizer.param_groups for key in _SETTINGS if key in group],
        "findings": of_rank(facts, step, kept_alike),
        "scaled": step.scaled if facts["engine"] in _SHARDED else None,
        "targets": step.targets,
    }


# ---------------------------------------------------------------- of one rank


def by_whom(facts: dict[str, Any], reduced: dict[str, int], sent: list[str]) -> str | None:
    """Who keeps the weights of the ranks alike: the engine, the script, nobody; None: unknown. `sent`: collectives.

    A plain model that reduces within its passes may be tensor-parallel. A script that averages by hand reduces a byte
    per parameter at least; a loss that is logged is less.
    """
    if len(facts["data_parallel_ranks"] or [0]) == 1:  # one of several that send nothing trains alone
        return "nobody" if facts["data_parallel_ranks"] and facts["world_size"] > 1 and not sent else None
    by_hand = facts["num_trainable_params"]
    if facts["engine"] in _AVERAGES:
        others = sum(reduced.values()) - reduced["backward"]
        return "engine" if reduced["backward"] else "script" if others >= by_hand else "nobody"
    if reduced["script"] >= by_hand:
        return "script"
    is_unknown = reduced["forward"] or reduced["backward"] or any(kind.endswith(("send", "recv")) for kind in sent)
    return None if is_unknown else "nobody"


def of_rank(facts: dict[str, Any], step: Step, kept_alike: str | None) -> list[str]:
    """What a step of one rank shows by itself."""
    found = []
    if facts["engine"] in _AVERAGES and kept_alike == "nobody":
        found.append(
            f"gradients were not averaged: {facts['engine']} over {len(facts['data_parallel_ranks'])} of "
            f"{facts['world_size']} ranks reduced 0 bytes in the step's backward passes; call the wrapped model, not "
            "its .module, and let the last micro step be outside of no_sync"
        )
    if step.clipped_scaled_by is not None:
        found.append(
            f"clipped before unscaling: at {step.clipped_at}, with the gradients times {step.clipped_scaled_by:g} by "
            "GradScaler; call scaler.unscale_(optimizer) before clip_grad_norm_"
        )
    if step.added_after_clipping:
        found.append(f"clipped too early: {step.added_after_clipping} backward call(s) added to the gradients after it")
    elif step.added_to_clipped:
        found.append(
            f"clipped too often: {step.added_to_clipped} of {step.backwards} backward calls added to gradients that "
            f"had been clipped at {step.clipped_at} already; clip once, after the step's last backward call"
        )
    elif not step.num_clipped and step.clipped_at not in (None, facts["gradient_clipping"]):
        found.append(f"clipped nothing: no gradient was there to clip at {step.clipped_at}; ZeRO has gradient_clipping")
    if step.updated_scaled_by not in (None, 1):
        found.append(f"not unscaled: GradScaler has gradients times {step.updated_scaled_by:g}; call scaler.step")
    if facts["zero_stage"] in (1, 2) and step.engine_backwards > 1:
        found.append(
            f"gradients were lost: ZeRO stage {facts['zero_stage']} had {step.engine_backwards} backward calls in a "
            "step's last micro batch; add the losses and call backward once"
        )
    if step.backwards and not step.began_clean:
        found.append(
            f"zero_grad is missing: gradients of earlier steps were there before each of {step.backwards} backward "
            "call(s) and are added; call optimizer.zero_grad() once a step"
        )
    if step.is_ascent or (step.scaled is not None and step.scaled < 0):
        how = "backward is called on the negative of the cross-entropy" if step.is_ascent else (
            f"gradients are multiplied with {step.scaled:.4g} between backward and the update"
        )  # fmt: skip
        found.append(f"gradient ascent: {how}, so that the loss grows; take the sign out")
    if 0 < step.num_gradients == step.num_zero_gradients:
        found.append(
            f"every gradient is zero: all elements of {step.num_gradients} tensors at the update; look for hooks, and "
            "for a loss that is constant"
        )
    return found


def not_trained(model: Any, optimizer: Any, stepped: Iterable[Any], unchanged: set[str]) -> tuple[list[str], list[str]]:
    """Trainable parameters that no optimizer has that stepped: findings, and notes. Rank-local.

    `optimizer`: which holds the model states. `unchanged`: names; what changes all the same has masters somewhere.
    """
    trainable = {id(p): (name, p) for name, p in model.named_parameters() if p.requires_grad}
    groups = [group for name in _OF_ZERO for group in getattr(optimizer, name, ())]
    has = {id(p) for group in groups for p in group} or _updated(stepped)
    missing = [(key, name) for key, (name, _) in trainable.items() if key not in has and name in unchanged]
    if not missing:
        return [], []
    waiting = _updated(each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer))
    strangers = len(has - set(map(id, model.parameters())))
    other = f" (they have {strangers} tensors of another model)" if strangers else ""
    lost, late = ([(key, name) for key, name in missing if (key in waiting) == is_late] for is_late in (False, True))
    why = f"no optimizer has them{other}; build it of model.parameters() once the model is complete and wrapped"
    return _untrained(lost, trainable, why), _untrained(late, trainable, "their optimizer has not stepped yet")


def _untrained(named: list[tuple[int, str]], trainable: dict[int, Any], why: str) -> list[str]:
    some, all_ = (sum(read_back.whole_size(trainable[key][1]) for key in keys) for keys in (dict(named), trainable))
    return [f"{some:,} of {all_:,} parameters are not trained, first {named[0][1]}: {why}"] if named else []


def _updated(optimizers: Iterable[Any]) -> set[int]:
    return {id(p) for each in optimizers for group in getattr(each, "param_groups", ()) for p in group["params"]}


def not_moved(model: Any, facts: dict[str, Any], optimizer: Any, before: Any, after: dict[str, Checksum]) -> list[str]:
    """Where the watched updates left what is not finite, or moved nothing. Rank-local; the unreadable is neither."""
    known = {name: after[name] for name, p in model.named_parameters() if p.requires_grad and after[name][1]}
    broken = [name for name, pair in known.items() if not math.isfinite(pair[1])]
    if broken:
        return [f"weights are not finite after the step: {len(broken)} of {len(known)}, first {broken[0]}"]
    has_masters = facts["parameter_dtypes"] != ["float32"] and facts.get("master_dtypes")  # which may have moved
    if not known or has_masters or any(pair != before.get(name) for name, pair in known.items()):
        return []
    rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
    return [
        f"no weight moved: in all watched updates, at learning rates {rates}; look for a scheduler that never steps, "
        "gradients erased before the update, and updates that 16 bits round away"
    ]


def put_back(
    model: Any, facts: dict[str, Any], before: dict[str, Checksum], begun: dict[str, Checksum], after: Any
) -> list[str]:
    """Whether the weights with which a step began are those of before an earlier update. Rank-local.

    `before`: ahead of that update. `begun`: as the step's first forward pass began. `after`: its own update.
    """
    names = [name for name, p in model.named_parameters() if p.requires_grad and name in before and name in begun]
    has_masters = facts["parameter_dtypes"] != ["float32"] and facts.get("master_dtypes")  # which may have moved
    are_same = all(before[name] == begun[name] for name in names)
    moves = any(after[name] != begun[name] for name in names)
    if not names or has_masters or not are_same or not moves:
        return []
    return [
        "weights are put back: an update moves them, and the next step begins with those of before; look for weights "
        "that are loaded or copied within the loop"
    ]


def lost_ties(model: Any) -> list[str]:
    """Embedding and head that the configuration of a transformers model ties, and that are two tensors."""
    inner = read_back.inner(model)
    if not getattr(getattr(inner, "config", None), "tie_word_embeddings", False):
        return []
    parts = [getattr(inner, f"get_{which}_embeddings", lambda: None)() for which in ("input", "output")]
    weights = [getattr(part, "weight", None) for part in parts]
    if any(weight is None or not weight.requires_grad for weight in weights) or weights[0] is weights[1]:
        return []
    if len({getattr(weight, "ds_id", None) for weight in weights} - {None}) == 1:  # of stage 3
        return []
    return [
        "embedding and head are not tied: config.tie_word_embeddings is true, and they are two parameters, each with "
        "an update of its own; call model.tie_weights() after loading"
    ]


def equal_embeddings(module: torch.nn.Module) -> list[str]:
    """Note embeddings and heads that hold the same values and are two parameters: a tie that may have been lost."""
    kinds = (torch.nn.Embedding, torch.nn.Linear)
    tables, heads = ([(name, part.weight) for name, part in module.named_modules() if type(part) is kind]
                     for kind in kinds)  # fmt: skip
    return [
        f"{table}.weight and {head}.weight hold the same values and are two parameters: were they tied before a load?"
        for (table, one), (head, other) in itertools.product(tables, heads)
        if one is not other and one.numel() > 1 and one.shape == other.shape and one.device.type != "meta"
        and not hasattr(one, "full_tensor") and not hasattr(one, "ds_id") and torch.equal(one, other)
    ]  # fmt: skip


# ---------------------------------------------------------------- of the data


def of_loader(loader: Any, num_ranks: int) -> list[str]:
    """Whether a loader's rows are divided among more ranks than there are: a part of them is never seen."""
    parts: dict[str, int] = {}
    seen: list[Any] = [loader]
    for each in seen:
        name = type(each).__name__
        if isinstance(each, torch.utils.data.DistributedSampler):
            parts[name] = each.num_replicas
        elif name == "BatchSamplerShard":  # accelerate's
            parts[name] = each.num_processes
        elif isinstance(each, torch.utils.data.Subset) and len(each) and num_ranks > 1:
            divided = len(each.dataset) / len(each)  # type: ignore[arg-type]
            if round(divided) == num_ranks and len(each.dataset) - len(each) * num_ranks < num_ranks:  # type: ignore[arg-type]
                parts[name] = num_ranks
        inner = [getattr(each, key, None) for key in ("batch_sampler", "sampler", "dataset")]
        seen += [one for one in inner if one is not None and not any(one is other for other in seen)]
    total = math.prod(parts.values())
    if total <= num_ranks:
        return []
    return [
        f"data is divided twice: {' and '.join(parts)} divide it by {total}, and {num_ranks} rank(s) have data of "
        f"their own; {1 - num_ranks / total:.0%} of the rows are never seen; leave one of them out"
    ]


def of_targets(counts: Sequence[int]) -> list[str]:
    """Note losses of a step that are means over other numbers of tokens."""
    if len(counts) < 2 or max(counts) <= 1.01 * min(counts):
        return []
    return [
        f"losses of the step are means over {min(counts):,} to {max(counts):,} targets: a token counts more where "
        "there are few; divide sums by the targets of the whole step, on all ranks, if each is to count alike"
    ]


# ---------------------------------------------------------------- of all ranks


def of_ranks(ranks: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Findings, and notes, of what all ranks have posted."""
    shown = dict.fromkeys(text for rank in ranks for text in rank["findings"])
    # These count where every rank finds them: FSDP's shard of an embedding may have no token of a batch.
    rare = tuple(each for each in _OF_SHARDS if not all(each in str(rank["findings"]) for rank in ranks))
    findings = [text for text in shown if not text.startswith(rare)]
    notes: list[str] = []
    for group in sorted({tuple(rank["ranks"]) for rank in ranks if rank["ranks"] and rank["watched"][-1]}):
        first, *others = (ranks[number] for number in group)
        if any((other["watched"], other["ranks"]) != (first["watched"], first["ranks"]) for other in others):
            notes.append(f"ranks {list(group)} are not compared: they watch other models")
            continue
        for number, other in zip(group[1:], others, strict=True):
            which, found = f"ranks {group[0]} and {number}", first_difference(first["weights"], other["weights"])
            unlike = [pair for pair in zip(first["settings"], other["settings"], strict=False) if len(set(pair)) > 1]
            if unlike:
                findings.append(f"{which} update otherwise: {' and '.join(unlike[0])}; give all optimizers one setting")
                break
            if found:
                findings.append(_apart(first, which, found))
                break
        differing = filter(None, (first_difference(first["buffers"], other["buffers"]) for other in others))
        notes += [f"buffers differ between ranks: {found}; who saves, saves its own" for found in differing][:1]
        factors = [rank["scaled"] for rank in (first, *others) if rank["scaled"] is not None]
        if factors and max(factors) - min(factors) > NEAR * max(map(abs, factors)):
            findings.append(
                f"gradients of ranks {list(group)} are multiplied with other numbers before the update, "
                f"{min(factors):.4g} to {max(factors):.4g}: a norm of each rank's own shards; clip by "
                "torch.nn.utils.clip_grad_norm_, which takes that of all"
            )
        notes += of_targets([count for rank in (first, *others) for count in rank["targets"]])
        batches = first["batches"]
        is_made_up = len(batches) < 2 or not batches[0] or batches[0] == batches[1]  # the same in each step
        if not is_made_up and all(other["batches"] == batches for other in others):
            findings.append(
                f"every rank trains on the same batch: in two steps the inputs of ranks {list(group)} are equal; give "
                "the DataLoader a DistributedSampler, or prepare it"
            )
    return findings, notes


def _apart(rank: dict[str, Any], which: str, found: str) -> str:
    if rank["watched"][0] not in _AVERAGES and rank["watched"][-1] == "nobody":
        return f"{which} train apart: nothing reduces their gradients, and weights differ, {found}; prepare the model"
    return (
        f"ranks differ: weights of {which} are not the same, {found}; look for weights changed or added after the "
        "wrap, and for backward passes outside of it"
    )
