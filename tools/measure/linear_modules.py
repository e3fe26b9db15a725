"""List the Linear modules of common architectures, and what a block saves only for the gradients of its weights.

    python tools/measure/linear_modules.py              # all model types; takes about a minute
    python tools/measure/linear_modules.py llama qwen3  # only these, which replace their entries

Writes study/theory/shapes/linear_modules.json, which study/theory/adapters.py reads. Small models of random sizes run a
forward pass on the CPU, once with all weights trainable and once with all of them frozen. The difference of what
autograd saves is written as a sum of the sizes of the model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from scipy.optimize import nnls
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from study import files
from study.theory.adapters import LINEAR_MODULES_FILE
from study.theory.shapes.config_json import MODEL_TYPES
from study.theory.shapes.formulas import evaluate

BATCH, LENGTH = 2, 24
MODELS = 10  # of random sizes
# Architectures of which transformers has only eager attention, or whose published models have it.
EAGER_ONLY = ("gpt-neo", "gpt-j", "gemma2")
TERMS = (
    "hidden", "queries", "keys", "feed_forward", "dense", "shared", "experts", "heads", "active*hidden",
    "active*feed_forward",
)  # fmt: skip
SIZES = (
    "hidden", "queries", "keys", "feed_forward", "dense", "shared", "experts", "vocabulary", "labels", "3*hidden",
    "4*hidden", "2*hidden", "queries + 2*keys", "2*feed_forward", "2*queries", "1", "2",
)  # fmt: skip
# Settings in which every block of a mixture has the same kind, by kind.
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_moe": {"experts": {"mlp_only_layers": []}, "dense": {"mlp_only_layers": [0, 1, 2, 3]}},
    "qwen3_moe": {"experts": {"mlp_only_layers": []}, "dense": {"mlp_only_layers": [0, 1, 2, 3]}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "modernbert": {"layer_types": ["full_attention"] * 4},
}


def draw(name: str, seed: int) -> dict[str, int]:
    """Return random small sizes, all of which differ."""
    rng = random.Random(seed)
    keys, more = MODEL_TYPES[name].keys, MODEL_TYPES[name].more
    grouped = "kv_heads" in keys
    while True:
        kv_heads = rng.choice([1, 2, 3])
        heads = kv_heads * rng.choice([2, 3, 4])
        head_size = rng.choice([8, 16, 24, 32])
        hidden = heads * (head_size if "head_size" not in keys else 2 * rng.randint(7, 20))
        n = {
            "heads": heads,
            "kv_heads": kv_heads if grouped else heads,
            "head_size": head_size,
            "hidden": hidden,
            "feed_forward": 8 * rng.randint(20, 60),
            "vocabulary": 8 * rng.randint(70, 90),
            "labels": rng.randint(5, 7),
            "positions": 64,
        }
        n |= {"experts": 4, "experts_per_token": rng.choice([1, 2, 3])} if "experts" in keys else {}
        n |= {part: 8 * rng.randint(20, 60) for part in more}
        compared = [n[part] for part in ("hidden", "feed_forward", *more)]
        compared += [heads * head_size] if "head_size" in keys else []
        compared += [kv_heads * head_size] if grouped else []
        if len(set(compared)) == len(compared) and hidden % 2 == 0:
            return n


def numbers_of(n: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers by which formulas call sizes."""
    named = {"active" if name == "experts_per_token" else name: value for name, value in n.items()}
    return {"queries": n["heads"] * n["head_size"], "keys": n["kv_heads"] * n["head_size"], **named}


