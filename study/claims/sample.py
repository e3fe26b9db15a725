"""What did a second reader decide, who saw neither verdicts nor rules? A seeded sample, and what was done about it.

sample.yaml holds it: the day, the seed, and for each sentence what the reader decided, why, and, where that was not
the ledger's, what was done.
"""

from __future__ import annotations

from pathlib import Path

from study import files
from study.claims.ledger import Held
from study.claims.rules.execution import Text
from study.errors import refusing
from study.files import Written

SAMPLE = Path(__file__).parent / "sample.yaml"


class Second(Written):
    """One sentence, decided again."""

    id: Text  # of its first reading
    decided: Held  # by the second reader
    why: Text  # in the second reader's words
    was: Held  # the ledger's, when the sample was drawn
    done: Text | None = None  # what was done, where the two differ


class Sample(Written):
    """All of it."""

    on: Text  # the day
    seed: int
    sentences: list[Second]


def read(path: Path = SAMPLE) -> Sample | None:
    """Read the sample; None where there is none yet. Raises Refusal."""
    if not path.exists():
        return None
    content = files.read_yaml(path, path.parent)
    with refusing(str(path)):
        return Sample.model_validate(content)
