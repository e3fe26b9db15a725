"""What can be asked on the command line? Each subcommand parses, calls one function and prints."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import get_args

from study.config import Parser, Precision, build_config, flag_parser
from study.errors import Refusal

# The tables of `zero-study compare`.
VIEWS = (
    "differences",
    "largest-batch",
    "scaling",
    "model-states",
    "communication",
    "peaks",
    "parity",
    "losses",
    "answer",
)

CLAIM_VERDICTS = ("replicated", "differs", "inconsistent", "outdated", "not tested here")

LARGEST_NUMBER = 1_000_000_000


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
        "memory, say); 3 some run has no outcome yet (interrupted, --minutes or --fail-fast); 2 refused.",
        allow_abbrev=False,
    )
    _add_study_options(study)
    study.add_argument(
        "--fail-fast",
        action="store_true",
        help="start no run after one that is neither ok nor out of memory",
    )
    study.add_argument(
        "--minutes",
        help="stop in time: start no run that is not expected to end so many minutes from now, and none that failed "
        "(default: none)",
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

    report = commands.add_parser(
        "report",
        help="make the pages of a study from its records; without a study: those that need no runs, and the index",
        allow_abbrev=False,
    )
    report.add_argument("study", nargs="?", help="a study that the project ships, or a YAML file of your own")
    report.add_argument(
        "--records",
        type=Path,
        action="append",
        help="folder of runs or records; several times for several boxes (default: runs/STUDY)",
    )
    report.add_argument("--output", type=Path, help="where the pages go (default: reports/STUDY, or reports)")
    report.set_defaults(call=_report)

    pack = commands.add_parser("pack", help="put a box's records into one file, with their digests", allow_abbrev=False)
    pack.add_argument("records", type=Path, nargs="+", help="folders of run directories or of collected records")
    pack.add_argument("file", type=Path, help="the file to write, for instance my-box.zip")
    pack.set_defaults(call=_pack)

    merge = commands.add_parser("merge", help="take a packed file's records into a folder", allow_abbrev=False)
    merge.add_argument("file", type=Path, help="a file that `zero-study pack` wrote")
    merge.add_argument("records", type=Path, help="folder to take them into, for instance reports/STUDY/records/my-box")
    merge.set_defaults(call=_merge)

    advice = commands.add_parser(
        "advise",
        help="predict every strategy for a model and GPUs: memory, time, price, and which to take",
        epilog="Without --model: the largest model for the GPUs. Without --gpus: the fewest GPUs for the model.",
        allow_abbrev=False,
    )
    advice.add_argument("--model", help="a known name (gpt2-xl, llama-2-7b ...), a hub id or a config.json")
    advice.add_argument(
        "--gpu", required=True, help="t4, l4, a10g, v100-16gb, a100-40gb, a100-80gb, h100-sxm, h200 ..."
    )
    advice.add_argument("--gpus", help="how many")
    advice.add_argument("--sequence-length", help="tokens (default: 1024, or as many as the model has positions)")
    advice.add_argument("--global-batch-size", help="sequences per optimizer step (default: 8 per GPU)")
    advice.add_argument("--strategy", help="only this one: a name or a file")
    advice.add_argument(
        "--micro-batch-size", help="sequences per GPU and forward pass (default: the fastest that fits)"
    )
    advice.add_argument("--gradient-accumulation-steps", help="micro steps (default: what the batch sizes leave)")
    advice.add_argument(
        "--precision",
        choices=[*get_args(Precision), "pure-bf16"],
        help="(default: bf16 where the GPU has it, else fp16)",
    )
    advice.add_argument(
        "--activation-checkpointing",
        action=argparse.BooleanOptionalAction,
        help="recompute each block (default: where it makes a strategy fit, or faster)",
    )
    advice.add_argument(
        "--kernels",
        choices=("fused", "transformers"),
        default="fused",
        help="as LLM Foundry has them, or those of transformers (default: fused)",
    )
    advice.add_argument("--json", action="store_true", help="print bytes and seconds as JSON")
    advice.add_argument("--write", type=Path, metavar="FILE", help="also write the recommended accelerate file")
    advice.set_defaults(call=_advise)

    predict = commands.add_parser(
        "predict",
        help="predict a study's runs on a box that nobody here has; without a study, all of the reports'",
        allow_abbrev=False,
    )
    predict.add_argument("study", nargs="?", help="a study that the project ships, or a YAML file of your own")
    predict.add_argument("--gpu", help="as `zero-study advise` names it")
    predict.add_argument("--gpus", help="how many (default: 1)")
    predict.add_argument(
        "--output", type=Path, default=Path("reports/predicted"), help="folder to write to (default: reports/predicted)"
    )
    predict.set_defaults(call=_predict)

    claims = commands.add_parser(
        "claims",
        help="print what others have published, claim by claim, and what became of it",
        epilog="Exit status of --check: 1 where a committed verdict no longer follows from records and theory.",
        allow_abbrev=False,
    )
    claims.add_argument("--source", help="only this source's")
    claims.add_argument("--verdict", choices=CLAIM_VERDICTS, help="only claims with this verdict")
    claims.add_argument("--json", action="store_true", help="print everything that is known of each claim as JSON")
    claims.add_argument("--check", action="store_true", help="decide every claim again, and list what has changed")
    claims.add_argument("--write", action="store_true", help="decide every claim again, and commit the verdicts")
    claims.set_defaults(call=_claims)

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
    from study.preflight import checks
    from study.run import default_output_dir
    from study.running import launch
    from study.strategy import file
    from study.training import request

    parser = flag_parser(prog="zero-study train", description="Check, launch and record one run.")
    parser.add_argument("--strategy", help=f"a file, or one of {', '.join(file.names())} (default: single)")
    parser.add_argument("--num-processes", help="processes to launch (default: what the strategy's file says)")
    parser.add_argument("--timeout", help="seconds after which the run is ended (default: none)")
    flags = vars(parser.parse_args(arguments))
    chosen = file.read_strategy(file.find_strategy(flags.pop("strategy", "single")))
    num_processes = _positive("--num-processes", flags.pop("num_processes", chosen.num_processes))
    timeout = flags.pop("timeout", None)
    timeout = None if timeout is None else _positive("--timeout", timeout)
    config = build_config(**flags)
    asked = request.Launch(chosen, num_processes, chosen.num_machines)
    run_dir = config.output_dir or default_output_dir(config, asked)
    checks.check_output_dir(run_dir)
    checks.check(config, chosen, num_processes, chosen.num_machines)

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
    if number > LARGEST_NUMBER:
        raise Refusal(f"{flag} {value}: is more than anybody has; {LARGEST_NUMBER:,} is the most")
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
    from study.running import plan, studies

    study = studies.find(options.study)
    runs = plan.select(study, options.data_dir, options.only)
    timeout = _positive("--timeout", options.timeout)
    print(plan.show(plan.make(study, runs, options.runs_dir / study.name, timeout)))
    return 0


def _run(options: argparse.Namespace) -> int:
    from study.running import plan, runner, studies

    study = studies.find(options.study)
    runs = plan.select(study, options.data_dir, options.only)
    timeout = _positive("--timeout", options.timeout)
    slot_seconds = math.inf if options.minutes is None else 60.0 * _positive("--minutes", options.minutes)
    return runner.run(study, runs, options.runs_dir / study.name, timeout, options.fail_fast, slot_seconds)


def _collect(options: argparse.Namespace) -> int:
    from study.records import collect

    collect.collect(options.runs, options.records)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from study.compare import answer, communication, losses, model_states, parity, peaks, text

    views = {
        "differences": lambda folders: text.differences(folders, options.control),
        "largest-batch": text.largest_batch,
        "scaling": text.scaling,
        "model-states": model_states.table,
        "communication": communication.table,
        "peaks": peaks.table,
        "parity": parity.table,
        "losses": losses.table,
        "answer": lambda folders: answer.table(folders, options.control),
    }
    print(views[options.view](options.records))
    return 0


def _report(options: argparse.Namespace) -> int:
    from study.report import build as report
    from study.running import studies

    if options.study is None:
        if options.records:
            raise Refusal("--records goes with a study; name one, or leave it out for the pages that need no runs")
        print(report.build_site(options.output or Path("reports")))
        return 0
    name = studies.find(options.study).name
    folders = options.records or [Path("runs") / name]
    print(report.build(options.study, folders, options.output or Path("reports") / name))
    return 0


def _advise(options: argparse.Namespace) -> int:
    import json

    from study import planner
    from study.planner import say

    if options.model is None and options.gpus is None:
        raise Refusal("--model or --gpus is missing: a model for its GPUs, GPUs for their model, or both")
    numbers = ("sequence_length", "global_batch_size", "micro_batch_size", "gradient_accumulation_steps")
    given = {name: getattr(options, name) for name in numbers}
    asked = planner.Asked(
        gpu=options.gpu,
        num_gpus=1 if options.gpus is None else _positive("--gpus", options.gpus),
        strategy=options.strategy,
        precision=options.precision,
        activation_checkpointing=options.activation_checkpointing,
        kernels=options.kernels,
        **{
            name: None if value is None else _positive("--" + name.replace("_", "-"), value)
            for name, value in given.items()
        },
    )
    if options.write is not None and None in (options.model, options.gpus):
        raise Refusal(f"--write {options.write}: needs both --model and --gpus")
    if options.write is not None:
        say.check_free(options.write)
    if options.model is None:
        found = planner.largest_models(asked)
        text, content = say.text_of_largest, say.content_of_largest
    elif options.gpus is None:
        found = planner.fewest_gpus(options.model, asked)
        text, content = say.text_of_fewest, say.content_of_fewest
    else:
        found = planner.advise(options.model, asked)
        text, content = say.text, say.content
    print(json.dumps(content(found), indent=1) if options.json else text(found))
    if options.write is not None:
        say.write(found, options.write)
        if not options.json:
            print(f"\nWritten: {options.write}")
    return 0


def _predict(options: argparse.Namespace) -> int:
    from study.planner import predictions
    from study.running import studies

    if options.study is None:
        if options.gpu or options.gpus:
            raise Refusal("--gpu and --gpus go with a study; name one, or leave them out for all of the reports'")
        for path in predictions.write_all(options.output):
            print(path)
        return 0
    if options.gpu is None:
        raise Refusal("--gpu is missing: predict STUDY --gpu a100-80gb --gpus 8")
    num_gpus = _positive("--gpus", options.gpus or 1)
    print(
        predictions.write(options.output, predictions.predict_study(studies.find(options.study), options.gpu, num_gpus))
    )
    return 0


def _claims(options: argparse.Namespace) -> int:
    import json

    from study.claims import verdicts
    from study.planner import say

    if options.check or options.write:
        if options.source or options.verdict or options.json or (options.check and options.write):
            raise Refusal("--check and --write decide every claim; give one of them alone")
        now = verdicts.decide_all()
        if options.write:
            verdicts.write(now)
            print(f"{verdicts.VERDICTS}: {len(now)} verdicts")
            return 0
        changed = verdicts.stale(verdicts.read(), now)
        for name, what in changed.items():
            print(f"{name}: {what}")
        print(f"{len(changed)} of {len(now)} verdicts no longer follow" if changed else f"{len(now)} verdicts follow")
        return 1 if changed else 0
    found = say.committed(options.source, options.verdict)
    print(json.dumps(say.content(found), indent=1, ensure_ascii=False) if options.json else say.text(found))
    return 0


def _pack(options: argparse.Namespace) -> int:
    from study.records import pack

    pack.pack(options.records, options.file)
    return 0


def _merge(options: argparse.Namespace) -> int:
    from study.records import pack

    pack.merge(options.file, options.records)
    return 0


def _extensions(options: argparse.Namespace) -> int:
    from study.preflight import extensions

    return extensions.build()
