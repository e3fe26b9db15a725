"""Run the benchmark of silent errors with `prove`, with TrainCheck, with PyTorch's own means and with the loss curve.

    python tools/measure/silent_errors.py                                 # all but TrainCheck, which needs --traincheck
    python tools/measure/silent_errors.py --only ddp-moved --tool traincheck --traincheck path/to/python

reports/silent_errors/programs.yaml lists the errors. Each program runs with FAULT=1 (wrong) and with FAULT=0 (its right
twin) on two processes. The results are merged into reports/silent_errors/results.json. TrainCheck learns from the right
twin, and then checks the wrong program and the right twin with another seed. It needs an environment of its own with
traincheck 0.2.0, torch 2.13.0 and deepspeed 0.19.8. With the same --work folder, it learns only what is missing there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.nn.parallel
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "reports" / "silent_errors"
PROGRAMS = FOLDER / "programs"
SIDES = {"right": "0", "wrong": "1"}  # values of FAULT
RANKS, SEEDS, LAST = 2, 5, 6  # LAST: the steps whose mean is the final loss
STEPS_OF_TRAINCHECK = 10  # a trace of more steps takes minutes to learn from
LIMIT = 900  # seconds
FORK = multiprocessing.get_context("fork")
SHARED = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
Json = dict[str, Any]


class Run(NamedTuple):
    """What a command did: its exit status, its output, and how long it took."""

    status: int
    output: str
    errors: str
    seconds: float


def execute(command: list[str], folder: Path, **variables: str) -> Run:
    """Run a command in a folder, and end all its processes after the time limit."""
    began, pipe, environment = time.monotonic(), subprocess.PIPE, {**os.environ, **SHARED, **variables}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the exit status is then -9
        output, errors = process.communicate()
    return Run(process.returncode, output, errors, round(time.monotonic() - began, 1))


def launched(python: str, entry: Json, *before: str) -> list[str]:
    """Return the command that starts a program on two processes, through a module if one is given."""
    words = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    return [*words, *before, entry["file"], *([entry["variant"]] if "variant" in entry else [])]


def without_paths(text: str) -> str:
    return re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+", "", text)


def prove(entry: Json) -> Json:
    """Run `prove`. Keep its errors and warnings, and the notes that it has only about the wrong program."""
    found: Json = {}
    for side, fault in SIDES.items():
        run = execute(launched(sys.executable, entry, "-m", "zero_study.prove", "--json"), PROGRAMS, FAULT=fault)
        start = re.search(r'^\{\n *"schema"', run.output, re.MULTILINE)
        answer = json.JSONDecoder().raw_decode(run.output[start.start() :])[0] if start else {}
        found[side] = {"exit_status": run.status, "verdict": answer.get("verdict"), "seconds": run.seconds}
        found[side] |= {"errors": [], "notes": []}
        if not start:  # for example because `prove` refuses a release with a known fault
            found[side]["message"] = without_paths(run.errors)[-600:]
        for finding in answer.get("findings", []):
            kept = {"id": finding["id"], "step": finding["place"]["step"], "text": without_paths(finding["text"])}
            found[side]["notes" if finding["severity"] == "note" else "errors"].append(kept)
    notes = found["right"].pop("notes")
    found["wrong"]["notes"] = [note for note in found["wrong"]["notes"] if note not in notes]
    return found


def run_rank(entry: Json, log: Path, variables: dict[str, str]) -> None:
    """Run a program in this process, which has imported PyTorch already."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update({**SHARED, **variables})
    torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
    os.chdir(PROGRAMS)
    sys.path.insert(0, str(PROGRAMS))
    sys.argv = [entry["file"], *([entry["variant"]] if "variant" in entry else [])]
    runpy.run_path(entry["file"], run_name="__main__")


