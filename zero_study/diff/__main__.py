"""Record a training script without changing it: `python -m zero_study.diff --output a train.py`.

On several processes: `accelerate launch -m zero_study.diff --output a train.py` or `torchrun -m zero_study.diff ...`.
With `--noise 1`, every result is rounded up or down at random, and the recording is written to a/noise-1. The
comparison uses such runs to measure the effect of rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .. import terminal
from ..errors import Refusal, exit_if_missing
from ..verdict import REFUSED
from . import NUM_STEPS

with exit_if_missing(is_command=__name__ == "__main__"):
    from ..engines import scripts
    from .recording import Recorder


def run_command() -> None:
    """Execute the command line of this process. A refused request prints one error and ends with exit status 2."""
    try:
        main()
    except Refusal as refusal:
        terminal.print_error(refusal)
        sys.exit(REFUSED)


def main(words: Sequence[str] | None = None) -> None:
    """Run a training script as Python would, and record its first optimizer steps."""
    parser = scripts.Parser("python -m zero_study.diff", allow_abbrev=False, description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write, with one file per rank")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="number of optimizer steps to record")
    parser.add_argument("--noise", type=int, help="record a run with random rounding, of this number")
    parser.add_argument("--whole", metavar="NAME", help="also keep complete tensors whose names begin with this")
    given = scripts.parse(parser, words)
    recorder = Recorder(given.output, given.steps, given.noise, given.whole, given.script, given.arguments)
    try:
        scripts.run(given.script, given.arguments)
    except BaseException as raised:
        recorder.end(raised)
        raise
    recorder.end()


if __name__ == "__main__":
    run_command()
