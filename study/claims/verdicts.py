"""Decide claims by comparing observed with expected values, and check the committed verdicts."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from study.claims import ledger
from study.claims.ledger import PLACE, Arithmetic, Claim, OfRecords, Source, Standing, Theory, Undecidable
from study.claims.rules import MissingEvidence, Observed, by_arithmetic, by_execution, by_others, by_public_runs
from study.claims.rules.by_execution import Execution
from study.claims.rules.by_others import ByOthers
from study.claims.rules.by_public_runs import ByPublicRuns
from zero_study.errors import Refusal, refusing
from zero_study.files import load, write_whole
from zero_study.verdict import Checked, NotChecked
from zero_study.verdict import Verdict as CheckVerdict

VERDICTS = Path(__file__).parent / "verdicts.json"
AGAIN = "Run `zero-study claims --write`."
DIGITS = 6  # significant digits of stored numbers: they show a change, and hide differences in the last bits
NUMBERS_TOLERANCE = 1e-4  # relative; smaller differences of observed values come from the machine


class Conclusion(Enum):
    """A verdict on a sentence: its name, its meaning, and whether the sentence is right ("yes", "no", "part", ...)."""

    AGREES = (
        "our small runs agree",
        "yes",
        "this project's runs agree: trainings of small models on a CPU, or the source's code executed with current "
        "engines",
    )
    AGREES_UNRUN = (
        "agrees, not run",
        "yes",
        "theory, runs of others, cited sources or the source's own numbers agree; this project ran nothing",
    )
    CONTRADICTED = (
        "contradicted",
        "no",
        "something contradicts the sentence: this project's runs, current engines, runs of others, the sources that it "
        "cites, theory, or a known fact",
    )
    CONTRADICTS_ITSELF = ("contradicts itself", "no", "the source's own numbers contradict the sentence")
    IN_PART = (
        "in part",
        "part",
        "the sentence can be read in two ways; the evidence agrees with one and contradicts the other",
    )
    OPEN = (
        "open",
        "open",
        "the evidence neither supports nor contradicts the sentence, or this project cannot test it",
    )
    NEEDS_HARDWARE = (
        "needs hardware",
        "open",
        "not tested: a command of this project could decide it, but on GPUs that this project does not have",
    )
    NEEDS_SOURCE = (
        "needs its source",
        "open",
        "not tested: the source does not publish the information that would decide it",
    )

    def __init__(self, word: str, standing: Standing, meaning: str) -> None:
        self.word, self.standing, self.meaning = word, standing, meaning

    @classmethod
    def of(cls, word: str) -> Conclusion:
        """Return the conclusion for a word that the file of verdicts stores."""
        return next(conclusion for conclusion in cls if conclusion.word == word)

    @property
    def is_decided(self) -> bool:
        return self.standing != "open"


# The kinds of evidence, strongest first: the word in verdicts.json, and the text that is printed next to a verdict.
Basis = Literal["record", "execution", "others", "cited", "theory", "fact", "arithmetic"]
BASES: dict[Basis, str] = {
    "record": "our runs", "execution": "today's engines", "others": "others' runs", "cited": "what it cites",
    "theory": "theory", "fact": "a known fact", "arithmetic": "its own numbers",
}  # fmt: skip
UNITS = {"bytes": 1.0, "GB": 1e9, "TB": 1e12, "GiB": 2.0**30}  # bytes per unit of measurement
# The beginning of the sentence that explains a verdict, by the kind of evidence.
SHOWN_BY: dict[Basis, str] = {
    "record": "Our runs gave", "execution": "A current engine gave", "others": "Others measured",
    "cited": "The work that the source cites gives", "theory": "We predict", "fact": "Known facts give",
    "arithmetic": "The source's own numbers give",
}  # fmt: skip
# What an engine did with code lines, and the same as a statement of the source.
_OUTCOMES = {
    "accepted": ("worked", "works"), "rejected": ("failed", "fails"),
    "ignored": ("caused no error, but had no effect", "has no effect"),
}  # fmt: skip
OPEN_END = 10  # an expected range is open at its far end if that is more than this many times the near end
_LARGE = {1e12: "trillion", 1e9: "billion", 1e6: "million"}


class Observation(BaseModel):
    """An observed value with its interval, in the unit of the claim."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    value: bool | float | str = Field(union_mode="left_to_right")  # a word: an outcome, or what a rule measured
    low: bool | float | None = Field(union_mode="left_to_right")
    high: bool | float | None = Field(union_mode="left_to_right")
    told: str  # how the interval was computed, or the evidence of the outcome

    @property
    def ends(self) -> tuple[Any, ...]:
        """The lower and the upper end of the interval. Both equal the value if there is no interval."""
        return tuple(self.value if end is None else end for end in (self.low, self.high))


