"""Define the commands that check files, scripts, upgrades, trainings, installed engines and published claims."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zero_study import files, progress, terminal
from zero_study.cli.options import PATH, TRACING, Statuses, command, json_option, require
from zero_study.command_line import NUMBER, argument
from zero_study.errors import Refusal, install_command
from zero_study.strategy import file
from zero_study.verdict import NotChecked, Verdict

if TYPE_CHECKING:
    from zero_study.answers.envelope import Answer
    from zero_study.conformance.cells import Cell


@command(
    "doctor",
    "Which keys of my DeepSpeed or accelerate file are ignored or wrong? Is this machine ready?",
    "doctor my_deepspeed.json",
    statuses=Statuses(
        "no key needs a change (without files: nothing on this machine would stop a run)",
        "a key needs a change (without files: something would stop a run)",
        "a file or an option is refused",
        "no key of a file could be checked, for instance because its kind is unknown (without files: a check could not "
        "be made)",
    ),
)
@argument(
    "paths",
    type=PATH,
    nargs=-1,
    metavar="[FILE]...",
    help="Configuration files, for example an accelerate file or a DeepSpeed JSON.",
)
@click.option("--all", "everything", is_flag=True, help="List all keys, including those that work as written.")
@json_option
@click.option("--fix", type=PATH, metavar="OUT", help="Write a corrected copy of FILE to this new file.")
@click.option(
    "--disk",
    type=PATH,
    metavar="DIR",
    help="A folder on the disk whose speed is measured if there is no FILE. [default: .]",
)
@click.option(
    "--for",
    "releases",
    multiple=True,
    metavar="PACKAGE==VERSION",
    help="Judge FILE by this release of accelerate, deepspeed, torch, transformers or trl, and list its known faults. "
    "Can be repeated.",
)
def _doctor(
    paths: tuple[Path, ...], everything: bool, as_json: bool, fix: Path | None, disk: Path | None,
    releases: tuple[str, ...],
) -> Verdict | Answer:  # fmt: skip
    """Check configuration files, or this machine.

    For each FILE, the command says what every key really does in the supported versions of accelerate, DeepSpeed and
    FSDP. It knows files of accelerate, DeepSpeed, Trainer (fsdp_config and TrainingArguments), TRL, axolotl,
    LLaMA-Factory, ms-swift and torchtitan. If a file names a DeepSpeed or FSDP file, the command checks that file too.
    Without FILE, the command looks for problems of this machine that would stop a run.
    """
    if not paths:
        about_a_file = {"--all": everything, "--fix": fix, "--for": releases}
        if given := [flag for flag, value in about_a_file.items() if value]:
            raise Refusal(f"{given[0]} needs a file. Name an accelerate file or a DeepSpeed JSON.")
        return _check_machine(disk or Path(), as_json)
    if disk is not None:
        raise Refusal(f"--disk {disk} is only for the check of this machine. Remove --disk, or remove the files.")
    if len(paths) == 1:
        return _check_file(paths[0], releases, fix, everything, as_json)
    if fix is not None:
        raise Refusal(f"--fix {fix} writes the corrected copy of one file, and you named {len(paths)}. Name one file.")
    return _check_files(paths, releases, everything, as_json)


def _check_machine(disk: Path, as_json: bool) -> Verdict | Answer:
    """Check this machine, print the result, and return the verdict, or the answer for JSON."""
    from zero_study.doctor import checkup, json_answer

    with progress.after_two_seconds(
        "Checking this machine: packages, compilers, two communicating processes, the disk"
    ):
        checks = checkup.examine(disk)
    if as_json:
        return json_answer.of_machine(checks, checkup.verdict(checks))
    print(checkup.text(checks))
    return checkup.verdict(checks)


def _check_file(
    file: Path, releases: tuple[str, ...], fix: Path | None, everything: bool, as_json: bool
) -> Verdict | Answer:
    """Print what the keys of a file do, write the corrected file to `fix`, and return the verdict.

    `fix` is None if no file is to be written.
    """
    from zero_study.doctor import examine, json_answer, text

    examined = examine.examine(file, *releases)
    fixed = None if fix is None else (fix, examine.write_mended(examined, fix))
    if not as_json:
        print(text.text(examined, everything, names_fix=fixed is None))
    if fixed is not None:  # with --json, standard error has it
        print(("" if as_json else "\n") + text.changes_text(examined, *fixed))
    return json_answer.of_file(examined, fixed) if as_json else examined.verdict


def _check_files(
    paths: tuple[Path, ...], releases: tuple[str, ...], everything: bool, as_json: bool
) -> Verdict | Answer:
    """Print what the keys of several files do, then a summary, and return the verdict on all files.

    A file that cannot be read does not stop the check of the others.
    """
    from zero_study.doctor import json_answer, several

    checked = several.examine(paths, *releases)
    if as_json:
        return json_answer.of_files(checked)
    print(checked.text(everything))
    return checked.verdict


@command(
    "prove",
    "Does my script train correctly?",
    "prove train.py",
    context_settings={"allow_interspersed_args": False},
    prints_itself=True,
    statuses=Statuses(
        "with --strict, everything was checked and no fault was found. Without --strict, the status is that of the "
        "script",
        "with --strict, training is wrong or is not as requested",
        "the script does not exist",
        "with --strict, something could not be checked",
    ),
)
@click.option(
    "--strict",
    is_flag=True,
    help="Fail if the training is wrong, differs from what was requested, or could not be checked.",
)
@click.option(
    "--allow-known-bad", is_flag=True, help="Continue although an installed release is known to train wrongly."
)
@click.option(
    "--reference",
    is_flag=True,
    help="Compare the gradients with those that one process without an engine computes for the same samples. With this "
    "option, every rank needs memory for the whole model.",
)
@json_option
@argument("script", type=PATH, metavar="SCRIPT", help="The training script.")
@argument("arguments", nargs=-1, type=click.UNPROCESSED, help="The arguments of the script.")
def _prove(
    strict: bool, allow_known_bad: bool, reference: bool, as_json: bool, script: Path, arguments: tuple[str, ...]
) -> int:
    """Check a training script without changing it.

    The command runs SCRIPT in one process. It prints which engine the script builds, which settings differ from the
    requested ones, and which faults the training has. It also prints the memory and the collectives of the third
    optimizer step. The command writes the same facts to the file proof.json.

    For several processes, use a launcher: accelerate launch -m zero_study.prove SCRIPT, or torchrun --nproc-per-node 2
    -m zero_study.prove SCRIPT.

    With --json, everything that the script prints goes to standard error, and rank 0 prints the answer when the script
    ends.
    """
    require("torch")
    if not script.is_file():
        raise Refusal(f"{script}: this file does not exist. Name a script, followed by its arguments.")
    flags = {
        "--strict": strict, "--allow-known-bad": allow_known_bad, "--reference": reference, "--json": as_json
    }  # fmt: skip
    options = [flag for flag, is_set in flags.items() if is_set]
    sys.stdout.flush()
    # A new interpreter is needed, because the script may import its own package `study`, and this process has already
    # imported the project's.
    words = [sys.executable, "-m", "zero_study.prove", *options, str(script), *arguments]
    os.execv(sys.executable, words)


def _script_first(_: click.Context, __: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the script and its arguments. Raises Refusal if an option stands in the place of the script."""
    if words and words[0].startswith("-"):
        raise Refusal(f"{words[0]}: everything after STRATEGY belongs to a script. Write options before STRATEGY.")
    return words


