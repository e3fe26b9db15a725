"""Test that commands, links and paths in README and docs/ exist, and that numbers there agree with the records."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import click
import docs_outputs
import docs_tables
import first_screen
import launching
import markdown_it
import page_numbers
import papermill
import pytest
import yaml
from launching import ROOT
from markdown_it.token import Token
from published import __main__ as published
from subjects import conformance

from study import config
from study.claims import snippets
from zero_study import cli
from zero_study.command_line import given
from zero_study.conformance import results
from zero_study.conformance.cells import PACKAGES
from zero_study.engines import this_machine
from zero_study.engines.this_machine import Machine
from zero_study.strategy import file

pytestmark = pytest.mark.pages

PAGE_PATTERNS = (
    "README.md", "AGENTS.md", "docs/*.md", "reports/*.md", "reports/*/README.md", "study/*/README.md",
    "zero_study/*/README.md", "zero_study/skills/**/*.md", "tools/**/README.md",
)  # fmt: skip
PAGES = sorted(path.relative_to(ROOT).as_posix() for pattern in PAGE_PATTERNS for path in ROOT.glob(pattern))


@cache
def tokens(page: str) -> list[Token]:
    return markdown_it.MarkdownIt().enable("table").parse((ROOT / page).read_text(encoding="utf-8"))


def inline(page: str) -> Iterator[Token]:
    """Links, code and text of a page, in paragraphs, tables and headings."""
    for token in tokens(page):
        yield from token.children or []


# ---------------------------------------------------------------- the pages


def test_every_guide_is_listed():
    listed = {dict(token.attrs)["href"] for token in inline("docs/README.md") if token.type == "link_open"}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed


def anchors(path: Path) -> set[str]:
    """The places of a page that a link can name: GitHub's of headings, the ids of HTML."""
    if path.suffix == ".html":
        return set(re.findall(r'\bid="([^"]+)"', path.read_text(encoding="utf-8")))
    page = tokens(path.relative_to(ROOT).as_posix())
    headings = [page[place + 1].content for place, token in enumerate(page) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for token in inline(page):
        target = dict(token.attrs).get("href", "") if token.type == "link_open" else ""
        if not target or re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path.resolve()), f"{page}: {target}"


FOLDERS = ("accelerate_configs/", "docs/", "notebooks/", "reports/", "study/", "tests/", "tools/", "zero_study/")
MADE = ("reports/smoke/", "reports/single-gpu/", "reports/my_study/")  # by the commands beside them


@pytest.mark.parametrize("page", PAGES)
def test_paths_are_there(page):
    named = {token.content for token in inline(page) if token.type == "code_inline"}
    paths = {name for name in named if name.startswith(FOLDERS) and not name.startswith(MADE) and "<" not in name}
    assert not [name for name in paths if not any(ROOT.glob(name))]


# ---------------------------------------------------------------- commands


# The command lines of modules of their own.
MODULES = {"study.claims.snippets": snippets.command}
SCRIPTS = {"tools/measure/published": published.published}


def commands() -> list[str]:
    """Every line of every block of commands, without its comment and without the file that takes its output."""
    blocks = [token.content for page in PAGES for token in tokens(page) if token.type == "fence" and token.info == "sh"]
    blocks = [block.replace("\\\n", " ") for block in blocks]
    lines = [re.sub(r"(^|\s+)(#|>|2>|\||&$)( .*)?$", "", line) for block in blocks for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line))


def check_flags(flags: dict) -> None:
    launchers = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
    own = {name: flags.pop(name, None) for name in ("strategy", "timeout", *launchers)}
    file.read_by_name(own["strategy"] or "single")
    config.build_config(**given(flags))


def check_study(words: list[str]) -> None:
    with contextlib.suppress(click.exceptions.Exit):  # --help
        context = cli.parse(words)
        if context.command.name == "train":
            check_flags(context.params)


LAUNCHED_MODULES = ("zero_study.diff", "zero_study.prove")  # which run another script
EXAMPLES = ROOT / "docs" / "examples"


