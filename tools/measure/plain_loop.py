"""Repeat a run with a plain loop: one process, no engine, no accelerate, and none of the trainer's code.

    python tools/measure/plain_loop.py runs/bits/gpt-wikitext-tiny-ddp-2x-seed0 [--ranks-first]

A comparison of strategies cannot find an error that all strategies share. This loop can. It computes the gradients of
the ranks one after another, adds them in the order of the ranks, and steps torch's AdamW. It reads configuration and
digests from the run's record, and compares weights and moments bit by bit after every step. The run must use the
bundled sample, fp32 and no dropout, with `--fixed-order optimizer,norm,collectives` and `--digest-every 1`.

Engines that reduce after each micro batch add the ranks first (`--ranks-first`). DDP and ZeRO-1 add the micro batches
first. Exit status: 0 if all bits are equal, 1 if they differ, 2 if this loop cannot repeat the run.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from study.workloads import synthetic  # the text alone

SIZES = {"tiny": (2, 128, 2), "mini": (4, 256, 4)}  # of BERT: layers, width, heads
GPT_SIZES = {"tiny": (2, 128, 2), "mini": (4, 128, 4)}


def batches_and_model(config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], torch.nn.Module]:
    """Return all training examples, in the order in which they were drawn, and the model with its first weights."""
    length, count = config["sequence_length"], config["num_train_examples"]
    tokenizer = synthetic.tokenizer(config["workload"])
    if config["workload"] == "bert-imdb":
        texts, labels = synthetic.reviews()
        reviews = datasets.Dataset.from_dict({"text": texts, "label": labels})
        split = reviews.train_test_split(test_size=0.2, seed=config["split_seed"]).shuffle(seed=config["split_seed"])
        drawn = split["train"].select(range(count))
        tokens = tokenizer(list(drawn["text"]), max_length=length, truncation=True, padding="max_length")
        examples = {name: torch.tensor(tokens[name]) for name in ("input_ids", "attention_mask")}
        examples["labels"] = torch.tensor(drawn["label"][:])
        layers, width, heads = SIZES[config["size"]]
        settings: Any = BertConfig(
            vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=4 * width, max_position_embeddings=512, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, classifier_dropout=0.0, pad_token_id=tokenizer.pad_token_id, num_labels=2,
            attn_implementation=config["attention"],
        )  # fmt: skip
        torch.manual_seed(config["seed"])
        return examples, BertForSequenceClassification(settings)
    lines = [line for line in synthetic.articles()["train"] if line]
    ids = np.concatenate([tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines])
    blocks = ids[: len(ids) // length * length].reshape(-1, length)
    order = np.random.default_rng(config["split_seed"]).permutation(len(blocks))
    input_ids = torch.from_numpy(blocks[order][:count].astype(np.int64))
    layers, width, heads = GPT_SIZES[config["size"]]
    settings = GPT2Config(
        vocab_size=len(tokenizer), n_embd=width, n_layer=layers, n_head=heads, n_positions=1024, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
        attn_implementation=config["attention"],
    )  # fmt: skip
    torch.manual_seed(config["seed"])
    return {"input_ids": input_ids, "labels": input_ids}, GPT2LMHeadModel(settings)


def train(config: dict[str, Any], world_size: int, ranks_first: bool) -> list[dict[str, Any]]:
    """Train all steps and return their digests."""
    examples, model = batches_and_model(config)
    is_bert = config["workload"] == "bert-imdb"
    batch = config["global_batch_size"]
    micro = config["micro_batch_size"] or batch // world_size
    num_micro_steps = batch // (micro * world_size)
    per_epoch = config["num_train_examples"] // batch * batch
    num_steps = config["max_steps"] or config["epochs"] * (config["num_train_examples"] // batch)
    draw, order = torch.Generator().manual_seed(config["seed"]), []
    while len(order) < num_steps * batch:
        order += torch.randperm(config["num_train_examples"], generator=draw)[:per_epoch].tolist()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config["weight_decay"]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = config["adam_beta1"], config["adam_beta2"]
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=config["adam_epsilon"], fused=False, foreach=False)

    def gradient(rows: list[int]) -> list[torch.Tensor]:
        """Return the gradient of one rank's micro batch, scaled to its part of the step."""
        micro_batch = {name: values[rows] for name, values in examples.items()}
        labels = micro_batch.pop("labels")
        if is_bert:
            loss = torch.nn.functional.cross_entropy(model(**micro_batch).logits, labels)
        else:
            logits = model(**micro_batch).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return list(torch.autograd.grad(loss / num_micro_steps, parameters))

    def added(terms: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        total = [tensor.clone() for tensor in terms[0]]
        for term in terms[1:]:
            for place, tensor in enumerate(term):
                total[place] += tensor
        return total

    digests = []
    for step in range(1, num_steps + 1):
        rows = order[(step - 1) * batch : step * batch]
        parts = [
            [gradient(rows[(m * world_size + r) * micro : (m * world_size + r + 1) * micro]) for r in range(world_size)]
            for m in range(num_micro_steps)
        ]
        averaged = [[[tensor / world_size for tensor in rank] for rank in micro_step] for micro_step in parts]
        if ranks_first:
            whole = added([added(micro_step) for micro_step in averaged])
        else:
            whole = added([added([micro_step[r] for micro_step in averaged]) for r in range(world_size)])
        if config["gradient_clipping"]:
            norm = sum(tensor.double().square().sum() for tensor in whole).sqrt().float()
            factor = torch.clamp(config["gradient_clipping"] / (norm + 1e-6), max=1.0)
            whole = [tensor * factor for tensor in whole]
        for parameter, tensor in zip(parameters, whole, strict=True):
            parameter.grad = tensor
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, num_steps)
        optimizer.step()
        digests.append({"step": step} | digest(model, optimizer))
    return digests


def learning_rate(config: dict[str, Any], step: int, num_steps: int) -> float:
    """Return the learning rate of the linear schedule with warm-up."""
    warmup, peak = config["warmup_steps"], float(config["learning_rate"])
    if step <= warmup:
        return peak * step / warmup
    return peak * (1 - (step - 1 - warmup) / (num_steps - warmup))


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the first 16 digits of the SHA-256 of weights and moments, in the order of the parameters' names."""
    parts = {}
    for kind, key in (("weights", None), ("first_moments", "exp_avg"), ("second_moments", "exp_avg_sq")):
        sha = hashlib.sha256()
        for name, parameter in sorted(model.named_parameters()):
            values = parameter.detach() if key is None else optimizer.state[parameter][key]
            sha.update(name.encode())
            sha.update(values.contiguous().numpy().tobytes())
        parts[kind] = sha.hexdigest()[:16]
    return parts


def main(arguments: list[str]) -> int:
    """Repeat a run, and print the first step that differs."""
    record = json.loads((Path(arguments[0]) / "record.json").read_text())
    config, expected = record["config"], record.get("digests")
    required = {"data": "bundled", "precision": "fp32", "dropout": 0, "schedule": "linear"}
    if not expected or config["digest_every"] != 1 or any(config[name] != value for name, value in required.items()):
        print("a run of --digest-every 1, the bundled sample, fp32 and --dropout 0 can be repeated", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    digests = train(config, record["world_size"], "--ranks-first" in arguments)
    for ours, recorded in zip(digests, expected, strict=True):
        for kind in ("first_moments", "second_moments", "weights"):
            if ours[kind] != recorded[kind]:
                print(f"other bits: {kind.replace('_', ' ')} from step {ours['step']} on")
                return 1
    print(f"the same bits in all {len(digests)} steps: weights and both moments, {digests[-1]['weights']} at the end")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
