"""Run the program of the source a100-replication, as published and corrected, and the parity traps.

python tools/measure/published protocol --output FILE
python tools/measure/published traps --output FILE
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from study import config
from zero_study import command_line
from zero_study.errors import run_command

PATH, NUMBER = click.Path(path_type=Path), click.IntRange(1)


@click.group(no_args_is_help=False, context_settings={"show_default": True})
def published() -> None:
    """Run what others published, as it is and mended. What --output has already is kept."""


@published.command("protocol")
@click.option("--size", default="tiny", help="size of BERT (published: large)")
@click.option("--epochs", type=NUMBER, default=1, help="as printed: 1; of its figure 1: 5")
@click.option("--data", type=click.Choice(("bundled", "hub", "files")), default="bundled", help="where text comes from")
@click.option("--data-dir", type=PATH, help="folder with imdb/ and tokenizers/, for --data files")
@click.option("--num-train-examples", type=NUMBER, default=800, help="reviews trained on")
@click.option("--num-eval-examples", type=NUMBER, default=200, help="reviews of the published evaluation")
@click.option("--repeats", type=NUMBER, default=5, help="starts of each program")
@click.option("--program", "programs", multiple=True, metavar="NAME", help="only this one, again for more")
@click.option("--output", type=PATH, required=True, help="JSON file")
def _protocol(repeats: int, programs: tuple[str, ...], output: Path, **flags: Any) -> None:
    """Run the a100-replication's program as published, and mended step by step."""
    from published import protocol

    protocol.measure(config.build_config("paper", **command_line.given(flags)), repeats, programs, output)


@published.command("traps")
@click.option("--data-dir", type=PATH, help="folder with imdb/ and tokenizers/ [default: the bundled sample]")
@click.option("--seeds", "num_seeds", type=NUMBER, default=5, help="number of seeds, from 0; an interval needs two")
@click.option("--trap", "names", multiple=True, metavar="NAME", help="only this one, again for more [default: all]")
@click.option("--output", type=PATH, required=True, help="JSON file")
def _traps(data_dir: Path | None, num_seeds: int, names: tuple[str, ...], output: Path) -> None:
    """Measure the difference that each parity trap makes between runs that read as the same training."""
    from published import traps

    traps.measure(names, num_seeds, data_dir, output)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # which has this package
    run_command(published)