@command(
    "dry-run",
    "Would my script hang on many ranks? How much memory would each need?",
    "dry-run --world 1024 zero3",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    statuses=Statuses(
        "all ranks that were run issue the same collectives",
        "ranks issue different collectives, so that the training hangs or its values are wrong, or a rank fails",
        "the training cannot be simulated",
        "nothing could be compared, because a script was run as a single rank, or issues no collectives",
    ),
)
@click.option("--world", "world_size", type=NUMBER, required=True, help="Number of simulated processes.")
@click.option(
    "--ranks",
    metavar="R,R",
    help="Ranks to simulate. [default: all ranks of a script with up to 8 processes; otherwise the first rank, the "
    "last rank, and the ranks whose numbers occur in comparisons in the script]",
)
@click.option("--per-machine", type=NUMBER, default=8, help="Number of processes per machine.")
@click.option(
    "--model", metavar="NAME", default="gpt2", help="Model: a known name (gpt2-xl, llama-2-7b, ...) or a config.json."
)
@click.option("--micro-batch-size", type=NUMBER, default=1, help="Number of sequences per process and forward pass.")
@click.option(
    "--sequence-length",
    type=NUMBER,
    help="Number of tokens per sequence. [default: 1024, or fewer if the model has fewer positions]",
)
@click.option("--gradient-accumulation-steps", type=NUMBER, default=1, help="Number of micro batches per step.")
@click.option(
    "--activation-checkpointing", is_flag=True, help="Recompute the activations of each block in the backward pass."
)
@click.option(
    "--mixed-precision", type=click.Choice(("no", "bf16")), help="Precision. [default: as in the accelerate file]"
)
@click.option("--output", type=PATH, metavar="FILE", help="Write all collectives to this JSON file, in their order.")
@json_option
@argument("strategy", metavar="STRATEGY", help=f"Strategy: an accelerate file, or one of {', '.join(file.names())}.")
@argument(
    "script",
    nargs=-1,
    type=click.UNPROCESSED,
    callback=_script_first,
    help="A script to run instead of a model, and its arguments.",
)
def _dry_run(
    strategy: str, script: tuple[str, ...], world_size: int, ranks: str | None, per_machine: int, output: Path | None,
    as_json: bool, **model: Any,
) -> Verdict | Answer:  # fmt: skip
    """Simulate a training on many ranks without GPUs.

    The command runs the real engine on this machine as a few ranks of a larger world. It prints the memory and the
    collectives of the simulated ranks, and finds places where ranks would wait for each other forever. The answer names
    the simulated ranks. Write options before STRATEGY.
    """
    require(*TRACING)
    from zero_study.dryrun import command as dry_run

    path = file.find_strategy(strategy)
    return dry_run.command(path, script, world_size, ranks, per_machine, output, as_json=as_json, **model)


