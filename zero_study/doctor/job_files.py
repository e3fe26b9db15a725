"""Read the lines that start a training in job files: `accelerate launch`, torchrun and DeepSpeed's launcher.

Job files are shell scripts, also of Slurm, and YAML files of SkyPilot and of Kubeflow's TrainJob.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engines.keys import known_keys
from ..files import read_whole, reading
from .findings import Settings
from .named_files import read_leniently

ENDINGS = (".sh", ".bash", ".sbatch", ".slurm")
UNKNOWN = "$"  # is in each value that only the running job knows
_PYTHON = r"python[\d.]*[ \t]+-m[ \t]+"
_PROGRAM = re.compile(
    rf"(?<![\w.-])(?:(?P<accelerate>accelerate[ \t\v]+launch|{_PYTHON}accelerate\.commands\.launch)"
    rf"|(?P<torchrun>torchrun|{_PYTHON}torch\.distributed\.run)|(?P<deepspeed>deepspeed))(?=[ \t\v])"
)
# A command ends with its line, or at one of these characters outside of an expansion.
_EXPANSION = r"\$\(\([^\n]*?\)\)|\$\([^()\n]*\)|\$\{[^}\n]*\}"
_COMMAND = re.compile(rf"(?:{_EXPANSION}|[^\n;|&])*")
_WORD = re.compile(rf"(?:{_EXPANSION}|\S)+")
_VALUE = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s;\"'])*"
_ASSIGNMENTS = re.compile(rf"(?m)^[ \t]*(?:export[ \t]+)?((?:\w+={_VALUE}[; \t]*)+)")
_VARIABLE = re.compile(r"(?<!\\)\$(?:\{(\w+)\}|(\w+))")
_ONE_NODE = re.compile(r"(?:--nodes|-N|--ntasks|-n)[= ]*[\"']?1\b|--nodelist|-w\b")  # options of srun
# Options of launchers without a value that accelerate does not have.
_SWITCHES = frozenset({"standalone", "run_path", "m", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi"})
_TYPES = {"multi_gpu": "MULTI_GPU", "use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "cpu": "NO"}


@dataclass(frozen=True)
class Launch:
    """One line that starts a training."""

    program: str  # accelerate, torchrun or deepspeed
    flags: Mapping[str, str]  # as far as it is known, with the values of variables
    line: int  # of the file
    nodes: int  # on which this line runs; 1 if this is not known
    variables: Mapping[str, str]
    is_complete: bool = True  # all options are known


def launches(path: Path) -> list[Launch]:
    """Return the lines of a job file that start a training. Empty for other files. Raises Refusal if unreadable."""
    if path.suffix not in (*ENDINGS, ".yaml", ".yml"):
        return []
    with reading(path, "text" if path.suffix in ENDINGS else "YAML"):
        text = read_whole(path).decode()
    if path.suffix not in ENDINGS:
        return list(_of_yaml(text))
    nodes = next(map(int, re.findall(r"(?m)^#SBATCH\s+(?:--nodes|-N)[= ]*(\d+)", text)), 1)
    # The script itself runs on node 0, and it fills in variables before srun starts a line on the other nodes.
    names = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NODEID": 0, "SLURM_PROCID": 0}
    return list(_launches(text, nodes, names if nodes > 1 else {}, is_on_each=False))


def number(text: Any) -> int | None:
    """Return a whole number. None if the text is something else, such as a variable that only the job knows."""
    return int(text) if str(text).isdecimal() else None


def _of_yaml(text: str) -> Iterator[Launch]:
    """Yield the lines in the jobs of SkyPilot or Kubernetes in a YAML file."""
    if re.search(r"(?m)^(?:run:|kind:\s*TrainJob)", text) is None:
        return
    for document in re.finditer(r"(?ms)(?:\A|^---).*?(?=^---|\Z)", text):
        job, trainer = Settings(read_leniently(document[0]) or {}), "spec.trainer."
        commands, nodes = [job.get("run", ""), job.get("setup", "")], job.get("num_nodes", 1)
        variables = {"SKYPILOT_NUM_NODES": nodes}
        if job.get("kind", None) == "TrainJob":
            nodes = job.get(f"{trainer}numNodes", 1)
            words = [job.get(f"{trainer}{key}", ()) for key in ("command", "args")]
            commands = [" ".join(str(word) for part in words if isinstance(part, list) for word in part)]
            if str(job.get("spec.runtimeRef.name")).startswith("torch"):  # this runtime sets variables for torchrun
                gpus = next(iter(re.findall(r"/gpu[\"']?:\s*[\"']?(\d+)", document[0])), UNKNOWN)
                per_node = job.get(f"{trainer}numProcPerNode", gpus)
                variables = {"PET_NNODES": nodes, "PET_NPROC_PER_NODE": per_node, "PET_NODE_RANK": UNKNOWN}
        # So that the commands have the line numbers that they have in the file.
        above = re.compile(r".*^[ \t]*(?:run|args|command):\s*(?:-\s*)?(?:[|>][-+]?\n)?", re.M | re.S).match(
            document[0]
        )
        begin = text.count("\n", 0, document.start() + (above.end() if above else 0))
        yield from _launches("\n" * begin + "\n".join(map(str, commands)), number(nodes) or 1, variables)


def _launches(text: str, nodes: int, variables: Mapping[str, Any], is_on_each: bool = True) -> Iterator[Launch]:
    """Yield the lines that start a training. On more than one node, they run by `srun`, or if each runs the text."""
    text = re.sub(r"\\\r?\n", " \v", re.sub(r"(?m)^[ \t]*#.*", "", text))  # one \v for each joined line
    for match in _PROGRAM.finditer(text):
        before = text[: match.start()]
        known, line = _assigned(before, variables), before.rpartition("\n")[2]
        if line.count("'") % 2:  # the shell of each node fills in the variables
            known |= dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID"), UNKNOWN)
        words = _WORD.findall("".join(_COMMAND.findall(text, match.end())[:1]))
        words = [piece for word in words for piece in _expanded(word, known)]
        flags = dict(_flags(words, known))
        # Options that only the running job knows, or an argument of another program, which may change it.
        has_unknown = UNKNOWN in "".join(words[:1]) or re.search(r"\s--\s", line) is not None
        if not (words or flags) or (match["deepspeed"] and ".py" not in "".join(words[:1])):
            continue  # such as `pip install deepspeed`
        runs_on_each = is_on_each or ("srun" in line and not _ONE_NODE.search(line))
        number_of_line = 1 + before.count("\n") + before.count("\v")
        runs_on = nodes if runs_on_each else 1
        yield Launch(str(match.lastgroup), flags, number_of_line, runs_on, known, not has_unknown)


def _assigned(text: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return variables, with those that a script has assigned. One that has several values is unknown."""
    assigned: dict[str, str] = {}
    known = {name: str(value) for name, value in variables.items()}
    for name, value in re.findall(rf"(\w+)=({_VALUE})", " ".join(_ASSIGNMENTS.findall(text))):
        value = value.strip("'") if value.startswith("'") else _filled_in(value, known)
        known[name] = assigned[name] = value if assigned.get(name, value) == value else UNKNOWN
    return known