class Verdict(BaseModel):
    """The verdict on one claim, as verdicts.json stores it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    verdict: Annotated[str, Field(pattern=f"^({'|'.join(conclusion.word for conclusion in Conclusion)})$")]
    by: Basis | None  # None if this project tried nothing
    observed: Observation | None  # None if nothing was observed
    why: Annotated[str, Field(min_length=1)]
    evidence: list[str]


# ---------------------------------------------------------------- deciding


def decide(source: Source, claim: Claim) -> Verdict:
    """Return the verdict on one claim. Raises ValueError if its rule cannot be applied."""
    rule = claim.rule
    if isinstance(rule, Undecidable):
        return _untried(rule)
    observed = _observe(source, claim)
    observation = _in_unit_of_claim(observed, claim)
    agrees = _agrees(observation, claim)
    if agrees is False and isinstance(rule, (ByOthers, ByPublicRuns)) and rule.asks == "one":
        agrees = None  # a case that nobody measured can still exist
    basis = decided_by(source, claim)
    reason = _reason(claim, observation, agrees, basis)
    if agrees is False and basis == "execution":
        reason = f"{reason} We used {by_execution.versions()}."
    return Verdict(
        verdict=_conclusion(agrees, basis).word,
        by=basis,
        observed=observation,
        why=reason,
        evidence=list(observed.evidence),
    )


def _untried(rule: Undecidable) -> Verdict:
    conclusion = {
        "hardware": Conclusion.NEEDS_HARDWARE,
        "source": Conclusion.NEEDS_SOURCE,
        "program": Conclusion.OPEN,
    }[rule.needs]
    command = f" The command is: {rule.command}" if rule.command else ""
    reason = f"To decide this claim, you need {rule.box}. Then {rule.run}.{command}"
    return Verdict(verdict=conclusion.word, by=None, observed=None, why=reason, evidence=[])


def _observe(source: Source, claim: Claim) -> Observed:
    """Apply the claim's rule and return what it observes. Raises ValueError if the rule cannot be applied."""
    match claim.rule:
        case Arithmetic() as rule:
            return by_arithmetic.observe(rule.formula, source.numbers)
        case Execution() as rule:
            return by_execution.observe(claim.id, rule)
        case ByOthers() as rule:
            return by_others.observe(rule, None if isinstance(claim.expected.value, bool) else claim.expected.band)
        case ByPublicRuns() as rule:
            return by_public_runs.observe(rule, claim.expected.band)
        case Theory() | OfRecords() as rule:
            observed: Observed = rule.functions[rule.function](**rule.arguments)
            return observed
    raise AssertionError(claim.rule)


def _conclusion(agrees: bool | None, basis: Basis) -> Conclusion:
    if agrees is None:
        return Conclusion.OPEN
    if agrees:
        return Conclusion.AGREES if basis in ("record", "execution") else Conclusion.AGREES_UNRUN
    return Conclusion.CONTRADICTS_ITSELF if basis == "arithmetic" else Conclusion.CONTRADICTED