@command(
    "upgrade",
    "What changes in my training if I upgrade DeepSpeed or torch?",
    "upgrade old.lock new.lock",
    statuses=Statuses(
        "no known change may affect training",
        "a known change may affect training",
        "a file cannot be read",
        "no change was found, but a package or an included file could not be compared, or a release is unknown",
    ),
)
@argument(
    "old",
    type=PATH,
    metavar="OLD",
    help="The packages before the upgrade: a lock file, requirements.txt, environment.yml or the output of `pip "
    "freeze`.",
)
@argument(
    "new",
    type=PATH,
    metavar="NEW",
    help="The packages after the upgrade: a lock file, requirements.txt, environment.yml or the output of `pip "
    "freeze`.",
)
@click.option(
    "--config",
    "configs",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="List only changes that concern a training with this configuration file. You can repeat this option.",
)
@click.option(
    "--script",
    "scripts",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="List only changes of what this training script or a module in its folder uses. You can repeat this option.",
)
@click.option(
    "--imports",
    metavar="NAMES",
    help="The packages that the training imports, separated by commas. This option replaces --script.",
)
@click.option("--stage", type=click.IntRange(0, 3), help="The ZeRO stage, if --config does not name it.")
@click.option("--optimizer", metavar="NAME", help="The optimizer, for instance adamw, if --config does not name it.")
@click.option(
    "--python",
    metavar="VERSION",
    help="Evaluate environment markers for this version of Python. [default: compare for every version]",
)
@click.option(
    "--output", type=PATH, metavar="FILE", help="Write the changes to this JSON file, each in the OSV format."
)
@json_option
def _upgrade(
    old: Path, new: Path, configs: tuple[Path, ...], scripts: tuple[Path, ...], imports: str | None,
    stage: int | None, optimizer: str | None, python: str | None, output: Path | None, as_json: bool,
) -> Verdict | Answer:  # fmt: skip
    """List what an upgrade of DeepSpeed, torch, transformers, trl, peft and others changes in a training.

    The list contains the faults that the upgrade adds and the faults that it removes, because both change a training.
    With --config, --script and similar options, changes of what your files do not use are only counted.
    """
    from zero_study.check import uses
    from zero_study.upgrade import changes, json_answer

    before, after = changes.read_lock(old, python), changes.read_lock(new, python)
    found = changes.compare_locks(before, after, uses.of_options(configs, scripts, imports, stage, optimizer))
    if output is not None:
        files.require_folder(output)
        files.write_json(output, changes.content(found))
    if as_json:
        return json_answer.of(found, before, after)
    print(changes.text(found, before, after))
    return found.verdict


