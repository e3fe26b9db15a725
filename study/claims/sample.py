"""What did a second reader decide, who saw neither verdicts nor rules? A seeded sample, and what was done about it.

sample.yaml holds it: the day, the seed, and for each sentence what the reader decided, why, and, where that was not
the ledger's, what was done.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import ValidationError

from study import files
from study.claims.ledger import Held
from study.claims.rules.execution import Text
from study.errors import Refusal, describe
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
    try:
        return Sample.model_validate(files.read_yaml(path, path.parent))
    except ValidationError as error:
        raise Refusal(describe(error, str(path))) from None


def draw(names: list[str], size: int, seed: int) -> list[str]:
    """Which of these sentences a sample of this size and seed has, in their own order."""
    chosen = np.random.default_rng(seed).choice(len(names), size=min(size, len(names)), replace=False)
    return [names[index] for index in sorted(chosen)]