def model_of(name: str, n: Mapping[str, int], layers: int, class_name: str, kind: str) -> Any:
    """Return a small model on the CPU, with blocks of one kind."""
    of_type = MODEL_TYPES[name]
    settings: dict[str, Any] = {key: n[part] for part, key in (of_type.keys | of_type.more).items() if part in n}
    own_names = {own: usual for usual, own in CONFIG_MAPPING[name].attribute_map.items()}
    settings |= {of_type.keys["layers"]: layers}
    if name == "gpt_neo":
        settings |= {"attention_types": [[["global"], layers]]}
    settings |= KINDS.get(name, {}).get(kind, {})
    settings |= {key: value[:layers] for key, value in OTHERS.get(name, {}).items()}
    if name in ("gemma2", "gemma3_text"):
        settings |= {"layer_types": ["full_attention"] * layers}
    if name == "gptj":
        settings |= {"rotary_dim": n["head_size"] // 2}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    labels = 2 if class_name.endswith("QuestionAnswering") else n["labels"]
    for dropout in ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop",
                    "dropout", "attention_dropout", "hidden_dropout", "resid_dropout", "embed_dropout",
                    "embedding_dropout", "activation_dropout"):  # fmt: skip
        if hasattr(CONFIG_MAPPING[name](), dropout):
            settings[own_names.get(dropout, dropout)] = 0.0
    config: Any = CONFIG_MAPPING[name](**settings, **tokens, num_labels=labels)
    if n.get("experts"):  # the kernel for all experts together needs aligned sizes
        config._experts_implementation = "eager"
    torch.manual_seed(0)
    attention = "eager" if of_type.architecture in EAGER_ONLY else "sdpa"
    return getattr(transformers, class_name)._from_config(config, attn_implementation=attention).train()


def blocks_of(model: Any, layers: int) -> tuple[str, nn.ModuleList]:
    """Return the list of blocks of a model, with its name."""
    return next(
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == layers
    )


def linears(module: nn.Module) -> Iterator[tuple[str, nn.Module, int, int]]:
    """Yield the Linear modules below a module: name, module, and the widths of input and output."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear):
            yield name, each, each.in_features, each.out_features
        elif isinstance(each, Conv1D):
            yield name, each, *each.weight.shape


def saved_storages(model: Any, n: Mapping[str, int], arithmetic: str) -> dict[int, int]:
    """Return the bytes of the storages that a forward pass saves, without those of parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in itertools.chain(model.parameters(), model.buffers())}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    words = torch.randint(1, n["vocabulary"] - 1, (BATCH, LENGTH))
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=arithmetic == "autocast"),
    ):
        outputs = (
            model(input_ids=words, use_cache=False) if "use_cache" in type(model.config)().__dict__ else model(words)
        )
        kept_alive = outputs  # noqa: F841
        return {pointer: storage.nbytes() for pointer, storage in kept.items()}


def saved_per_token(
    name: str, n: Mapping[str, int], class_name: str, kind: str, arithmetic: str, frozen: bool
) -> float:
    """Return the bytes that a block saves for each token, with trainable or with frozen weights."""
    totals = []
    for layers in (2, 4):
        model = model_of(name, n, layers, class_name, kind)
        if arithmetic == "half":
            model = model.to(torch.bfloat16)
        if frozen:
            model.requires_grad_(False)
            model.get_input_embeddings().register_forward_hook(lambda *args: args[-1].requires_grad_(True))
        totals.append(sum(saved_storages(model, n, arithmetic).values()))
    return (totals[1] - totals[0]) / 2 / BATCH / LENGTH


def formula(values: Sequence[float], numbers: Sequence[Mapping[str, int]]) -> str:
    """Return the sum of sizes that fits values best, with factors that are multiples of a half."""
    names = [term for term in TERMS if all(word in numbers[0] for word in term.split("*"))]
    matrix = np.array([[evaluate(term, each) for term in names] for each in numbers], dtype=float)
    keep = [at for at in range(len(names)) if not any(np.allclose(matrix[:, at], matrix[:, b]) for b in range(at))]
    factors = nnls(matrix[:, keep], np.array(values))[0]
    factors = np.round(factors * 2) / 2
    error = np.abs(matrix[:, keep] @ factors - values).max() / max(1.0, np.abs(values).max())
    terms = [(names[at], float(factor)) for at, factor in zip(keep, factors, strict=True) if factor]
    text = " + ".join(f"{int(f) if f == int(f) else f}*{term}" for term, f in terms) or "0"
    print(f"    {text:60} error {error:.2%}")
    return text