@command(
    "diff",
    "In which step and tensor do two trainings first differ by more than rounding?",
    "diff a b",
    statuses=Statuses(
        "there is no difference",
        "there is a difference",
        "the trainings cannot be compared, for instance because a run with noise belongs to another training",
        "the result is unknown, because a recording is damaged or mixed from several, because a training failed or "
        "ended early, or because no weights are updated",
    ),
)
@argument(
    "a",
    type=PATH,
    metavar="A",
    help="Folder with a recorded training. The folder can also contain recordings of this training with noise.",
)
@argument("b", type=PATH, metavar="B", help="Folder with the second recorded training.")
@click.option("--output", type=PATH, metavar="FILE", help="Write all differences to this JSON file.")
@json_option
def _diff(a: Path, b: Path, output: Path | None, as_json: bool) -> Verdict | Answer:
    """Find the first tensor in which two trainings differ by more than rounding.

    Record each training first: python -m zero_study.diff --output A train.py. Record A once more with --noise 1, to
    measure how much rounding changes the tensors (docs/diff.md). The answer says which steps and which tensors were
    compared.
    """
    from zero_study.answers import envelope
    from zero_study.diff import compare, json_answer, text
    from zero_study.diff.recorded import Damaged, Recording

    if output is not None:
        files.require_folder(output)
    try:
        with progress.after_two_seconds(f"Reading and comparing {a} and {b}"):
            result = compare.compare(Recording.read(a), Recording.read(b))
            shown = text.text(result)
    except Damaged as damaged:
        terminal.print_error(terminal.printable(str(damaged)))
        verdict = Verdict.of(0, (), [NotChecked("the recordings", str(damaged), True)])
        return envelope.error("diff", "not checked", str(damaged), verdict.status) if as_json else verdict
    if output is not None:
        files.write_json(output, text.content(result))
    if as_json:
        return json_answer.of(result)
    print(shown)
    return result.verdict


