"""Run code lines that sources publish with current engines, in new processes for each claim.

    python -m study.claims.snippets [--claim ID] [--output FILE]

Everything runs on a CPU. The command writes a file of results, from which `zero-study claims` derives its verdicts.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from study.claims import ledger
from study.claims.rules import by_execution
from study.claims.rules.by_execution import Execution, Result, Results
from study.running.launch import QUIET_ENVIRONMENT
from zero_study import files, processes
from zero_study.engines import extensions
from zero_study.errors import Refusal, RunFailed, run_command

PACKAGES = ("torch", "deepspeed", "accelerate", "transformers", "datasets", "huggingface_hub")
TIMEOUT_SECONDS = 300

# Environment variables of every process. The hub is never contacted. Warnings about leaked semaphores are ignored,
# because processes that end at once always cause them.
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ON_CPU |= {"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}

# The smallest accelerate file that starts DeepSpeed. The keys of a snippet are added to it or replace its keys.
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


def execute_all(claim_ids: Sequence[str], path: Path) -> None:
    """Execute the code lines of these claims, or of all claims if none is given, and write the results to a file.

    The file is written after each claim. Raises Refusal if a claim has no code lines, and RunFailed if the lines of a
    claim could not be executed.
    """
    files.require_folder(path)
    extensions.use_own_folder()
    os.environ.update(QUIET_ENVIRONMENT | ON_CPU | {"PYTHONPATH": str(files.ROOT)})
    extensions.provide(extensions.OF_STRATEGIES, "what the sources print")
    claims = [claim for source in ledger.read() for claim in source.claims]
    rules = {claim.id: claim.rule for claim in claims if isinstance(claim.rule, Execution)}
    if unknown := [name for name in claim_ids if name not in rules]:
        raise Refusal(
            f"--claim {unknown[0]}: this claim has no code lines. Choose a claim of the ledger with rule.type: "
            "execution."
        )
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    results = _earlier_results(path, versions) if claim_ids and path.exists() else {}
    for name in claim_ids or rules:
        results[name] = result = execute(name, rules[name])
        print(f"{name}: {result.outcome}" + (f": {result.message}" if result.message else ""), flush=True)
        content = Results(
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            command=by_execution.COMMAND,
            versions=versions,
            results={name: results[name] for name in rules if name in results},
        )
        # After each claim, so that an interruption loses one result at most.
        files.write_json(path, content.model_dump())


def _earlier_results(path: Path, versions: dict[str, str]) -> dict[str, Result]:
    """Return the results that the file already has. Raises Refusal if other versions produced them."""
    earlier = by_execution.read(path)
    if earlier.versions != versions:
        raise Refusal(f"{path}: these versions are not installed here. Remove --claim to execute every claim again.")
    return earlier.results


@dataclass(frozen=True)
class _Ended:
    """What the processes of one claim left: exit statuses, error lines and results."""

    statuses: list[int]
    errors: list[str]  # lines of stderr
    answers: list[dict[str, Any]]  # one for each rank that wrote its answer
    has_started: bool  # at least one process got as far as executing the lines

    @property
    def refusal(self) -> str | None:
        """The engine's error message if it rejected the code lines, otherwise None.

        This is the first message of all ranks, because the error of one rank makes the other ranks fail too.
        """
        return next((answer["message"] for answer in self.answers if "message" in answer), None)

    @property
    def faults(self) -> list[str]:
        """The tracebacks of errors in this project's code, not in the engine."""
        return [answer["fault"] for answer in self.answers if "fault" in answer]


def execute(name: str, rule: Execution) -> Result:
    """Execute the code lines of one claim and return the result. Raises RunFailed if this project's code fails."""
    ended = _give(name, rule)
    message = _message(name, rule, ended)
    answers = ended.answers if message is None else []
    values = {wish: _shared([answer["found"][wish] for answer in answers]) for wish in rule.wants if answers}
    return Result(
        rule_sha256=rule.sha256,
        outcome=by_execution.outcome(rule.wants, values, message),
        message=message,
        found=values,
        measured=_shared([answer["measured"] for answer in answers]) if answers else None,
    )


