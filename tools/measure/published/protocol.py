"""Run the program of the source a100-replication as published, and with its defects corrected step by step.

Each program of study/claims/defects.yaml runs in its own process (program.py), once per repeat.
study/claims/defects.py computes the effects from the results.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from study.claims import defects
from study.claims.defects import PROGRAMS
from study.config import RunConfig
from study.records.machine import SAME
from study.workloads import sources
from zero_study import files, processes
from zero_study.engines import extensions, this_machine
from zero_study.errors import Refusal

TRAINED_HERE = ("tiny", "micro", "mini")  # sizes for which BODY_TRAINING in program.py works
TIMEOUT_SECONDS = 3600  # of one process
SHOWN = ("workload", "size", "data", "num_train_examples", "num_eval_examples", "sequence_length", "dropout", "epochs")
FEWEST_STEPS = 10  # per arm, because the appendix logs the loss every 10 steps
LARGEST_BATCH = 16
BODY_SHARE = 4  # if there are no published weights, 1 of 4 reviews is used for pretraining


def measure(config: RunConfig, repeats: int, programs: Sequence[str], output: Path) -> None:
    """Run the programs that the file does not contain yet, and add each run to the file.

    `programs` are names of programs, or empty for all. Raises Refusal if the flags or the content of the file do not
    fit, and RunFailed if a program fails.
    """
    if unknown := set(programs) - set(PROGRAMS):
        raise Refusal(f"--program {min(unknown)}: this program is unknown. Use one of {', '.join(PROGRAMS)}")
    _check(config, output)
    experiment = _kept(output, config)
    names = list(programs or PROGRAMS)
    # Each repeat begins with another program, so that a slow change of the machine favors none.
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
    """Raise Refusal, before any program is started, for settings that would fail or change the experiment."""
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
    """Return the content of the file, or of a new one. Raises Refusal if the file has another experiment."""
    settings = config.model_dump(mode="json", include=set(SHOWN))
    content = defects.read(output) if output.exists() else {"settings": settings, "runs": {}}
    if content["settings"] != settings:
        raise Refusal(
            f"--output {output}: holds another experiment; name another file, or give the flags it was made with"
        )
    return content


def _start(config: RunConfig, body: Path | None, name: str | None, repeat: int, folder: Path) -> dict[str, Any]:
    """Run a program once and return its observations. If `name` is None, train the pretrained weights.

    Raises Refusal or RunFailed if the process fails.
    """
    spec = folder / "spec.json"
    program = None if name is None else PROGRAMS[name]._asdict()
    job = {"config": config.model_dump(mode="json"), "body": body and str(body), "program": program, "repeat": repeat}
    files.write_json(spec, job)
    command = ["-m", "published.program", str(spec)]
    tools = str(Path(__file__).resolve().parents[1])  # so that the process finds this package
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (tools, os.environ.get("PYTHONPATH"))))}
    what, remedy = f"{name or 'the body'}, repeat {repeat}", "try a smaller --size, or fewer --num-train-examples"
    answers = processes.run_ranks(
        command, what, remedy=remedy, timeout_seconds=TIMEOUT_SECONDS, environment=environment
    )
    return cast(dict[str, Any], answers[0])