@command(
    "saved",
    "Is my checkpoint or saved model complete?",
    "saved checkpoint-1000",
    statuses=Statuses(
        "nothing is wrong",
        "something is wrong",
        "the folder is refused",
        "nothing could be checked, the comparison of --against could not be made, or --strict was given and something "
        "could not be checked",
    ),
)
@argument("folder", type=PATH, metavar="FOLDER", help="Folder of a checkpoint, a saved model or an adapter.")
@click.option(
    "--against",
    type=PATH,
    metavar="OTHER",
    help="Compare the tensors with those of another checkpoint, saved model or adapter, or of a recording of "
    "`zero-study diff`.",
)
@click.option(
    "--model",
    type=PATH,
    metavar="FOLDER",
    help="Folder with the config.json of the model, or of an adapter's base model.",
)
@click.option("--strict", is_flag=True, help="End with exit status 3 if something could not be checked.")
@click.option("--trust-pickle", is_flag=True, help="Also load pickle files, which can run code when they are loaded.")
@json_option
def _saved(
    folder: Path, against: Path | None, model: Path | None, strict: bool, trust_pickle: bool, as_json: bool
) -> Verdict | Answer:
    """Check whether a checkpoint or a saved model is complete.

    The command reads checkpoints of DeepSpeed (ZeRO-0 to 3 and universal), of FSDP2 (DCP) and of accelerate, and
    folders of transformers and PEFT. It finds empty, missing, partial, untied and wrongly typed tensors, and files that
    do not belong together. With --against, it also compares the values of the tensors.
    """
    require("torch", "safetensors")
    from zero_study.saved.command import command as check_saved

    return check_saved(folder, against, model, strict, trust_pickle, as_json)


@command(
    "conformance",
    "Do the installed DeepSpeed, accelerate and torch train correctly?",
    "conformance --only plain",
    statuses=Statuses(
        "every configuration that was compared is right, or a known failure",
        "a configuration is wrong or crashed",
        "the request is refused",
        "no configuration could be compared, or a configuration that is right in the file of --known is refused now",
    ),
)
@click.option(
    "--only",
    multiple=True,
    metavar="TEXT",
    help="Check only the configurations whose names contain this text. The text 'plain' selects the "
    "configurations without a special feature. The option can be repeated. [default: all]",
)
@click.option("--ranks", metavar="NUMBERS", help="Numbers of processes, separated by commas. [default: 1,2]")
@click.option(
    "--release",
    "package_versions",
    multiple=True,
    metavar="PACKAGE==VERSION",
    help="Use another release of deepspeed, accelerate or torch, and check only the configurations without a special "
    "feature. The option can be repeated. [default: the installed releases]",
)
@click.option(
    "--known",
    type=PATH,
    metavar="FILE",
    help="Do not count failures that are already in this file, which --output wrote in an earlier call.",
)
@click.option(
    "--optimizer",
    "optimizers",
    multiple=True,
    metavar="NAME",
    help="Check the configurations with this optimizer, or with every optimizer (all). The option can be repeated. "
    "[default: AdamW]",
)
@click.option("--adapters", is_flag=True, help="Check the configurations that train a LoRA adapter of a frozen model.")
@click.option("--output", type=PATH, metavar="FILE", help="JSON file to write.")
@json_option
def _conformance(
    only: tuple[str, ...],
    ranks: str | None,
    package_versions: tuple[str, ...],
    known: Path | None,
    optimizers: tuple[str, ...],
    adapters: bool,
    output: Path | None,
    as_json: bool,
) -> Verdict | Answer:
    """Check whether the installed engines train correctly.

    The command trains a small model in every configuration that the engines offer, and compares each training with a
    reference that uses no engine. It runs on a CPU and takes some minutes.
    """
    if output is not None:
        files.require_folder(output)
    require("torch")
    if find_spec("deepspeed") is None:
        raise Refusal("deepspeed is not installed. Run `pip install deepspeed`.")
    from zero_study.conformance import json_answer, matrix, matrix_file, releases, results

    _check_ranks(ranks)
    chosen_releases = releases.parse(package_versions)
    cells = _cells_to_examine(only, ranks, chosen_releases, optimizers, adapters)
    earlier = None if known is None else matrix_file.load(known)
    examined = matrix.run(cells, lambda line: print(line, flush=True), chosen=chosen_releases)
    verdict = results.verdict(examined, earlier)
    if output is not None:
        files.write_json(output, {**examined, **verdict.content()})
    if as_json:
        return json_answer.of(examined, verdict, earlier)
    if earlier is not None:
        new = ", ".join(results.failed_cells(examined, earlier)) or "none"
        print(terminal.wrap(f"New failures compared with {known}: {new}."))
        for each in verdict.not_checked:
            if each.is_requested:
                print(terminal.wrap(f"Could not be compared with {known}: {each}."))
        print()
    print("\n".join(results.summary_lines(examined)))
    return verdict


