"""The commands that check files, upgrades, trainings, the installed engines and published claims."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from study import files, progress
from study.cli.options import NUMBER, PATH, TRAINING, command, require
from study.errors import Refusal
from study.files import require_clone
from study.strategy import file

if TYPE_CHECKING:
    from study.engines.conformance.cells import Cell


@command("doctor")
@click.argument("file", type=PATH, required=False, help="an accelerate file or a DeepSpeed JSON, of anybody")
@click.option("--all", "everything", is_flag=True, help="list the keys that do no harm, too")
@click.option("--json", "as_json", is_flag=True, help="print every finding as JSON")
@click.option("--fix", type=PATH, metavar="OUT", help="also write the mended file, to a new file")
@click.option("--disk", type=PATH, metavar="DIR", help="without FILE: a folder on the disk to be tried [default: .]")
@click.option("--for", "release", metavar="deepspeed==VERSION", help="also what this release trains wrongly of it")
def _doctor(
    file: Path | None, everything: bool, as_json: bool, fix: Path | None, disk: Path | None, release: str | None
) -> int:
    """Say what each key of a file really does.

    With these versions; without a file, what would bite on this machine.

    Exit status: 0 every key does what it says, or nothing bites; 1 otherwise; 2 the file cannot be read.
    """
    if file is None:
        about_a_file = {"--all": everything, "--fix": fix, "--for": release}
        if given := [flag for flag, value in about_a_file.items() if value]:
            raise Refusal(f"{given[0]} is about a file; name one")
        return _check_machine(disk or Path(), as_json)
    if disk is not None:
        raise Refusal(f"--disk {disk} is about this machine; leave FILE out, or --disk")
    return _check_file(file, release, fix, everything, as_json)


def _check_machine(disk: Path, as_json: bool) -> int:
    """Print what would fail on this machine; return the exit status."""
    from study.engines.doctor import checkup

    with progress.after_two_seconds(
        "Checking this machine: packages, compilers, two communicating processes, the disk"
    ):
        checks = checkup.examine(disk)
    print(checkup.as_json(checks) if as_json else checkup.text(checks))
    return int(any(check.verdict == "bites" for check in checks))


def _check_file(file: Path, release: str | None, fix: Path | None, everything: bool, as_json: bool) -> int:
    """Print what the keys of a file do, and write the mended file to `fix`; return the exit status."""
    from study.engines.doctor import examine, text

    examined = examine.examine(file, release)
    changes = None if fix is None else examine.write_mended(examined, fix)
    print(examined.as_json() if as_json else text.text(examined, everything, release))
    if fix is not None and changes is not None:
        print(
            ("" if as_json else "\n") + text.changes_text(examined, fix, changes), file=sys.stderr if as_json else None
        )
    return 1 if examined.matters else 0


@command("dry-run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--world", "world_size", type=NUMBER, required=True, help="processes that are pretended")
@click.option(
    "--ranks",
    metavar="R,R",
    help="which of them are asked [default: the first and the last; of up to 4 with a script, all]",
)
@click.option("--per-machine", type=NUMBER, default=8, help="processes on one machine")
@click.option("--model", metavar="NAME", default="gpt2", help="a known name (gpt2-xl, llama-2-7b ...) or a config.json")
@click.option("--micro-batch-size", type=NUMBER, default=1, help="sequences per process and forward pass")
@click.option("--sequence-length", type=NUMBER, help="tokens [default: 1024, or as many as the model has positions]")
@click.option("--gradient-accumulation-steps", type=NUMBER, default=1, help="micro steps per optimizer step")
@click.option("--activation-checkpointing", is_flag=True, help="recompute each block")
@click.option("--mixed-precision", type=click.Choice(("no", "bf16")), help="[default: what the file says]")
@click.option("--output", type=PATH, metavar="FILE", help="JSON file to write, with every call in its order")
@click.argument("strategy", metavar="STRATEGY", help=f"an accelerate file, or one of {', '.join(file.names())}")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, help="a script in the place of a model, and its arguments")
def _dry_run(
    strategy: str, script: tuple[str, ...], world_size: int, ranks: str | None, per_machine: int, output: Path | None,
    **model: Any,
) -> int:  # fmt: skip
    """Run the engine as some ranks of many that are not there.

    Says what each holds and sends, and where they would wait for each other for ever. Options come first.

    Exit status: 0 the ranks make the same calls; 1 they part, which is a hang; 2 it cannot be pretended.
    """
    require(*TRAINING)
    from study.dryrun import command as dry_run

    return dry_run.command(file.find_strategy(strategy), script, world_size, ranks, per_machine, output, **model)


@command("upgrade")
@click.argument(
    "old", type=PATH, metavar="OLD", help="uv.lock, requirements.txt, environment.yml or what `pip freeze` prints"
)
@click.argument("new", type=PATH, metavar="NEW", help="the same, after the upgrade")
@click.option("--output", type=PATH, metavar="FILE", help="JSON file to write, each change as OSV has it")
def _upgrade(old: Path, new: Path, output: Path | None) -> int:
    """Say what other releases change in a training.

    Exit status: 0 nothing comes that trains otherwise; 1 something does, is unknown, or could not be compared; 2 a file
    cannot be read.
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
@click.argument("a", type=PATH, metavar="A", help="folder of a recorded training, with noise-1 and so on in it")
@click.argument("b", type=PATH, metavar="B", help="the same, of the other training")
@click.option("--output", type=PATH, metavar="FILE", help="JSON file to write, with all differences")
def _diff(a: Path, b: Path, output: Path | None) -> int:
    """Say in which tensor two trainings first differ by more than rounding.

    Record each with `python -m zero_study.diff --output A train.py`, and A once more with --noise 1: docs/diff.md.

    Exit status: 0 no difference; 1 there is one; 2 they cannot be compared; 3 not known, because a recording is damaged
    or mixed from several, or because a training failed or ended before the other one.
    """
    from study.engines.diff import compare, text
    from study.engines.diff.recorded import Damaged, Recording

    if output is not None:
        files.require_folder(output)
    try:
        result = compare.compare(Recording.read(a), Recording.read(b))
        shown = text.text(result)
    except Damaged as damaged:
        print(f"zero-study: {text.printable(str(damaged))}", file=sys.stderr)
        return 3
    if output is not None:
        files.write_json(output, text.content(result))
    print(shown)
    return 0 if result.is_same else 1 if result.differences or result.replicas else 3


