"""Start accelerate with real configuration files and read the engine, so that doctor's findings can be checked.

The files are those of tests/real_files/: files of public repositories (started with `accelerate launch` and two
processes), each of them as doctor mends it, and files with one trap each (started as one process). The program starts
all of them, writes tests/real_files/observed.json, and prints how many of doctor's findings were right.

    python tools/measure/doctor_observed.py [NAME ...]    # with names, it starts only these files
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from zero_study.doctor import examine
from zero_study.doctor.findings import NOT_STATED, Finding

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests" / "real_files"
OBSERVED = FILES / "observed.json"
PROGRAM = Path(__file__).with_name("doctor_program.py")

# The JSON that one of the accelerate files names is among the files.
NEIGHBORS = {"../deepspeed_config_templates/zero_stage1_config.json": "accelerate_zero1.json"}


@dataclass(frozen=True)
class Case:
    """A file to be started: what it holds, the JSON that lies where it names one, and what the program is told."""

    name: str
    content: dict[str, Any]
    is_json: bool
    neighbors: dict[str, dict[str, Any]]
    arguments: tuple[str, ...] = ()

    def write(self, folder: Path) -> Path:
        """Write the file and what lies beside it, as its repository has them."""
        for path_in_file, content in self.neighbors.items():
            (folder / path_in_file).resolve().parent.mkdir(exist_ok=True)
            (folder / path_in_file).write_text(json.dumps(content))
        path = folder / ("file.json" if self.is_json else "file.yaml")
        path.write_text(json.dumps(self.content) if self.is_json else yaml.safe_dump(self.content))
        return path

    def examined(self, folder: Path) -> examine.Examined:
        """What doctor says of the file, in its folder."""
        before = Path.cwd()
        path = self.write(folder)
        os.chdir(folder)
        try:
            return examine.examine(Path(path.name))
        finally:
            os.chdir(before)


def index() -> list[dict[str, str]]:
    """Where the real files come from."""
    return yaml.safe_load((FILES / "index.yaml").read_text())


def cases() -> dict[str, Case]:
    """Every file to be started: the real ones, those that doctor changes as it mends them, and the traps."""
    all_cases = {row["file"]: _real(row["file"]) for row in index()}
    for name, case in list(all_cases.items()):
        with tempfile.TemporaryDirectory() as scratch:
            mended = examine.mended(case.examined(_folder(scratch)))
        if mended != case.content:
            all_cases[f"mended {name}"] = Case(f"mended {name}", mended, case.is_json, case.neighbors)
    for name, trap in yaml.safe_load((FILES / "traps.yaml").read_text()).items():
        is_json = "yaml" not in trap
        neighbors = {} if is_json or "json" not in trap else {"named.json": trap["json"]}
        content = trap["json"] if is_json else trap["yaml"]
        all_cases[f"trap {name}"] = Case(f"trap {name}", content, is_json, neighbors, tuple(trap.get("arguments", ())))
    return all_cases


def _real(name: str) -> Case:
    path = FILES / name
    content = json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text())
    path_in_file = content.get("deepspeed_config", {}).get("deepspeed_config_file")
    neighbors = {}
    if path_in_file in NEIGHBORS:
        neighbors[path_in_file] = json.loads((FILES / NEIGHBORS[path_in_file]).read_text())
    return Case(name, content, path.suffix == ".json", neighbors)


def _folder(scratch: str) -> Path:
    folder = Path(scratch) / "a" / "b"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class Started:
    """A file in a folder of its own, and how it is started there."""

    folder: Path
    words: list[str]  # of `accelerate launch`
    keys: list[str]  # of which doctor says something
    counts_processes: bool  # whether as many start as the file says

    def observed(self, out: str, error: str) -> dict[str, Any]:
        """What the engine has of the file's keys, or the error that ended the program."""
        line = next((line for line in out.splitlines() if line.startswith("FOUND ")), None)
        if line is None:
            return {"error": last_error(error, str(self.folder.parents[1]))}
        engine_values = json.loads(line.removeprefix("FOUND "))
        by_key = {key: read_back(engine_values, key, not self.counts_processes) for key in self.keys}
        return {"values": {key: value for key, value in by_key.items() if value is not NOT_STATED}}


def prepare(case: Case, scratch: str, alone: bool = False) -> Started:
    """Write a file to be started; `alone`: as one process, which is what becomes of launchers of one as well."""
    folder = _folder(scratch)
    keys = sorted({finding.key for finding in case.examined(folder).findings})
    config = "file.json" if case.is_json else "file.yaml"
    if case.is_json:
        config = "names_it.yaml"
        section = {"deepspeed_config_file": "file.json"}
        (folder / config).write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": section}))
    kind, num_processes = case.content.get("distributed_type"), case.content.get("num_processes", 0)
    starts_one = kind in ("NO", "MULTI_CPU", False)
    processes = [] if starts_one or (not case.is_json and num_processes <= 2) else ["--num_processes", "2"]
    words = ["--config_file", config, *processes, "--main_process_port", "0"]
    return Started(folder, words, keys, starts_one or not (processes or alone))