def decided_by(source: Source, claim: Claim) -> Basis:
    """Return the kind of evidence that decides a claim, such as "cited" or "others".

    This is "cited" if the rule uses a source that the claim's source cites, "fact" if an arithmetic rule takes a number
    from elsewhere, "others" if public runs decide, and otherwise the type of the rule.
    """
    rule = claim.rule
    assert not isinstance(rule, Undecidable)
    if isinstance(rule, ByPublicRuns):
        return "others"
    formula = rule.formula if isinstance(rule, Arithmetic) else rule.function if isinstance(rule, Theory) else ""
    if source.source != ledger.CITED and re.search(rf"\b({ledger.CITED}|paper)_", formula):
        return "cited"
    return "fact" if isinstance(rule, Arithmetic) and rule.fact else rule.type


def headline(readings: Sequence[Verdict]) -> tuple[str, Basis | None]:
    """Return the verdict on a sentence, and the kind of evidence on which it is based.

    `readings` are the verdicts on the claims that the sentence makes. If no claim contradicts the source, the first one
    decides. If some claims contradict it and others agree, the verdict is "in part". Otherwise the contradiction with
    the strongest evidence decides.
    """
    against = [verdict for verdict in readings if Conclusion.of(verdict.verdict).standing == "no"]
    if not against:
        return readings[0].verdict, readings[0].by
    by_strength: list[str | None] = [*BASES]
    strongest = min(against, key=lambda verdict: by_strength.index(verdict.by))
    agrees = any(Conclusion.of(verdict.verdict).standing == "yes" for verdict in readings)
    return Conclusion.IN_PART.word if agrees else strongest.verdict, strongest.by


def _in_unit_of_claim(observed: Observed, claim: Claim) -> Observation:
    expected = claim.expected
    if isinstance(observed.value, str):
        return Observation(value=observed.value, low=None, high=None, told=observed.told)
    if isinstance(expected.value, str) or isinstance(observed.value, bool) != isinstance(expected.value, bool):
        raise ValueError(
            f"expected.value {expected.value!r}: the rule finds {observed.value!r}, which cannot be compared with it"
        )
    unit = 1.0
    if observed.in_bytes:
        (measure,) = PLACE.findall(expected.unit)
        if measure not in UNITS:
            raise ValueError(f"expected.unit {expected.unit!r}: {{{measure}}} is none of {', '.join(UNITS)}")
        unit = UNITS[measure]

    def rounded(value: float) -> float:
        return value if isinstance(value, bool) else float(f"{value / unit:.{DIGITS}g}")

    low, high = (None, None) if observed.interval is None else map(rounded, observed.interval)
    return Observation(value=rounded(observed.value), low=low, high=high, told=observed.told)


def _agrees(observation: Observation, claim: Claim) -> bool | None:
    """Return whether the observation agrees with the expectation. None if its interval allows both answers."""
    expected = claim.expected.value
    if isinstance(observation.value, str):
        return observation.value == expected
    low, high = observation.ends
    if isinstance(expected, bool):
        return None if low != high else low == expected
    least, most = claim.expected.band
    if least <= low and high <= most:
        return True
    return False if high < least or low > most else None


def _reason(claim: Claim, observation: Observation, agrees: bool | None, basis: Basis) -> str:
    """Return the sentences that explain a verdict: what was observed, what the source says, and whether they agree."""
    value, unit, shown_by = observation.value, claim.expected.unit, SHOWN_BY[basis]
    is_of_others = isinstance(claim.rule, (ByOthers, ByPublicRuns))
    judged = {True: "agrees", False: "contradicted", None: "too close to decide"}[agrees]
    if is_of_others and agrees is not False:
        judged = "agrees in these measurements" if agrees else "not decided by these measurements"
    digits = 3
    if isinstance(value, str) and value in _OUTCOMES:
        details = f" ({observation.told})" if value != "accepted" else ""
        observed = f"With current engines, we tried {unit}. It {_OUTCOMES[value][0]}{details}."
    elif isinstance(value, str):
        observed = f"{shown_by} {_quantity(unit, value)}."
    elif isinstance(value, bool):
        doubt = "" if observation.low == observation.high else f", but {_yes(not value)} is within the error"
        observed = f"{unit} {shown_by}: {_yes(value)}{doubt}."
    else:
        numbers = (value, *observation.ends)
        if agrees is False and any(f" {_number(each, 3)} " in f" {_expectation(claim, 3)} " for each in numbers):
            digits = DIGITS  # the contradiction would otherwise not be visible
        shown, *ends = (_number(each, digits) for each in numbers)
        details = f", {observation.told}" if observation.told and not is_of_others else ""
        interval = "" if {*ends} == {shown} else f" ({' to '.join(ends)}{details})"
        observed = f"{shown_by} {_quantity(unit, shown, interval)}."
    if is_of_others:
        observed += f" This is {observation.told}."
    expectation = _expectation(claim, digits)
    if isinstance(claim.expected.value, tuple) or claim.expected.tolerance.side:
        return f"{observed} We count {expectation} as agreement: {judged}."  # the source may state no bound
    return f"{observed} The source says {expectation}: {judged}."


