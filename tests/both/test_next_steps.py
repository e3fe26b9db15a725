"""What a command says to do next: it works as typed, and has the options that the user gave."""

from __future__ import annotations

import ast
import io
import re
import shlex
from contextlib import redirect_stdout, suppress
from pathlib import Path

import click
import launching
import pytest
from click.exceptions import Exit

from study.claims import ledger
from study.compare import summary
from study.config import build_config
from study.run import make_run
from study.running import next_run
from zero_study import cli, terminal
from zero_study.errors import Refusal
from zero_study.strategy.file import read_by_name

PACKAGES = [launching.ROOT / name for name in ("study", "zero_study")]
PLACE = "PLACE"  # stands for what a message fills in


def parse(words: list[str]) -> dict:
    """Return the options of a command line of zero-study. It is not executed."""
    assert words[0] == "zero-study"
    return cli.parse(words[1:]).params


# ---------------------------------------------------------------- commands in messages


def texts(path: Path) -> list[str]:
    """Return the texts of a module that are not docstrings, with PLACE for what is filled in."""
    tree = ast.parse(path.read_text())
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else PLACE for part in node.values))
        elif isinstance(node, ast.Constant) and not isinstance(parents[node], (ast.Expr, ast.JoinedStr)):
            found += [node.value] if isinstance(node.value, str) else []
    return found


def quoted_commands() -> list[tuple[str, str]]:
    """Return each command of zero-study that a message shows in backticks, with the file that it is in."""
    found = {}
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        for text in texts(path):
            for command in re.findall(r"`(zero-study [a-z][^`]*)`", text):
                found[command.partition(" < ")[0]] = str(path.relative_to(launching.ROOT))
    return sorted((path, command) for command, path in found.items())


def commands_of_rules() -> list[tuple[str, str]]:
    """Return the commands that `zero-study why` and the ledger of claims tell the user to type."""
    found = []
    for path in sorted((launching.ROOT / "zero_study" / "why" / "rules").glob("*.yaml")):
        for text in re.findall(r"zero-study [a-z-]+(?: --[a-z-]+(?: [A-Z\d][\w.=]*)?| [A-Z]{2,}\b| zero3| train\.py)*",
                               " ".join(path.read_text().split())):  # fmt: skip
            found.append((path.name, text))
    rules = [(source.source, claim.rule) for source in ledger.read() for claim in source.claims]
    found += [(name, rule.command) for name, rule in rules if getattr(rule, "command", None)]
    return sorted(set(found))


def test_commands_in_messages_can_be_typed():
    commands = [*quoted_commands(), *commands_of_rules()]
    refused = {}
    for path, command in commands:
        try:
            check(command)
        except (Refusal, click.ClickException) as error:
            refused[path, command] = str(error)
    assert refused == {}
    assert len(commands) > 40


def check(command: str) -> None:
    words = [re.sub(r"^[A-Z]{2,}$", "1", word) for word in shlex.split(command)]  # a placeholder may be a number
    if len(words) == 2:  # a mention of the command, which may need arguments
        assert words[1] in cli.all_commands()
        return
    with suppress(Exit):  # of --help
        parse([*words, "1"] if words[-1] == "--output" else words)


# ---------------------------------------------------------------- train, run