def observe(case: Case) -> dict[str, Any]:
    """Start a file with `accelerate launch` and two processes."""
    if case.content.get("num_machines", 1) not in (0, 1):
        return {"not_started": "needs several machines"}
    with tempfile.TemporaryDirectory(prefix="doctor-") as scratch:
        started = prepare(case, scratch)
        words = [sys.executable, "-m", "accelerate.commands.launch", *started.words, str(PROGRAM), *case.arguments]
        ended = subprocess.run(
            words, cwd=started.folder, env=environment(), capture_output=True, text=True, timeout=600
        )  # fmt: skip
        return started.observed(ended.stdout, ended.stderr)


def observe_alone(cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Start files one after another as one process each, forked from one that has imported what takes its seconds."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as scratch:
        several = [case for case in cases if case.content.get("num_machines", 1) not in (0, 1)]
        observed = {case.name: {"not_started": "needs several machines"} for case in several}
        started = {
            case.name: prepare(case, f"{scratch}/{number}", alone=True)
            for number, case in enumerate(cases)
            if case not in several
        }
        arguments = {case.name: case.arguments for case in cases}
        jobs = [
            {"folder": str(process.folder), "words": process.words, "arguments": arguments[name]}
            for name, process in started.items()
        ]
        listed = Path(scratch) / "cases.json"
        listed.write_text(json.dumps(jobs))
        subprocess.run([sys.executable, PROGRAM, "--many", listed], env=environment(), check=True, capture_output=True)
        for name, process in started.items():
            out, error = ((process.folder / file).read_text() for file in ("out", "err"))
            observed[name] = process.observed(out, error)
    return observed


def environment() -> dict[str, str]:
    """Of a box without a GPU, and one thread a process."""
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def last_error(text: str, scratch: str) -> str:
    """The error that ends the program: the last of rank 0's chain, else what the launcher says."""
    text = re.sub(r"^\[rank\d+\]: ", "", text, flags=re.MULTILINE).replace(scratch, ".")
    lines = [line for line in text.splitlines() if not line.startswith("E1")]
    raised = [n for n, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    raised = [n for n in raised if "ChildFailedError" not in lines[n] and "CalledProcessError" not in lines[n]]
    if not raised:
        return text[-300:]
    chained = [n for n in raised if "another exception occurred" in " ".join(lines[n + 1 : n + 4])]
    first = next((n for n in raised if n not in chained), raised[0])
    # The launcher's own traceback may follow.
    message_lines = takewhile(lambda line: not line.startswith("Traceback"), lines[first : first + 3])
    return " ".join(line.strip() for line in message_lines)[:400]


_Z = "zero_optimization."
_PLACES = {  # of a key of an accelerate file in what the program says
    "deepspeed_config.zero_stage": "engine.zero_config.stage",
    "deepspeed_config.gradient_clipping": "engine.gradient_clipping",
    "deepspeed_config.gradient_accumulation_steps": "engine.gradient_accumulation_steps",
    "deepspeed_config.offload_optimizer_device": "engine.zero_config.offload_optimizer.device",
    "deepspeed_config.offload_param_device": "engine.zero_config.offload_param.device",
    "deepspeed_config.offload_optimizer_nvme_path": "engine.zero_config.offload_optimizer.nvme_path",
    "deepspeed_config.offload_param_nvme_path": "engine.zero_config.offload_param.nvme_path",
    "deepspeed_config.zero3_save_16bit_model": "engine.zero_config.gather_16bit_weights_on_model_save",
    "dynamo_config": "dynamo_backend",
    "dynamo_config.dynamo_backend": "dynamo_backend",
    "enable_cpu_affinity": "cpu_affinity",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "plugin.transformer_cls_names_to_wrap",
    "optimizer.type": "engine.optimizer_name",
    "scheduler.type": "engine.scheduler_name",
    _Z + "stage3_gather_fp16_weights_on_model_save": "engine.zero_config.gather_16bit_weights_on_model_save",
}
_SECTIONS = {  # of a DeepSpeed JSON in what the engine has
    "zero_optimization": "zero_config", "fp16": "float16_config", "bf16": "bfloat16_config",
    "bfloat16": "bfloat16_config", "optimizer.params": "optimizer_params", "scheduler.params": "scheduler_params",
    "aio": "aio_config", "compile": "compile_config",
}  # fmt: skip


def read_back(engine_values: dict[str, Any], key: str, processes_overridden: bool) -> Any:
    """What the program found in the place of a key; NOT_STATED where there is no such place."""
    if key == "mixed_precision":
        if "engine" not in engine_values:
            return engine_values.get("mixed_precision", NOT_STATED)
        enabled = (name for name, at in (("bf16", "bfloat16_config"), ("fp16", "float16_config"))
                   if engine_values["engine"][at]["enabled"])  # fmt: skip
        return next(enabled, "no")
    if key == "num_processes":
        return NOT_STATED if processes_overridden else engine_values.get("num_processes", NOT_STATED)
    if key == "distributed_type":
        kind = engine_values.get("distributed_type", NOT_STATED)
        return "MULTI_GPU" if kind == "MULTI_CPU" else kind  # which accelerate makes of it on a CPU
    if key in ("bfloat16", "zero_optimization.cpu_offload"):
        place = {"bfloat16": "engine.bfloat16_config.enabled"}.get(key, "engine.zero_config.offload_optimizer.device")
        return {"cpu": True, "none": False}.get(value := _at(engine_values, place), value)
    if key in _PLACES:
        return _at(engine_values, _PLACES[key])
    if key.startswith("fsdp_config.fsdp_"):
        return _at(engine_values, "plugin." + key.removeprefix("fsdp_config.fsdp_"))
    for section, place in _SECTIONS.items():
        if key.startswith(f"{section}."):
            inner = key.removeprefix(f"{section}.")
            value = _at(engine_values, f"engine.{place}.{inner}")
            return (
                _at(engine_values, f"engine.{place}.{inner.removeprefix('stage3_')}") if value is NOT_STATED else value
            )
    return _at(engine_values, f"engine.{key}")


def _at(engine_values: Any, place: str) -> Any:
    for part in place.split("."):
        if not isinstance(engine_values, dict) or part not in engine_values:
            return NOT_STATED
        engine_values = engine_values[part]
    return engine_values


def judge(findings: list[Finding], observed: dict[str, Any]) -> list[tuple[Finding | None, str]]:
    """Hold each finding to what was seen: right, wrong, or not seen. (None, wrong): the error that doctor missed."""
    if "not_started" in observed:
        return [(finding, "not seen") for finding in findings]
    if "error" in observed:
        explaining = [f for f in findings if f.error and f.error in observed["error"]]
        verdicts: list[tuple[Finding | None, str]] = [
            (f, "right" if f in explaining and f.effect != "not examined" else "not seen") for f in findings
        ]
        return verdicts if explaining else [*verdicts, (None, "wrong")]
    return [(finding, _judge_started(finding, observed["values"])) for finding in findings]


def _judge_started(finding: Finding, values: dict[str, Any]) -> str:
    if finding.effect == "crashes":
        return "wrong"
    value = values.get(finding.key, NOT_STATED)
    if finding.engine_has is not NOT_STATED and finding.effect != "not examined":
        return "not seen" if value is NOT_STATED else "right" if same(finding.engine_has, value) else "wrong"
    if finding.effect == "ignored" and finding.matters:  # an unknown key has no place in the engine
        return "right" if value is NOT_STATED else "not seen"
    return "not seen"


_NAMES = {  # of what the engine has, in a file
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "transformer_auto_wrap_policy": "transformer_based_wrap",
    "size_based_auto_wrap_policy": "size_based_wrap",
}  # fmt: skip


def same(in_file: Any, in_engine: Any) -> bool:
    """Whether a value as it is written is what the engine has."""
    if in_file == "auto":  # filled in
        return in_engine not in ("auto", None)
    if isinstance(in_file, bool) or isinstance(in_engine, bool):
        return str(in_file).lower() == str(in_engine).lower()
    if isinstance(in_file, (int, float)) and isinstance(in_engine, (int, float)):
        return float(in_file) == float(in_engine)
    if isinstance(in_engine, str) and isinstance(in_file, str):
        word = in_engine.rpartition(".")[2].partition(":")[0]
        return in_file.lower() in (in_engine.lower(), word.lower(), _NAMES.get(word), *in_engine.lower().split("'"))
    return in_file == in_engine


def committed() -> dict[str, Any]:
    """What was seen of each file, as it is committed."""
    return json.loads(OBSERVED.read_text())


def judged() -> dict[str, list[tuple[Finding | None, str]]]:
    """What became of every claim about every file that was started."""
    observed = committed()
    verdicts = {}
    for name, case in cases().items():
        with tempfile.TemporaryDirectory() as scratch:
            verdicts[name] = judge(case.examined(_folder(scratch)).findings, observed[name])
    return verdicts


def main() -> None:
    """Start the files, and store what was seen: the real ones as anybody does, the others alone."""
    observed = committed() if OBSERVED.exists() else {}
    every = cases()
    chosen = [every[name] for name in sys.argv[1:] or every]
    real = {row["file"] for row in index()}
    for case in [case for case in chosen if case.name in real]:
        observed[case.name] = observe(case)
        print(case.name, observed[case.name].get("error", "started"), flush=True)
    observed |= observe_alone([case for case in chosen if case.name not in real])
    in_order = {name: observed[name] for name in every if name in observed}
    OBSERVED.write_text(json.dumps(in_order, indent=0) + "\n")
    print(dict(Counter(verdict for findings in judged().values() for _, verdict in findings)))


if __name__ == "__main__":
    main()