def _quantity(unit: str, shown: str, notes: str = "") -> str:
    """Return the unit of a claim with a value in its place, such as "a peak of 145 GiB (131 to 159) at stage 2"."""
    before, measure, after = PLACE.split(unit)
    if shown == "1" and not measure.startswith("times"):
        measure = re.sub(r"^(\w+)s\b", r"\1", measure)
    return f"{before}{f'{shown} {measure}'.rstrip()}{notes}{after}"


def stated(claim: Claim) -> str:
    """Return what agrees with the source as text, such as "a peak of about 145 GiB at stage 2"."""
    unit, says = claim.expected.unit, _expectation(claim, 3)
    return _quantity(unit, says) if PLACE.search(unit) else f"{unit} {says}"


def _expectation(claim: Claim, digits: int) -> str:
    """Return what agrees with the source: yes or no, a word, a number, a range, or a bound if one end is open."""
    value, tolerance = claim.expected.value, claim.expected.tolerance
    if isinstance(value, bool):
        return _yes(value)
    if isinstance(value, str):
        return f"that it {_OUTCOMES[value][1]}" if value in _OUTCOMES else value
    low, high = claim.expected.band if tolerance.side else value if isinstance(value, tuple) else (value, value)
    if low == high:
        return f"{'' if tolerance.exact else 'about '}{_number(low, digits)}"
    if low == 0 or low < OPEN_END * high < 0:
        return f"at most {_number(high, digits)}"
    if 0 < OPEN_END * low < high:
        return f"at least {_number(low, digits)}"
    return f"{_number(low, digits)} to {_number(high, digits)}"


def _number(value: float, digits: int) -> str:
    """Return a number as text with so many significant digits, such as "0.05", "12,500", "3.76 billion" or "2e-8"."""
    is_exact = value == round(value) and abs(value) < min(_LARGE)
    rounded = value if is_exact else float(f"{value:.{digits}g}")
    for size, word in _LARGE.items():
        if abs(rounded) >= size:
            return f"{rounded / size:.{digits}g} {word}"
    if 0 < abs(rounded) < 1e-4:
        return f"{value:.3g}".replace("e-0", "e-")
    return f"{rounded:,.0f}" if abs(rounded) >= 1e4 else f"{rounded:g}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


# ---------------------------------------------------------------- the committed ones


def decide_all(folder: Path = ledger.FOLDER, missing: dict[str, str] | None = None) -> dict[str, Verdict]:
    """Return the verdict on every claim of the ledger, by the claim's id.

    Claims whose records or results are absent are left out if `missing` is given, which gets the reason by claim id.
    Raises Refusal with the file and the claim if a rule cannot be applied.
    """
    verdicts = {}
    for source in ledger.read(folder):
        for claim in source.claims:
            with refusing(f"{folder / source.source}.yaml: {claim.id}: rule"):
                try:
                    verdicts[claim.id] = decide(source, claim)
                except MissingEvidence as absent:
                    if missing is None:
                        raise
                    missing[claim.id] = str(absent)
    return verdicts


