"""Write a folder per task, with its question and its files: python make.py FOLDER.

The files of a checkpoint are sparse: 1,024 values every 2,097,152, and zeros, which need no disk, between them.
"""

import json
import shutil
import sys
import zlib
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
import yaml

HERE = Path(__file__).parent
LAYER = {f"self_attn.{name}_proj": (5120, 5120) for name in "qkvo"} | {
    "mlp.gate_proj": (13824, 5120),
    "mlp.up_proj": (13824, 5120),
    "mlp.down_proj": (5120, 13824),
    "input_layernorm": (5120,),
    "post_attention_layernorm": (5120,),
}


def fill(path: Path, start: int, count: int, dtypes: list[str], seed: str, pages: slice = slice(None)) -> None:
    """Write the values of a tensor, which depend on its seed, after they have had each of the data types."""
    with path.open("r+b") as file:
        for at in range(0, count, 1 << 21)[pages]:
            values = 0.02 * torch.randn(
                1024, generator=torch.Generator().manual_seed(zlib.crc32(f"{seed} {at}".encode()))
            )
            for dtype in dtypes:
                values = values.to(getattr(torch, dtype))
            file.seek(start + at * values.itemsize)
            file.write(values.view(torch.uint8).numpy().tobytes())


def write_model(folder: Path, layers: int, dtype: str, step: str = "", **faults: dict[str, str]) -> None:
    """Write a model like Llama in safetensors, with its index and the faults of tensors.

    `seed` names the tensor whose values a tensor has, `copied` the type through which its values went (none: zeros),
    `pages` the one that is different, and `index` the file that the index says instead.
    """
    size = getattr(torch, dtype).itemsize
    shapes = {f"model.layers.{n}.{name}.weight": LAYER[name] for n in range(layers) for name in LAYER}
    shapes = {"model.embed_tokens.weight": (32000, 5120), **shapes, "model.norm.weight": (5120,)}
    shapes |= dict.fromkeys(faults["pages"], (32000, 5120)) if "pages" in faults else {}
    index = {}
    groups = [list(shapes)[first : first + 30] for first in range(0, len(shapes), 30)]
    for number, names in enumerate(groups, 1):
        path = folder / f"model-{number:05}-of-{len(groups):05}.safetensors"
        ends = list(accumulate((prod(shapes[name]) * size for name in names), initial=0))
        head = {
            name: {"dtype": {2: "BF16", 4: "F32"}[size], "shape": shapes[name], "data_offsets": ends[i : i + 2]}
            for i, name in enumerate(names)
        }
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with path.open("r+b") as file:
            file.truncate(8 + len(text) + ends[-1])
        for name, end in zip(names, ends, strict=False):
            place = (path, 8 + len(text) + end, prod(shapes[name]))
            if through := faults.get("copied", {}).get(name, dtype):
                fill(*place, [through, dtype], faults.get("seed", {}).get(name, name + step))
            if page := faults.get("pages", {}).get(name):
                fill(*place, [dtype], "old", slice(int(page), int(page) + 1))
            index[name] = path.name
    index |= faults.get("index", {})
    total = {"total_size": sum(map(prod, shapes.values())) * size}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": total, "weight_map": index}, indent=1))
    config = {"model_type": "llama", "tie_word_embeddings": True, "num_hidden_layers": layers, "hidden_size": 5120}
    (folder / "config.json").write_text(json.dumps(config))


for task in yaml.safe_load((HERE / "tasks.yaml").read_text()):
    target = Path(sys.argv[1]) / task["id"]
    target.mkdir(parents=True)
    (target / "question.md").write_text(task["question"])
    for name in task["files"]:
        shutil.copy(HERE / name, target)
    for name, options in task.get("checkpoints", {}).items():
        (target / name).mkdir()
        write_model(target / name, **options)
