"""Define the command that trains with exact arithmetic and compares every bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zero_study import files
from zero_study.cli.options import PATH, TRAINING, Statuses, command, json_option, require

if TYPE_CHECKING:
    from zero_study.answers.envelope import Answer
    from zero_study.verdict import Verdict


@command(
    "exact",
    "Do all strategies train bitwise identical weights?",
    "exact --quick",
    statuses=Statuses(
        "every training has the bits of the reference, and every planted fault was found",
        "the bits of a training differ, or a planted fault was not found",
        "the request is refused",
        "a strategy that --only names could not be trained",
    ),
)
@click.option(
    "--only",
    multiple=True,
    metavar="NAMES",
    help="Train only these strategies, separated by commas. The option can be repeated. [default: all]",
)
@click.option("--ranks", metavar="NUMBERS", help="Numbers of processes, separated by commas. [default: 1,2,3,4,8]")
@click.option("--quick", is_flag=True, help="Train only five strategies, on two and three processes.")
@click.option(
    "--faults",
    "with_faults",
    is_flag=True,
    help="Also train with deliberate faults, and check that each fault is found.",
)
@click.option(
    "--fault",
    "fault_names",
    multiple=True,
    metavar="TEXT",
    help="Train only with the deliberate faults whose names contain this text. The option can be repeated.",
)
@click.option("--output", type=PATH, metavar="FILE", help="JSON file to write.")
@json_option
def _exact(
    only: tuple[str, ...],
    ranks: str | None,
    quick: bool,
    with_faults: bool,
    fault_names: tuple[str, ...],
    output: Path | None,
    as_json: bool,
) -> Verdict | Answer:
    """Check whether all strategies train bitwise identical weights.

    The command trains a model whose sums are never rounded, with every strategy of this project. Every gradient, weight
    and momentum must be bitwise equal to that of a reference, which computes in integers. It runs on a CPU and takes
    some minutes.
    """
    if output is not None:
        files.require_folder(output)
    require(*TRAINING, "deepspeed")
    from study.exact import command as exact_command

    return exact_command.run(
        quick=quick, only=only, ranks=ranks, with_faults=with_faults, fault_names=fault_names, output=output,
        as_json=as_json,
    )  # fmt: skip


COMMANDS = (_exact,)