def forked(entry: Json, folder: Path, **variables: str) -> Run:
    """Run a program in forks of this process, which saves the time that starting PyTorch takes."""
    began, ranks = time.monotonic(), []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for rank in range(RANKS):
        place = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **variables}
        ranks.append(FORK.Process(target=run_rank, args=(entry, folder / f"log.{rank}", place)))
        ranks[-1].start()
    while {process.exitcode for process in ranks} in ({None}, {None, 0}) and time.monotonic() - began < LIMIT:
        time.sleep(0.02)
    failed = [process.exitcode for process in ranks if process.exitcode]
    for process in ranks:
        process.kill()
        process.join()
    failed += [process.exitcode for process in ranks if process.exitcode]
    errors = "".join((folder / f"log.{rank}").read_text() for rank in range(RANKS))
    return Run(failed[0] if failed else 0, "", errors, round(time.monotonic() - began, 1))


def means_of_torch(entry: Json) -> Json:
    """Run with PyTorch's own checks. Keep the exit status and the first error."""
    found: Json = {"debug_detail": {}, "detect_anomaly": {}}
    for side, fault in SIDES.items():
        for means, setting in zip(found, ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, {"ANOMALY": "1"}), strict=True):
            with tempfile.TemporaryDirectory() as folder:
                run = forked(entry, Path(folder), FAULT=fault, **setting)
            named = re.findall(r"^([\w.]*(?:Error|Exception)\b.*)", run.errors, re.M) if run.status else []
            message = without_paths(named[0])[:300] if named else None
            found[means][side] = {"exit_status": run.status, "message": message, "seconds": run.seconds}
    return found


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return how far the tensors of one are from the other's, relative to their norm."""
    names = [name for name in one if name in other and one[name].shape == other[name].shape]
    square = sum(float((one[name] - other[name]).square().sum()) for name in names)
    return float(f"{(square / sum(float(one[name].square().sum()) for name in names)) ** 0.5:.3g}")


def losses(entry: Json) -> Json:
    """Compare the final losses with the spread of the right twin over seeds, and the final weights."""
    curves, weights = {}, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for fault, seed in [("1", 0), *(("0", seed) for seed in range(SEEDS))]:
            paths = {"LOSSES": str(folder / "losses"), "WEIGHTS": str(folder / "weights")}
            if (run := forked(entry, folder, FAULT=fault, SEED=str(seed), **paths)).status:
                raise click.ClickException(f"{entry['id']}: {run.errors[-2000:]}")
            curves[fault, seed] = json.loads((folder / "losses").read_text())
            weights[fault, seed] = [torch.load(folder / f"weights.{rank}") for rank in range(RANKS)]
    found: Json = {"weights": {"wrong_against_right": max(map(distance, weights["0", 0], weights["1", 0]))}}
    for side, fault in SIDES.items():
        found["weights"][f"ranks_of_{side}"] = distance(*weights[fault, 0])
    for kind, last in (("losses", LAST), *([("evaluations", 1)] if curves["1", 0]["evaluations"] else [])):
        final = {key: statistics.fmean(curve[kind][-last:]) for key, curve in curves.items()}
        spread = max(final["0", seed] for seed in range(SEEDS)) - min(final["0", seed] for seed in range(SEEDS))
        found[kind] = {"wrong": final["1", 0], "right": final["0", 0], "spread": spread}
        found[kind]["shows"] = abs(final["1", 0] - final["0", 0]) > spread
    return found