def _expanded(word: str, variables: Mapping[str, str]) -> list[str]:
    """Return the options that a variable stands for, or the word itself."""
    match = _VARIABLE.fullmatch(word.strip("\"'"))
    options = variables.get(match[1] or match[2], "") if match else ""
    return options.split() if options.startswith("-") else [word]


def _filled_in(text: str, variables: Mapping[str, str]) -> str:
    """Return a word of a script with the values of its variables."""
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0]), text.strip("\"'"))


def _flags(words: list[str], variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of a launcher with their values, and take them from the words."""
    types = known_keys.engine_schema("accelerate", "flags")
    while words and words[0].lstrip("\"'").startswith("-"):
        name, equals, value = words.pop(0).strip("\"'-").partition("=")
        name = name.replace("-", "_")
        if not equals and words and name not in _SWITCHES and types.get(name, {}).get("type") != "flag":
            value = words.pop(0)
        yield name, _filled_in(value, variables)


def with_flags(content: Mapping[str, Any], flags: Mapping[str, str]) -> tuple[dict[str, Any], set[str]]:
    """Return the content of an accelerate file as the flags of the launcher change it, and the unknown keys."""
    places = {key: section for section, keys in known_keys.accelerate_sections().items() for key in keys}
    fields = known_keys.engine_schema("accelerate", "fields")
    changed = {key: dict(value) if isinstance(value, dict) else value for key, value in content.items()}
    unknown = set()
    for name, text in flags.items():
        section = changed
        if name in places:
            section = changed[places[name]] = changed.get(places[name]) or {}
        elif name in _TYPES:
            changed["distributed_type"] = _TYPES[name]
        if UNKNOWN in text:
            unknown.add(name)
            section.pop(name, None)
        elif name in places or name in fields:
            section[name] = int(text) if text.isdecimal() else text
    return changed, unknown
