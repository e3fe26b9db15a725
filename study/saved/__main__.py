"""Check a checkpoint or a saved model: `python -m zero_study.saved FOLDER`.

The exit statuses are those of `zero-study saved`: 0 nothing is wrong, 1 something is wrong, 2 the folder is refused,
3 it could not be checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import terminal
from ..answers import envelope
from ..answers.envelope import Answer
from ..errors import Refusal
from ..verdict import REFUSED
from .command import command


def main(words: Sequence[str] | None = None) -> None:
    """Check a folder, and exit with the status of `zero-study saved`."""
    parser = argparse.ArgumentParser("python -m zero_study.saved", allow_abbrev=False, description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of a checkpoint, a saved model or an adapter")
    parser.add_argument("--against", type=Path, help="another such folder, or a recording of `zero-study diff`")
    parser.add_argument("--model", type=Path, help="folder with the config.json of the model, or of an adapter's base")
    parser.add_argument("--strict", action="store_true", help="exit with status 3 if something was not checked")
    parser.add_argument("--trust-pickle", action="store_true", help="also load files that run code when loaded")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args(words)
    try:
        result = command(
            arguments.folder,
            arguments.against,
            arguments.model,
            arguments.strict,
            arguments.trust_pickle,
            arguments.json,
        )
        status = result.status
        if isinstance(result, Answer):
            print(result.text())
    except Refusal as refusal:
        message = " ".join(str(refusal).split())
        status = REFUSED
        if arguments.json:
            print(envelope.error("saved", "refused", message, status).text())
        else:
            terminal.print_error(message)
    sys.exit(status)


if __name__ == "__main__":
    main()
