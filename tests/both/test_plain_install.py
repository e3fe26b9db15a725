"""Test each command without extras installed: it works, or one message names the extra that it needs.

Also test the wheel, and the Dockerfile, which builds it.
"""

from __future__ import annotations

import email
import gzip
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest
from packaging.requirements import Requirement

from zero_study import cli, errors, files, version
from zero_study.cli import options
from zero_study.errors import Refusal

RECORDS = launching.ROOT / "reports" / "cpu" / "records" / "smoke"
LOG = launching.ROOT / "tests" / "fixtures" / "logs" / "juniper_h100_n1_result_0.txt"
SOUND = launching.ROOT / "tests" / "why" / "sound" / "deepspeed-chat-ppo.log"
GPU = "--gpu l4 --gpus 2"

# Each command as a user types it, by the extra that it needs.
BY_EXTRA = {
    None: [
        "plan smoke", f"pack {RECORDS} collected", f"compare {RECORDS}", f"pack {RECORDS} box.zip",
        "merge box.zip merged", "claims", "claims --json", "advise --model gpt2 --gpu l4", f"advise {GPU}",
        *(f"compare {RECORDS} --view {v}" for v in ("model-states", "communication", "peaks", "parity", "acceptance")),
        f"doctor {launching.ROOT / 'accelerate_configs' / 'ddp.yaml'}", f"predict buckets {GPU}",
        f"upgrade {launching.ROOT / 'constraints.txt'} {launching.ROOT / 'constraints.txt'}",
        f"advise --model gpt2 {GPU}", f"advise --model gpt2 {GPU} --strategy zero3_tuned --write own.yaml", "diff . .",
        f"import {LOG} --output imported",
        f"why {SOUND}", f"check {launching.ROOT / 'accelerate_configs' / 'ddp.yaml'}", "skills print",
    ],
    "check": [
        "conformance", f"advise --model gpt2 {GPU} --trace", "dry-run --world 2 zero2", "prove train.py", "saved .",
    ],
    "train": ["train", "run smoke", "job smoke bert-imdb-tiny-zero2-2x-seed0", "exact", "export runs"],
    "trackers": ["import events.out.tfevents.1 --output imported"],
    "report": [
        f"compare {RECORDS} --view differences", f"compare {RECORDS} --verdict smoke", "claims --check",
        f"report smoke --records {RECORDS}",
    ],
}  # fmt: skip
COMMANDS = {line: extra for extra, lines in BY_EXTRA.items() for line in lines}

# Runs every command in one process from which the modules are hidden, in the current folder.
PROGRAM = """
import contextlib, io, json, sys
hidden, lines = json.load(sys.stdin)
sys.modules.update(dict.fromkeys(hidden))
from zero_study import __main__
results = {}
for line in lines:
    sys.argv = ["zero-study", *line.split()]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            __main__.main()
        except SystemExit as end:
            status = end.code
    results[line] = status, out.getvalue(), err.getvalue()
json.dump(results, sys.stdout)
"""


def modules_of_extras() -> dict[str, set[str]]:
    """The modules that come with each extra."""
    result: dict[str, set[str]] = {}
    distributions = importlib.metadata.packages_distributions()
    for line in importlib.metadata.requires("zero-study"):
        if extra := re.search(r'extra == "(\w+)"', line):
            name = _plain(re.match(r"[\w.-]+", line)[0])
            modules = {module for module, packages in distributions.items() if name in map(_plain, packages)}
            result.setdefault(extra[1], set()).update(modules)
    return result


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


@pytest.fixture
def plain_install() -> dict[str, tuple[int, str, str]]:
    """Status, stdout and stderr of each command."""
    return json.loads((launching.once("plain", _run_all) / "results.json").read_text())


def _run_all(folder: Path) -> None:
    hidden = sorted(set.union(*modules_of_extras().values()))
    assert {"torch", "pandas", "scipy", "matplotlib", "markdown_it", "papermill"} <= set(hidden)
    recording = {
        "format": 4, "rank": 0, "world_size": 1, "token": "a", "of": None, "engine": "", "versions": {},
        "asked": 1, "steps": 1, "completed": 1, "raised": None, "backward": [],
        "entries": [[step, "weights", "w", 0, 1, "float32", [1.0 + step] * 32, []] for step in (0, 1)],
    }  # fmt: skip
    (folder / "rank-0.json.gz").write_bytes(gzip.compress(json.dumps(recording).encode()))
    (folder / "events.out.tfevents.1").write_bytes(bytes(12) + b"brain.Event:2")
    asked = {"input": json.dumps([hidden, list(COMMANDS)]), "cwd": folder, "env": launching.environment()}
    completed = subprocess.run([sys.executable, "-c", PROGRAM], **asked, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    (folder / "results.json").write_text(completed.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "extra"), COMMANDS.items())
