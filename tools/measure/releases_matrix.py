"""Run the checks of a training in environments with older and newer releases, one environment after another.

    python tools/measure/releases_matrix.py zero_study-0.1.0-py3-none-any.whl --output reports/releases_matrix.json

Each environment gets the releases of a training, and then the wheel with its extra `check`, which must not change them.
The commands run on sound and on wrong examples with two processes on a CPU. The results of each environment are merged
into the file. PyTorch's builds with CUDA take about 5 GB, so an environment is deleted before the next one is made.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("torch", "accelerate", "transformers", "deepspeed")
ENVIRONMENTS = [  # releases of NAMES
    ("2.6.0", "1.4.0", "4.49.0", "0.16.9"),
    ("2.8.0", "1.10.1", "4.56.2", "0.17.5"),
    ("2.10.0", "1.12.0", "5.0.0", "0.18.9"),
    ("2.13.0", "1.15.0", "5.23.0", "0.19.8"),
    ("2.15.0", "1.15.0", "5.24.0", "0.19.8"),
]
LIMIT = 600  # seconds of one command
SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1",
    "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
RANKS = "-m torch.distributed.run --standalone --nproc-per-node 2 -m"
PYTEST = "-m pytest -q --tb=short -p no:cacheprovider"
# Imports the training of test_training.py, and tests one strategy.
ONE_TEST = """
import os
from test_training import train
from zero_study.testing import assert_same_training
def test_same(): assert assert_same_training(train, ranks=2, strategies=os.environ["STRATEGIES"].split())
"""


class Case(NamedTuple):
    """A command on an example. `mistake` is a part of the right finding. It is None if the example is sound."""

    command: str
    example: str
    words: str
    mistake: str | None = None
    before: tuple[str, ...] = ()  # commands that make what this one reads
    variables: dict[str, str] = {}  # noqa: RUF012


SAVING, STALE = "train_save.py", "stale_optimizer.py"
CASES = [
    Case("prove", "DDP", f"{RANKS} zero_study.prove --json train_a.py"),
    Case("prove", "DDP: gradients are not averaged", f"{RANKS} zero_study.prove --json train_wrong.py",
         "gradients-not-averaged"),
    Case("prove", "FSDP2", f"{RANKS} zero_study.prove --json {STALE}", None, (), {"FAULT": "0"}),
    Case("prove", "FSDP2: the optimizer has other parameters", f"{RANKS} zero_study.prove --json {STALE}",
         "untrained-parameters", (), {"FAULT": "1"}),
    Case("prove", "DeepSpeed ZeRO-3: every rank has the same rows", f"{RANKS} zero_study.prove --json {SAVING}",
         "same batch"),
    Case("prove", "Trainer of transformers", f"{RANKS} zero_study.prove --json train_trainer.py trained 8"),
    Case("diff", "DDP twice", "-m zero_study diff a again --json", None,
         (f"{RANKS} zero_study.diff --output a train_a.py", f"{RANKS} zero_study.diff --output again train_a.py")),
    Case("diff", "DDP: the loss is divided by the number of ranks", "-m zero_study diff a b --json", "0.5 times",
         (f"{RANKS} zero_study.diff --output b train_b.py",)),
    Case("saved", "ZeRO-3 without gathering: empty tensors", "-m zero_study saved model --json", "saved/empty",
         (f"{RANKS} zero_study.diff --output recorded {SAVING}",)),
    Case("saved", "ZeRO-3 with gathering", "-m zero_study saved gathered --against checkpoint --json"),
    Case("saved", "Checkpoint of ZeRO-3", "-m zero_study saved checkpoint --against recorded --json"),
    Case("testing", "accelerate: DDP, ZeRO-2, ZeRO-3", f"{PYTEST} same.py", None, (),
         {"STRATEGIES": "ddp zero2 zero3"}),
    Case("testing", "accelerate: FSDP2", f"{PYTEST} same.py", None, (), {"STRATEGIES": "fsdp2"}),
    Case("testing", "accelerate: every rank has the same rows", f"{PYTEST} test_training_wrong.py", "same batch"),
    Case("testing", "accelerate: only rank 0 calls a collective", f"{PYTEST} test_training_hang.py", "HANG"),
    Case("doctor", "DeepSpeed: a misspelt key", "-m zero_study doctor my_zero3.json --json", "gradient_cliping"),
    Case("doctor", "accelerate: ZeRO-3", "-m zero_study doctor accelerate_configs/zero3.yaml --json"),
]  # fmt: skip


class Run(NamedTuple):
    """The exit status of a command, and its two outputs."""

    status: int
    output: str
    errors: str


def run(python: Path, words: str, folder: Path, variables: dict[str, str]) -> Run:
    """Run Python with these words, and end all its processes after the limit."""
    path = f"{python.parent}:{os.environ['PATH']}"
    environment = {**os.environ, **SETTINGS, "PATH": path, "TORCH_EXTENSIONS_DIR": str(folder / "ext"), **variables}
    process = subprocess.Popen(
        [python, *words.split()], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the exit status is then -9
        output, errors = process.communicate()
    return Run(process.returncode, output, errors)


def last_error(text: str) -> str:
    """Return the last line of a text that names an exception, or its last line, without paths of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    messages = [line for line in lines if re.match(r"(?:\[rank\d\]: |E +)?[\w.]*(?:Error|Exception|Checked)\b", line)]
    messages = [line for line in messages if "ChildFailedError" not in line]  # torchrun's summary
    return re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+", "", (messages or lines or ["no output"])[-1])[:300]


