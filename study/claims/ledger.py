"""Read the ledger, which lists published claims, their conditions, and the rules that decide them.

Unknown keys and values of a wrong type are errors.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from study.claims.rules import Text, by_arithmetic, by_execution, by_records, by_theory
from study.claims.rules.by_execution import Execution
from study.claims.rules.by_others import ByOthers
from study.claims.rules.by_public_runs import ByPublicRuns
from zero_study.errors import Refusal, describe, refusing
from zero_study.files import StrictModel, read_yaml

FOLDER = Path(__file__).parent / "ledger"
QUESTIONS = Path(__file__).parent / "questions.yaml"
CORRECTIONS = Path(__file__).parent / "corrections.yaml"
LONGEST_PHRASE = 12  # the most words of a source that a phrase may quote
EXACT_TOLERANCE = 1e-9  # relative: the rounding of a float
PLACE = re.compile(r"\{([^{}]*)\}")  # where the value goes in a unit, with the unit of measurement inside
CITED = "papers"  # the source that all others cite; their formulas may use its numbers as papers_<name>

Standing = Literal["yes", "part", "no", "open"]  # whether a sentence holds
Kind = Literal[
    "memory", "capacity", "throughput", "communication", "convergence", "offload", "cost", "configuration", "advice",
]  # fmt: skip


class Tolerance(StrictModel):
    """The tolerance around an expected value. It is either relative, absolute or exact.

    A stated amount that has to suffice, such as the memory that a training needs, has a tolerance only below: it may be
    generous, but must not be smaller than what we observe.

    Some tolerances were changed after results were known. study/claims/corrections.yaml lists them.
    """

    relative: Annotated[float, Field(gt=0, lt=1)] | None = None
    absolute: Annotated[float, Field(gt=0)] | None = None
    exact: Literal[True] | None = None
    side: Literal["below"] | None = None  # below: only smaller values are within the tolerance; None: both sides

    @model_validator(mode="after")
    def _one(self) -> Tolerance:
        units = [name for name in ("relative", "absolute", "exact") if getattr(self, name) is not None]
        if len(units) != 1:
            raise ValueError(
                f"tolerance: {' and '.join(units) or 'nothing'} given; give one of relative, absolute, exact"
            )
        return self


class Expected(StrictModel):
    """The value that a source claims: a number, a range, yes or no, or a word."""

    value: bool | float | tuple[float, float] | Text = Field(union_mode="left_to_right")
    unit: Text  # "a peak of {GiB} at stage 2"; a question for yes or no; for an outcome, what was tried
    tolerance: Tolerance

    @model_validator(mode="before")
    @classmethod
    def _typed(cls, content: Any) -> Any:
        value = content.get("value") if isinstance(content, dict) else None
        if isinstance(value, list) and len(value) == 2 and all(_is_number(end) for end in value):
            return {**content, "value": tuple(map(float, value))}
        if value is not None and not isinstance(value, (bool, str)) and not _is_number(value):
            raise ValueError(f"value {value!r}: give a number, [low, high], true, false or a word")
        return content

    @model_validator(mode="after")
    def _fits(self) -> Expected:
        if isinstance(self.value, tuple) and self.value[0] > self.value[1]:
            raise ValueError(f"value {list(self.value)}: the lower end comes first")
        if isinstance(self.value, (bool, str)) and not self.tolerance.exact:
            raise ValueError(f"tolerance: {self.value!r} has none but exact")
        if isinstance(self.value, bool):
            if not self.unit.endswith("?"):
                raise ValueError(f"unit {self.unit!r}: write a question that yes or no answers")
        elif len(PLACE.findall(self.unit)) != (self.value not in by_execution.OUTCOMES):
            raise ValueError(
                f"unit {self.unit!r}: write once where the value goes, such as 'a peak of {{GiB}} at stage 2'; "
                "an outcome has no such place"
            )
        return self

    @cached_property
    def band(self) -> tuple[float, float]:
        """The lowest and the highest value within the tolerance. The expected value must be a number or a range."""
        low, high = self.value if isinstance(self.value, tuple) else (float(self.value), float(self.value))
        relative = EXACT_TOLERANCE if self.tolerance.exact else self.tolerance.relative or 0.0
        absolute = self.tolerance.absolute or 0.0
        least = low - relative * abs(low) - absolute
        return least, high if self.tolerance.side else high + relative * abs(high) + absolute


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Arithmetic(StrictModel):
    """A rule that compares the claim with numbers of the same source, or of a source that it cites."""

    type: Literal["arithmetic"]
    formula: Text
    fact: Text | None = None  # the known fact that the formula uses; None if it uses only numbers of the source


class _Call(StrictModel):
    functions: ClassVar[dict[str, Any]]  # functions that the ledger may call, by name
    function: Text
    arguments: dict[str, Any]

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.function not in self.functions:
            raise ValueError(f"function {self.function!r} is unknown. Use one of {', '.join(self.functions)}")
        try:
            inspect.signature(self.functions[self.function]).bind(**self.arguments)
        except TypeError as error:
            raise ValueError(f"arguments: {error}, of {self.function}") from None
        by_theory.check_cases(self.function, self.arguments)
        return self


class Theory(_Call):
    """A rule that compares the claim with formulas of papers, or with this project's predictions."""

    functions = by_theory.FUNCTIONS
    type: Literal["theory"]