def test_a_command_works_or_names_the_extra(line, extra, plain_install):
    status, out, err = plain_install[line]
    if extra is None:
        assert status == 0
        assert all(line.endswith(" ...") for line in err.splitlines()), err  # what a slow command is doing
        assert out
    else:
        package = r"[\w-]+"
        said = rf"zero-study: {package} is not installed\. Run\s+`pip install -e '.*\[{extra}\]'`\.\n"
        assert re.fullmatch(said, err), err
        assert (status, out) == (2, "")


def test_a_plan_says_what_it_could_not_check(plain_install):
    _, out, _ = plain_install["plan smoke"]
    assert "single-1x-seed0-timed " in out
    assert "Not checked, because torch is not installed: " in out


def test_every_command_is_tried():
    tried = {name for name in cli.all_commands() for line in COMMANDS if f"{line} ".startswith(f"{name} ")}
    assert tried == set(cli.all_commands())


@pytest.mark.parametrize("module", options.TRAINING)
@pytest.mark.parametrize("command", ["train --strategy single", "run smoke"])
def test_a_run_is_refused_where_one_package_is_missing(module, command, monkeypatch, tmp_path):
    """Else every run of a study would be launched, and its crash kept."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError) as missing:
        cli.run(command.split())
    assert errors.describe_missing(missing.value).startswith(f"{module.replace('_', '-')} is not installed. Run `pip ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "said"), [("torch", "torch is not installed. In the clone, run `make setup`."), ("study.x", None)]
)
def test_a_clone_that_is_not_installed(monkeypatch, name, said):
    def requires(_):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert errors.describe_missing(ModuleNotFoundError(name=name)) == said


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("torch.utils.data", "torch", "check"), ("pyarrow", "pyarrow", "train"), ("markdown_it", "markdown-it-py", "dev")],
)
def test_a_missing_module_is_told_by_its_package(module, package, extra):
    said = errors.describe_missing(ModuleNotFoundError(name=module))
    assert said == f"{package} is not installed. Run `{errors.install_command(extra)}`."


COMMIT = "0123abc"


@pytest.mark.parametrize(
    ("source", "command"),
    [
        (None, "pip install 'zero-study[train]'"),
        ({"url": "file:///nowhere/my%20wheels/zero_study-0.1.0.whl", "archive_info": {}},
         "pip install './zero_study-0.1.0.whl[train]'"),
        ({"url": "https://example.org/zero_study.whl", "archive_info": {}},
         "pip install 'zero-study[train] @ https://example.org/zero_study.whl'"),
        ({"url": "https://example.org/zero-study", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
         f"pip install 'zero-study[train] @ git+https://example.org/zero-study@{COMMIT}'"),
    ],
    ids=["index", "removed wheel", "address", "git"],
)  # fmt: skip
def test_the_command_for_an_extra_names_where_the_project_came_from(source, command, monkeypatch, tmp_path):
    text = None if source is None else json.dumps(source)
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "zero_study" / "errors.py"))  # in no clone
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    assert errors.install_command("train") == command
    words = shlex.split(command)
    if "@" in words[2]:
        assert Requirement(words[2]).extras == {"train"}


def test_the_command_for_an_extra_names_the_wheel_or_the_clone(monkeypatch, tmp_path):
    monkeypatch.chdir(launching.ROOT)
    assert errors.install_command("report") == "pip install -e '.[report]'"
    monkeypatch.chdir(tmp_path)
    assert errors.install_command("report") == f"pip install -e '{launching.ROOT}[report]'"
    wheel = tmp_path / "a folder" / "zero_study.whl"
    wheel.parent.mkdir()
    wheel.touch()
    text = json.dumps({"url": wheel.as_uri(), "archive_info": {}})
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "zero_study" / "errors.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    assert errors.install_command("report") == f"pip install '{wheel}[report]'"


def test_what_only_a_clone_holds_is_refused_elsewhere(monkeypatch, tmp_path):
    files.require_clone("these")
    monkeypatch.setattr(files, "ROOT", tmp_path)
    with pytest.raises(
        Refusal, match=r"^these are only in a clone of the project. Clone it, and run in the clone: pip "
    ):
        files.require_clone("these")


# ---------------------------------------------------------------- the hook of pre-commit

HOOKS = launching.ROOT / ".pre-commit-hooks.yaml"
AUTO = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
RIGHT = {"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0, **dict.fromkeys(AUTO, "auto")}
WRONG = {**RIGHT, "gradient_cliping": 1.0}


@pytest.mark.parametrize(
    ("path", "is_checked"),
    [
        ("configs/ds_config.json", True), ("ds-config-zero3.json", True), ("deepspeed.yaml", True),
        ("accelerate_configs/zero2.yaml", True), ("zero-3.json", True), ("fsdp2_config.yml", True),
        ("package.json", False), ("accelerate_configs/notes.yaml", False), ("deepspeed.py", False),
        ("zero_shot.json", False), ("ids_config.json", False),
    ],
)  # fmt: skip
def test_the_hook_checks_files_by_their_names(path, is_checked):
    from pre_commit import clientlib

    (hook,) = clientlib.load_manifest(HOOKS)
    assert bool(re.search(hook["files"], path)) == is_checked
    program, *words = hook["entry"].split()
    assert (program, cli.parse([*words, path]).command.name) == ("zero-study", "doctor")


@pytest.mark.slow
@pytest.mark.launches
def test_the_hook_stops_a_commit(tmp_path):
    """Of a repository that pre-commit clones and installs into its own environment."""
    launching.use()
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    copy_sources(ours)
    shutil.copy(HOOKS, ours)
    theirs.mkdir()
    env = launching.environment({"PYTHONPATH": None, "PRE_COMMIT_HOME": str(tmp_path / "home")})
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for folder in (ours, theirs):
        for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "--allow-empty", "-m", "all"]):
            subprocess.run(["git", *words], cwd=folder, env=env, check=True)
    hook = [sys.executable, "-m", "pre_commit", "try-repo", str(ours), "zero-study-doctor", "--all-files"]
    for content, status in ((WRONG, 1), (RIGHT, 0)):
        (theirs / "ds_config.json").write_text(json.dumps(content))
        subprocess.run(["git", "add", "."], cwd=theirs, env=env, check=True)
        completed = subprocess.run(hook, cwd=theirs, env=env, capture_output=True, text=True)
        assert completed.returncode == status, completed.stdout + completed.stderr
        assert ("gradient_cliping" in completed.stdout) == (content is WRONG)


# ---------------------------------------------------------------- a wheel


PACKAGES = ("study", "zero_study")
DOCKERFILE = launching.ROOT / "Dockerfile"
LARGEST_WHEEL = 5 << 20  # bytes


def sources() -> list[str]:
    """The files and folders that the Dockerfile copies: with them and nothing else, the wheel is built."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    return [name.rstrip("/") for line in lines for name in line.split()]