def answer(case: Case, completed: Run) -> tuple[str, str]:
    """Return whether the answer is right, wrong, "not checked" or "crash", and the reason if it is not right."""
    if case.command == "testing":
        checked = completed.status == 0 and "skipped" not in completed.output
        unknown = "CouldNotBeChecked" in completed.output or (completed.status == 0 and not checked)
        is_wrong = completed.status == 1 and "AssertionError" in completed.output
        verdict = "unknown" if unknown else "sound" if checked else "found" if is_wrong else ""
        text, reason = completed.output, last_error(completed.output)
    else:
        start = re.search(r'^\{\n *"schema"', completed.output, re.MULTILINE)
        content: dict[str, Any] = json.JSONDecoder().raw_decode(completed.output[start.start() :])[0] if start else {}
        is_internal = (content.get("error") or {}).get("kind") == "internal"
        verdict = "" if is_internal else content.get("verdict", "")
        errors = [finding for finding in content.get("findings", []) if finding["severity"] != "note"]
        text = json.dumps(errors)
        reasons = [f"{check['what']}: {check['why']}" for check in content.get("could_not_check", [])]
        texts = [error["text"] for error in errors]
        message = str((content.get("error") or {}).get("message", ""))
        is_raised = completed.status and "Traceback (most recent" in completed.errors
        raised = last_error(completed.errors) if is_raised else ""
        reason = "; ".join(texts) or raised or "; ".join(reasons) or message or last_error(completed.errors)
    if verdict not in ("sound", "found"):
        return ("not checked" if verdict in ("unknown", "refused") else "crash"), reason
    is_right = verdict == "sound" if case.mistake is None else verdict == "found" and case.mistake in text
    return ("right", "") if is_right else ("wrong", reason if verdict == "found" else "nothing was found")


def installed(python: Path) -> dict[str, str]:
    listed = subprocess.run([UV, "pip", "list", "--format", "json", "--python", python], capture_output=True, text=True)
    return {package["name"]: package["version"] for package in json.loads(listed.stdout)}


UV = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))


def made(releases: tuple[str, ...], wheel: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Make an environment. Return its Python, its releases, and what the installation of the wheel changed."""
    python = folder / "bin" / "python"
    packages = [f"{name}=={release}" for name, release in zip(NAMES, releases, strict=True)]
    install = [UV, "pip", "install", "-q", "--python", python]
    settings = {**os.environ, **SETTINGS}
    subprocess.run([UV, "venv", "-q", "--python", sys.executable, folder], check=True)
    # setup.py of DeepSpeed imports torch.
    subprocess.run([*install, *packages[:-1], "setuptools", "wheel", "ninja"], env=settings, check=True)
    subprocess.run([*install, "--no-build-isolation", packages[-1]], env=settings, check=True)
    before = installed(python)
    subprocess.run([*install, f"{wheel}[check]"], env=settings, check=True)
    after = installed(python)
    changed = {name: [before[name], after.get(name)] for name in before if after.get(name) != before[name]}
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    facts = {"packages": {name: after[name] for name in NAMES}, "bytes": size, "changed_by_installation": changed}
    return python, facts


def results(python: Path, folder: Path, commands: tuple[str, ...]) -> list[dict[str, Any]]:
    """Run the cases of some commands in a folder with copies of the examples."""
    shutil.copytree(ROOT / "docs" / "examples", folder, dirs_exist_ok=True)
    shutil.copytree(ROOT / "reports" / "silent_errors" / "programs", folder, dirs_exist_ok=True)
    shutil.copytree(ROOT / "accelerate_configs", folder / "accelerate_configs")
    (folder / "same.py").write_text(ONE_TEST)
    listed = []
    for case in CASES:
        if commands and case.command not in commands:
            continue
        began = time.monotonic()
        for words in case.before:
            completed = run(python, words, folder, {})
            if completed.status:
                outcome, reason = "crash", last_error(completed.errors)
                break
        else:
            outcome, reason = answer(case, run(python, case.words, folder, case.variables))
        if outcome in ("crash", "not checked") and case.command == "prove":
            alone = case.words.replace("-m zero_study.prove --json ", "")
            reason += " (also without `prove`)" if run(python, alone, folder, case.variables).status else ""
        seconds = round(time.monotonic() - began, 1)
        print(f"  {case.command}, {case.example}: {outcome} {reason} ({seconds} s)", flush=True)
        listed.append({"command": case.command, "example": case.example, "is_sound": case.mistake is None,
                       "answer": outcome, "why": reason, "seconds": seconds})  # fmt: skip
    return listed


@click.command()
@click.argument("wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--only", multiple=True, help="Releases of torch, for example 2.6.0. [default: all]")
@click.option("--command", "commands", multiple=True, help="Commands, for example prove. [default: all]")
def main(wheel: Path, output: Path, only: tuple[str, ...], commands: tuple[str, ...]) -> None:
    """Run the matrix with a wheel of this project."""
    for releases in ENVIRONMENTS:
        if only and releases[0] not in only:
            continue
        with tempfile.TemporaryDirectory(prefix="zero-study-matrix-") as name:
            print(", ".join(f"{name} {release}" for name, release in zip(NAMES, releases, strict=True)), flush=True)
            python, facts = made(releases, wheel.resolve(), Path(name) / "venv")
            facts |= {"python": platform.python_version()}
            facts["results"] = results(python, Path(name) / "examples", commands)
        former = json.loads(output.read_text()) if output.is_file() else []
        entries = {entry["packages"]["torch"]: entry for entry in former}
        torch = facts["packages"]["torch"]
        if commands:  # the answers of the other commands stay
            new = {(result["command"], result["example"]): result for result in facts["results"]}
            facts["results"] = [
                new.get((result["command"], result["example"]), result) for result in entries[torch]["results"]
            ]
        entries = {**entries, torch: facts}
        output.write_text(json.dumps([entries[name] for name in sorted(entries, key=Version)], indent=1) + "\n")


if __name__ == "__main__":
    main()
