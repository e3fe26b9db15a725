"""Logs of modded-nanogpt: one program on one and on eight H100, and programs with many repeats."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from public_sources.checkout import Checkout
from public_sources.reading import read_if_possible, thinned
from zero_study.public_runs.schema import PublicRun, Series

ROOT = "records/track_1_short/"
NEWEST = f"{ROOT}2026-07-13_PrefixTokenPrediction/"  # with runs on one GPU and on eight
FOLDERS = {  # folder -> how eight GPUs reduce gradients, and what they shard
    NEWEST: "gradients and optimizer states of most parameters sharded",
    f"{ROOT}2025-05-25_EvenFasterReduce/": "gradients all-reduced",
    f"{ROOT}2025-05-25_MuonWithAuxAdamExample/": "gradients all-reduced",
    f"{ROOT}2025-05-30_noallreduce/": "gradients reduce-scattered, optimizer states sharded",
}
EVERY = 10  # steps of which the time is kept; every evaluation is kept
LEAST_REPEATS = 10  # of a program whose repeats are kept
EVALUATED_EVERY = 250  # steps between the evaluations of repeats that are kept


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the trainings, with the release of PyTorch and the card that the log states."""
    for path in checkout.under(*FOLDERS, suffix=".txt"):
        entry, _, file = path.removeprefix(NEWEST).removeprefix(ROOT).rpartition("/")
        if re.fullmatch(r"[0-9a-f-]{36}\.txt", file) is None:
            continue
        run = _read(
            checkout, path, f"{entry}-{file[:8]}", entry,
            next(how for folder, how in FOLDERS.items() if path.startswith(folder)),
            model="modded-nanogpt",
            precision="bf16 with FP8 parts",
            optimizer="Muon and Adam",
            compiled=True,
        )  # fmt: skip
        if run is not None:
            yield thinned(run, EVERY)


def repeats(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the trainings of every program that was logged at least `LEAST_REPEATS` times, without `runs`.

    Logs of one folder that begin with the same source code are repeats. Only the time, the memory and some held-out
    losses are kept. Copies of a log in other folders are left out.
    """
    paths_of: dict[tuple[str, str], list[str]] = {}
    seen: set[str] = set()
    logs = checkout.under("records/", suffix=".txt")
    num_logs = Counter(path.rpartition("/")[0] for path in logs)
    for path in logs:
        if num_logs[path.rpartition("/")[0]] < LEAST_REPEATS:
            continue
        content = checkout.read(path)
        code, line, _ = content.partition(b"\n" + 100 * b"=")
        digest = hashlib.sha256(content).hexdigest()
        if line and b" val_loss:" in content and digest not in seen and not path.startswith(tuple(FOLDERS)):
            paths_of.setdefault((path.rpartition("/")[0], hashlib.sha256(code).hexdigest()[:8]), []).append(path)
        seen.add(digest)
    for (folder, code_digest), paths in paths_of.items():
        entry = f"{folder.removeprefix('records/')}, code {code_digest}"
        for path in paths if len(paths) >= LEAST_REPEATS else []:
            file = path.rpartition("/")[2].removesuffix(".txt")
            run = _read(checkout, path, f"{entry}, {file}", entry, model="modded-nanogpt")
            if run is not None and run.evaluation is not None:
                yield run.model_copy(update={"training": None, "evaluation": _some(run.evaluation)})


def _some(evaluations: Series) -> Series:
    """Return the last evaluation, and those at multiples of `EVALUATED_EVERY` steps."""
    steps = evaluations.columns["step"]
    kept = [n for n, step in enumerate(steps) if n == len(steps) - 1 or (step and step % EVALUATED_EVERY == 0)]
    names = [name for name in ("step", "seconds", "evaluation_loss") if name in evaluations.columns]
    return Series(columns={name: [evaluations.columns[name][n] for n in kept] for name in names})


def _read(
    checkout: Checkout, path: str, name: str, entry: str, on_several_gpus: str | None = None, **stated: Any
) -> PublicRun | None:
    head = checkout.read(path).decode(errors="replace")
    cards = re.findall(r"\bNVIDIA (H100[\w ]*?)(?: +(?:On|Off)| *\|)", head)
    torch = re.search(
        r"Running (?:PyTorch|Python)[^\n]*?(?:PyTorch|torch)\s*([\d.]+[\w.+]*)|Running PyTorch ([\d.]+[\w.+]*)",
        head,
    )
    return read_if_possible(
        checkout, path, name,
        entry=entry,
        data="FineWeb",
        gpu="H100-SXM5-80GB" if cards else None,
        num_gpus=len(cards) or None,
        num_nodes=1 if cards else None,
        program="modded-nanogpt",
        engine="the program's own",
        strategy="one GPU" if len(cards) == 1 else on_several_gpus,
        versions={"torch": next(filter(None, torch.groups()))} if torch else {},
        **stated,
    )  # fmt: skip