def check_launched_module(module: str, words: list[str]) -> None:
    assert module in LAUNCHED_MODULES
    (script,) = [word for word in words if word.endswith(".py")]
    assert script == "train.py" or (EXAMPLES / script).is_file()


def check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(words)
    assert options.module
    check_launched_module(options.training_script, options.training_script_args)


def check_launch(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert words.pop(0) == "launch"
    options = launch_command_parser().parse_args(words)
    if options.module:
        check_launched_module(options.training_script, options.training_script_args)
        return
    assert options.training_script == "study/train.py"
    assert (ROOT / options.training_script).is_file()
    check_flags({"strategy": options.config_file, **config.parse_flags(options.training_script_args)})


def check_python(words: list[str]) -> None:
    if words[0] == "-m" and words[1] in MODULES:
        MODULES[words[1]].make_context(words[1], words[2:])
        return
    if words[0] in SCRIPTS:
        SCRIPTS[words[0]].commands[words[1]].make_context(words[1], words[2:])
        return
    if words[0] == "-m" and words[1] in LAUNCHED_MODULES:
        check_launched_module(words[1], words[2:])
        return
    if words[0] == "-m" and words[1].startswith(("study.", "zero_study.")):
        module = ROOT / words[1].replace(".", "/")
        file = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
        assert file.read_text().count('if __name__ == "__main__":') == 1
        return
    (path,) = [word for word in words if word.endswith(".py")]
    assert (ROOT / path).is_file()


def check_make(words: list[str]) -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert set(words) <= set(targets)


def check_pip(words: list[str]) -> None:
    extras = re.findall(r"\.\[([\w,]+)\]", " ".join(words))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(",".join(extras).split(",")) - {""} <= set(known)


def check_docker(words: list[str]) -> None:
    if words[0] == "build":
        assert (ROOT / "Dockerfile").is_file()
    elif "--entrypoint" not in words:
        image = next(place for place, word in enumerate(words) if word.startswith("zero-study"))
        check_study(words[image + 1 :])


def check_sky(words: list[str]) -> None:
    for path in (word for word in words if word.endswith(".yaml")):
        envs = yaml.safe_load((ROOT / path).read_text())["envs"]
        assert {word.partition("=")[0] for flag, word in itertools.pairwise(words) if flag == "--env"} <= set(envs)


def check_papermill(words: list[str]) -> None:
    (notebook,) = (word for word in words if word.startswith("notebooks/"))
    declared = papermill.inspect_notebook(ROOT / notebook)
    given = [name for flag, name in itertools.pairwise(words) if flag == "-p"]
    for flag, text in itertools.pairwise(words):
        given += yaml.safe_load(text) if flag == "-y" else []
    assert given or words[0] == "--help-notebook"
    assert set(given) <= declared.keys()


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "zero-study": check_study, "accelerate": check_launch, "python": check_python, "make": check_make,
    "pip": check_pip, "sky": check_sky, "torchrun": check_torchrun, "papermill": check_papermill,
    "docker": check_docker,
}  # fmt: skip
SHELL = (  # not ours
    "source ", "pre-commit install", "(cd data && zip ", "grep ", "DS_BUILD_OPS=0 pip wheel ", "git clone ", "safety ",
    "rsync ", "aws ", "pytest ", "python3 -m venv ", "zcat ", "diff ", "cat ", "cd ", "sh ", "wait",
    "export CUDA_HOME=", "ln -s ", "FAULT=1 torchrun ",
)  # fmt: skip


@pytest.mark.parametrize("line", commands())
def test_the_program_knows_the_command(line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)  # from where files name their JSON
    program, *words = shlex.split(line)
    if not line.startswith(SHELL):
        CHECKS[program](words)


GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
GPT2 |= {"activation_function": "gelu_new"}
CHEAP = ("compare", "advise", "plan", "claims")
STANDS_FOR = dict.fromkeys(("DIR", "runs", "reports/cpu/records"), "reports/cpu/records/bert-large")
STANDS_FOR["runs/my_study"] = STANDS_FOR["runs/gpu-acceptance"] = STANDS_FOR["runs"]
STANDS_FOR["reports/one-gpu/records/my-machine"] = STANDS_FOR["runs"]
STANDS_FOR["runs/bits"] = "reports/cpu/records/bits"
STANDS_FOR["imported"] = "reports/public/opentau.jsonl.gz"