def _check_ranks(ranks: str | None) -> None:
    if ranks is not None and not re.fullmatch(r"[1-9](,[1-9])*", ranks):
        raise Refusal(
            f"--ranks {ranks}: these are not numbers of processes. Write numbers with commas, for instance 1,2."
        )


def _cells_to_examine(
    only: tuple[str, ...],
    ranks: str | None,
    chosen_releases: dict[str, str],
    optimizers: tuple[str, ...],
    adapters: bool,
) -> list[Cell]:
    """Return the configurations whose names contain every text of --only. Raises Refusal if there is none."""
    from zero_study.conformance import cells

    if adapters and (optimizers or chosen_releases):
        other = "--optimizer" if optimizers else "--release"
        raise Refusal(f"--adapters and {other} select different configurations. Use one of them.")
    if ranks is not None and (chosen_releases or optimizers or adapters):
        subject = "another release" if chosen_releases else "an optimizer" if optimizers else "an adapter"
        raise Refusal(f"--ranks {ranks}: {subject} is always checked on two processes. Remove --ranks.")
    if adapters:
        matrix = cells.of_adapters()
    elif optimizers:
        engines = [engine for package in chosen_releases for engine in cells.OPTIMIZERS_UNDER[package]]
        matrix = cells.of_optimizers(_chosen_optimizers(optimizers), engines or cells.UNDER)
    elif chosen_releases:
        matrix = cells.of_release(chosen_releases, (cells.PLAIN, *cells.NEWER_VARIATIONS, *cells.LOSS_SCALE_VARIATIONS))
    else:
        matrix = cells.matrix(sorted({int(number) for number in (ranks or "1,2").split(",")}))
    chosen = [cell for cell in matrix if all(_is_named(cell, text) for text in only)]
    if not chosen:
        raise Refusal(
            f"--only {' --only '.join(only)}: no configuration has this name. An example of a name is {matrix[0].name}."
        )
    return chosen


def _is_named(cell: Cell, text: str) -> bool:
    """Return whether --only with this text selects a configuration.

    "plain" selects the configurations without a special feature.
    """
    return text in cell.name or text == cell.variation == "plain"


def _chosen_optimizers(names: tuple[str, ...]) -> list[str]:
    """Return the optimizers that --optimizer names.

    Raises Refusal if one is unknown, or its library is not installed.
    """
    from zero_study.conformance.cells import LIBRARY_OF, OPTIMIZERS

    chosen = list(OPTIMIZERS) if "all" in names else list(dict.fromkeys(names))
    for name in chosen:
        if name not in OPTIMIZERS:
            raise Refusal(f"--optimizer {name}: this optimizer is unknown. Choose one of {', '.join(OPTIMIZERS)}, all.")
        library = LIBRARY_OF.get(name)
        if library and find_spec(library) is None:
            raise Refusal(
                f"--optimizer {name}: {library} is not installed, so {name} could not be checked. Install it "
                f"with {install_command('optimizers')}, or name other optimizers."
            )
    return chosen