class OfRecords(_Call):
    """A rule that compares the claim with the committed records of runs."""

    functions = by_records.FUNCTIONS
    type: Literal["record"]


class Undecidable(StrictModel):
    """A rule for a claim that this project cannot decide. It names the machine and the run that could decide it."""

    type: Literal["undecidable"]
    box: Text
    run: Text
    command: Text | None = None  # the zero-study command that would decide it
    needs: Literal["hardware", "source", "program"] = "hardware"  # source: not published; program: does not exist

    @model_validator(mode="after")
    def _has_its_command(self) -> Undecidable:
        if (self.needs == "hardware") != (self.command is not None):
            raise ValueError(f"command: is {self.command}; what needs hardware has one, what needs a {self.needs} none")
        return self


Rule = Arithmetic | Theory | OfRecords | ByOthers | ByPublicRuns | Execution | Undecidable


class Claim(StrictModel):
    """One statement of a source: its phrase, its expected value and the rule that decides it."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*(\.[a-z0-9]+(-[a-z0-9]+)*)+$")]
    where: Text
    phrase: Text
    kind: Kind
    conditions: Text
    expected: Expected
    rule: Annotated[Rule, Field(discriminator="type")]
    note: str

    @model_validator(mode="after")
    def _short(self) -> Claim:
        words = [word for word in self.phrase.split() if re.search(r"\w", word)]
        if len(words) > LONGEST_PHRASE:
            raise ValueError(f"phrase: {len(words)} words, of which {LONGEST_PHRASE} may be quoted; shorten it")
        return self

    @model_validator(mode="after")
    def _of_its_quantity(self) -> Claim:
        if isinstance(self.rule, ByOthers) and isinstance(self.expected.value, bool) != (self.rule.quantity == "fits"):
            raise ValueError(f"expected.value {self.expected.value!r}: rows of {self.rule.quantity} say another kind")
        return self

    @model_validator(mode="after")
    def _of_public_runs(self) -> Claim:
        if isinstance(self.rule, ByPublicRuns) and isinstance(self.expected.value, (bool, str)):
            raise ValueError(f"expected.value {self.expected.value!r}: public runs give a number; write one")
        return self

    @model_validator(mode="after")
    def _can_fail(self) -> Claim:
        if not isinstance(self.rule, Execution):
            return self
        value = self.expected.value
        if value not in by_execution.OUTCOMES and self.rule.measures is None:
            words = ", ".join(by_execution.OUTCOMES)
            raise ValueError(f"expected.value {value!r}: is none of {words}; write one, or give rule.measures")
        if value in by_execution.OUTCOMES and self.rule.measures is not None:
            raise ValueError(f"rule.measures: {value!r} is an outcome, for which nothing is measured; take it out")
        if value in ("accepted", "ignored") and not self.rule.wants:
            raise ValueError("rule.wants: is empty, and nothing would show whether the lines take effect; add one")
        return self


class Sentence(StrictModel):
    """One sentence of a source, with the ids of all claims that it makes."""

    says: Text | None = None  # the content in plain words; None if the quoted phrase is plain
    readings: Annotated[list[str], Field(min_length=1)]  # ids of claims, which together give the verdict
    aside: list[str] = Field(default_factory=list)  # ids of strained readings and related runs, which decide nothing
    line: Annotated[int, Field(ge=1)]  # line number in the saved text of the source, including blank lines
    question: str | None = None  # the key in QUESTIONS of the question that it answers
    holds: Standing  # the answer of `reason`; must match the verdicts on the readings
    reason: Text  # the explanation from the evidence, written by a person
    remedy: Text | None = None  # what to do instead, if the sentence does not hold
    petty: bool = False  # a small mistake that misleads nobody; not counted
    rank: Annotated[int, Field(ge=1)] | None = None  # rank among the most important faults; 1 is first

    @model_validator(mode="after")
    def _fits(self) -> Sentence:
        if self.holds != "part" and (self.holds == "no") != (self.remedy is not None):
            raise ValueError(
                f"remedy: required with `holds: no`, optional with `holds: part`, and otherwise not allowed. "
                f"This sentence has `holds: {self.holds}`"
            )
        if self.rank is not None and self.remedy is None:
            raise ValueError("rank: is of sentences that do not hold; take it out")
        return self


class Source(StrictModel):
    """One published source: its numbers, its claims, and its sentences."""

    source: Text
    title: Text
    url: Text | None
    numbers: dict[str, float]  # numbers for formulas; the name contains the unit
    claims: list[Claim]
    was_read: Text | None = None  # the form in which the source was read, and who provided it
    believe: Text | None = None  # whether it can be believed, in two or three sentences
    trust: Text | None = None  # what can be relied on, in one sentence
    distrust: Text | None = None  # what cannot be relied on, in one sentence
    unknown: Text | None = None  # what nobody knows, in one sentence
    sentences: list[Sentence] = Field(default_factory=list)  # in the order of the text; empty if not collected yet

    @model_validator(mode="after")
    def _whole(self) -> Source:
        if not self.sentences:
            return self
        missing = [name for name in ("was_read", "trust", "distrust", "unknown") if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{missing[0]}: is missing; a source with sentences has it")
        self._check_readings()
        ranks = sorted(sentence.rank for sentence in self.sentences if sentence.rank is not None)
        if ranks != list(range(1, len(ranks) + 1)):
            raise ValueError(f"sentences: the ranks are {ranks}; number the faults that matter from 1 on")
        return self

    def _check_readings(self) -> None:
        """Raise ValueError unless every claim is in exactly one sentence."""
        counts = Counter(name for sentence in self.sentences for name in (*sentence.readings, *sentence.aside))
        ids = {claim.id for claim in self.claims}
        if unknown := sorted(counts.keys() - ids):
            raise ValueError(f"sentences: {unknown[0]} is no claim of this source; correct it")
        if unassigned := sorted(ids - counts.keys()):
            raise ValueError(f"sentences: {unassigned[0]} is in none of them; add it to one, or take the claim out")
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"sentences: {repeated[0]} is in {counts[repeated[0]]} of them; a claim is of one")


def read(folder: Path = FOLDER) -> list[Source]:
    """Return all sources of the ledger, sorted by name.

    Raises Refusal if a file is invalid. The message names the file, the claim and the key.
    """
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise Refusal(f"{folder}: there is no ledger in this folder. Each source is a YAML file.")
    states = [path.stat() for path in (*paths, QUESTIONS)]
    return list(_read_all(tuple(paths), tuple((state.st_mtime_ns, state.st_size) for state in states)))


@cache
def _read_all(paths: tuple[Path, ...], _: tuple[tuple[int, int], ...]) -> list[Source]:
    """Return the sources in these files. They are read again only if the time or the size of a file has changed."""
    sources = _with_cited([_read(path) for path in paths])
    file_of_claim: dict[str, str] = {}
    known_questions = questions()
    for path, source in zip(paths, sources, strict=True):
        for sentence in source.sentences:
            if sentence.question is not None and sentence.question not in known_questions:
                keys = ", ".join(known_questions)
                raise Refusal(
                    f"{path}: {sentence.readings[0]}: there is no question {sentence.question!r}. Choose one of {keys}."
                )
        for claim in source.claims:
            if claim.id in file_of_claim:
                raise Refusal(
                    f"{path}: {claim.id}: id: {file_of_claim[claim.id]} already has this id. Choose another one."
                )
            file_of_claim[claim.id] = path.name
            if isinstance(claim.rule, Arithmetic):
                with refusing(f"{path}: {claim.id}: rule"):
                    by_arithmetic.observe(claim.rule.formula, source.numbers)
    return sources


def questions() -> dict[str, dict[str, str]]:
    """Return the questions that are checked for every publication, with the answers of this project and of the papers.

    Raises Refusal if the file of questions cannot be read.
    """
    return read_yaml(QUESTIONS, QUESTIONS.parent)


def _read(path: Path) -> Source:
    content = read_yaml(path, FOLDER)
    try:
        source = Source.model_validate(content)
    except ValidationError as error:
        place, subject = error.errors()[0]["loc"], str(path)
        if place[:1] == ("claims",) and len(place) > 1:  # the claim by its id
            entry = content["claims"][place[1]]
            subject += f": {entry.get('id') if isinstance(entry, dict) else place[1]}"
        raise Refusal(describe(error, subject)) from None
    if source.source != path.stem:
        raise Refusal(f"{path}: source {source.source!r}: must be the file's name, {path.stem!r}")
    for claim in source.claims:
        if not claim.id.startswith(f"{source.source}."):
            raise Refusal(f"{path}: {claim.id}: id: must begin with {source.source}.")
    return source


def _with_cited(sources: list[Source]) -> list[Source]:
    """Return the sources, each with the numbers of the papers added under names that begin with papers_."""
    numbers = next((source.numbers for source in sources if source.source == CITED), {})
    cited = {f"{CITED}_{name}": value for name, value in numbers.items()}
    return [
        source if source.source == CITED else source.model_copy(update={"numbers": {**cited, **source.numbers}})
        for source in sources
    ]


class Correction(StrictModel):
    """One correction of the ledger: a changed, added or removed expectation, or a sentence that was decided again."""

    id: Text  # id of the claim, or of the first reading of the sentence
    on: Text  # the day
    before: Text | None = None  # the expectation, and the rule if it changed; None if unchanged
    after: Text | None = None
    was: Text | None  # the earlier verdict; None if it was not known
    became: Text | None  # the new verdict; None if the claim was removed, or see verdicts.json
    why: Text

    @property
    def moved(self) -> str:
        """The old and the new value as text, with an arrow between them."""
        verdict = f"{self.was or 'verdict not recorded'} → {self.became or 'the verdict of today'}"
        return f"{self.before} → {self.after} ({verdict})" if self.before else verdict


def corrections(path: Path = CORRECTIONS) -> list[Correction]:
    """Return the corrections of the ledger in the order of the file. Raises Refusal if an entry is invalid."""
    with refusing(str(path)):
        return [Correction.model_validate(entry) for entry in read_yaml(path, path.parent)["corrections"]]
