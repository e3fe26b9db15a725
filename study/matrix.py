"""Which runs does a study consist of? Plain data: workloads x strategies x world sizes x seeds, with a question."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from study import strategy
from study.config import Refusal

EVERY = tuple(strategy.names())
DEEPSPEED_SHARDED = tuple(name for name in EVERY if name.startswith("zero") and name != "zero0")


@dataclass(frozen=True)
class Part:
    """A block of runs: every combination of its strategies, world sizes and seeds, with the same flags."""

    flags: dict[str, Any]
    strategies: tuple[str, ...] = EVERY
    world_sizes: tuple[int, ...] = (2,)
    seeds: tuple[int, ...] = (0,)
    label: str = ""


@dataclass(frozen=True)
class Study:
    question: str
    parts: tuple[Part, ...]
    needs_text: bool = False  # real text: --data-dir


@dataclass(frozen=True)
class Run:
    """One launch."""

    run_id: str
    strategy: str
    num_processes: int
    flags: dict[str, Any] = field(hash=False)

    def arguments(self) -> list[str]:
        """The run's flags as train.py takes them."""
        words: list[str] = []
        for name, value in self.flags.items():
            flag = "--" + name.replace("_", "-")
            words += (
                [flag if value else flag.replace("--", "--no-", 1)] if isinstance(value, bool) else [flag, str(value)]
            )
        return words


_SMOKE = {"num_train_examples": 320, "num_eval_examples": 64, "max_steps": 40, "learning_rate": 1e-3}
_STATES = {"num_train_examples": 64, "num_eval_examples": 16, "max_steps": 6, "learning_rate": 1e-3}
_PARITY = {
    "num_train_examples": 96,
    "num_eval_examples": 16,
    "max_steps": 12,
    "learning_rate": 1e-3,
    "gradient_clipping": 0,
    "dropout": 0,
}
_CLIPPED = {"gradient_clipping": 0.5, "dropout": 0.1}
_DISTRIBUTED = tuple(name for name in EVERY if name != "single")
_FEW = ("ddp", "zero2", "zero3")
# From scratch BERT stands still at chance until, suddenly, it does not; dropout and small batches delay that for long.
_CPU_BERT = {
    "workload": "bert-imdb",
    "size": "micro",
    "num_train_examples": 5120,
    "num_eval_examples": 500,
    "sequence_length": 128,
    "dropout": 0,
    "global_batch_size": 32,
    "max_steps": 160,
    "learning_rate": 1e-3,
    "warmup_steps": 10,
}
_CPU_GPT = {
    "workload": "gpt-wikitext",
    "size": "mini",
    "num_train_examples": 400,
    "num_eval_examples": 100,
    "sequence_length": 64,
    "global_batch_size": 8,
    "max_steps": 50,
    "learning_rate": 1e-3,
    "warmup_steps": 5,
}
_BERT_LARGE = {
    "workload": "bert-imdb",
    "size": "large",
    "num_train_examples": 8,
    "num_eval_examples": 4,
    "sequence_length": 128,
    "global_batch_size": 2,
    "max_steps": 3,
}

STUDIES: dict[str, Study] = {
    "smoke": Study(
        "Do both workloads train, and prove themselves, under every strategy that this box can run?",
        (Part({"workload": "bert-imdb", **_SMOKE}), Part({"workload": "gpt-wikitext", **_SMOKE})),
    ),
    "parity": Study(
        "Does every strategy train what DDP trains, with and without clipping and dropout, on one process and on two?",
        (
            Part({"workload": "bert-imdb", **_PARITY, **_CLIPPED}, label="clipped"),
            Part({"workload": "gpt-wikitext", **_PARITY, **_CLIPPED}, label="clipped"),
            Part({"workload": "bert-imdb", **_PARITY}),
            Part({"workload": "gpt-wikitext", **_PARITY}),
            Part({"workload": "bert-imdb", **_PARITY, "micro_batch_size": 4}, ("single",), (1,), label="accumulated"),
            Part(
                {"workload": "gpt-wikitext", **_PARITY, "micro_batch_size": 4}, ("single",), (1,), label="accumulated"
            ),
            Part({"workload": "bert-imdb", **_PARITY, "micro_batch_size": 2}, _DISTRIBUTED, label="accumulated"),
            Part({"workload": "gpt-wikitext", **_PARITY, "micro_batch_size": 2}, _FEW, label="accumulated"),
        ),
    ),
    "model-states": Study(
        "How many bytes of model states does a rank hold, on 1, 2 and 4 processes?",
        (
            Part({"workload": "bert-imdb", **_STATES}, world_sizes=(1, 2, 4)),
            Part({"workload": "bert-imdb", "precision": "bf16", **_STATES}, strategies=DEEPSPEED_SHARDED, label="bf16"),
        ),
    ),
    "cpu": Study(
        "Do the loss curves on real text depend on the strategy?",
        (
            Part(_CPU_BERT),
            Part(_CPU_BERT, strategies=("ddp", "zero3"), seeds=(1, 2)),
            Part(_CPU_GPT),
            Part(_CPU_GPT, strategies=("ddp", "zero3"), seeds=(1, 2)),
        ),
        needs_text=True,
    ),
    "bert-large": Study(
        "Does BERT-large, 335 million parameters, train under every strategy on this box?",
        (Part(_BERT_LARGE),),
        needs_text=True,
    ),
}


def find(name: str) -> Study:
    if name not in STUDIES:
        raise Refusal(f"study {name!r} is unknown; there are {', '.join(STUDIES)}")
    return STUDIES[name]


def runs(name: str, data_dir: Path | None) -> Iterator[Run]:
    """Yield a study's runs, workload by workload. Raises Refusal where it needs real text and has none."""
    study = find(name)
    if study.needs_text and data_dir is None:
        raise Refusal(
            f"study {name!r} trains on real text; pass --data-dir, a folder with imdb/, wikitext-2/, tokenizers/"
        )
    text = {"data": "files", "data_dir": data_dir} if study.needs_text else {}
    for part in study.parts:
        for world_size in part.world_sizes:
            for chosen in part.strategies:
                processes = 1 if chosen == "single" else world_size
                if (chosen == "single" and world_size != part.world_sizes[0]) or (chosen == "ddp" and world_size == 1):
                    continue  # one process is one run whatever the world; DDP needs two
                for seed in part.seeds:
                    flags = {**part.flags, **text, "seed": seed}
                    label = f"-{part.label}" if part.label else ""
                    size = flags.get("size", "tiny")
                    yield Run(
                        f"{flags['workload']}-{size}-{chosen}-{processes}x-seed{seed}{label}", chosen, processes, flags
                    )
