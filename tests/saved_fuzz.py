"""Damage checkpoints at random, and check them: `saved_fuzz.py FOLDER NUMBER SEED` runs the long form by hand.

FOLDER has folders of checkpoints, such as those that saved_program.py writes. `zero-study saved` must end with a
verdict or with a refusal of one line, whatever a file contains.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ODD: list[Any] = [
    None, True, False, 0, -1, 7, 10**9, 10**30, -(10**18), 0.5, float("nan"), float("inf"), "", "\x1b[31mred", "a\nb",
    "../../../etc/passwd", "/etc/passwd", "(a+)+$", "(((", "*", "(.*.*.*)*x", "x" * 5000, [], {}, [None], [[]],
    {"a": {}},
    [1, "a", None], {"x": None}, {"weight": 5}, "NoSuchModel", "LlamaForCausalLM", "AutoModel", "pipeline", "float8",
    [[[[[[[[[[]]]]]]]]]], ["q_proj"] * 3, [-1], [10**12], {"q_proj": [10**12]}, {"(": 4}, {"(a+)+$": 4}, "all-linear",
]  # fmt: skip
ODD_TENSORS: list[Callable[[], Any]] = [
    lambda: torch.empty(0), lambda: torch.tensor(3), lambda: torch.zeros(2, 3, dtype=torch.int8),
    lambda: torch.full((3,), float("nan")), lambda: torch.zeros(2, 2, dtype=torch.complex64),
    lambda: torch.ones(1).expand(1000, 1000), lambda: torch.eye(3).to_sparse(), lambda: torch.ones(4, dtype=torch.bool),
    lambda: torch.ones(1, 1, 1, 1, 1, 1), lambda: torch.full((2,), 1e38), lambda: torch.ones(10**7),
    lambda: torch.ones(4, dtype=torch.float8_e4m3fn), lambda: torch.ones(1).expand(1 << 20, 1 << 20),
]  # fmt: skip


def odd(draw: random.Random, of_tensors: bool = False) -> Any:
    return draw.choice(ODD_TENSORS)() if of_tensors and draw.random() < 0.5 else draw.choice(ODD)


def mutate(content: Any, draw: random.Random, of_tensors: bool = False, depth: int = 0) -> Any:
    """Return plain data with one value, key or part replaced, removed or added."""
    if depth > 6 or not isinstance(content, dict | list) or not content or draw.random() < 0.12:
        return odd(draw, of_tensors)
    changed: Any = dict(content) if isinstance(content, dict) else list(content)
    keys = list(changed) if isinstance(changed, dict) else range(len(changed))
    key = draw.choice(list(keys))
    kind = draw.random()
    if kind < 0.15:
        del changed[key]
    elif kind < 0.25 and isinstance(changed, dict):
        changed[draw.choice(["weight_map", "state", "step", "r", "\x1b[2J", 5, "a.b", "params"])] = odd(
            draw, of_tensors
        )
    else:
        changed[key] = mutate(changed[key], draw, of_tensors, depth + 1)
    return changed


def damage_json(path: Path, draw: random.Random) -> None:
    kind = draw.random()
    if kind < 0.08:
        path.write_bytes(draw.choice([b"", b"{", b"[" * 100_000, b"\xff\xfe", b"1" * 6000, b"null", b'{"a": 1}' * 2]))
        return
    content = json.loads(path.read_bytes())
    for _ in range(draw.randint(1, 3)):
        content = mutate(content, draw)
    path.write_text(json.dumps(content, default=str, skipkeys=True))


def damage_torch(path: Path, draw: random.Random) -> None:
    if draw.random() < 0.25:
        return damage_bytes(path, draw)
    content = torch.load(path, weights_only=False, map_location="cpu")
    for _ in range(draw.randint(1, 2)):
        content = mutate(content, draw, of_tensors=True)
    torch.save(content, path)
    return None


def damage_bytes(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    kind = draw.random()
    if kind < 0.3 or not content:
        content = content[: draw.randrange(len(content) + 1)]
    elif kind < 0.9:
        for _ in range(draw.choice([1, 1, 4, 64])):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    else:
        content = bytearray(draw.randbytes(200))
    path.write_bytes(bytes(content))


def damage_safetensors(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    if draw.random() < 0.4:
        return damage_bytes(path, draw)
    header = json.loads(content[8 : 8 + size])
    header = mutate(header, draw)
    text = json.dumps(header, default=str, skipkeys=True).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return None


def damage_metadata(path: Path, draw: random.Random) -> None:
    if draw.random() < 0.3:
        return damage_bytes(path, draw)
    metadata = pickle.loads(path.read_bytes())
    kind = draw.randrange(4)
    if kind == 0:
        setattr(metadata, draw.choice(["state_dict_metadata", "storage_data", "planner_data"]), odd(draw))
    elif kind == 1:
        entry = draw.choice(list(metadata.storage_data.values()))
        object.__setattr__(entry, draw.choice(["offset", "length", "relative_path"]), odd(draw))
    elif kind == 2:
        entry = draw.choice([each for each in metadata.state_dict_metadata.values() if hasattr(each, "chunks")])
        object.__setattr__(entry, draw.choice(["size", "chunks", "properties"]), odd(draw))
    else:
        entries = [each for each in metadata.state_dict_metadata.values() if getattr(each, "chunks", None)]
        chunk = draw.choice(draw.choice(entries).chunks)
        value = draw.choice([torch.Size([10**6, 10**6]), torch.Size([-1]), None, "a", (0, 0, 0)])
        object.__setattr__(chunk, draw.choice(["offsets", "sizes"]), value)
    path.write_bytes(pickle.dumps(metadata))
    return None


def damage_names(path: Path, draw: random.Random) -> None:
    """Give a file another name."""
    names = [
        "model-00001-of-00000.safetensors", "rng_state_999999999.pth", "random_states_777777.pkl", "optimizer.pt",
        "optimizer.bin", "scheduler.pt", "trainer_state.json", "zero_pp_rank_99_mp_rank_00_optim_states.pt", "latest",
        "mp_rank_00_model_states.pt", "adapter_config.json", "config.json", "manifest.json", ".metadata", "a\nb.json",
        "pytorch_model.bin", "model.safetensors.index.json", "training_args.bin",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
    ]  # fmt: skip
    path.rename(path.with_name(draw.choice(names)))


def damage(folder: Path, draw: random.Random) -> str:
    """Damage one or two files of a folder, and say which."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".md"))
    chosen = []
    for path in draw.sample(files, min(len(files), draw.choice([1, 1, 2]))):
        chosen.append(path.name)
        if path.name == "latest":
            path.write_text(draw.choice(["", "../..", "/", "\0", "x" * 5000, "global_step2\nglobal_step3", "."]))
        elif draw.random() < 0.06:
            damage_names(path, draw)
        elif path.suffix == ".json":
            damage_json(path, draw)
        elif path.suffix == ".safetensors":
            damage_safetensors(path, draw)
        elif path.name == ".metadata":
            damage_metadata(path, draw)
        elif path.suffix in (".pt", ".bin", ".pth", ".pkl") and path.name != "training_args.bin":
            damage_torch(path, draw)
        else:
            damage_bytes(path, draw)
    return ", ".join(chosen)