def cheap() -> list[str]:
    """Return the commands that take seconds, but for those that other tests run.

    test_docs_outputs.py runs those whose output a page shows, and test_claims.py decides all claims.
    """
    places = [place for page in docs_outputs.pages() for place in docs_outputs.places(page)]
    displayed = {line for place in places if not place.is_run for line in place.commands.splitlines()}
    requested = [line for line in commands() if line.startswith(tuple(f"zero-study {name}" for name in CHEAP))]
    return [line for line in requested if line not in displayed and not re.search("claims --(check|write)", line)]


def test_the_study_of_the_guide_is_the_one_that_its_outputs_are_of():
    (block,) = [token.content for token in tokens("docs/studies.md") if token.type == "fence" and token.info == "yaml"]
    assert block == (ROOT / "docs" / "examples" / "my_study.yaml").read_text(encoding="utf-8")


# The committed runs of the study show no planted fault, so there is no verdict. Of the question, no strategy fits.
STATUS = {"zero-study compare --verdict learned-pilot reports/cpu/records/learned-pilot": 3}
DOES_NOT_FIT = "--sequence-length 131072"


@pytest.mark.parametrize("line", cheap())
def test_cheap_commands_run(line, tmp_path, monkeypatch, capsys):
    (block,) = [token.content for token in tokens("docs/studies.md") if token.type == "fence" and token.info == "yaml"]
    (tmp_path / "my_study.yaml").write_text(block)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    for folder in ("accelerate_configs", "reports", "study", "zero_study"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    if "--this-machine" in line:
        monkeypatch.setattr(this_machine, "find", lambda: Machine((85_000_000_000,) * 8, 2 << 40, "NVIDIA H200"))
    words = [STANDS_FOR.get(word, word) for word in shlex.split(line)[1:]]
    assert cli.run(words) == STATUS.get(line, 1 if DOES_NOT_FIT in line else 0)
    assert capsys.readouterr().out.strip()


def test_make_help_lists_what_the_guides_name():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    completed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    named = {shlex.split(line)[1] for line in commands() if line.startswith("make ")} - {"help"}
    assert completed.returncode == 0
    assert named <= set(re.findall(r"^make (\S+)", completed.stdout, re.MULTILINE))


def test_a_machine_without_a_network_gets_what_runs_need_and_no_more():
    """PyTorch is there already. Packages of the site need a newer Python, and torchao slows every process down."""
    (pattern,) = re.findall(r"^grep -vE '(.*)'", (ROOT / "docs" / "gpus.md").read_text(), re.MULTILINE)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = {line.partition("==")[0].lower() for line in lines if not re.match(pattern, line)}
    assert {"accelerate", "transformers", "peft", "bitsandbytes", "ninja", "nvidia-ml-py", "papermill"} <= kept
    assert not {"torch", "torchao", "deepspeed", "zensical", "pymdown-extensions", "soupsieve", "nbconvert"} & kept


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(("page", "name"), [place for place in docs_tables.PLACES if docs_tables.is_committed(*place)])
def test_a_block_is_what_the_records_say(page, name):
    """To mend it: python tools/derive/docs_tables.py."""
    assert docs_tables.between(page, name) == docs_tables.PLACES[page, name]()


def test_a_table_that_is_not_committed_is_printed_and_shown_on_the_site(capsys):
    page, name = "reports/machines.md", "saving"
    docs_tables.main([page, name])
    table = capsys.readouterr().out
    assert table.startswith("| strategy |")
    text = (ROOT / page).read_text(encoding="utf-8")
    assert table not in text
    assert table in docs_tables.filled(page, text)


@pytest.mark.parametrize(("page", "name"), page_numbers.PLACES)
def test_a_number_in_a_sentence_is_what_the_records_say(page, name):
    """To mend it: python tools/derive/page_numbers.py."""
    assert page_numbers.written(page, name) == {page_numbers.PLACES[page, name]()}


def test_every_place_is_known():
    marked = {(page, name) for page in PAGES for name in re.findall(r"<!-- /(\w+) -->", (ROOT / page).read_text())}
    assert marked == {*docs_tables.PLACES, *page_numbers.PLACES}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_oldest_version_that_is_supported_was_examined(package):
    assert conformance.lower_bound(package) in results.read(package)


# A fault -> the stages and releases of the list of faults, and how the advice of the guide names the stages.
STAGES_IN_ADVICE = {
    "autocast-norm": ("stages 1 and 2 with and without CPU offload", "0.17.2", "0.17.5", "stage 1 or 2 with the key"),
    "zero2-accumulation": ("stage 2 without CPU offload", "0.17.6", "0.18.2", "lost at stage 2"),
    "outputs-of-outputs": ("stages 0 to 2 with and without CPU offload", "0.18.3", "0.19.5", "twice at stages 0 to 2"),
    "zero1-offload-fp32-sum": ("stage 1 with CPU offload", None, "0.19.7", "stage 1 with CPU offload"),
}


@pytest.mark.parametrize("fault_id", STAGES_IN_ADVICE)
def test_the_advice_on_releases_names_the_stages_of_the_list_of_faults(fault_id):
    stages, first, last, words = STAGES_IN_ADVICE[fault_id]
    (fault,) = (fault for fault in results.faults() if fault.id == fault_id)
    assert (conformance.stages_in_words(fault.engines), fault.introduced, fault.last) == (stages, first, last)
    text = (ROOT / "docs" / "releases.md").read_text(encoding="utf-8")
    guide = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)  # without the addresses of links
    assert words in guide
    assert last in guide