def copy_sources(folder: Path) -> None:
    """Copy what the wheel is built from: a build leaves folders behind."""
    folder.mkdir(exist_ok=True)
    for name in sources():
        if (launching.ROOT / name).is_dir():
            shutil.copytree(launching.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(launching.ROOT / name, folder)


def built_wheel(folder: Path) -> Path:
    """Build a wheel as `python -m build` does, from a source distribution."""
    copy_sources(folder)
    command = [sys.executable, "-m", "build", "--no-isolation"]
    completed = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def test_the_dockerfile_copies_what_is_sent_to_it():
    lines = (launching.ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:].rstrip("/") for line in lines if line.startswith("!")} == set(sources())
    assert f"zero_study-{version.__version__}" not in DOCKERFILE.read_text()  # a release would have to change it


@pytest.mark.slow
@pytest.mark.launches
def test_a_wheel_holds_what_commands_read_and_nothing_else(tmp_path):
    path = built_wheel(tmp_path)
    files_there = {
        str(path.relative_to(tmp_path))
        for name in PACKAGES
        for path in (tmp_path / name).rglob("*")
        if path.is_file() and path.parts[-1] != "README.md"  # written for those who work in a clone
    }
    assert len(files_there) > 100
    assert {"zero_study/py.typed", "zero_study/accelerate_configs/zero3.yaml", "study/train.py"} <= files_there
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        described = email.message_from_bytes(wheel.read(f"zero_study-{version.__version__}.dist-info/METADATA"))
    assert files_there <= names
    others = [name for name in names - files_there if ".dist-info/" not in name and not name.endswith("README.md")]
    assert not others
    assert path.stat().st_size < LARGEST_WHEEL
    assert f"zero_study-{version.__version__}.dist-info/licenses/LICENSE" in names
    assert described["License-Expression"] == "Apache-2.0"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(described.get_all("Classifier"))
    addresses = [line.partition(", ")[2] for line in described.get_all("Project-URL", [])]
    assert all(version.REPOSITORY and address.startswith(version.REPOSITORY) for address in addresses)
    with tarfile.open(next((tmp_path / "dist").glob("*.tar.gz"))) as source:
        assert not [name for name in source.getnames() if "/tests" in name]
    check = [sys.executable, "-m", "twine", "check", "--strict", *(tmp_path / "dist").iterdir()]
    checked = subprocess.run(check, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
@pytest.mark.launches
def test_an_installation_leaves_nothing_in_the_clone(tmp_path):
    copy_sources(tmp_path / "clone")
    before = {*(tmp_path / "clone").rglob("*")}
    words = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--target"]
    subprocess.run([sys.executable, *words, tmp_path / "installed", tmp_path / "clone"], check=True)
    assert (tmp_path / "installed" / "zero_study" / "accelerate_configs" / "zero3.yaml").is_file()
    assert {*(tmp_path / "clone").rglob("*")} == before


# A user's script. mypy takes the types of zero_study from the installed wheel.
TYPED_SCRIPT = """
from pathlib import Path
import zero_study.prove
from zero_study import Request, __version__, advise, diff, prove, saved
def strategies(model: str, gpus: int) -> list[str]:
    advice = advise(model, Request(gpu="h100-sxm", num_gpus=gpus))
    return [option.strategy.name for option in advice.options]
def findings(a: Path, b: Path) -> int:
    diff.assert_same_training(a, b)
    return sum(len(folder.findings) for folder in saved.read(a))
def is_fault(error: Exception) -> bool:
    return isinstance(error, prove.TrainingFault | zero_study.prove.KnownFault)
from zero_study import not_there  # type: ignore[attr-defined]
print(strategies("gpt2-xl", 8), __version__)
"""


def test_an_installation_for_checks_changes_no_release():
    """`pip install` leaves a package as it is if the requirement has no bound."""
    project = tomllib.loads((launching.ROOT / "pyproject.toml").read_text())["project"]
    extra = [Requirement(line) for line in project["optional-dependencies"]["check"]]
    assert {"accelerate", "torch", "transformers"} <= {each.name for each in extra}
    assert not [str(each) for each in extra if each.specifier]
    core = [Requirement(line) for line in project["dependencies"]]
    assert {operator for each in core for operator in (bound.operator for bound in each.specifier)} == {">="}


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the lowest releases have no wheels for this Python")
def test_the_lowest_releases_work(tmp_path):
    """The commands that need no extra, with exactly the lower bounds of pyproject.toml."""
    launching.use()
    own, elsewhere = tmp_path / "venv", tmp_path / "elsewhere"
    project = tomllib.loads((launching.ROOT / "pyproject.toml").read_text())["project"]
    lowest = [line.replace(">=", "==") for line in project["dependencies"]]
    (tmp_path / "source").mkdir()
    wheel = built_wheel(tmp_path / "source")
    env = launching.environment({"PYTHONPATH": None, "PYTHONWARNINGS": "error"})
    subprocess.run([sys.executable, "-m", "venv", own], env=env, check=True)
    pip = [own / "bin" / "python", "-m", "pip", "install", "-q"]
    subprocess.run([*pip, wheel, *lowest], env={**env, "PYTHONWARNINGS": ""}, check=True)
    shutil.copytree(launching.ROOT / "docs" / "examples", elsewhere)
    for line, expected in AT_THE_LOWEST.items():
        command = [own / "bin" / "zero-study", *line.split()]
        completed = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True)
        assert completed.returncode == expected, (line, completed.stderr)
        assert "Error" not in completed.stderr, (line, completed.stderr)


