"""Does a claim hold? What a rule observed, against what was expected; the committed verdicts and their check."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from study.claims import ledger
from study.claims.ledger import Arithmetic, Claim, Held, OfRecords, Source, Theory, Undecidable
from study.claims.rules import Observed, by_arithmetic, by_execution, by_others
from study.claims.rules.by_execution import Execution
from study.claims.rules.by_others import ByOthers
from study.errors import Refusal, refusing
from study.files import load, write_json

VERDICTS = Path(__file__).parent / "verdicts.json"
AGAIN = "run `zero-study claims --write`"
DIGITS = 6  # of a number that is written: enough to see a change, few enough for the last bits to differ
SAME = 1e-4  # relative; observed values that differ by less are the same on another machine

# A verdict says what came out and by what: a source that agrees with itself is not one that runs agree with.
HOLDS = {
    "record": "reproduced",
    "execution": "works as printed",
    "others": "measured by others to hold",
    "theory": "predicted to hold",
    "arithmetic": "adds up",
    "cited": "matches what it cites",
}
FAILS = {
    "record": "contradicted by runs",
    "execution": "contradicted by today's engine",
    "others": "measured by others to fail",
    "theory": "contradicted by theory",
    "arithmetic": "contradicts itself",
    "cited": "contradicts what it cites",
}
OPEN, NEEDS, NEEDS_SOURCE = "open", "needs hardware", "needs its source"
WORDS = (*HOLDS.values(), *FAILS.values(), OPEN, NEEDS, NEEDS_SOURCE)


def holds(word: str) -> Held:
    """What a verdict comes to."""
    return "yes" if word in HOLDS.values() else "no" if word in FAILS.values() else "open"


UNITS = {"bytes": 1.0, "GB": 1e9, "TB": 1e12, "GiB": 2.0**30}  # of what is observed in bytes, by the unit's first word
WHO: dict[type, str] = {
    Arithmetic: "arithmetic",
    Execution: "today's engine",
    OfRecords: "records",
    ByOthers: "rows of others",
}


class Seen(BaseModel):
    """What was observed, in the unit of the claim."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    value: bool | float | str = Field(union_mode="left_to_right")  # a word: an outcome, or what a rule measured
    low: bool | float | None = Field(union_mode="left_to_right")
    high: bool | float | None = Field(union_mode="left_to_right")
    told: str  # how the interval came about, or what shows the outcome


def _word(text: str) -> str:
    if text not in WORDS:
        raise ValueError(f"verdict {text!r} is none of {', '.join(WORDS)}")
    return text


