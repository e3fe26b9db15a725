"""What can be asked on the command line? Each subcommand parses, calls one function and prints."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from study.config import Parser, Refusal, build_config, flag_parser

if TYPE_CHECKING:
    from study import launch, matrix


def run(arguments: list[str]) -> int:
    """Run one subcommand; return the exit status."""
    parser = Parser(prog="zero-study", description="The ZeRO replication study.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("train", help="check, launch and record one run", add_help=False, allow_abbrev=False)

    study = commands.add_parser(
        "run", help="run a study's runs one after another; finished ones are kept", allow_abbrev=False
    )
    study.add_argument("study", help="smoke, parity, model-states, cpu or bert-large")
    study.add_argument("--data-dir", type=Path, help="folder with imdb/, wikitext-2/ and tokenizers/, for real text")
    study.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run directories go (default: runs)")
    study.add_argument("--only", default="", help="only runs whose id contains this")
    study.add_argument(
        "--timeout", type=float, default=1800, help="seconds after which one run is ended (default: 1800)"
    )
    study.set_defaults(call=_run)

    collect = commands.add_parser(
        "collect", help="copy the records and steps of finished runs into a folder to commit", allow_abbrev=False
    )
    collect.add_argument("runs", type=Path, help="folder of run directories")
    collect.add_argument("records", type=Path, help="folder to copy into, for instance reports/cpu/records")
    collect.set_defaults(call=_collect)

    states = commands.add_parser(
        "model-states", help="table of measured model-state bytes beside the paper's formula", allow_abbrev=False
    )
    states.add_argument("records", type=Path, nargs="+", help="folders of run directories")
    states.set_defaults(call=_model_states)

    parity = commands.add_parser(
        "parity", help="table of how far each strategy's steps are from ddp's", allow_abbrev=False
    )
    parity.add_argument("records", type=Path, nargs="+", help="folders of run directories")
    parity.set_defaults(call=_parity)

    losses = commands.add_parser("losses", help="table of what each run learned", allow_abbrev=False)
    losses.add_argument("records", type=Path, nargs="+", help="folders of run directories")
    losses.set_defaults(call=_losses)

    extensions = commands.add_parser(
        "extensions", help="build the DeepSpeed extensions that offload needs, once", allow_abbrev=False
    )
    extensions.set_defaults(call=_extensions)

    if arguments[:1] == ["train"]:  # its flags are RunConfig's fields
        return _train(arguments[1:])
    options = parser.parse_args(arguments)
    return options.call(options)


def _train(arguments: list[str]) -> int:
    from study import launch, strategy

    parser = flag_parser(prog="zero-study train", description="Check, launch and record one run.")
    parser.add_argument("--strategy", help=f"a file, or one of {', '.join(strategy.names())} (default: single)")
    parser.add_argument("--num-processes", help="processes to launch (default: what the strategy's file says)")
    parser.add_argument("--timeout", help="seconds after which the run is ended (default: none)")
    flags = vars(parser.parse_args(arguments))
    chosen = strategy.read_strategy(strategy.find_strategy(flags.pop("strategy", "single")))
    num_processes = _positive("--num-processes", flags.pop("num_processes", chosen.num_processes))
    timeout = flags.pop("timeout", None)
    timeout = None if timeout is None else _positive("--timeout", timeout)
    config = build_config(**flags)
    asked = strategy.Launch(chosen, num_processes, chosen.num_machines)
    run_dir = config.output_dir or strategy.default_output_dir(config, asked)
    strategy.check_output_dir(run_dir)
    strategy.check(config, chosen, num_processes, chosen.num_machines)

    own = {"--strategy", "--num-processes", "--timeout", "--output-dir"}
    outcome = launch.launch(
        chosen.path,
        num_processes,
        _without(arguments, own),
        run_dir,
        timeout,
        lambda line: print(f"  {line}", flush=True),
    )
    if outcome.status == "refused":
        raise Refusal(outcome.message)
    print(f"{outcome.status}: {outcome.message}" + (f" ({outcome.record_path})" if outcome.record_path else ""))
    return 0 if outcome.status == "ok" else 1


def _positive(flag: str, value: str | int) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise Refusal(f"{flag} {value}: must be a whole number of at least 1")
    return number


def _without(arguments: list[str], flags: set[str]) -> list[str]:
    """The arguments without these flags and their values, in either form."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        if skip:
            skip = False
        elif word in flags:
            skip = True
        elif word.partition("=")[0] not in flags:
            kept.append(word)
    return kept