# A command line with its exit status, of the lowest releases.
AT_THE_LOWEST = {
    "--help": 0, "check --help": 0, "train --help-all": 0, "advse": 2, "train": 2, "advise --model gpt2 --gpu l4": 0,
    "check .": 1, "doctor my_zero3.json": 1, "upgrade old.lock new.lock": 1, "why oom.log": 1, "claims": 0,
    f"predict buckets {GPU}": 0, f"compare {RECORDS}": 0, f"import {LOG} --output imported": 0, "skills print": 0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.launches
def test_a_wheel_works_in_an_environment_of_its_own(tmp_path):
    """From another folder than the clone, and with nothing but what it asks for; `prove` beside a torch."""
    (tmp_path / "source").mkdir()
    (tmp_path / "elsewhere").mkdir()
    wheel, own = built_wheel(tmp_path / "source"), tmp_path / "venv"
    launching.use()

    def run(*words: str | Path) -> str:
        env = launching.environment({"PYTHONPATH": None})
        completed = subprocess.run(words, cwd=tmp_path / "elsewhere", env=env, capture_output=True, text=True)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout

    run(sys.executable, "-m", "venv", own)
    run(own / "bin" / "python", "-m", "pip", "install", "-q", "-c", launching.ROOT / "constraints.txt", wheel)
    shutil.copy(launching.ROOT / "accelerate_configs" / "ddp.yaml", tmp_path / "elsewhere")
    assert "gpt2" in run(own / "bin" / "zero-study", "advise", "--model", "gpt2", *GPU.split())
    for words in (["doctor", "ddp.yaml"], ["claims"], ["why", SOUND]):
        assert run(own / "bin" / "zero-study", *words)
    # What is missing is installed from the same wheel.
    lines = [own / "bin" / "python", "-c", "from zero_study import errors; print(errors.install_command('train'))"]
    assert run(*lines) == f"pip install '{wheel}[train]'\n"
    (tmp_path / "elsewhere" / "script.py").write_text(TYPED_SCRIPT)
    run(sys.executable, "-m", "mypy", "--strict", "--python-executable", own / "bin" / "python", "script.py")
    (packages,) = own.glob("lib/*/site-packages")
    with_torch = f"import sys; sys.path += {[path for path in sys.path if path.endswith('site-packages')]!r}"
    code = f"{with_torch}; import zero_study.prove as prove; print(prove.__file__)"
    proving = run(own / "bin" / "python", "-c", code)
    assert Path(proving.splitlines()[-1]).is_relative_to(packages)
    _run_without_study(packages, tmp_path / "elsewhere", own / "bin" / "python")


SCRIPT = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# A command line of each tool, with the exit status.
TOOLS = {
    f"advise --model gpt2 {GPU}": 0, "doctor ddp.yaml": 0, f"why {SOUND}": 0, "check ddp.yaml": 0, "skills print": 0,
    f"upgrade {launching.ROOT / 'constraints.txt'} {launching.ROOT / 'constraints.txt'}": 0, "prove script.py": 0,
    "dry-run --world 2 --model gpt2 --sequence-length 8 ddp": 0, "saved adapter": 2, "diff recorded recorded": 0,
    "conformance --only zero0/fp32/1-rank/accumulation-1": 0,
}  # fmt: skip


def _run_without_study(packages: Path, folder: Path, python: Path) -> None:
    """Run every tool from an installed wheel of which the package `study` was removed, with this Python's torch."""
    shutil.rmtree(packages / "study")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "adapter").mkdir()
    others = [path for path in sys.path if path.endswith("site-packages")]  # without their .pth files
    env = launching.environment({"PYTHONPATH": ":".join([str(packages), *others])})

    def status(*words: str) -> tuple[int, str]:
        done = subprocess.run([python, *words], cwd=folder, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    recorded = status("-m", "zero_study.diff", "--steps", "2", "--output", "recorded", "script.py")
    assert recorded[0] == 0, recorded[1]
    for line, expected in TOOLS.items():
        result = status("-m", "zero_study", *line.split())
        assert result[0] == expected, (line, result[1])
    refused, text = status("-m", "zero_study", "train")
    assert (refused, "the package study is not installed" in " ".join(text.split())) == (2, True), text
