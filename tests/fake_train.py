"""Stands in for a run: leaves within milliseconds what train.py would leave, and ends as it is told.

    python fake_train.py RUNS.json [FLAGS] --output-dir FOLDER

RUNS.json, written by `prepare`, says how each run ends. As a program it needs the standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

NUM_STEPS = 8
HERE = Path(__file__).resolve()
OUT_OF_MEMORY = {"step": 1, "error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."}


def prepare(path, runs, endings=None):
    """Write RUNS.json for these planned runs; `endings` by run id, "ok" for the others."""
    template = json.loads((HERE.parent / "fixtures" / "records" / "auto-ddp" / "record.json").read_text())
    content = {}
    for run in runs:
        config = run.config
        micro, accumulation = config.batches(run.world_size)
        proof = {"world_size": run.world_size, "precision": config.precision, "micro_batch_size": micro}
        record = {
            **template, **{name: getattr(config, name) for name in ("workload", "size", "seed")},
            "run_id": run.run_id, "strategy": run.strategy.name, "world_size": run.world_size,
            "config": config.model_dump(mode="json"),
            "proof": template["proof"] | proof | {"gradient_accumulation_steps": accumulation},
        }  # fmt: skip
        for name in ("model_state_bytes", "resting_state_bytes", "peak_memory"):
            if template.get(name):
                record[name] = [template[name][0]] * run.world_size
        content[run.run_id] = {"record": record, "ending": (endings or {}).get(run.run_id, "ok")}
    path.write_text(json.dumps(content))


def command(path):
    """What to put in the place of `launch.command`."""
    return lambda run: [sys.executable, "-I", "-S", str(HERE), str(path), *run.arguments()]


def loss(seed, step):
    return round(0.7 - 0.01 * step + 0.001 * seed, 6)


REST_OF_A_STEP = {"learning_rate": 1e-3, "grad_norm": 1.0, "seconds": 0.005, "tokens": 64}


def main():
    run_dir = Path(sys.argv[sys.argv.index("--output-dir") + 1])
    run = json.loads(Path(sys.argv[1]).read_text())[run_dir.name]
    record, ending = run["record"], run["ending"]
    if (run_dir / "record.json").exists():
        sys.exit("this is for runs without a record")
    if ending == "refused":
        print(f"zero-study: {Path.cwd()}/data cannot be read; mend it", file=sys.stderr)
        return 2
    with open(run_dir / "steps.jsonl", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (run_dir / "two-at-once").touch()
        file.truncate(0)
        for step in range(1, NUM_STEPS + 1):
            file.write(json.dumps({"step": step, "loss": loss(record["seed"], step), **REST_OF_A_STEP}) + "\n")
            file.flush()
            time.sleep(0.005)
    if ending == "crashed":
        print(
            'Traceback (most recent call last):\n  File "model.py", line 3, in f\nRuntimeError: broken', file=sys.stderr
        )
        return 1
    if ending == "killed_while_recording":
        (run_dir / "swap").mkdir()
        (run_dir / "swap" / "0.swp").write_text("moments")
        record |= {"status": "interrupted", "failure": {"step": 2, "error": "Interrupted: by SIGTERM"}}
        (run_dir / "record.json").write_text(json.dumps(record))
    if ending.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "hanging":
        time.sleep(600)
    if ending == "out_of_memory":
        record |= {"status": ending, "failure": OUT_OF_MEMORY, "steps_done": 0}
    if ending == "failed":
        record |= {"status": ending, "failure": {"step": 2, "error": "Failed: step 2: the loss is nan"}}
    record |= {"final_loss": loss(record["seed"], NUM_STEPS)}
    (run_dir / "config.json").write_text("{}")
    record["steps_sha256"] = hashlib.sha256((run_dir / "steps.jsonl").read_bytes()).hexdigest()
    scratch = run_dir / "record.json.part"
    scratch.write_text(json.dumps(record))
    scratch.replace(run_dir / "record.json")
    if ending == "hanging_after_result":
        time.sleep(600)
    return 0 if ending == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
