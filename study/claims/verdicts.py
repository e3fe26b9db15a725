"""Does a claim hold? What a rule observed, against what was expected; the committed verdicts and their check."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from study.claims import ledger
from study.claims.ledger import Arithmetic, Claim, Held, OfRecords, Source, Theory, Undecidable
from study.claims.rules import Observed, by_arithmetic, by_execution, by_others
from study.claims.rules.by_execution import Execution
from study.claims.rules.by_others import ByOthers
from study.errors import Refusal, refusing
from study.files import ROOT, load, write_whole

VERDICTS = Path(__file__).parent / "verdicts.json"
CORRECTED = ROOT / "reports" / "corrections.md"
ABOUT_CORRECTIONS = """# What was corrected in the ledger of published claims?

Expectations that were changed after they had been decided, and sentences that were decided anew. Verdicts are in the
words of their day."""
AGAIN = "run `zero-study claims --write`"
DIGITS = 6  # of a number that is written: enough to see a change, few enough for the last bits to differ
SAME = 1e-4  # relative; observed values that differ by less are the same on another machine

# What a reader is told, and what it means. By what a verdict came about is said beside it: see BY.
MEANING = {
    "our small runs agree": "runs here agree: small models on a CPU, or the printed lines given to today's engines",
    "agrees, not run": "theory, others' runs, what it cites or its own numbers agree; nothing was run here",
    "contradicted": "runs here, today's engines, others' runs, what it cites, theory or a known fact say otherwise",
    "contradicts itself": "its own numbers say otherwise",
    "in part": "one plain reading of it agrees, another is contradicted",
    "open": "what was found neither agrees nor contradicts it, or nothing of ours can try it",
    "needs hardware": "not tried: a command of this study would decide it, on GPUs that we lack",
    "needs its source": "not tried: what would decide it is not published",
}
AGREES, UNRUN, AGAINST, ITSELF, IN_PART, OPEN, NEEDS, NEEDS_SOURCE = MEANING
COMES_TO: dict[str, Held] = {AGREES: "yes", UNRUN: "yes", IN_PART: "part", AGAINST: "no", ITSELF: "no"}
By = Literal["record", "execution", "others", "cited", "theory", "fact", "arithmetic"]
BY = {  # the strongest first
    "record": "our runs", "execution": "today's engines", "others": "others' runs", "cited": "what it cites",
    "theory": "theory", "fact": "a known fact", "arithmetic": "its own numbers",
}  # fmt: skip
RUN = ("record", "execution")
UNITS = {"bytes": 1.0, "GB": 1e9, "TB": 1e12, "GiB": 2.0**30}  # of what is observed in bytes, by the unit's first word
WHO: dict[type, str] = {
    Arithmetic: "arithmetic", Execution: "today's engine", OfRecords: "records", ByOthers: "rows of others",
}  # fmt: skip


class Seen(BaseModel):
    """What was observed, in the unit of the claim."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    value: bool | float | str = Field(union_mode="left_to_right")  # a word: an outcome, or what a rule measured
    low: bool | float | None = Field(union_mode="left_to_right")
    high: bool | float | None = Field(union_mode="left_to_right")
    told: str  # how the interval came about, or what shows the outcome


class Verdict(BaseModel):
    """What became of a claim."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    verdict: Annotated[str, Field(pattern=f"^({'|'.join(MEANING)})$")]
    by: By | None  # None: nothing was tried
    observed: Seen | None  # None: nothing was
    why: Annotated[str, Field(min_length=1)]
    evidence: list[str]


# ---------------------------------------------------------------- deciding


def decide(source: Source, claim: Claim) -> Verdict:
    """Decide one claim. Raises ValueError where its rule cannot be followed."""
    rule = claim.rule
    if isinstance(rule, Undecidable):
        by = f" ({rule.command})" if rule.command else ""
        word = {"hardware": NEEDS, "source": NEEDS_SOURCE, "program": OPEN}[rule.needs]
        return Verdict(verdict=word, by=None, observed=None, why=f"It takes {rule.box}: {rule.run}{by}.", evidence=[])
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
    word = OPEN if agrees is None else ITSELF if by == "arithmetic" else AGAINST
    if agrees:
        word = AGREES if by in RUN else UNRUN
    why = _why(claim, seen, agrees)
    if agrees is False and by == "execution":
        why = f"{why[:-1]} (today: {by_execution.versions()})."
    return Verdict(verdict=word, by=by, observed=seen, why=why, evidence=list(observed.evidence))


def decided_by(source: Source, claim: Claim) -> By:
    """What decides a claim: the type of its rule, `cited` where that asks what the source cites, or a `fact`."""
    rule = claim.rule
    assert not isinstance(rule, Undecidable)
    asks = rule.formula if isinstance(rule, Arithmetic) else rule.function if isinstance(rule, Theory) else ""
    if source.source != ledger.CITED and re.search(rf"\b({ledger.CITED}|paper)_", asks):
        return "cited"
    return "fact" if isinstance(rule, Arithmetic) and rule.fact else rule.type


def headline(readings: Sequence[Verdict]) -> tuple[str, By | None]:
    """A sentence's verdict, and by what: any plain reading against it is heard; where none is, the first decides."""
    against = [one for one in readings if one.verdict in (AGAINST, ITSELF)]
    if not against:
        return readings[0].verdict, readings[0].by
    strongest = min(against, key=lambda one: list(BY).index(one.by or ""))
    agrees = any(COMES_TO.get(one.verdict) == "yes" for one in readings)
    return IN_PART if agrees else strongest.verdict, strongest.by


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
            word, _ = headline([verdicts[name] for name in sentence.readings])
            if COMES_TO.get(word, "open") != sentence.holds:
                found[sentence.readings[0]] = f"is written to be {sentence.holds!r} (holds), and comes out as {word}"
    return found


def write(verdicts: dict[str, Verdict], path: Path = VERDICTS) -> None:
    """Write the verdicts, each in a line of its own; and beside the reports all corrections, the newest first."""
    lines = (f"{json.dumps(name)}: {json.dumps(verdict.model_dump())}" for name, verdict in verdicts.items())
    write_whole(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    write_whole(CORRECTED, corrected().encode())


def corrected() -> str:
    """The page of corrections, as Markdown."""
    lines = [ABOUT_CORRECTIONS]
    for day, ones in itertools.groupby(reversed(ledger.corrections()), key=lambda one: one.on):
        told = [(one.id, f"{one.moved}. {one.why}".replace("*", "\\*").replace("<", "&lt;")) for one in ones]
        lines += ["", f"## {day}", "", *(f"- **{name}**: {what}" for name, what in told)]
    return "\n".join(lines) + "\n"


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
