"""Which defect of the a100-replication's protocol makes "ZeRO is better"? Run as published, and mended step by step.

    zero-study protocol --data files --data-dir DIR --output FILE

Starts each of PROGRAMS in effects.py in a process of its own (program.py), repeat by repeat. What FILE has already is
kept, so that an experiment that was stopped goes on. With `--data hub` the model's body has the published weights;
otherwise it is trained first, on reviews that the protocol does not see. effects.py derives the effects from FILE.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study import files
from study.config import RunConfig
from study.engines import extensions, this_machine
from study.errors import Refusal
from study.published import child
from study.published.effects import PROGRAMS, read
from study.published.program import BODY_SHARE
from study.records.machine import SAME
from study.workloads import sources

TRAINED_HERE = ("tiny", "micro", "mini")  # by a rate and in a number of epochs that suit small models
TIMEOUT_SECONDS = 3600  # of one process
SHOWN = ("workload", "size", "data", "num_train_examples", "num_eval_examples", "sequence_length", "dropout", "epochs")
PROGRAM = ("-m", "study.published.program")
FEWEST_STEPS = 10  # of an arm: the appendix logs its loss after so many
LARGEST_BATCH = max(int(arm.partition("-")[2]) for program in PROGRAMS.values() for arm in program.arms)


def measure(config: RunConfig, repeats: int, programs: Sequence[str], output: Path) -> None:
    """Run what the file lacks of these programs, or of all, and write each run into it.

    Raises Refusal, and RunFailed where a program failed.
    """
    if unknown := set(programs) - set(PROGRAMS):
        raise Refusal(f"--program {min(unknown)}: is unknown; take one of {', '.join(PROGRAMS)}")
    _check(config, output)
    experiment = _kept(output, config)
    missing = [
        (name, repeat)
        for repeat in range(repeats)
        for name in _rotated(list(programs or PROGRAMS), repeat)
        if f"{name}/{repeat}" not in experiment["runs"]
    ]
    with tempfile.TemporaryDirectory(prefix="zero-study-protocol-") as folder:
        body = None if config.effective_init == "pretrained" else Path(folder) / "body.pt"
        if body is not None and missing:
            print("training the body ...", flush=True)
            trained = _start(config, body, None, 0, Path(folder))
            if experiment.setdefault("body", trained) != trained:
                raise Refusal(f"--output {output}: has runs from a body that came out differently; name another file")
            left = experiment["body"]["num_reviews"] * (BODY_SHARE - 1)
            sources.require_reviews(config, left, "what training the body leaves")
        for number, (name, repeat) in enumerate(missing, 1):
            print(f"[{number}/{len(missing)}] {name}, repeat {repeat}", flush=True)
            run = _start(config, body, name, repeat, Path(folder))
            experiment["machine"] = _same_machine(output, experiment.get("machine"), run.pop("machine"))
            experiment["runs"][f"{name}/{repeat}"] = run
            experiment["finished_at"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            files.write_json(output, experiment)


def _rotated(names: list[str], repeat: int) -> list[str]:
    """The programs in the order of a repeat, each of which begins with another: a drift of the machine favours none."""
    start = repeat % len(names)
    return names[start:] + names[:start]


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
        raise Refusal(
            f"the protocol runs on one GPU, this machine has {num_gpus}; hide the others (CUDA_VISIBLE_DEVICES=0)"
        )
    extensions.check(["cpu_adam"])


def _same_machine(output: Path, known: dict[str, Any] | None, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the file's machine. Raises Refusal where another machine, or other libraries, made its runs."""
    for key in SAME:
        if known is not None and known[key] != machine[key]:
            raise Refusal(
                f"--output {output}: has runs with {key} {known[key]}, this machine has {machine[key]}; name another "
                "file"
            )
    return known or machine


def _kept(output: Path, config: RunConfig) -> dict[str, Any]:
    """What the file has of this experiment. Raises Refusal where it holds another one."""
    settings = config.model_dump(mode="json", include=set(SHOWN))
    if not output.exists():
        return {"settings": settings, "runs": {}}
    content = read(output)
    if content["settings"] != settings:
        raise Refusal(
            f"--output {output}: holds another experiment; name another file, or give the flags it was made with"
        )
    return content


def _start(config: RunConfig, body: Path | None, name: str | None, repeat: int, folder: Path) -> dict[str, Any]:
    """Start a program once and return what it observed; without a name, train the body.

    Raises Refusal where the program refused, RunFailed where it failed.
    """
    spec, result = folder / "spec.json", folder / "result.json"
    result.unlink(missing_ok=True)
    files.write_json(
        spec,
        {
            "config": config.model_dump(mode="json"),
            "body": None if body is None else str(body),
            "program": None if name is None else PROGRAMS[name]._asdict(),
            "repeat": repeat,
        },
    )
    what = f"{name or 'the body'}, repeat {repeat}"
    remedy = "try a smaller --size, or fewer --num-train-examples"
    return child.run_python([*PROGRAM, str(spec), str(result)], result, what, TIMEOUT_SECONDS, remedy)