def _run(options: argparse.Namespace) -> int:
    from study import launch, matrix, strategy

    study = matrix.find(options.study)
    planned = [r for r in matrix.runs(study, options.data_dir) if options.only in r.run_id]
    if not planned:
        raise Refusal(f"--only {options.only}: no run of study {options.study!r} has that in its id")
    print(f"{study.name}: {study.question}\n{len(planned)} runs into {options.runs_dir / study.name}")
    rows: list[list[str]] = []
    failed = 0
    started = time.monotonic()
    for number, run in enumerate(planned, 1):
        run_dir = options.runs_dir / study.name / run.run_id
        head = f"[{number}/{len(planned)}] {run.run_id}"
        path = run_dir / "record.json"
        if path.exists() and _is_this_run(run, path):
            outcome = launch.Outcome("ok", "kept", path)
        else:
            path.unlink(missing_ok=True)
            try:
                chosen = strategy.read_strategy(strategy.find_strategy(run.strategy))
                strategy.check(build_config(**run.flags), chosen, run.num_processes, chosen.num_machines)
            except Refusal as refusal:
                outcome = launch.Outcome("skipped", str(refusal), None)
            else:
                outcome = launch.launch(
                    chosen.path, run.num_processes, run.arguments(), run_dir, options.timeout,
                    lambda line, head=head: print(f"{head}: {line}", flush=True),
                )  # fmt: skip
        failed += outcome.status not in ("ok", "skipped")
        print(f"{head}: {outcome.status}, {outcome.message} ({time.monotonic() - started:.0f} s so far)", flush=True)
        rows.append(_row(run, outcome))
    print()
    _print_table(
        ["workload", "strategy", "processes", "final loss", "model states", "collectives", "s/step", "record"], rows
    )
    print("model states: MiB per rank as the optimizer steps; collectives: MiB per rank and step, all-reduces twice")
    return 1 if failed else 0


def _is_this_run(run: matrix.Run, path: Path) -> bool:
    """Whether a finished run is the planned one. Raises Refusal where it is another that has its name."""
    from study import record

    finished = record.read(path)
    planned = build_config(**run.flags).model_dump(mode="json")
    for name in set(planned) - {"output_dir"}:
        if finished.config[name] != planned[name]:
            raise Refusal(
                f"{path}: holds a run with {name}={finished.config[name]!r}, the study plans {planned[name]!r}; "
                "pass another --runs-dir, or delete it"
            )
    return finished.status == "ok"


def _row(run: matrix.Run, outcome: launch.Outcome) -> list[str]:
    from study import record

    start = [run.flags["workload"], run.strategy, str(run.num_processes)]
    if outcome.status != "ok":
        return [*start, outcome.status, "", "", "", outcome.message.splitlines()[0]]
    facts = record.read(outcome.record_path)
    states = max(s.parameters + s.gradients + s.optimizer_states for s in facts.model_state_bytes)
    collectives = sum(c.bytes * (2 if c.kind == "all_reduce" else 1) for c in facts.collectives_per_step)
    seconds = facts.timing.median_seconds
    return [
        *start,
        f"{facts.final_loss:.4f}",
        f"{states / 2**20:.2f}",
        f"{collectives / 2**20:.2f}",
        "" if seconds is None else f"{seconds:.3f}",
        str(outcome.record_path),
    ]


def _print_table(head: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _collect(options: argparse.Namespace) -> int:
    from study.compare import collect

    collect.collect(options.runs, options.records)
    return 0


def _model_states(options: argparse.Namespace) -> int:
    from study.compare import model_states

    print(model_states.table(options.records))
    return 0


def _parity(options: argparse.Namespace) -> int:
    from study.compare import parity

    print(parity.table(options.records))
    return 0


def _losses(options: argparse.Namespace) -> int:
    from study.compare import losses

    print(losses.table(options.records))
    return 0


def _extensions(options: argparse.Namespace) -> int:
    from study import extensions

    return extensions.build()