# ---------------------------------------------------------------- README answers first

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Without tables between comments, which docs_tables.py writes and another test compares with the records.
FINDINGS = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", README, flags=re.DOTALL)
FINDINGS = FINDINGS.partition("What we measured")[2].partition("\n## ")[0]
assert FINDINGS
# Numbers of names: a stage, a release, and what is no quantity.
NAMES = re.compile(r"<picture>.*?</picture>|fp32|bf16|ZeRO-\d|FSDP2|\d+\.\d+\.\d+|\(\[[^)]*\)\)|\([^)]*\)", re.DOTALL)


def numbers(sentence):
    return re.findall(r"\d+(?:\.\d+)?", NAMES.sub("", sentence))


def test_no_sentence_begins_a_list_by_its_number():
    assert not re.search(r"^ *\d+\. ", README, re.MULTILINE)


def test_a_finding_has_no_number_without_a_record():
    sentences = re.split(r"[.;)] (?=[A-Z(*\[])", " ".join(FINDINGS.split()))
    said = {number.said.split()[0] for number in first_screen.NUMBERS}
    assert {each for sentence in sentences for each in numbers(sentence)} <= said


@pytest.mark.parametrize("number", first_screen.NUMBERS, ids=lambda number: number.what)
def test_a_number_is_what_the_records_say(number):
    assert number.found() == number.said
    assert number.said in " ".join(README.split())
    study = ROOT / "study" / "studies" / f"{number.study}.yaml"
    if number.study != "conformance":
        assert "uperseded by" not in study.read_text(encoding="utf-8")