def outcome(folder: Path, draw: random.Random, other: Path | None = None) -> str:
    """Run the command on a folder, and return what is wrong with how it ends; "" if nothing is."""
    from zero_study import cli
    from zero_study.errors import Refusal

    words = ["saved", str(folder), *(["--json"] if draw.random() < 0.3 else [])]
    if other is not None and draw.random() < 0.4:
        words += ["--against", str(other)]
        if draw.random() < 0.5:
            words[1], words[-1] = words[-1], words[1]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            status = cli.run(words)
    except Refusal as refusal:
        return "" if str(refusal) and "Traceback" not in str(refusal) else "an empty refusal"
    except Exception:
        return traceback.format_exc()
    if status not in (0, 1, 3):
        return f"exit status {status}"
    return "an escape code was printed" if "\x1b" in printed.getvalue() else ""


def rounds(source: Path, number: int, seed: int) -> list[str]:
    """Damage and check `number` copies of the folders in a folder. Return what went wrong."""
    wrong = []
    kinds = sorted(path for path in source.iterdir() if path.is_dir())
    for at in range(number):
        draw = random.Random(seed * 1_000_003 + at)
        with tempfile.TemporaryDirectory() as scratch:
            original = draw.choice(kinds)
            copy = Path(shutil.copytree(original, Path(scratch) / original.name))
            done = damage(copy, draw)
            problem = outcome(copy, draw, original)
        if problem:
            wrong.append(f"seed {seed}, round {at}, {original.name}, {done}: {problem}")
    return wrong


def main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("a round took more than its time")))
    source, number, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    count = 0
    for at in range(number):
        signal.alarm(90)
        for problem in rounds(source, 1, seed * 10_000 + at):
            count += 1
            print(problem, flush=True)
        signal.alarm(0)
    print(f"{number} rounds, {count} wrong")


if __name__ == "__main__":
    main()
