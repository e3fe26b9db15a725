"""When was an expectation fixed, and what was changed of it since? A later change is a correction, which is listed.

frozen.json has the digest of each expectation and the day on which it was frozen; `zero-study claims --write` adds new
ones and changes none. corrections.yaml lists the changes: those from before there was freezing, taken from the history
of the ledger, and every one since, with the digest of what it made of the expectation.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter

from study import files
from study.claims.ledger import Arithmetic, Claim, Source
from study.claims.rules.execution import Text
from study.errors import refusing
from study.files import Written
from study.records import machine

T = TypeVar("T")

FROZEN = Path(__file__).parent / "frozen.json"
CORRECTIONS = Path(__file__).parent / "corrections.yaml"


class Correction(Written):
    """One expectation that was changed, added or taken out after it had been decided."""

    id: Text  # the claim's
    on: Text  # the day
    before: Text  # the expectation and, where that changed, how it was decided
    after: Text
    was: Text | None  # its verdict before; None: it was not known
    became: Text | None  # and after; None: the claim was taken out, or its verdict is the ledger's
    why: Text
    sha256: str | None = None  # of the expectation that it made; None: from before there was freezing, or gone
    gone: bool = False  # the claim was taken out


class Frozen(Written):
    """One expectation as it was first written down."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    on: Text
    after: Text  # the commit on top of which it was frozen


def digest(source: Source, claim: Claim) -> str:
    """Of what a verdict hangs on: words, conditions, expectation, rule and its numbers, being a headline."""
    content = claim.model_dump(mode="json", include={"phrase", "conditions", "expected", "rule"})
    if isinstance(claim.rule, Arithmetic):
        named = re.findall(r"[A-Za-z_]\w*", claim.rule.formula)
        content["numbers"] = {name: source.numbers[name] for name in sorted(set(named)) if name in source.numbers}
    content["headline"] = claim.id in {sentence.readings[0] for sentence in source.sentences}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read(path: Path = FROZEN) -> dict[str, Frozen]:
    """Read what is frozen; nothing where there is no file. Raises Refusal."""
    return _checked(TypeAdapter(dict[str, Frozen]), files.load(path, "what is frozen") if path.exists() else {}, path)


def corrections(path: Path = CORRECTIONS) -> list[Correction]:
    """Read the corrections, in the order of the file. Raises Refusal."""
    listed = files.read_yaml(path, path.parent).get("corrections", [])
    return _checked(TypeAdapter(list[Correction]), listed, path)


def _checked(kind: TypeAdapter[T], content: Any, path: Path) -> T:
    with refusing(str(path)):
        return kind.validate_python(content)


def changed(sources: list[Source], frozen: dict[str, Frozen], listed: list[Correction]) -> dict[str, str]:
    """By claim: an expectation that is not what was frozen, and of which no correction says so."""
    last = {correction.id: correction for correction in listed if correction.sha256 or correction.gone}
    found = {}
    now = {claim.id: digest(source, claim) for source in sources for claim in source.claims}
    for name, sha256 in now.items():
        if name not in frozen:
            found[name] = "is not frozen yet; run `zero-study claims --write`"
        elif sha256 != (last[name].sha256 if name in last else frozen[name].sha256):
            found[name] = (
                f"has another expectation than was frozen on {frozen[name].on} or last listed; list it in "
                f"{CORRECTIONS.name} with sha256: {sha256}"
            )
    for name in frozen.keys() - now.keys():
        if name not in last or not last[name].gone:
            found[name] = f"was frozen on {frozen[name].on} and is gone; list it in {CORRECTIONS.name} with gone: true"
    return found


def write(sources: list[Source], path: Path = FROZEN) -> None:
    """Freeze what is not frozen yet, and leave the rest as it is."""
    known = read(path)
    today, commit = (
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        machine.git_state()["git_commit"] or "unknown",
    )
    for source in sources:
        for claim in source.claims:
            known.setdefault(claim.id, Frozen(sha256=digest(source, claim), on=today, after=commit))
    files.write_json(path, {name: known[name].model_dump() for name in sorted(known)})
