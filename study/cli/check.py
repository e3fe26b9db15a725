"""The commands that check files, scripts, upgrades, trainings, the installed engines and published claims."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from study import files, progress, terminal
from study.cli.options import NUMBER, PATH, TRAINING, command, require
from study.errors import Refusal
from study.files import require_clone
from study.strategy import file

if TYPE_CHECKING:
    from study.engines.conformance.cells import Cell


@command("doctor")
@click.argument("file", type=PATH, required=False, help="any accelerate file or DeepSpeed JSON")
@click.option("--all", "everything", is_flag=True, help="list all keys, including those that work as written")
@click.option("--json", "as_json", is_flag=True, help="print the findings as JSON")
@click.option("--fix", type=PATH, metavar="OUT", help="write a corrected copy of FILE to this new file")
@click.option("--disk", type=PATH, metavar="DIR", help="without FILE: a folder on the disk to be measured [default: .]")
@click.option(
    "--for", "release", metavar="deepspeed==VERSION", help="also list the known faults of this release that affect FILE"
)
def _doctor(
    file: Path | None, everything: bool, as_json: bool, fix: Path | None, disk: Path | None, release: str | None
) -> int:
    """Check a configuration file, or this machine.

    With FILE, the command says what each of its keys really does with the supported versions of accelerate and
    DeepSpeed. Without FILE, it checks this machine for everything that would stop a run.

    Exit status with a file: 0 if no key needs a change, 1 if one does, 2 if the file cannot be read. Without a file:
    0 if nothing on this machine would stop a run, 1 otherwise.
    """
    if file is None:
        about_a_file = {"--all": everything, "--fix": fix, "--for": release}
        if given := [flag for flag, value in about_a_file.items() if value]:
            raise Refusal(f"{given[0]} needs a file. Name an accelerate file or a DeepSpeed JSON.")
        return _check_machine(disk or Path(), as_json)
    if disk is not None:
        raise Refusal(f"--disk {disk} is only for the check of this machine. Remove --disk, or remove the file.")
    return _check_file(file, release, fix, everything, as_json)


def _check_machine(disk: Path, as_json: bool) -> int:
    """Check this machine, print the result, and return the exit status: 1 if something would stop a run, else 0."""
    from study.engines.doctor import checkup

    with progress.after_two_seconds(
        "Checking this machine: packages, compilers, two communicating processes, the disk"
    ):
        checks = checkup.examine(disk)
    print(checkup.as_json(checks) if as_json else checkup.text(checks))
    return int(any(check.verdict == "bites" for check in checks))


def _check_file(file: Path, release: str | None, fix: Path | None, everything: bool, as_json: bool) -> int:
    """Print what the keys of a file do, write the corrected file to `fix`, and return the exit status.

    The exit status is 1 if a key does not work as written, else 0. `fix` is None if no file is to be written.
    """
    from study.engines.doctor import examine, text

    examined = examine.examine(file, release)
    changes = None if fix is None else examine.write_mended(examined, fix)
    print(examined.as_json() if as_json else text.text(examined, everything, release))
    if fix is not None and changes is not None:
        print(
            ("" if as_json else "\n") + text.changes_text(examined, fix, changes), file=sys.stderr if as_json else None
        )
    return 1 if examined.matters else 0


@command("prove", context_settings={"allow_interspersed_args": False})
@click.option("--strict", is_flag=True, help="fail if training is wrong, is not as requested, or could not be checked")
@click.option("--allow-known-bad", is_flag=True, help="continue with a release that is known to train wrongly")
@click.argument("script", type=PATH, metavar="SCRIPT", help="the training script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, help="the arguments of the script")
def _prove(strict: bool, allow_known_bad: bool, script: Path, arguments: tuple[str, ...]) -> int:
    """Check a training script without changing it.

    The command runs SCRIPT in one process. It prints the engine that the script builds, what differs from the request,
    faults of the training, and the memory and messages of the third optimizer step, and writes them to proof.json.

    For several processes, use a launcher: accelerate launch -m zero_study.prove SCRIPT, or torchrun --nproc-per-node 2
    -m zero_study.prove SCRIPT.

    Exit status: that of the script; with --strict also 1 if training is wrong, is not as requested, or could not be
    checked; 2 if there is no such script.
    """
    require("torch")
    if not script.is_file():
        raise Refusal(f"{script}: no such file. Name a script, and then its arguments.")
    options = [flag for flag, is_set in (("--strict", strict), ("--allow-known-bad", allow_known_bad)) if is_set]
    sys.stdout.flush()
    # A new interpreter is needed, because the script may import its own package `study`, and this process has already
    # imported the project's.
    words = [sys.executable, "-m", "zero_study.prove", *options, str(script), *arguments]
    os.execv(sys.executable, words)


@command("dry-run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--world", "world_size", type=NUMBER, required=True, help="number of simulated processes")
@click.option(
    "--ranks",
    metavar="R,R",
    help="the ranks to run [default: the first and the last; with a script and up to 4 processes, all]",
)
@click.option("--per-machine", type=NUMBER, default=8, help="processes per machine")
@click.option(
    "--model", metavar="NAME", default="gpt2", help="a known name (gpt2-xl, llama-2-7b, ...) or a config.json"
)
@click.option("--micro-batch-size", type=NUMBER, default=1, help="sequences per process and forward pass")
@click.option(
    "--sequence-length",
    type=NUMBER,
    help="tokens per sequence [default: 1024, or fewer if the model has fewer positions]",
)
@click.option("--gradient-accumulation-steps", type=NUMBER, default=1, help="micro batches per optimizer step")
@click.option(
    "--activation-checkpointing", is_flag=True, help="recompute the activations of each block in the backward pass"
)
@click.option("--mixed-precision", type=click.Choice(("no", "bf16")), help="precision [default: that of the file]")
@click.option("--output", type=PATH, metavar="FILE", help="JSON file to write, with all collectives in their order")
@click.argument("strategy", metavar="STRATEGY", help=f"an accelerate file, or one of {', '.join(file.names())}")
@click.argument(
    "script", nargs=-1, type=click.UNPROCESSED, help="a script to run instead of a model, and its arguments"
)
def _dry_run(
    strategy: str, script: tuple[str, ...], world_size: int, ranks: str | None, per_machine: int, output: Path | None,
    **model: Any,
) -> int:  # fmt: skip
    """Simulate a training on many ranks without GPUs.

    The command runs the real engine on this machine as a few ranks of a larger world. It prints the memory and the
    collectives of these ranks, and finds places where ranks would wait for each other forever. Write options before
    STRATEGY.

    Exit status: 0 if all ranks make the same calls; 1 if they do not, which means a hang; 2 if the training cannot be
    simulated.
    """
    require(*TRAINING)
    from study.dryrun import command as dry_run

    return dry_run.command(file.find_strategy(strategy), script, world_size, ranks, per_machine, output, **model)


@command("upgrade")
@click.argument(
    "old", type=PATH, metavar="OLD", help="a lock file, requirements.txt, environment.yml or the output of `pip freeze`"
)
@click.argument("new", type=PATH, metavar="NEW", help="the same file after the upgrade")
@click.option("--output", type=PATH, metavar="FILE", help="JSON file to write, with each change in the OSV format")
def _upgrade(old: Path, new: Path, output: Path | None) -> int:
    """List what an upgrade of DeepSpeed, torch, transformers, trl, peft and others changes in a training.

    Exit status: 0 if no known change may affect training; 1 if one may, or if a release is unknown or could not be
    compared; 2 if a file cannot be read.
    """
    from study.engines import upgrade

    before, after = upgrade.read_lock(old), upgrade.read_lock(new)
    changes = upgrade.compare(before.pins, after.pins)
    if output is not None:
        files.require_folder(output)
        files.write_json(output, {"vulns": [change.as_osv() for change in changes]})
    print(upgrade.text(changes, before, after))
    return int(not upgrade.is_fine(changes, before, after))


@command("diff")
@click.argument("a", type=PATH, metavar="A", help="folder of a recorded training, and of its runs with noise")
@click.argument("b", type=PATH, metavar="B", help="folder of the other recorded training")
@click.option("--output", type=PATH, metavar="FILE", help="JSON file to write, with all differences")
def _diff(a: Path, b: Path, output: Path | None) -> int:
    """Find the first tensor in which two trainings differ by more than rounding.

    Record each training first: python -m zero_study.diff --output A train.py. Record A once more with --noise 1, to
    measure what rounding does (docs/diff.md).

    Exit status: 0 if there is no difference; 1 if there is one; 2 if the trainings cannot be compared; 3 if the result
    is unknown, because a recording is damaged or mixed from several, or because a training failed or ended early.
    """
    from study.engines.diff import compare, text
    from study.engines.diff.recorded import Damaged, Recording

    if output is not None:
        files.require_folder(output)
    try:
        with progress.after_two_seconds(f"Reading and comparing {a} and {b}"):
            result = compare.compare(Recording.read(a), Recording.read(b))
            shown = text.text(result)
    except Damaged as damaged:
        print(f"zero-study: {text.printable(str(damaged))}", file=sys.stderr)
        return 3
    if output is not None:
        files.write_json(output, text.content(result))
    print(shown)
    return 0 if result.is_same else 1 if result.differences or result.replicas else 3


@command("saved")
@click.argument("folder", type=PATH, metavar="FOLDER", help="folder of a checkpoint, a saved model or an adapter")
@click.option(
    "--against",
    type=PATH,
    metavar="OTHER",
    help="another such folder, or a recording of `zero-study diff`, to compare with",
)
@click.option(
    "--model",
    type=PATH,
    metavar="FOLDER",
    help="folder with the config.json of the model, or of an adapter's base model",
)
@click.option("--strict", is_flag=True, help="exit with status 1 also if something could not be checked")
@click.option("--trust-pickle", is_flag=True, help="also load files that run code when they are loaded")
@click.option("--json", "as_json", is_flag=True, help="print the result as JSON")
def _saved(
    folder: Path, against: Path | None, model: Path | None, strict: bool, trust_pickle: bool, as_json: bool
) -> int:
    """Check whether a checkpoint or a saved model is complete.

    The command reads checkpoints of DeepSpeed (ZeRO-0 to 3 and universal), of FSDP2 (DCP) and of accelerate, and
    folders of transformers and PEFT. It finds empty, missing, partial, untied and wrongly typed tensors, and shards
    that do not belong together. With --against, it also compares the values.

    Exit status: 0 if nothing is wrong; 1 if something is wrong, if no file could be read, if the comparison of
    --against could not be made, or if --strict was given and something could not be checked; 2 if the folder is
    refused.
    """
    require("torch", "safetensors")
    from study.engines.saved.command import command as check_saved

    return check_saved(folder, against, model, strict, trust_pickle, as_json)


@command("conformance")
@click.option("--only", multiple=True, metavar="TEXT", help="only cells whose name contains this text; may be repeated")
@click.option("--ranks", metavar="NUMBERS", help="numbers of processes, separated by commas [default: 1,2]")
@click.option(
    "--release",
    "package_versions",
    multiple=True,
    metavar="PACKAGE==VERSION",
    help="check the plain cells of another release of deepspeed, accelerate or torch",
)
@click.option(
    "--known",
    type=PATH,
    metavar="FILE",
    help="an earlier --output file; cells that failed there in the same way do not count as failures",
)
@click.option(
    "--optimizer",
    "optimizers",
    multiple=True,
    metavar="NAME",
    help="check the cells of this optimizer instead of AdamW's; may be repeated; all: every optimizer",
)
@click.option("--adapters", is_flag=True, help="check the cells that train a LoRA adapter of a frozen model")
@click.option("--output", type=PATH, metavar="FILE", help="JSON file to write")
def _conformance(
    only: tuple[str, ...],
    ranks: str | None,
    package_versions: tuple[str, ...],
    known: Path | None,
    optimizers: tuple[str, ...],
    adapters: bool,
    output: Path | None,
) -> int:
    """Check whether the installed engines train correctly.

    The command trains a small model in every way that the engines offer (each way is a cell), and compares each cell
    with a reference that uses no engine. It runs on a CPU and takes some minutes.

    Exit status: 0 if every cell is right, refused, or a known failure; 1 if one is wrong or crashed.
    """
    require(*TRAINING[:1], "deepspeed")
    from study.engines.conformance import committed, installation, releases

    _check_ranks(ranks)
    chosen_releases = releases.parse(package_versions)
    cells = _cells_to_examine(only, ranks, chosen_releases, optimizers, adapters)
    if output is not None:
        files.require_folder(output)
    earlier = None if known is None else committed.load(known)
    results = installation.examine(cells, lambda line: print(line, flush=True), chosen=chosen_releases)
    if output is not None:
        files.write_json(output, results)
    failures = committed.failures(results, earlier)
    if known is not None:
        print(terminal.wrapped(f"New failures compared with {known}: {', '.join(failures) or 'none'}."), end="\n\n")
    print("\n".join(committed.lines(results)))
    return int(bool(failures))


def _check_ranks(ranks: str | None) -> None:
    if ranks is not None and not re.fullmatch(r"[1-9](,[1-9])*", ranks):
        raise Refusal(f"--ranks {ranks}: these are not numbers of processes. Write for instance 1,2.")


def _cells_to_examine(
    only: tuple[str, ...],
    ranks: str | None,
    chosen_releases: dict[str, str],
    optimizers: tuple[str, ...],
    adapters: bool,
) -> list[Cell]:
    """Return the cells of the matrix whose names contain every text of --only. Raises Refusal if there is none."""
    from study.engines.conformance import cells

    if adapters and (optimizers or chosen_releases):
        other = "--optimizer" if optimizers else "--release"
        raise Refusal(f"--adapters and {other} select different cells. Give one of them.")
    if ranks is not None and (chosen_releases or optimizers or adapters):
        subject = "another release" if chosen_releases else "an optimizer" if optimizers else "an adapter"
        raise Refusal(f"--ranks {ranks}: {subject} is always checked on two processes. Remove --ranks.")
    if adapters:
        matrix = cells.of_adapters()
    elif optimizers:
        engines = [engine for package in chosen_releases for engine in cells.OPTIMIZERS_UNDER[package]]
        matrix = cells.of_optimizers(_chosen_optimizers(optimizers), engines or cells.UNDER)
    elif chosen_releases:
        matrix = cells.of_release(chosen_releases, (cells.PLAIN, *cells.NEWER_TWISTS))
    else:
        matrix = cells.matrix(sorted({int(number) for number in (ranks or "1,2").split(",")}))
    chosen = [cell for cell in matrix if all(text in cell.name for text in only)]
    if not chosen:
        raise Refusal(
            f"--only {' --only '.join(only)}: no cell has such a name. An example of a name is {matrix[0].name}."
        )
    return chosen


def _chosen_optimizers(names: tuple[str, ...]) -> list[str]:
    """Return the optimizers that --optimizer names.

    Raises Refusal if one is unknown, or its library is not installed.
    """
    from study.engines.conformance.cells import LIBRARY_OF, OPTIMIZERS

    chosen = list(OPTIMIZERS) if "all" in names else list(dict.fromkeys(names))
    for name in chosen:
        if name not in OPTIMIZERS:
            raise Refusal(
                f"--optimizer {name}: there is no such optimizer. Choose one of {', '.join(OPTIMIZERS)}, all."
            )
        library = LIBRARY_OF.get(name)
        if library and find_spec(library) is None:
            raise Refusal(
                f"--optimizer {name}: {library} is not installed, so {name} could not be checked. Install it with "
                "pip install zero-study[optimizers], or name other optimizers."
            )
    return chosen


@command("claims")
@click.argument("name", required=False, metavar="[SOURCE|CLAIM]", help="the name of a source, or of a claim")
@click.option("--search", metavar="WORDS", help="list the sentences that contain all these words")
@click.option("--json", "as_json", is_flag=True, help="print everything about a source, or about all sources, as JSON")
@click.option("--check", is_flag=True, help="decide every claim again, and list the differences")
@click.option("--write", is_flag=True, help="decide every claim again, and write the verdicts")
def _claims(name: str | None, search: str | None, as_json: bool, check: bool, write: bool) -> int:
    """Show the verdicts on published claims.

    With the name of a source or of a claim, the command prints its verdicts; without a name, it prints a summary of all
    sources.

    Exit status of --check and --write: 1 if a verdict no longer follows from the records, or if a sentence states
    another verdict than its rule finds.
    """
    import json

    from study.claims import in_terminal, sentences

    if sum([check, write, as_json, search is not None]) > 1 or ((check or write or search is not None) and name):
        raise Refusal(
            "--check, --write, --search and --json cannot be combined, and --check, --write and --search concern all "
            "claims. Give only one of them, without a name."
        )
    if check or write:
        require_clone("the records by which claims are decided")
        require("pandas", "scipy")
        with progress.after_two_seconds("Deciding every claim again from the committed records"):
            return _decide_claims(write)
    if search is not None:
        print(in_terminal.search(search))
    elif as_json:
        print(json.dumps(sentences.content(sentences.read(name)), indent=1, ensure_ascii=False))
    else:
        print(in_terminal.text(name))
    return 0


def _decide_claims(write: bool) -> int:
    from study.claims import ledger, verdicts

    sources, now = ledger.read(), verdicts.decide_all()
    if write:
        verdicts.write(now)
        print(f"Wrote {len(now)} verdicts to {verdicts.VERDICTS}.")
    wrong = verdicts.unlike(sources, now) | verdicts.stale(verdicts.read(), now)
    if wrong:
        print(f"{len(wrong)} of {len(now)} claims differ from their committed verdicts:")
    else:
        print(f"All {len(now)} committed verdicts follow from the records.")
    for name, difference in wrong.items():
        print(terminal.wrapped(f"{name}: {difference}", "  ", "    "))
    return 1 if wrong else 0


COMMANDS = (_doctor, _prove, _dry_run, _upgrade, _diff, _saved, _conformance, _claims)