def traincheck(entry: Json, entries: list[Json], python: Path, work: Path) -> Json:
    """Learn invariants from the right twin. Check the wrong program, and the right twin with another seed."""
    found, twin = dict[str, Any](), next((other for other in entries if other["id"] == entry.get("twin")), entry)
    learned, right = work / twin["id"] / "invariants.json", work / twin["id"] / "right.json"

    def collect(program: Json, name: str, **variables: str) -> Path:
        folder, traces = work / str(program["id"]) / f"programs_{name}", work / str(program["id"]) / name
        shutil.rmtree(traces, ignore_errors=True)
        shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "run.sh").write_text(" ".join(launched(str(python), program)) + "\n")
        words = ["-p", program["file"], "-s", "run.sh", "-a", "--models-to-track", "model"]
        command = [str(python.with_name("traincheck-collect")), *words, "--model-tracker-style", "sampler"]
        run = execute([*command, "--output-dir", str(traces)], folder, STEPS=str(STEPS_OF_TRAINCHECK), **variables)
        if "exited with code 0" not in (traces / "program_output.txt").read_text():
            raise RuntimeError(f"the instrumented program failed ({name})")
        found[f"seconds_to_trace_{name}"] = run.seconds
        return traces

    def check(program: Json, name: str, **variables: str) -> Json:
        traces, checked = collect(program, name, **variables), work / program["id"] / f"checked_{name}"
        words = ["-f", str(traces), "-i", str(learned), "-o", str(checked), "--no-html-report"]
        run = execute([str(python.with_name("traincheck-check")), *words], work)
        if not (total := re.search(r"Total failed invariants: (\d+)/(\d+)", run.output + run.errors)):
            raise RuntimeError(f"TrainCheck could not check ({name})")
        shutil.rmtree(traces)
        violations = json.loads((checked / name / "violations_summary.json").read_text())["violations"]
        shown = [{"name": v["display_name"], "step": v["first_step"], "times": v["occurrences"]} for v in violations]
        return {"violated": int(total[1]), "invariants": int(total[2]), "violations": shown, "seconds": run.seconds}

    try:
        if not right.exists():
            traces = collect(twin, "learned", FAULT="0")
            run = execute([str(python.with_name("traincheck-infer")), "-f", str(traces), "-o", str(learned)], work)
            shutil.rmtree(traces)
            found["seconds_to_learn"] = run.seconds
            right.write_text(json.dumps(check(twin, "right", FAULT="0", SEED="1")))
        wrong, of_right = check(entry, "wrong", FAULT="1"), json.loads(right.read_text())
    except (RuntimeError, OSError) as error:
        return {**found, "error": without_paths(str(error))}
    known = {violation["name"] for violation in of_right["violations"]}
    wrong["violations"] = [violation for violation in wrong["violations"] if violation["name"] not in known]
    return {**found, "wrong": wrong, "right": of_right}


@click.command(help=__doc__)
@click.option("--only", multiple=True, metavar="ID", help="Run only these entries.")
@click.option("--tool", "tools", multiple=True, type=click.Choice(["prove", "traincheck", "torch", "losses"]))
@click.option("--traincheck", "python", metavar="PYTHON", help="The Python of an environment with TrainCheck.")
@click.option("--work", type=click.Path(path_type=Path), help="Keep what TrainCheck learned in this folder.")
@click.option("--output", type=click.Path(path_type=Path), default=FOLDER / "results.json", show_default="results.json")
def main(only: tuple[str, ...], tools: tuple[str, ...], python: str | None, work: Path | None, output: Path) -> None:
    entries: list[Json] = yaml.safe_load((FOLDER / "programs.yaml").read_text(encoding="utf-8"))
    if unknown := set(only) - {entry["id"] for entry in entries}:
        raise click.UsageError(f"programs.yaml has no entry {', '.join(sorted(unknown))}")
    if "traincheck" in tools and not python:
        raise click.UsageError("TrainCheck needs --traincheck PYTHON")
    place = (work or Path(tempfile.mkdtemp())).resolve()
    runs: dict[str, Callable[[Json], Json]] = {"prove": prove, "torch": means_of_torch, "losses": losses}
    if python:
        runs["traincheck"] = lambda entry: traincheck(entry, entries, Path(python).absolute(), place)
    for entry in (entry for entry in entries if not only or entry["id"] in only):
        for tool in tools or runs:
            click.echo(f"{entry['id']}: {tool}", err=True)
            result = runs[tool](entry)
            results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"entries": {}}
            results["versions"] = {name: version(name) for name in ("deepspeed", "numpy", "torch", "zero-study")}
            results["entries"].setdefault(entry["id"], {})[tool] = result
            output.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