def width(values: Sequence[int], numbers: Sequence[Mapping[str, int]]) -> str:
    """Return the size that equals a width in all models."""
    for text in SIZES:
        if all(
            word in numbers[0] or word[0].isdigit() for term in text.split(" + ") for word in term.split("*")
        ) and all(evaluate(text, each) == value for value, each in zip(values, numbers, strict=True)):
            return text
    raise ValueError(f"no size of the model is {values}")


def grouped(name: str, n: Mapping[str, int], class_name: str, kind: str) -> dict[str, tuple[str, bool]]:
    """Return for each Linear of the last block the first one with the same input, and whether others save it too."""
    model = model_of(name, n, 2, class_name, kind)
    model.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda *args: args[-1].requires_grad_(True))
    _, blocks = blocks_of(model, 2)
    inputs: dict[str, Any] = {}
    for of_block, module, _, _ in linears(blocks[-1]):
        module.register_forward_pre_hook(
            lambda _, args, of_block=of_block: inputs.__setitem__(of_block, args[0].untyped_storage())
        )
    saved = saved_storages(model, n, "fp32")
    first: dict[int, str] = {}
    return {
        of_block: (first.setdefault(storage.data_ptr(), of_block), storage.data_ptr() in saved)
        for of_block, storage in inputs.items()
    }


def outside(name: str, sizes: Sequence[dict[str, int]], class_name: str) -> dict[str, Any]:
    """Return the Linear modules outside the blocks of a class, and the name of the list of its blocks.

    Each has its widths, whether it has a bias, and whether it makes the logits.
    """
    models = [model_of(name, n, 2, class_name, next(iter(KINDS.get(name, {"block": {}})))) for n in sizes]
    numbers = [numbers_of(n) | {"labels": m.config.num_labels} for n, m in zip(sizes, models, strict=True)]
    prefix = blocks_of(models[0], 2)[0]
    of_models = [[each for each in linears(model) if not each[0].startswith(prefix)] for model in models]
    output = models[0].get_output_embeddings()
    found = []
    for at, (title, module, *_) in enumerate(of_models[0]):
        widths = [width([each[at][place] for each in of_models], numbers) for place in (2, 3)]
        found.append([title, *widths, module.bias is not None, module is output])
    return {"prefix": prefix, "linears": found}


def entry(name: str) -> dict[str, Any]:
    """Return the Linear modules of a model type and what its blocks save for the gradients of weights."""
    of_type = MODEL_TYPES[name]
    class_name = next(each for each, head in of_type.classes.items() if head == "tokens")
    sizes = [draw(name, seed) for seed in range(MODELS)]
    numbers = [numbers_of(n) for n in sizes]
    blocks: dict[str, Any] = {}
    for kind in KINDS.get(name, {"block": {}}):
        models = [model_of(name, n, 2, class_name, kind) for n in sizes]
        of_models = [list(linears(blocks_of(model, 2)[1][-1])) for model in models]
        groups = grouped(name, sizes[0], class_name, kind)
        found = [
            [of_block, width([each[at][2] for each in of_models], numbers),
             width([each[at][3] for each in of_models], numbers), *groups.get(of_block, (of_block, False))]
            for at, (of_block, *_) in enumerate(of_models[0])
        ]  # fmt: skip
        blocks[kind] = {"linears": found, "saved_for_weights": {}}
        for arithmetic in ("fp32", "autocast", "half"):
            print(f"  {name} {kind} {arithmetic}")
            values = [
                saved_per_token(name, n, class_name, kind, arithmetic, False)
                - saved_per_token(name, n, class_name, kind, arithmetic, True)
                for n in sizes
            ]
            blocks[kind]["saved_for_weights"][arithmetic] = formula(values, numbers)
    outsides = {class_title: outside(name, sizes[:4], class_title) for class_title in of_type.classes}
    return {"blocks": blocks, "outsides": outsides}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MODEL_TYPE")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    path = LINEAR_MODULES_FILE
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for name in arguments.names or MODEL_TYPES:
        print(name, flush=True)
        content[name] = entry(name)
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(content[key])}" for key in MODEL_TYPES if key in content)
        files.write_whole(path, f"{{\n{lines}\n}}\n".encode())


if __name__ == "__main__":
    main()