# What README's first table says -> the page with the output of the command, and what stands in it.
ANSWERS = {
    "gradients were not averaged": ("docs/prove.md", "WRONG gradients were not averaged", "every rank trains on"),
    "HANG: rank 0 is in the all_reduce of line 21, rank 1 in that of line 17": (
        "docs/dry-run.md", "rank 0: all_reduce of 4 bytes float32 train_hang.py:21", "rank 1: all_reduce",
    ),
    "`lm_head.weight` and `model.embed_tokens.weight` have no elements": (
        "docs/saved.md", "empty (2): lm_head.weight, model.embed_tokens.weight",
    ),
    "8 of 19 known changes may affect training": (
        "docs/releases.md", "8 of 19 known changes", "gradients are lost",
    ),
    "Its tensors used 74.6 GiB, but the step before needed at most 5.8 GiB": (
        "docs/why.md", "Its tensors used 74.6 GiB", "the log states at most 5.8 GiB of memory",
    ),
    "First difference: step 1, all 4 gradients that differ are half as large in B": (
        "docs/diff.md", "First difference: step 1, all 4 gradients that differ are 0.5 times as large in B",
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", ANSWERS)
def test_an_answer_in_the_first_table_is_in_the_output_of_its_command(said):
    page, *parts = ANSWERS[said]
    output = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert said in README
    assert [part for part in parts if part not in output] == []


def test_readme_is_short():
    text = re.sub(r"<picture>.*?</picture>|<!--.*?-->|\]\([^)]*\)", " ", README, flags=re.DOTALL)
    words = [part for part in text.split() if re.search(r"\w", part)]  # not the bars of tables
    assert len(words) <= 1500


@pytest.mark.slow
def test_the_first_comparison_prints_what_it_shows(tmp_path):
    guide = (ROOT / "docs" / "train.md").read_text(encoding="utf-8").partition("## Compare one process with several")[2]
    commands, displayed = re.search(r"```sh\n(.*?)```.*?```text\n(.*?)```", guide, re.DOTALL).groups()
    commands = "set -e; i=0\n" + re.sub(r" > \w+\.log", f" --output-dir {tmp_path}/$((i=i+1))", commands)
    commands = commands.replace("compare runs", f"compare {tmp_path}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as after `source .venv/bin/activate`
    environment = launching.environment({"PATH": path})
    completed = subprocess.run(["bash", "-c", commands], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-2000:]
    expected, printed = _memory_rows(displayed), _memory_rows(completed.stdout)
    assert len(expected) == 4
    assert printed.keys() == expected.keys(), completed.stdout  # strategy, ranks and loss
    for row, sizes in expected.items():  # the buffers of PyTorch's kernels depend on the processor
        assert printed[row] == pytest.approx(sizes, rel=0.05), completed.stdout


@pytest.mark.slow
@pytest.mark.launches
def test_the_script_makes_what_the_first_table_examines(tmp_path):
    folder = shutil.copytree(ROOT / "docs" / "examples", tmp_path / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = launching.environment({"PATH": path})
    subprocess.run(["sh", "record.sh"], cwd=folder, env=environment, check=True, capture_output=True)
    for command, answer in (
        ("saved model", "empty (2): lm_head.weight, model.embed_tokens.weight"),
        ("diff a b", "First difference: step 1, all 4 gradients"),
    ):
        words = [sys.executable, "-m", "zero_study", *command.split()]
        completed = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        assert completed.returncode == 1
        assert answer in completed.stdout


def _memory_rows(text: str) -> dict[tuple[str, ...], list[float]]:
    """Return the peak and its ratio by the columns before them, and the unit. Times, which vary, are left out."""
    rows = re.findall(r"^(\w+ .*?)  +([\d.]+) ([MG]iB)(?: +([\d.]+)x)?", text, re.MULTILINE)
    return {
        (*words.split(), unit): [float(each) for each in (size, ratio) if each] for words, size, unit, ratio in rows
    }


# ---------------------------------------------------------------- what `make derived` makes is what is committed


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@example.org", "-c", "core.hooksPath=/dev/null"]
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.mark.nightly
@pytest.mark.launches
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the tree is in no repository, which says what belongs to it")
def test_make_derived_changes_nothing(tmp_path):
    for name in git(ROOT, "ls-files", "-z").split("\0"):
        if name and ((ROOT / name).is_symlink() or (ROOT / name).is_file()):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name, follow_symlinks=False)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "As it is")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    launching.use()
    created = subprocess.run(
        ["make", "-o", "setup", "derived"],
        cwd=tmp_path, env=launching.environment({"PYTHONPATH": str(tmp_path)}), capture_output=True, text=True,
    )  # fmt: skip
    assert created.returncode == 0, created.stdout + created.stderr
    assert len(re.findall(r"^\S.* \.\.\.$", created.stdout, re.MULTILINE)) >= 15
    assert git(tmp_path, "status", "--short", "--", ":!.venv") == ""
