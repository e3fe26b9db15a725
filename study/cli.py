"""What can be asked on the command line? Each subcommand parses, calls one function and prints."""

from __future__ import annotations

import argparse
from pathlib import Path

from study.config import Parser, Refusal, build_config, flag_parser

# The tables of `zero-study compare`.
VIEWS = ("differences", "largest-batch", "scaling", "model-states", "parity", "losses", "answer")


def run(arguments: list[str]) -> int:
    """Run one subcommand; return the exit status."""
    parser = Parser(prog="zero-study", description="The ZeRO replication study.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("train", help="check, launch and record one run", add_help=False, allow_abbrev=False)

    plan = commands.add_parser(
        "plan",
        help="list a study's runs in their order: what is kept, what is skipped and why, how long the rest takes",
        allow_abbrev=False,
    )
    _add_study_options(plan)
    plan.set_defaults(call=_plan)

    study = commands.add_parser(
        "run",
        help="run a study's runs one after another; finished ones are kept",
        epilog="Exit status: 0 every run is ok or skipped; 1 every run has an outcome, and some are not ok (out of "
        "memory, say); 3 some run has no outcome yet (interrupted, or --fail-fast); 2 refused.",
        allow_abbrev=False,
    )
    _add_study_options(study)
    study.add_argument(
        "--fail-fast",
        action="store_true",
        help="start no run after one that is neither ok nor out of memory",
    )
    study.set_defaults(call=_run)

    collect = commands.add_parser(
        "collect", help="copy the records and steps of finished runs into a folder to commit", allow_abbrev=False
    )
    collect.add_argument("runs", type=Path, help="folder of run directories")
    collect.add_argument("records", type=Path, help="folder to copy into, for instance reports/cpu/records")
    collect.set_defaults(call=_collect)

    compare = commands.add_parser(
        "compare", help="compare runs with the control, with intervals and verdicts, as Markdown", allow_abbrev=False
    )
    compare.add_argument("records", type=Path, nargs="+", help="folders of run directories or of collected records")
    compare.add_argument("--view", choices=VIEWS, default="differences", help="which table (default: differences)")
    compare.add_argument("--control", default="ddp", help="the strategy to compare with (default: ddp)")
    compare.set_defaults(call=_compare)

    report = commands.add_parser("report", help="execute the notebooks on a study's records: pages", allow_abbrev=False)
    report.add_argument("study", help="a study that the project ships, or a YAML file of your own")
    report.add_argument(
        "--records",
        type=Path,
        action="append",
        help="folder of runs or records; several times for several boxes (default: runs/STUDY)",
    )
    report.add_argument("--output", type=Path, help="where the pages go (default: reports/STUDY)")
    report.set_defaults(call=_report)

    pack = commands.add_parser("pack", help="put a box's records into one file, with their digests", allow_abbrev=False)
    pack.add_argument("records", type=Path, nargs="+", help="folders of run directories or of collected records")
    pack.add_argument("file", type=Path, help="the file to write, for instance my-box.zip")
    pack.set_defaults(call=_pack)

    merge = commands.add_parser("merge", help="take a packed file's records into a folder", allow_abbrev=False)
    merge.add_argument("file", type=Path, help="a file that `zero-study pack` wrote")
    merge.add_argument("records", type=Path, help="folder to take them into, for instance reports/STUDY/records/my-box")
    merge.set_defaults(call=_merge)

    extensions = commands.add_parser(
        "extensions", help="build the DeepSpeed extensions that offload needs, once", allow_abbrev=False
    )
    extensions.set_defaults(call=_extensions)

    if arguments[:1] == ["train"]:  # its flags are RunConfig's fields
        return _train(arguments[1:])
    options = parser.parse_args(arguments)
    return options.call(options)


def _add_study_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", help="a study that the project ships (studies/), or a YAML file of your own")
    parser.add_argument("--data-dir", type=Path, help="folder with imdb/, wikitext-2/ and tokenizers/, for real text")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run directories go (default: runs)")
    parser.add_argument("--only", default="", help="only runs whose id contains this")
    parser.add_argument("--timeout", default=1800, help="seconds after which one run is ended (default: 1800)")


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
    ended = launch.launch(
        chosen.path,
        num_processes,
        _without(arguments, own),
        run_dir,
        timeout,
        lambda line: print(f"  {line}", flush=True),
    )
    if ended.status == "misconfigured" and ended.record_path is None:
        raise Refusal(ended.message)
    print(f"{ended.status}: {ended.message}" + (f" ({ended.record_path})" if ended.record_path else ""))
    if ended.status == "crashed":
        print("\n".join([" ".join(ended.command), *ended.stderr_tail]))
    return 0 if ended.status == "ok" else 1


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


def _plan(options: argparse.Namespace) -> int:
    from study import matrix, plan

    study = matrix.find(options.study)
    runs = plan.select(study, options.data_dir, options.only)
    timeout = _positive("--timeout", options.timeout)
    print(plan.show(plan.make(study, runs, options.runs_dir / study.name, timeout)))
    return 0


def _run(options: argparse.Namespace) -> int:
    from study import matrix, plan, runner

    study = matrix.find(options.study)
    runs = plan.select(study, options.data_dir, options.only)
    timeout = _positive("--timeout", options.timeout)
    return runner.run(study, runs, options.runs_dir / study.name, timeout, options.fail_fast)


def _collect(options: argparse.Namespace) -> int:
    from study.compare import collect

    collect.collect(options.runs, options.records)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from study.compare import answer, losses, model_states, parity, text

    views = {
        "differences": lambda folders: text.differences(folders, options.control),
        "largest-batch": text.largest_batch,
        "scaling": text.scaling,
        "model-states": model_states.table,
        "parity": parity.table,
        "losses": losses.table,
        "answer": lambda folders: answer.table(folders, options.control),
    }
    print(views[options.view](options.records))
    return 0


def _report(options: argparse.Namespace) -> int:
    from study import matrix, report

    name = matrix.find(options.study).name
    folders = options.records or [Path("runs") / name]
    print(report.build(options.study, folders, options.output or Path("reports") / name))
    return 0


def _pack(options: argparse.Namespace) -> int:
    from study.compare import pack

    pack.pack(options.records, options.file)
    return 0


def _merge(options: argparse.Namespace) -> int:
    from study.compare import pack

    pack.merge(options.file, options.records)
    return 0


def _extensions(options: argparse.Namespace) -> int:
    from study import extensions

    return extensions.build()