def check(now: Mapping[str, Verdict], wrong: Collection[str], missing: Mapping[str, str]) -> CheckVerdict:
    """Return the verdict of the command `claims --check`, from which its exit status follows.

    `now` has the claims that were decided again, `wrong` those that differ from what is committed, and `missing` has
    the reasons why the remaining claims could not be decided.
    """
    undecided = sum(not Conclusion.of(verdict.verdict).is_decided for verdict in now.values())
    decided = len(now) - undecided
    return CheckVerdict.of(
        len(wrong),
        [
            Checked(decided, "claim", "decided again and compared with the committed verdicts"),
            Checked(undecided, "claim", "still undecided, as committed"),
        ],
        [NotChecked(name, reason, True) for name, reason in missing.items()],
    )


def disagreeing(sources: list[Source], verdicts: dict[str, Verdict]) -> dict[str, str]:
    """Return a message for each sentence whose verdict differs from the one that the ledger expects (its key "holds").

    The messages are keyed by the id of the sentence's first claim. Sentences with a claim that has no verdict are left
    out.
    """
    differing = {}
    for source in sources:
        for sentence in source.sentences:
            if not verdicts.keys() >= {*sentence.readings}:
                continue
            word, _ = headline([verdicts[name] for name in sentence.readings])
            if Conclusion.of(word).standing != sentence.holds:
                message = f"the ledger states {sentence.holds!r} (holds), but the verdict is {word}"
                differing[sentence.readings[0]] = message
    return differing


def write(verdicts: dict[str, Verdict], path: Path = VERDICTS) -> None:
    """Write the verdicts to `path`, one line for each."""
    lines = (f"{json.dumps(name)}: {json.dumps(verdict.model_dump())}" for name, verdict in verdicts.items())
    write_whole(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read(path: Path = VERDICTS) -> dict[str, Verdict]:
    """Return the committed verdicts by the claim's id.

    Raises Refusal if the file is invalid. The message names the file and the claim.
    """
    content = load(path, "verdicts")
    if not isinstance(content, dict):
        raise Refusal(f"{path}: there are no verdicts in this file. {AGAIN}")
    verdicts = {}
    for name, entry in content.items():
        with refusing(f"{path}: {name}"):
            verdicts[name] = Verdict.model_validate(entry)
    return verdicts


def outdated(committed: dict[str, Verdict], now: dict[str, Verdict]) -> dict[str, str]:
    """Return a message for each claim whose committed verdict differs from the current one, by the claim's id."""
    changes = {}
    for name in [*now, *(name for name in committed if name not in now)]:
        if name not in committed:
            changes[name] = f"there is no committed verdict, and the current one is {now[name].verdict}"
        elif name not in now:
            changes[name] = "the ledger does not contain this claim"
        elif differing := _differing(committed[name], now[name]):
            before, after = committed[name].verdict, now[name].verdict
            changes[name] = (
                f"the committed verdict is {before}, and the current one is {after}. They differ in {differing}"
            )
    return changes


def _differing(first: Verdict, second: Verdict) -> str:
    """Return the names of the fields in which two verdicts differ: verdict, numbers, evidence, reason.

    Numbers that agree within NUMBERS_TOLERANCE count as equal.
    """
    agreement = {
        "verdict": first.verdict == second.verdict,
        "numbers": _numbers_agree(first.observed, second.observed),
        "evidence": first.evidence == second.evidence,
        "reason": first.why == second.why,
    }
    return ", ".join(part for part, agrees in agreement.items() if not agrees)


def _numbers_agree(first: Observation | None, second: Observation | None) -> bool:
    if first is None or second is None:
        return first is second
    for a, b in ((first.value, second.value), (first.low, second.low), (first.high, second.high)):
        if isinstance(a, float) and isinstance(b, float):
            if abs(a - b) > NUMBERS_TOLERANCE * max(abs(a), abs(b)) + 1e-9:
                return False
        elif type(a) is not type(b) or a != b:
            return False
    return True
