"""Logs of modded-nanogpt: one program on one and on eight H100."""

from __future__ import annotations

import re
from collections.abc import Iterator

from public_sources.checkout import Checkout
from public_sources.reading import read_run, thinned
from study.public_runs.schema import PublicRun

ROOT = "records/track_1_short/"
NEWEST = f"{ROOT}2026-07-13_PrefixTokenPrediction/"  # with runs on one GPU and on eight
FOLDERS = {  # folder -> how eight GPUs reduce gradients, and what they shard
    NEWEST: "gradients and optimizer states of most parameters sharded",
    f"{ROOT}2025-05-25_EvenFasterReduce/": "gradients all-reduced",
    f"{ROOT}2025-05-25_MuonWithAuxAdamExample/": "gradients all-reduced",
    f"{ROOT}2025-05-30_noallreduce/": "gradients reduce-scattered, optimizer states sharded",
}
EVERY = 10  # steps of which the time is kept; every evaluation is kept


def runs(checkout: Checkout) -> Iterator[PublicRun]:
    """Yield the trainings, with the release of PyTorch and the card that the log states."""
    for path in checkout.under(*FOLDERS, suffix=".txt"):
        entry, _, file = path.removeprefix(NEWEST).removeprefix(ROOT).rpartition("/")
        if re.fullmatch(r"[0-9a-f-]{36}\.txt", file) is None:
            continue
        eight = next(how for folder, how in FOLDERS.items() if path.startswith(folder))
        head = checkout.read(path).decode(errors="replace")
        cards = re.findall(r"\bNVIDIA (H100[\w ]*?)(?: +(?:On|Off)| *\|)", head)
        torch = re.search(
            r"Running (?:PyTorch|Python)[^\n]*?(?:PyTorch|torch)\s*([\d.]+[\w.+]*)|Running PyTorch ([\d.]+[\w.+]*)",
            head,
        )
        yield thinned(
            read_run(
                checkout, path, f"{entry}-{file[:8]}",
                entry=entry,
                model="GPT with 124 million parameters, modded-nanogpt",
                data="FineWeb",
                gpu="H100-SXM5-80GB" if cards else None,
                num_gpus=len(cards) or None,
                num_nodes=1 if cards else None,
                program="modded-nanogpt",
                engine="the program's own",
                strategy=eight if len(cards) > 1 else "one GPU",
                precision="bf16 with FP8 parts",
                optimizer="Muon and Adam",
                compiled=True,
                versions={"torch": next(filter(None, torch.groups()))} if torch else {},
            ),
            EVERY,
        )  # fmt: skip