@command("conformance")
@click.option("--only", multiple=True, metavar="TEXT", help="only cells whose name contains this, and every other TEXT")
@click.option("--ranks", metavar="NUMBERS", help="how many processes, with commas between [default: 1,2]")
@click.option(
    "--release",
    "package_versions",
    multiple=True,
    metavar="PACKAGE==VERSION",
    help="another release than the installed one, of deepspeed, accelerate or torch: its plain cells",
)
@click.option("--known", type=PATH, metavar="FILE", help="an earlier --output: what it has as it is now is no failure")
@click.option("--output", type=PATH, help="JSON file to write")
def _conformance(
    only: tuple[str, ...], ranks: str | None, package_versions: tuple[str, ...], known: Path | None, output: Path | None
) -> int:
    """Ask whether the installed engines train right.

    Trains a toy in every way that they offer, and holds each against a reference without an engine.

    On a CPU, in some minutes. Exit status: 0 every cell is the same or refused, or known; 1 one is wrong or crashed.
    """
    require(*TRAINING[:1], "deepspeed")
    from study.engines.conformance import committed, installation, releases

    _check_ranks(ranks)
    chosen_releases = releases.parse(package_versions)
    cells = _cells_to_examine(only, ranks, chosen_releases)
    if output is not None:
        files.require_folder(output)
    earlier = None if known is None else committed.load(known)
    results = installation.examine(cells, lambda line: print(line, flush=True), chosen=chosen_releases)
    if output is not None:
        files.write_json(output, results)
    print("\n".join(committed.lines(results)))
    failures = committed.failures(results, earlier)
    if known is not None:
        print(f"\nnew since {known}: {', '.join(failures) or 'none'}")
    return int(bool(failures))


def _check_ranks(ranks: str | None) -> None:
    if ranks is not None and not re.fullmatch(r"[1-9](,[1-9])*", ranks):
        raise Refusal(f"--ranks {ranks}: write numbers of processes, for instance 1,2")


def _cells_to_examine(only: tuple[str, ...], ranks: str | None, chosen_releases: dict[str, str]) -> list[Cell]:
    """Return the cells of the matrix whose names contain every text of --only. Raises Refusal if there is none."""
    from study.engines.conformance import cells

    if chosen_releases:
        if ranks is not None:
            raise Refusal(f"--ranks {ranks}: another release is examined on two processes; leave it out")
        matrix = cells.of_release(chosen_releases, (cells.PLAIN, *cells.NEWER_TWISTS))
    else:
        matrix = cells.matrix(sorted({int(number) for number in (ranks or "1,2").split(",")}))
    chosen = [cell for cell in matrix if all(text in cell.name for text in only)]
    if not chosen:
        raise Refusal(
            f"--only {' --only '.join(only)}: no cell's name has that; zero2/bf16/2-ranks/accumulation-2 is one"
        )
    return chosen


@command("claims")
@click.argument("asked", required=False, metavar="[SOURCE|CLAIM]", help="what is asked of: a source or a claim")
@click.option("--search", metavar="WORDS", help="the sentences in which all these words are")
@click.option("--json", "as_json", is_flag=True, help="print everything that is known, of a source or of all, as JSON")
@click.option("--check", is_flag=True, help="decide every claim again, and list what has changed")
@click.option("--write", is_flag=True, help="decide every claim again, write the verdicts")
def _claims(asked: str | None, search: str | None, as_json: bool, check: bool, write: bool) -> int:
    """Say what became of published sentences.

    Of a source, of one claim, or how all came out.

    Exit status of --check and --write: 1 where a verdict no longer follows, or a sentence says another one than its
    rule finds.
    """
    import json

    from study.claims import sentences

    if sum([check, write, as_json, search is not None]) > 1 or ((check or write or search is not None) and asked):
        raise Refusal("--check and --write decide every claim, --search looks in all; give one of them alone")
    if check or write:
        require_clone("the records that claims are decided by")
        return _decide_claims(write)
    if search is not None:
        print(sentences.search(search))
    elif as_json:
        print(json.dumps(sentences.content(sentences.read(asked)), indent=1, ensure_ascii=False))
    else:
        print(sentences.text(asked))
    return 0


def _decide_claims(write: bool) -> int:
    from study.claims import ledger, verdicts

    sources, now = ledger.read(), verdicts.decide_all()
    if write:
        verdicts.write(now)
        print(f"{verdicts.VERDICTS}: {len(now)} verdicts")
    wrong = verdicts.unlike(sources, now) | verdicts.stale(verdicts.read(), now)
    for name, what in wrong.items():
        print(f"{name}: {what}")
    print(
        f"{len(wrong)} of {len(now)} claims are not as they are committed" if wrong else f"{len(now)} verdicts follow"
    )
    return 1 if wrong else 0


COMMANDS = (_doctor, _dry_run, _upgrade, _diff, _conformance, _claims)
