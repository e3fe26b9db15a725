"""Measure the parity traps: pairs of runs that look like the same training but differ in one unwritten setting.

In a trap, an arm and its control differ in a setting that nobody wrote down. In a second pair of arms, this setting is
the same on both sides. traps.yaml lists the traps. Arms are small trainings from scratch that accelerate starts, as it
starts published scripts (trap_arm.py). The file gets the actual settings of each engine and its results.
study/claims/traps.py computes the differences from the file.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from study.claims.traps import read
from study.config import RunConfig
from study.records.machine import SAME
from study.running.launch import QUIET_ENVIRONMENT
from study.workloads import sources
from zero_study import files, processes
from zero_study.engines import extensions, this_machine
from zero_study.errors import Refusal

TIMEOUT_SECONDS = 3600  # for one arm with all its seeds


class Trap(NamedTuple):
    """The names of the arms of a trap, and the quantities by which they are compared.

    A quantity is a key of a seed's results or of the actual settings of the engine.
    """

    what: str
    control: str
    trapped: str
    matched: str
    matched_control: str | None = None  # None if it is the same as `control`
    quantities: Sequence[str] = ("train_loss", "eval_loss")

    @property
    def arms(self) -> list[str]:
        return [arm for arm in (self.control, self.trapped, self.matched, self.matched_control) if arm]


_DATA = files.read_yaml(Path(__file__).with_name("traps.yaml"), Path(__file__).parent)
SETTINGS: dict[str, Any] = _DATA["settings"]
ARMS: dict[str, dict[str, Any]] = _DATA["arms"]
TRAPS = {name: Trap(**keys) for name, keys in _DATA["traps"].items()}


def asked_of(arm: str) -> dict[str, Any]:
    """Return the settings that start an arm: the accelerate file, the DeepSpeed JSON, and the settings of the script.

    The DeepSpeed JSON is None if the arm has none.
    """
    asked = ARMS[arm]
    num_processes = asked.get("processes", 1)
    script = {"micro_batch_size": 16 // num_processes, **_DATA["script"], **asked.get("script", {})}
    file = {"distributed_type": asked.get("type", "NO"), "num_processes": num_processes}
    content = None
    if "section" in asked:
        file |= {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, **asked["section"]}}
    if "stage" in asked:
        file["distributed_type"] = "DEEPSPEED"
        content = {
            "zero_optimization": {"stage": asked["stage"], "reduce_bucket_size": 5_000_000},
            "gradient_clipping": 0.0,
            "gradient_accumulation_steps": script["gradient_accumulation_steps"],
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
        }
        engine = dict(asked.get("engine", {}))
        content["zero_optimization"] |= engine.pop("zero_optimization", {})
        content |= engine
    return {"accelerate_file": file, "deepspeed_json": content, "program": script}


# ---------------------------------------------------------------- measuring


def measure(names: Sequence[str], num_seeds: int, data_dir: Path | None, output: Path) -> None:
    """Measure the traps that the file does not contain yet, and add them to the file.

    `names` are names of traps, or empty for all. Seeds count from 0. Raises Refusal if the settings or the content of
    the file do not fit, and RunFailed if a launch fails.
    """
    if unknown := [name for name in names if name not in TRAPS]:
        raise Refusal(f"--trap {unknown[0]}: this trap is unknown. Use one of {', '.join(TRAPS)}")
    files.require_folder(output)
    text: dict[str, Any] = {"data": "files", "data_dir": data_dir} if data_dir else {}
    sources.check(RunConfig(**text, **{name: SETTINGS[name] for name in SETTINGS if name in RunConfig.model_fields}))
    arms = list(dict.fromkeys(arm for name in names or TRAPS for arm in TRAPS[name].arms))
    content = read_or_begin(output, data_dir is not None)
    extensions.use_own_folder()
    check_machine(arms)
    for number, arm in enumerate(arms, 1):
        measured = content["arms"].get(arm, {}).get("seeds", {})
        if lacking := [seed for seed in range(num_seeds) if str(seed) not in measured]:
            print(f"{number} of {len(arms)}: {arm}, seeds {', '.join(map(str, lacking))}", flush=True)
            add(content, arm, start(arm, lacking, data_dir))
            content["traps"] = {
                name: trap._asdict() for name, trap in TRAPS.items() if set(trap.arms) <= set(content["arms"])
            }
            content["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
            # Put lists of plain values on one line.
            shown = json.dumps(content, indent=1, allow_nan=False)
            shown = re.sub(r"\[[^][{}]*\]", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), shown)
            files.write_whole(output, f"{shown}\n".encode())


def check_machine(arms: Sequence[str]) -> None:
    """Raise Refusal for arms that would fail on this machine, and build the extensions that the arms need."""
    num_gpus = len(this_machine.find().gpu_memory_bytes)
    asked = {arm: asked_of(arm) for arm in arms}
    of_two = [arm for arm in arms if asked[arm]["accelerate_file"]["num_processes"] == 2]
    if num_gpus == 1 and of_two:
        raise Refusal(f"{of_two[0]} needs 2 GPUs, this machine has 1; hide it (CUDA_VISIBLE_DEVICES=) to take the CPU")
    needed = set()
    for one in asked.values():
        if "offload_optimizer" in (one["deepspeed_json"] or {}).get("zero_optimization", {}):
            needed.add("cpu_adam")
    extensions.provide(needed, "an arm with an offloaded optimizer")


def read_or_begin(path: Path, from_files: bool) -> dict[str, Any]:
    """Return the content of the file, or of a new one. Raises Refusal if other settings produced the file."""
    command = "python tools/measure/published traps" + (" --data-dir DIR" if from_files else "") + " --output FILE"
    if not path.exists():
        begun = {"command": command, "date": None, "machine": None, "settings": SETTINGS, "data": None}
        return {**begun, "arms": {}, "traps": {}}
    content = read(path)
    alike = all(arm in ARMS and asked_of(arm) == facts["asked"] for arm, facts in content["arms"].items())
    if content["settings"] != SETTINGS or ("--data-dir" in content["command"]) != from_files or not alike:
        raise Refusal(f"{path}: was made with other settings or another kind of text; choose another --output")
    return content


def start(arm: str, seeds: list[int], data_dir: Path | None) -> dict[str, Any]:
    """Launch one arm, which trains the seeds one after another, and return its results.

    Raises RunFailed if it fails.
    """
    asked = asked_of(arm)
    with tempfile.TemporaryDirectory(prefix="zero-study-traps-") as name:
        folder = Path(name)
        content = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "machine_rank": 0}
        content |= asked["accelerate_file"]
        if engine := asked["deepspeed_json"]:
            files.write_json(folder / "deepspeed.json", engine)
            is_partitioned = engine["zero_optimization"]["stage"] == 3
            named = {"deepspeed_config_file": str(folder / "deepspeed.json"), "zero3_init_flag": is_partitioned}
            content |= {"deepspeed_config": named}
        files.write_json(folder / "accelerate.yaml", content)  # JSON is YAML
        job = {"program": asked["program"], "settings": SETTINGS, "seeds": seeds}
        files.write_json(folder / "job.json", {**job, "data_dir": str(data_dir.resolve()) if data_dir else None})
        launch = ["-m", "accelerate.commands.launch", "--config_file", str(folder / "accelerate.yaml")]
        script = [str(Path(__file__).with_name("trap_arm.py")), str(folder / "job.json")]
        command = [*launch, "--main_process_port", "0", *script]
        environment = QUIET_ENVIRONMENT | {"OMP_NUM_THREADS": "1"} | os.environ
        remedy = "try fewer --seeds at once: the file keeps what it has"
        found = processes.run_ranks(
            command, arm, remedy=remedy, timeout_seconds=TIMEOUT_SECONDS, environment=environment
        )
        return cast(dict[str, Any], found[0])


def add(content: dict[str, Any], arm: str, launched: dict[str, Any]) -> None:
    """Add the results of one launch to the content of the file.

    Raises Refusal if machine, data or engine differ from those in the file.
    """
    known = content["arms"].setdefault(arm, {"asked": asked_of(arm), "ran": launched["ran"], "seeds": {}})
    machine = {name: launched["machine"][name] for name in SAME}
    for where, key, value in (
        (content, "machine", machine), (content, "data", launched["data"]), (known, "ran", launched["ran"]),
    ):  # fmt: skip
        where[key] = where[key] or value
        if where[key] != value:
            raise Refusal(f"{arm}, {key}: the file has {where[key]}, this launch has {value}; choose another --output")
    known["seeds"] |= launched["seeds"]
