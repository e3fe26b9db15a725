"""How much of "ZeRO is better" does each defect of the a100-replication's protocol make? Run as published, and mended.

PROGRAMS are started as processes of their own (program.py), repeat by repeat; defects.yaml has them, and which of
their arms are compared. An effect is what ZeRO's arm has over what the plain arm has, less 1: below 0 ZeRO is
better. It is taken repeat by repeat; its interval is Student's t of 95 % over repeats.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from study import files, processes
from study.compare.differences import t_interval
from study.compare.parity import WITHIN
from study.config import RunConfig
from study.engines import extensions, this_machine
from study.errors import Refusal
from study.records.machine import SAME
from study.workloads import sources

TRAINED_HERE = ("tiny", "micro", "mini")  # by a rate and in a number of epochs that suit small models
TIMEOUT_SECONDS = 3600  # of one process
SHOWN = ("workload", "size", "data", "num_train_examples", "num_eval_examples", "sequence_length", "dropout", "epochs")
FEWEST_STEPS = 10  # of an arm: the appendix logs its loss after so many
LARGEST_BATCH = 16
BODY_SHARE = 4  # one review in so many trains the body, where no published weights are to be had

Metric = Literal["validation loss", "training loss", "time", "peak memory"]
METRICS: tuple[Metric, ...] = ("validation loss", "training loss", "time", "peak memory")
LOSSES = METRICS[:2]


class Program(NamedTuple):
    """What one process runs: its arms, in order, and which defects of the published program are mended in it."""

    arms: tuple[str, ...]  # plain or zero, and the batch size: "zero-8"
    honoured: bool = False  # settings-unread: the DeepSpeed settings are given where they are read
    fresh_model: bool = False  # same-model: each arm has a model of its own
    seeded_head: bool = False  # head-unseeded: equal seeds draw equal heads
    own_seeds: bool = False  # one-seed: each repeat has its own split, order and dropout
    start: int = 0  # programs with different numbers draw different heads, unless these are seeded


class Comparison(NamedTuple):
    """Two arms, each of a program by name and position, and which observation of an arm is its value."""

    plain: tuple[str, int]
    zero: tuple[str, int]
    reading: Mapping[Metric, str]


# As the published program reads its arms, and mended; and the defects that are mended in reading, not in running.
READINGS: dict[str, dict[Metric, str]] = {
    "published": {
        "validation loss": "logged_eval_loss", "training loss": "logged_train_loss", "time": "span",
        "peak memory": "life_peak_bytes",
    },
    "mended": {
        "validation loss": "held_out_loss", "training loss": "last_epoch_loss", "time": "step",
        "peak memory": "peak_bytes",
    },
}  # fmt: skip
READING_OF: dict[str, tuple[Metric, ...]] = {
    "peak-kept": ("peak memory",), "timing-span": ("time",), "losses-of-few": LOSSES,
}  # fmt: skip


def _comparison(plain: list[Any], zero: list[Any], read: str, but: str = "") -> Comparison:
    other = READINGS["mended" if read == "published" else "published"]
    otherwise = {metric: other[metric] for metric in READING_OF.get(but, ())}
    return Comparison((plain[0], plain[1]), (zero[0], zero[1]), READINGS[read] | otherwise)


_DATA = files.read_yaml(Path(__file__).with_name("defects.yaml"), Path(__file__).parent)
DEFECTS: dict[str, dict[str, str]] = _DATA["defects"]  # short, published, mended
PROGRAMS = {name: Program(**{**keys, "arms": tuple(keys["arms"])}) for name, keys in _DATA["programs"].items()}
GROUPS = {
    title: {name: _comparison(**keys) for name, keys in group.items()} for title, group in _DATA["comparisons"].items()
}
AS_PUBLISHED, MENDED = GROUPS["as published"]["all defects"], GROUPS["all mended"]["batch 8"]
MENDED_ALONE, LEFT_ALONE = GROUPS["one defect mended, the others left"], GROUPS["all mended but one"]

# ---------------------------------------------------------------- effects


class Effect(NamedTuple):
    """What ZeRO's arm has over the plain one's, less 1, by repeat; below 0 ZeRO is better."""

    values: dict[int, float]
    mean: float
    low: float | None  # None: one repeat has no interval
    high: float | None
    drawn: bool  # weights or order are drawn anew in each repeat; otherwise repeats are the same training

    @classmethod
    def of(cls, values: dict[int, float], drawn: bool) -> Effect | None:
        return cls(values, *t_interval(np.array(list(values.values()))), drawn) if values else None

    @property
    def word(self) -> str:
        """The effect in words: ZeRO is better or worse, there is no difference, or why repeats cannot decide."""
        if self.low is None or self.high is None:
            return "one repeat"
        if max(abs(self.low), abs(self.high)) <= WITHIN:
            return "no difference"
        if not self.drawn:
            return "the same each time"
        return "better" if self.high < 0 else "worse" if self.low > 0 else "not told apart"


def read(path: Path) -> dict[str, Any]:
    """Read the results of the protocol. Raises Refusal."""
    content = files.load(path, "results of the protocol")
    if not isinstance(content, dict) or not {"settings", "machine", "runs"} <= content.keys():
        raise Refusal(f"{path}: holds no results of the protocol; make them with study.claims.published protocol")
    if unknown := {name.partition("/")[0] for name in content["runs"]} - PROGRAMS.keys():
        raise Refusal(f"{path}: runs: {min(unknown)} is no program; take it out")
    return content


def effect(results: Mapping[str, Any], comparison: Comparison, metric: Metric) -> Effect | None:
    """The effect of a comparison on one metric; None where no repeat has both arms."""
    plain, zero = (_values(results, place, comparison.reading[metric]) for place in comparison[:2])
    programs = [PROGRAMS[name] for name, _ in (comparison.plain, comparison.zero)]
    drawn = metric not in LOSSES or any(program.own_seeds or not program.seeded_head for program in programs)
    return Effect.of({repeat: zero[repeat] / plain[repeat] - 1 for repeat in sorted(plain.keys() & zero.keys())}, drawn)


def _values(results: Mapping[str, Any], place: tuple[str, int], reading: str) -> dict[int, float]:
    """By repeat: what the arm at a place (program, position) is compared by, where it did not fail."""
    program, position = place
    clock = "" if results["machine"]["gpus"] else "cpu_"  # of the processor on a CPU, whose cores others may share
    values = {}
    for name, start in results["runs"].items():
        started, _, repeat = name.partition("/")
        if started != program or position >= len(start["arms"]) or "error" in start["arms"][position]:
            continue
        arm: dict[str, Any] = start["arms"][position]
        if reading == "span":
            value = arm[f"{clock}seconds"]
        elif reading == "step":
            value = arm[f"step_{clock}seconds"] / arm["ran"]["batch_size"]
        else:
            value = arm["epoch_losses"][-1] if reading == "last_epoch_loss" else arm[reading]
        values[int(repeat)] = value
    return values


# ---------------------------------------------------------------- the experiment


def measure(config: RunConfig, repeats: int, programs: Sequence[str], output: Path) -> None:
    """Run what the file lacks of these programs, or of all, and write each run into it.

    Raises Refusal, and RunFailed where a program failed.
    """
    if unknown := set(programs) - set(PROGRAMS):
        raise Refusal(f"--program {min(unknown)}: is unknown; take one of {', '.join(PROGRAMS)}")
    _check(config, output)
    experiment = _kept(output, config)
    names = list(programs or PROGRAMS)
    # Each repeat begins with another program, so that a drift of the machine favours none.
    ordered = [(names[(repeat + i) % len(names)], repeat) for repeat in range(repeats) for i in range(len(names))]
    missing = [(name, repeat) for name, repeat in ordered if f"{name}/{repeat}" not in experiment["runs"]]
    with tempfile.TemporaryDirectory(prefix="zero-study-protocol-") as folder:
        body = None if config.effective_init == "pretrained" else Path(folder) / "body.pt"
        if body is not None and missing:
            print("training the body ...", flush=True)
            trained = _start(config, body, None, 0, Path(folder))
            if experiment.setdefault("body", trained) != trained:
                raise Refusal(f"--output {output}: has runs from a body that came out differently; name another file")
            left = trained["num_reviews"] * (BODY_SHARE - 1)
            sources.require_reviews(config, left, "what training the body leaves")
        for number, (name, repeat) in enumerate(missing, 1):
            print(f"[{number}/{len(missing)}] {name}, repeat {repeat}", flush=True)
            run = _start(config, body, name, repeat, Path(folder))
            machine = run.pop("machine")
            known = experiment.setdefault("machine", machine)
            if differing := [key for key in SAME if known[key] != machine[key]]:
                raise Refusal(f"--output {output}: has runs with another {differing[0]}; name another file")
            experiment["runs"][f"{name}/{repeat}"] = run
            experiment["finished_at"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            files.write_json(output, experiment)


def _check(config: RunConfig, output: Path) -> None:
    """Refuse, before anything is started, what would fail or would not be this experiment."""
    sources.check(config)
    if config.num_train_examples * config.epochs < FEWEST_STEPS * LARGEST_BATCH:
        raise Refusal(
            f"--num-train-examples {config.num_train_examples}: is too few for the program to log a loss; give at "
            f"least {-(-FEWEST_STEPS * LARGEST_BATCH // config.epochs)}"
        )
    if config.effective_init == "scratch" and config.size not in TRAINED_HERE:
        raise Refusal(
            f"--size {config.size}: its body would be trained from scratch, which works for {', '.join(TRAINED_HERE)}; "
            "add --data hub for published weights"
        )
    files.require_folder(output)
    if (num_gpus := len(this_machine.find().gpu_memory_bytes)) > 1:  # Trainer would train plain arms on all of them
        raise Refusal(f"the protocol is of one GPU, this machine has {num_gpus}; hide others (CUDA_VISIBLE_DEVICES=0)")
    extensions.provide(["cpu_adam"], "the published program")


def _kept(output: Path, config: RunConfig) -> dict[str, Any]:
    """What the file has of this experiment. Raises Refusal where it holds another one."""
    settings = config.model_dump(mode="json", include=set(SHOWN))
    content = read(output) if output.exists() else {"settings": settings, "runs": {}}
    if content["settings"] != settings:
        raise Refusal(
            f"--output {output}: holds another experiment; name another file, or give the flags it was made with"
        )
    return content


def _start(config: RunConfig, body: Path | None, name: str | None, repeat: int, folder: Path) -> dict[str, Any]:
    """Start a program once and return what it observed; without a name, train the body. Raises Refusal, RunFailed."""
    spec = folder / "spec.json"
    program = None if name is None else PROGRAMS[name]._asdict()
    job = {"config": config.model_dump(mode="json"), "body": body and str(body), "program": program, "repeat": repeat}
    files.write_json(spec, job)
    command = ["-m", "study.claims.published.program", str(spec)]
    what, remedy = f"{name or 'the body'}, repeat {repeat}", "try a smaller --size, or fewer --num-train-examples"
    return cast(dict[str, Any], processes.run_ranks(command, what, remedy=remedy, timeout_seconds=TIMEOUT_SECONDS)[0])