@pytest.mark.parametrize(
    ("strategy", "num_processes", "options"),
    [
        ("single", 1, {}),
        ("ddp", 2, {"workload": "gpt-wikitext", "size": "mini", "max_steps": 5}),
        ("zero2", 4, {"preset": "smoke", "measure": False, "output_dir": Path("mine/first run-zero2")}),
        ("ddp", 3, {"global_batch_size": 6, "seed": 3}),
    ],
)
def test_the_next_run_has_the_options_of_this_one(strategy, num_processes, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if options.get("output_dir"):
        options["output_dir"] = Path("mine") / "first-zero2"
    run = make_run(build_config(**options), read_by_name(strategy), num_processes)
    train, compare = next_run.commands(run, options)
    chosen = {name: value for name, value in parse(train).items() if value is not None}
    following = chosen.pop("strategy")
    assert following != strategy
    if (folder := chosen.pop("output_dir", None)) is not None:
        assert str(folder) == f"mine/first-{following}"
    for name, value in options.items():
        if name != "output_dir":
            assert str(chosen[name]) == str(value), name
    world = chosen.get("num_processes") or read_by_name(following).num_processes
    assert world == (num_processes if strategy != "single" else 2)
    assert parse(compare)["records"][0] == run.folder
    # What is printed can be pasted into a shell, also if it has several lines.
    shown = summary.terminal.command(train, "          ")
    assert shlex.split(shown.replace("\\\n", " ")) == train
    assert all(len(line) <= terminal.width() for line in shown.splitlines())


def test_a_finished_run_is_not_suggested_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(build_config(), read_by_name("ddp"), 2)
    for _ in range(3):
        _, compare = next_run.commands(run, {})
        assert not Path(compare[-1]).exists()
        Path(compare[-1]).mkdir(parents=True)
    assert next_run.commands(run, {}) == []


# ---------------------------------------------------------------- advise, doctor


def output(*words: str) -> tuple[int, str]:
    with redirect_stdout(io.StringIO()) as out:
        status = cli.run(list(words))
    return status, out.getvalue()


def test_the_launch_command_reads_the_file_that_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    question = ["advise", "--model", "gpt2", "--gpu", "h100", "--gpus", "2"]
    _, text = output(*question, "--write", "mine.yaml")
    assert "--config_file mine.yaml" in text
    assert Path("mine.yaml").is_file()
    _, text = output(*question)
    name = re.search(r"--write (\S+) writes", text)[1]
    assert f"--config_file {name}" in text
    assert output(*question, "--write", name)[0] == 0
    assert Path(name).is_file()


def test_doctor_names_the_command_that_mends_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.json").write_bytes((launching.ROOT / "docs/examples/my_zero3.json").read_bytes())
    status, text = output("doctor", "my.json", "--for", "deepspeed==0.19.8")
    assert status == 1
    command = shlex.split(text.rpartition("corrected copy:")[2].replace("\\\n", " "))
    assert parse(command)["releases"] == ("deepspeed==0.19.8",)
    assert "corrected copy:" not in output(*command[1:])[1]
    written = command[-1]
    status, text = output("doctor", written)
    assert status == 0
    assert "corrected copy:" not in text  # nothing to mend
    assert output("doctor", "my.json")[1].rstrip().endswith("my-fixed2.json")  # never a file that exists


def test_doctor_does_not_offer_what_it_cannot_mend(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.toml").write_text('[training]\nlocal_batch_siz = 8\n[job]\ndump_folder = "x"\n')
    with redirect_stdout(io.StringIO()) as out:
        try:
            cli.run(["doctor", "model.toml"])
        except Refusal:
            return
    assert "--fix" not in out.getvalue()


# ---------------------------------------------------------------- prove, diff


@pytest.mark.launches
@pytest.mark.parametrize("program", ["zero_study.prove", pytest.param("zero_study.diff", marks=pytest.mark.slow)])
def test_a_script_without_a_launcher_names_the_command_that_works(program, tmp_path):
    options = ["--strict"] if program.endswith("prove") else ["--output", "recorded"]
    script = launching.ROOT / "docs" / "examples" / "train_a.py"
    completed = launching.attempt(["python", "-m", program, *options, script], cwd=tmp_path)
    assert completed.returncode == 1
    assert "Traceback" not in completed.stderr
    command = shlex.split(terminal.last_error(completed.stderr).split("`")[1])
    assert command[0] == "torchrun"
    launched = launching.attempt(["python", "-m", "torch.distributed.run", *command[1:]], cwd=tmp_path)
    assert launched.returncode == 0, launched.stderr


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_errors_fit_the_terminal_and_commands_stay_whole(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    command = "`zero-study predict STUDY --gpu a100-80gb --gpus 8 --output some/folder/of/mine`"
    message = f"{'a long sentence about what is wrong ' * 15}. Write {command}, or {'nothing at all ' * 10}"
    terminal.print_error(message)
    printed = capsys.readouterr().err
    assert command in printed
    assert [line for line in printed.splitlines() if len(line) > columns and command not in line] == []
    assert terminal.last_error(printed) == " ".join(f"zero-study: {message}".split())


def test_errors_are_printed_in_one_place():
    """`print_error` wraps them. A rank's error is read by its launcher, so it stays on one line."""
    for path in (path for package in PACKAGES for path in package.rglob("*.py")):
        if path.name == "terminal.py":
            continue
        assert not re.search(r"print\(f?\"(zero-study|prove|diff): .*file=sys\.stderr", path.read_text()), path
