"""What do today's engines do with the lines that the sources print? Each claim's are given to them, in a fresh process.

    zero-study snippets [--claim ID] [--output FILE]

On a CPU, a few seconds each. The results are a file from which `zero-study claims` makes its verdicts.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from study import files
from study.claims import child, ledger
from study.claims.ledger import Execution
from study.claims.rules import execution
from study.claims.rules.execution import Result, Results
from study.engines import extensions
from study.errors import Refusal, RunFailed
from study.files import write_json
from study.running import bound, ending
from study.running.launch import QUIET

FRESH = multiprocessing.get_context("forkserver")
PACKAGES = ("torch", "deepspeed", "accelerate", "transformers", "datasets", "huggingface_hub")
TIMEOUT_SECONDS = 300

# Of every process, from its start on. The hub is not asked. Semaphores of processes that end at once are no news.
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ON_CPU |= {"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}

# The least accelerate file that starts DeepSpeed; a snippet's keys come on top.
LEAST = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_machines": 1,
    "machine_rank": 0,
    "mixed_precision": "no",
    "use_cpu": False,
    "rdzv_backend": "static",
    "same_network": True,
}


def execute_all(asked: Sequence[str], path: Path) -> None:
    """Execute these claims, or all, and write their results after each.

    Raises Refusal for what cannot be executed, and RunFailed where a claim's lines could not be.
    """
    files.require_folder(path)
    extensions.use_own_folder()
    os.environ.update(QUIET | ON_CPU | {"PYTHONPATH": str(execution.ROOT)})
    FRESH.set_forkserver_preload(["deepspeed", "transformers.trainer"])
    extensions.check(extensions.EXTENSIONS)
    rules = {
        claim.id: claim.rule for source in ledger.read() for claim in source.claims if isinstance(claim.rule, Execution)
    }
    for name in asked:
        if name not in rules:
            raise Refusal(
                f"--claim {name}: no such claim is executed; those of the ledger with rule.type: execution are"
            )
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    known: dict[str, Result] = {}
    if asked and path.exists():
        before = execution.read(path)
        if before.versions != versions:
            raise Refusal(f"{path}: versions: these are not installed here; leave --claim out to execute every claim")
        known = before.results
    for name in asked or rules:
        known[name] = result = execute(name, rules[name])
        print(f"{name}: {result.outcome}" + (f": {result.message}" if result.message else ""), flush=True)
        results = Results(
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            command=execution.COMMAND,
            versions=versions,
            results={name: known[name] for name in rules if name in known},
        )
        write_json(path, results.model_dump())  # after each, so that whatever ends this loses one at most


def execute(name: str, rule: Execution) -> Result:
    """Give one claim's lines to the engine. Raises RunFailed where that fails for a reason of the study's own."""
    with tempfile.TemporaryDirectory(prefix="zero-study-") as temporary:
        place, folder = Path(temporary) / "study", Path(temporary) / "snippet"
        place.mkdir()
        folder.mkdir()
        snippet = rule.snippet.replace("SWAP_DIR", str(folder / "swap"))
        (place / "rule.json").write_text(json.dumps(rule.model_dump() | {"snippet": snippet}))
        statuses = _run(name, rule, snippet, place, folder)
        errors = [line for path in sorted(place.glob("stderr-*.log")) for line in ending.read_lines(path)]
        answers = [json.loads(path.read_text()) for path in sorted(place.glob("answer-*.json"))]
        ran = (place / "started").exists()
    message = next((answer["message"] for answer in answers if "message" in answer), None)
    faults = [answer["fault"] for answer in answers if "fault" in answer]
    # Where one rank refuses, the others fail of that.
    if message is None and (faults or not (ran or rule.through == "accelerate-yaml")):
        raise RunFailed("\n".join([f"{name}: could not be executed", *(faults or errors[-30:])]))
    if message is None and (not answers or any(statuses)):
        message = _last_words(errors, statuses)
    by_rank = [] if message is not None else answers
    found = {asked: _shared([answer["found"][asked] for answer in by_rank]) for asked in rule.wants if by_rank}
    return Result(
        rule_sha256=rule.sha256,
        outcome=execution.outcome(rule.wants, found, message),
        message=message,
        found=found,
        measured=_shared([answer["measured"] for answer in by_rank]) if by_rank else None,
    )


def _shared(values: list[Any]) -> Any:
    """The value of all ranks, or a list by rank."""
    return values[0] if all(value == values[0] for value in values) else values


def _last_words(errors: list[str], statuses: list[int]) -> str:
    """What a process said that ended without an answer: its exception, or the signal that ended it."""
    if ended := [signal.Signals(-status).name for status in statuses if status < 0]:
        return f"ended by {ended[0]}"
    raised = ending.raised_in(errors)
    return files.shown_text((raised[-1].text if raised else errors[-1]).replace(sys.prefix, "(python)"))


def _run(name: str, rule: Execution, snippet: str, place: Path, folder: Path) -> list[int]:
    """Run the processes of a claim to their end; return their exit statuses. Raises RunFailed after a time limit."""
    if rule.through == "accelerate-yaml":
        return [_launch(name, {**LEAST, "num_processes": rule.processes, **yaml.safe_load(snippet)}, place, folder)]
    launched: dict[str, str] = {}
    if rule.processes == 2 or rule.through == "deepspeed-json":  # otherwise as in a notebook: no launcher
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(rule.processes)}
    ranks = [launched and {**launched, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(rule.processes)]
    # Forked from a process that has imported the engines and done nothing else: seconds less for each.
    started = [FRESH.Process(target=_become, args=(rank, place, folder), daemon=True) for rank in ranks]
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(TIMEOUT_SECONDS)
        if any(process.is_alive() for process in started):
            raise RunFailed(f"{name}: not done after {TIMEOUT_SECONDS} s")
        return [process.exitcode for process in started]
    finally:
        for process in started:
            process.kill()


def _become(launched: dict[str, str], place: Path, folder: Path) -> None:
    """Take the place of a process that a user or a launcher started."""
    import numpy
    import torch

    torch.seed()  # a fork has its parent's numbers ahead, a process that is started its own
    numpy.random.seed()
    os.environ.update(launched)
    os.chdir(folder)
    for stream, number in (("stdout", 1), ("stderr", 2)):
        with open(place / f"{stream}-{launched.get('RANK', '0')}.log", "w") as file:
            os.dup2(file.fileno(), number)
    child.main(place)


def _launch(name: str, content: dict[str, Any], place: Path, folder: Path) -> int:
    file = place / "accelerate.yaml"
    file.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    command += ["--main_process_port", "0", "--module", child.__name__, str(place)]
    with (
        open(place / "stderr-0.log", "w") as stderr,
        subprocess.Popen(bound.command(command), cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr) as process,
    ):
        try:
            return process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{name}: not done after {TIMEOUT_SECONDS} s") from None
        finally:
            with suppress(psutil.NoSuchProcess):
                for left in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with suppress(psutil.NoSuchProcess):
                        left.kill()