def _give(name: str, rule: Execution) -> _Ended:
    """Run the processes that execute the code lines, and return their statuses, errors and results."""
    with tempfile.TemporaryDirectory(prefix="zero-study-") as temporary:
        place, folder = Path(temporary) / "study", Path(temporary) / "snippet"
        place.mkdir()
        folder.mkdir()
        snippet = rule.snippet.replace("SWAP_DIR", str(folder / "swap"))
        (place / "rule.json").write_text(json.dumps(rule.model_dump() | {"snippet": snippet}))
        ranks = _run(name, rule, snippet, place, folder)
        return _Ended(
            statuses=[rank.returncode for rank in ranks],
            errors=[line for rank in ranks for line in rank.errors],
            answers=[json.loads(path.read_text()) for path in sorted(place.glob("answer-*.json"))],
            has_started=(place / "started").exists(),
        )


def _message(name: str, rule: Execution, ended: _Ended) -> str | None:
    """Return the engine's error message if it rejected the lines. None if it accepted them.

    Raises RunFailed if the lines could not be executed at all.
    """
    if ended.refusal is not None:
        return ended.refusal
    was_given = ended.has_started or rule.through == "accelerate-yaml"
    if ended.faults or not was_given:
        raise RunFailed("\n".join([f"{name}: could not be executed", *(ended.faults or ended.errors[-30:])]))
    if not ended.answers or any(ended.statuses):
        return _last_words(ended.errors, ended.statuses)
    return None


def _shared(values: list[Any]) -> Any:
    """Return the value that all ranks have. If they differ, return the list of values by rank."""
    return values[0] if all(value == values[0] for value in values) else values


def _last_words(errors: list[str], statuses: list[int]) -> str:
    """Return why a process ended without a result: its last exception, or the signal that ended it."""
    if ended := [signal.Signals(-status).name for status in statuses if status < 0]:
        return f"ended by {ended[0]}"
    raised = processes.raised_in(errors)
    return files.redact_paths((raised[-1].text if raised else errors[-1]).replace(sys.prefix, "(python)"))


def _run(name: str, rule: Execution, snippet: str, place: Path, folder: Path) -> list[processes.Rank]:
    """Run the processes of a claim until they end. Raises RunFailed if they exceed TIMEOUT_SECONDS."""
    program, num_ranks, environment = ["study.claims.snippet_process", str(place)], rule.processes, dict(os.environ)
    if rule.through == "accelerate-yaml":
        file = place / "accelerate.yaml"
        file.write_text(yaml.safe_dump({**LEAST, "num_processes": num_ranks, **yaml.safe_load(snippet)}))
        launcher = ["accelerate.commands.launch", "--config_file", str(file), "--main_process_port", "0", "--module"]
        program, num_ranks = [*launcher, *program], 1
    elif rule.through == "deepspeed-json":  # in all other cases, one process runs without a launcher, as in a notebook
        environment["WORLD_SIZE"] = str(num_ranks)
    try:
        return processes.run(
            ["-m", *program], num_ranks, timeout_seconds=TIMEOUT_SECONDS, environment=environment, folder=folder
        )
    except RunFailed as late:
        raise RunFailed(f"{name}: {late}") from None


@click.command()
@click.option("--claim", "claims", multiple=True, metavar="ID", help="only this one, again for more; others stay")
@click.option(
    "--output", type=click.Path(path_type=Path), default=by_execution.RESULTS, help="JSON file of the results"
)
def command(claims: tuple[str, ...], output: Path) -> None:
    """Run the code lines that the sources publish with current engines, and record the results."""
    execute_all(claims, output)


if __name__ == "__main__":
    run_command(command)
