"""Give the code lines that sources print to today's engines, each claim's lines in new processes.

    python -m study.claims.snippets [--claim ID] [--output FILE]

On a CPU. The results are a file from which `zero-study claims` makes its verdicts.
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

from study import files, processes
from study.claims import ledger
from study.claims.rules import by_execution
from study.claims.rules.by_execution import Execution, Result, Results
from study.engines import extensions
from study.errors import Refusal, RunFailed, run_command
from study.running.launch import QUIET_ENVIRONMENT

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


def execute_all(claim_ids: Sequence[str], path: Path) -> None:
    """Execute these claims, or all, and write their results after each.

    Raises Refusal for what cannot be executed, and RunFailed where a claim's lines could not be.
    """
    files.require_folder(path)
    extensions.use_own_folder()
    os.environ.update(QUIET_ENVIRONMENT | ON_CPU | {"PYTHONPATH": str(files.ROOT)})
    extensions.provide(extensions.EXTENSIONS, "what the sources print")
    rules = _rules_of_execution()
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
        files.write_json(path, content.model_dump())  # after each, so that whatever ends this loses one at most


def _rules_of_execution() -> dict[str, Execution]:
    claims = [claim for source in ledger.read() for claim in source.claims]
    return {claim.id: claim.rule for claim in claims if isinstance(claim.rule, Execution)}


def _earlier_results(path: Path, versions: dict[str, str]) -> dict[str, Result]:
    """Read the results that stay. Raises Refusal where they are of other versions."""
    earlier = by_execution.read(path)
    if earlier.versions != versions:
        raise Refusal(f"{path}: these versions are not installed here. Remove --claim to execute every claim again.")
    return earlier.results


@dataclass(frozen=True)
class _Ended:
    """The results of the processes of a claim."""

    statuses: list[int]
    errors: list[str]  # lines of stderr
    answers: list[dict[str, Any]]  # of the ranks that wrote one
    has_started: bool  # a process came as far as the lines

    @property
    def refusal(self) -> str | None:
        """The engine's message if it refused the lines. If one rank refuses, the others fail because of that."""
        return next((answer["message"] for answer in self.answers if "message" in answer), None)

    @property
    def faults(self) -> list[str]:
        """Errors of this project's own program."""
        return [answer["fault"] for answer in self.answers if "fault" in answer]


def execute(name: str, rule: Execution) -> Result:
    """Give one claim's code lines to the engine. Raises RunFailed if this project's own code fails."""
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
    """Run the processes that give the lines to the engine, and read what they left."""
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
    """Return the engine's message if it refused the lines; None if it accepted them. Raises RunFailed."""
    if ended.refusal is not None:
        return ended.refusal
    was_given = ended.has_started or rule.through == "accelerate-yaml"
    if ended.faults or not was_given:
        raise RunFailed("\n".join([f"{name}: could not be executed", *(ended.faults or ended.errors[-30:])]))
    if not ended.answers or any(ended.statuses):
        return _last_words(ended.errors, ended.statuses)
    return None


def _shared(values: list[Any]) -> Any:
    """The value of all ranks, or a list by rank."""
    return values[0] if all(value == values[0] for value in values) else values


def _last_words(errors: list[str], statuses: list[int]) -> str:
    """Return the last message of a process that ended without a result: its exception, or the signal that ended it."""
    if ended := [signal.Signals(-status).name for status in statuses if status < 0]:
        return f"ended by {ended[0]}"
    raised = processes.raised_in(errors)
    return files.redact_paths((raised[-1].text if raised else errors[-1]).replace(sys.prefix, "(python)"))


def _run(name: str, rule: Execution, snippet: str, place: Path, folder: Path) -> list[processes.Rank]:
    """Run the processes of a claim to their end. Raises RunFailed after a time limit."""
    program, num_ranks, environment = ["study.claims.snippet_process", str(place)], rule.processes, dict(os.environ)
    if rule.through == "accelerate-yaml":
        file = place / "accelerate.yaml"
        file.write_text(yaml.safe_dump({**LEAST, "num_processes": num_ranks, **yaml.safe_load(snippet)}))
        launcher = ["accelerate.commands.launch", "--config_file", str(file), "--main_process_port", "0", "--module"]
        program, num_ranks = [*launcher, *program], 1
    elif rule.through == "deepspeed-json":  # otherwise one process is as in a notebook: without a launcher
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
    """Give today's engines the lines that the sources print, and note what becomes of them."""
    execute_all(claims, output)


if __name__ == "__main__":
    run_command(command)