@command(
    "why",
    "Why did my run fail, hang, slow down or train wrongly?",
    "why train.log",
    statuses=Statuses(
        "the rows of steps in the log show no exception and no sign of trouble",
        "a failure or a sign of trouble was found",
        "the request is refused",
        "the log has neither a failure nor enough rows of steps",
    ),
)
@argument(
    "logs",
    type=PATH,
    nargs=-1,
    metavar="[LOG]...",
    help="One or several files with the output of one run. [default: standard input, also written as -]",
)
@click.option(
    "--model",
    metavar="NAME",
    help="The model, as in `zero-study advise`. If the model is known, the answer can name the tensor that did not "
    "fit, and changes that help.",
)
@click.option(
    "--gpu",
    metavar="NAME",
    help="The GPU, as in `zero-study advise`. [default: a GPU with as much memory as the log states]",
)
@click.option("--gpus", "num_gpus", type=NUMBER, metavar="N", help="Number of GPUs.")
@click.option("--strategy", metavar="NAME", help="The strategy of the run, such as zero2 or fsdp2.")
@click.option("--micro-batch-size", type=NUMBER, metavar="N", help="Number of sequences per GPU and micro step.")
@click.option("--sequence-length", type=NUMBER, metavar="N", help="Number of tokens per sequence.")
@click.option(
    "--environment/--no-environment",
    "is_environment_requested",
    default=None,
    help="Look at the releases and the source of the installed packages that a traceback names. [default: only if the "
    "log's folder of packages is on this machine]",
)
@click.option(
    "--flight-recorder",
    type=PATH,
    metavar="DIR",
    help="Folder with the files of PyTorch's flight recorder, one per rank. It needs no log.",
)
@click.option("--snapshot", type=PATH, metavar="FILE", help="File with a memory snapshot of PyTorch. It needs no log.")
@click.option(
    "--trace", type=PATH, metavar="FILE", help="JSON file with a trace of PyTorch's profiler. It needs no log."
)
@json_option
def _why(
    logs: tuple[Path, ...],
    flight_recorder: Path | None,
    snapshot: Path | None,
    trace: Path | None,
    is_environment_requested: bool | None,
    as_json: bool,
    **known: Any,
) -> Verdict | Answer:
    """Find the first failure in what a run printed, and state what is certain about it.

    The command reads the output of one rank or of all ranks, from any launcher. It names the first failure with its
    message and its frames, computes what the numbers in the log show, and quotes what a library's own check says. If
    the cause is not in the log, it says so, with the question to ask and what to record next time. Nothing in a log is
    executed, the network is used only for the id of a model that is not known here, and tokens and passwords are masked
    in the answer.
    """
    from zero_study.answers import envelope
    from zero_study.logs.printed_settings import Setting
    from zero_study.why import answer, json_answer, memory_snapshot, profiler_trace, text
    from zero_study.why import flight_recorder as calls

    recorded = [
        *(calls.facts(flight_recorder) if flight_recorder else []),
        *(memory_snapshot.facts(snapshot) if snapshot else []),
        *(profiler_trace.facts(trace) if trace else []),
    ]
    if known["strategy"] is not None:
        file.find_strategy(known["strategy"])
    setting = Setting(**known)
    has_recording = not logs and any((flight_recorder, snapshot, trace))
    if has_recording and not recorded:
        reason = (
            "The recordings show neither a difference between ranks nor a call that waits. Name the log of the run."
        )
        terminal.print_error(reason)
        unknown = Verdict.of(0, (), [NotChecked("the cause", reason, True)])
        return envelope.error("why", "not checked", reason, unknown.status) if as_json else unknown
    named = logs if logs and logs != (Path("-"),) else [] if has_recording else [_standard_input()]
    found = answer.answer(named, setting, recorded, is_environment_requested)
    if as_json:
        return json_answer.of(found, str(logs[0]) if len(logs) == 1 and logs != (Path("-"),) else None)
    print(text.text(found))
    return found.verdict


def _standard_input() -> Iterator[bytes]:
    """Yield the lines of standard input. Raises Refusal if it is a terminal."""
    if sys.stdin.isatty():
        raise Refusal("A log is missing. Name a file, or write it to standard input: `zero-study why < train.log`.")
    yield from sys.stdin.buffer


COMMANDS = (_doctor, _prove, _dry_run, _upgrade, _diff, _saved, _conformance, _why)
