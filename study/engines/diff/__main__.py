"""`python -m zero_study.diff --output a train.py`: a recording of a script in which nothing was written for it.

Also `accelerate launch -m zero_study.diff --output a train.py` and `torchrun -m zero_study.diff ...`. With
`--noise 1` its results are rounded otherwise, and go into a/noise-1: what the comparison takes its bound from.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .. import scripts
from . import NUM_STEPS
from .recording import Recorder


def main(words: Sequence[str] | None = None) -> None:
    """Run a script as Python would, and record its first optimizer steps."""
    parser = argparse.ArgumentParser("python -m zero_study.diff", allow_abbrev=False, description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the recording, a file for each rank")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="optimizer steps to record")
    parser.add_argument("--noise", type=int, help="number of a run whose results are rounded otherwise")
    parser.add_argument("--whole", metavar="NAME", help="keep what begins with this name as it is, not sketches alone")
    given = scripts.parse(parser, words)
    recorder = Recorder(given.output, given.steps, given.noise, given.whole)
    try:
        scripts.run(given.script, given.arguments)
    except BaseException as raised:
        recorder.end(raised)
        raise
    recorder.end()


if __name__ == "__main__":
    main()