class Verdict(BaseModel):
    """What became of a claim."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    verdict: Annotated[str, AfterValidator(_word)]
    observed: Seen | None  # None: nothing was
    why: Annotated[str, Field(min_length=1)]
    evidence: list[str]


# ---------------------------------------------------------------- deciding


def decide(source: Source, claim: Claim) -> Verdict:
    """Decide one claim. Raises ValueError where its rule cannot be followed."""
    rule = claim.rule
    if isinstance(rule, Undecidable):
        by = f" ({rule.command})" if rule.command else ""
        word = NEEDS if rule.needs == "hardware" else NEEDS_SOURCE
        return Verdict(verdict=word, observed=None, why=f"It takes {rule.box}: {rule.run}{by}.", evidence=[])
    if isinstance(rule, Arithmetic):
        observed = by_arithmetic.observe(rule.formula, source.numbers)
    elif isinstance(rule, Execution):
        observed = by_execution.observe(claim.id, rule)
    elif isinstance(rule, ByOthers):
        observed = by_others.observe(rule, None if isinstance(claim.expected.value, bool) else claim.expected.band)
    else:
        observed = rule.functions[rule.function](**rule.arguments)
    seen = _seen(observed, claim)
    agrees = _agrees(seen, claim)
    if agrees is False and isinstance(rule, ByOthers) and rule.asks == "one":
        agrees = None  # that nobody measured such a case leaves none out
    by = decided_by(source, claim)
    word = OPEN if agrees is None else HOLDS[by] if agrees else FAILS[by]
    why = _why(claim, seen, agrees)
    if word == FAILS["execution"]:
        why = f"{why[:-1]} (today: {by_execution.versions()})."
    return Verdict(verdict=word, observed=seen, why=why, evidence=list(observed.evidence))


def decided_by(source: Source, claim: Claim) -> str:
    """What decides a claim: the type of its rule, or `cited` where that asks what the source cites."""
    rule = claim.rule
    asks = rule.formula if isinstance(rule, Arithmetic) else rule.function if isinstance(rule, Theory) else ""
    if source.source == ledger.CITED or not re.search(rf"\b({ledger.CITED}|paper)_", asks):
        return rule.type
    return "cited"


def _seen(observed: Observed, claim: Claim) -> Seen:
    expected = claim.expected
    if isinstance(observed.value, str):
        return Seen(value=observed.value, low=None, high=None, told=observed.told)
    if isinstance(expected.value, str) or isinstance(observed.value, bool) != isinstance(expected.value, bool):
        raise ValueError(
            f"expected.value {expected.value!r}: the rule finds {observed.value!r}; they cannot be compared"
        )
    unit = 1.0
    if observed.in_bytes:
        word = expected.unit.split()[0]
        if word not in UNITS:
            raise ValueError(f"expected.unit {expected.unit!r}: begins with none of {', '.join(UNITS)}")
        unit = UNITS[word]

    def rounded(value: float) -> float:
        return value if isinstance(value, bool) else float(f"{value / unit:.{DIGITS}g}")

    low, high = (None, None) if observed.interval is None else map(rounded, observed.interval)
    return Seen(value=rounded(observed.value), low=low, high=high, told=observed.told)


def _agrees(seen: Seen, claim: Claim) -> bool | None:
    """Whether what was observed is what was expected; None where its interval allows both."""
    expected = claim.expected.value
    if isinstance(seen.value, str):
        return seen.value == expected
    low, high = (seen.value if end is None else end for end in (seen.low, seen.high))
    if isinstance(expected, bool):
        return None if low != high else low == expected
    least, most = claim.expected.band
    if least <= low and high <= most:
        return True
    return False if high < least or low > most else None


_DONE = {
    "accepted": "takes the lines, and they are in effect",
    "rejected": "refuses the lines",
    "ignored": "takes the lines, and they are not in effect",
}


def _why(claim: Claim, seen: Seen, agrees: bool | None) -> str:
    """One sentence, from the numbers."""
    value, unit, wanted = claim.expected.value, claim.expected.unit, _wanted(claim)
    who = WHO.get(type(claim.rule), "theory")
    s = "" if who.endswith("s") else "s"
    told = f" ({seen.told})" if seen.told else ""
    if isinstance(seen.value, str):
        them = "them " if value in by_execution.OUTCOMES else ""
        judged = "as the source has it" if agrees else f"where the source has {them}{wanted}"
        return f"{unit}: today's engine {_DONE.get(seen.value, f'gives {seen.value}')}{told}, {judged}."
    if isinstance(seen.value, bool):
        said = f"{unit}: {who} say{s} {_yes(seen.value)}{told}, the source {wanted}"
        return f"{said}." if agrees is not None else f"{said}, but the amounts are too near one another to be sure."
    between = ""
    if seen.low is not None and seen.high is not None and _number(seen.low) != _number(seen.high):
        how = f", {seen.told}" if seen.told else ""
        between = f" (between {_number(seen.low)} and {_number(seen.high)}{how})"
    on_rows = " on these rows" if isinstance(claim.rule, ByOthers) else ""
    judged = {
        None: f"which neither agrees with nor leaves out {wanted}",
        True: f"which agrees with {wanted}{on_rows}",
        False: f"where the source has {wanted}",
    }[agrees]
    return f"{unit}: {who} give{s} {_number(seen.value)}{between}, {judged}."


def _wanted(claim: Claim) -> str:
    value, tolerance = claim.expected.value, claim.expected.tolerance
    if isinstance(value, (str, bool)):
        return value if isinstance(value, str) else _yes(value)
    text = f"{_number(value[0])} to {_number(value[1])}" if isinstance(value, tuple) else _number(value)
    if tolerance.relative is not None:
        return f"{text} within {100 * tolerance.relative:g} %"
    return text if tolerance.absolute is None else f"{text} within {_number(tolerance.absolute)}"


def _number(value: float) -> str:
    """As a person writes it: four digits, no exponent where it can be avoided."""
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        rounded = float(f"{value:.4g}")
        return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:g}"
    return f"{value:.3g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


# ---------------------------------------------------------------- the committed ones


def decide_all(folder: Path = ledger.FOLDER) -> dict[str, Verdict]:
    """Decide every claim of the ledger. Raises Refusal naming file and claim where a rule cannot be followed."""
    verdicts = {}
    for source in ledger.read(folder):
        for claim in source.claims:
            with refusing(f"{folder / source.source}.yaml: {claim.id}: rule"):
                verdicts[claim.id] = decide(source, claim)
    return verdicts


def unlike(sources: list[Source], verdicts: dict[str, Verdict]) -> dict[str, str]:
    """By the first reading of a sentence: where what is written of it is not what its rule finds."""
    found = {}
    for source in sources:
        for sentence in source.sentences:
            word = verdicts[sentence.readings[0]].verdict
            if holds(word) != sentence.holds:
                found[sentence.readings[0]] = f"is written to be {sentence.holds!r} (holds), and comes out as {word}"
    return found


def write(verdicts: dict[str, Verdict], path: Path = VERDICTS) -> None:
    write_json(path, {name: verdict.model_dump() for name, verdict in verdicts.items()})


def read(path: Path = VERDICTS) -> dict[str, Verdict]:
    """Read the committed verdicts. Raises Refusal naming the file and the claim."""
    content = load(path, "verdicts")
    if not isinstance(content, dict):
        raise Refusal(f"{path}: holds no verdicts; {AGAIN}")
    verdicts = {}
    for name, entry in content.items():
        with refusing(f"{path}: {name}"):
            verdicts[name] = Verdict.model_validate(entry)
    return verdicts


def stale(committed: dict[str, Verdict], now: dict[str, Verdict]) -> dict[str, str]:
    """By claim: what no longer follows of its committed verdict."""
    changes = {}
    for name in [*now, *(name for name in committed if name not in now)]:
        if name not in committed:
            changes[name] = f"has no committed verdict, and is {now[name].verdict}"
        elif name not in now:
            changes[name] = "is no claim of the ledger"
        elif other := _differing(committed[name], now[name]):
            changes[name] = f"is committed as {committed[name].verdict}, and is {now[name].verdict}, with other {other}"
    return changes


def _differing(one: Verdict, other: Verdict) -> str:
    """The parts in which two verdicts differ by more than the last digits of what was observed."""
    parts = {
        "verdict": one.verdict == other.verdict,
        "numbers": _numbers_are_same(one.observed, other.observed),
        "evidence": one.evidence == other.evidence,
        "reason": one.why == other.why,
    }
    return ", ".join(name for name, is_same in parts.items() if not is_same)


def _numbers_are_same(one: Seen | None, other: Seen | None) -> bool:
    if one is None or other is None:
        return one is other
    for a, b in ((one.value, other.value), (one.low, other.low), (one.high, other.high)):
        if isinstance(a, float) and isinstance(b, float):
            if abs(a - b) > SAME * max(abs(a), abs(b)) + 1e-9:
                return False
        elif type(a) is not type(b) or a != b:
            return False
    return True
