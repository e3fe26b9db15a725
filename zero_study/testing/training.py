"""Compare the training on several ranks with that of one process: `assert_same_training`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from .. import processes, terminal
from ..errors import Refusal, RunFailed
from ..files import read_yaml
from . import outcomes, programs

RECORDED_STEPS = 50  # at most; recording a step takes about as long as the step itself
START_SECONDS = 240.0  # for importing the engines on a busy machine; they take about 10 s
ENGINES = {"DEEPSPEED": "deepspeed"}  # accelerate's distributed_type -> the package of its engine
NEEDED = ("torch", "accelerate")
REFERENCE = "one process"
OF_PARAMETERS = ("weights", "gradient", "clipped", "update")  # kinds of differences


class Strategy(NamedTuple):
    """A strategy of the test, and its name in messages."""

    name: str
    file: Path
    package: str | None  # of its engine, if it is not PyTorch
    precision: str  # mixed precision: no, fp16 or bf16
    is_shipped: bool  # with this package, which leaves clipping to the training

    @classmethod
    def of(cls, given: str | os.PathLike[str]) -> Strategy:
        """Return a strategy by the name or the path of its accelerate file. Raises Refusal if there is no such file."""
        file = programs.file_of(given)
        content = read_yaml(file, Path("accelerate_configs"))
        package = ENGINES.get(str(content.get("distributed_type")))
        return cls(file.stem, file, package, str(content.get("mixed_precision", "no")), file.stem == str(given))

    def missing_packages(self) -> str:
        """Return a text that names the packages that are not installed. Empty if all are installed."""
        absent = [each for each in (*NEEDED, self.package) if each and not programs.is_installed(each)]
        return f"{terminal.names(absent)} {'is' if len(absent) == 1 else 'are'} not installed" if absent else ""


def compare(
    train: programs.Trained,
    ranks: int,
    given: Sequence[str | os.PathLike[str]],
    arguments: Sequence[object],
    mixed_precision: str | None,
    gradient_clipping: float | None,
    seconds: float,
    missing: str | None,
) -> int:
    """Raise AssertionError unless a function trains with each strategy as on one process.

    Return the number of steps that were compared with each strategy.
    """
    __tracebackhide__ = True
    if ranks < 2:
        raise Refusal(f"ranks={ranks} compares one process with itself. Choose at least 2.")
    if not given:
        raise Refusal("strategies=[] compares nothing. Name a strategy, such as ddp.")
    strategies = [Strategy.of(name) for name in given]
    precisions = {mixed_precision} if mixed_precision else {strategy.precision for strategy in strategies}
    if len(precisions) > 1:
        raise Refusal(
            f"The strategies train in several precisions ({', '.join(sorted(precisions))}), but are "
            "compared with one training. Compare them in several assertions, or pass mixed_precision."
        )
    absent = {
        strategy.name: missing_packages for strategy in strategies if (missing_packages := strategy.missing_packages())
    }
    present = [strategy for strategy in strategies if strategy.name not in absent]
    with tempfile.TemporaryDirectory(prefix="zero-study-test-") as name:
        folder = Path(name)
        script = programs.script_of(train, arguments, folder)
        faults, unknown, num_steps = (
            _compare(script, present, ranks, precisions.pop(), gradient_clipping, seconds, folder)
            if present
            else ([], [], 0)
        )
    if faults:
        raise AssertionError("\n\n".join([*faults, *unknown]))
    if unknown:
        raise outcomes.CouldNotBeChecked("\n\n".join(unknown))
    if absent:
        reasons = ", ".join(f"{strategy} ({packages})" for strategy, packages in absent.items())
        done = f" {terminal.names([strategy.name for strategy in present])} trained as one process." if present else ""
        outcomes.skip_or_fail(f"not checked: {reasons}.{done}", missing)
    return num_steps


def _compare(
    script: programs.Script,
    strategies: Sequence[Strategy],
    ranks: int,
    precision: str,
    gradient_clipping: float | None,
    seconds: float,
    folder: Path,
) -> tuple[list[str], list[str], int]:
    """Train and compare.

    Return a text for each strategy that trains differently, a text for each of which it is not known, and the smallest
    number of steps that were compared.
    """
    __tracebackhide__ = True
    reference = folder / "one-process"
    clipping = gradient_clipping or 0.0
    trainings = [
        _request(script, None, 1, precision, clipping, reference, None),
        _request(script, None, 1, precision, clipping, reference, 1),
        *(
            _request(script, strategy, ranks, precision, clipping, folder / "recordings" / str(number), None)
            for number, strategy in enumerate(strategies)
        ),
    ]
    alone, *others = _train(script, trainings, seconds)
    failure = alone["failure"] or (None if any(reference.glob("rank-*")) else _why_no_proof(alone["proofs"]))
    failure = failure or (others[0]["failure"] if others else None)  # of the run with noise
    if failure:
        raise outcomes.CouldNotBeChecked(
            f"{script.name} does not train on {REFERENCE}, so there is nothing to compare with: {failure}."
        )
    faults: list[str] = []
    unknown: list[str] = []
    compared: list[int] = []
    for strategy, training, outcome in zip(strategies, trainings[2:], others[1:], strict=True):
        title = f"{strategy.name} on {ranks} ranks"
        fault, reason, num_steps = _judge(script.name, title, reference, Path(training["recording"]), outcome)
        faults += [fault] if fault else []
        unknown += [reason] if reason else []
        compared.append(num_steps)
    return faults, unknown, min(compared)


def _request(
    script: programs.Script,
    strategy: Strategy | None,
    ranks: int,
    precision: str,
    clipping: float,
    recording: Path,
    noise: int | None,
) -> dict[str, Any]:
    """Return the request for one training, as dryrun/recorded_ranks.py reads it. Without a strategy: one process."""
    return {
        "file": None if strategy is None else str(strategy.file),
        "num_ranks": ranks,
        "arguments": script.arguments_for("single" if strategy is None else strategy.name),
        "recording": str(recording),
        "noise": noise,
        "precision": precision,
        "clipping": clipping if strategy is not None and strategy.is_shipped else None,
    }


def _train(script: programs.Script, trainings: Sequence[Mapping[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Run all trainings in one process that forks their ranks, and return their outcomes."""
    request = {
        "script": str(script.path),
        "is_function": script.is_function,
        "steps": RECORDED_STEPS,
        "seconds": seconds,
        "trainings": trainings,
    }
    try:
        (result,) = processes.run_ranks(
            programs.words("dryrun/recorded_ranks.py", json.dumps(request)),
            script.name,
            timeout_seconds=START_SECONDS + seconds * len(trainings),
            environment=programs.environment(),
        )
    except RunFailed as failure:
        raise outcomes.CouldNotBeChecked(f"{failure}.") from None
    parsed: list[dict[str, Any]] = result
    return parsed


def _judge(
    script: str, title: str, reference: Path, recording: Path, outcome: Mapping[str, Any]
) -> tuple[str | None, str | None, int]:
    """Return what is wrong with a strategy's training, why it is not known, and how many steps were compared.

    The first two are None if the training is sound.
    """
    from ..diff import compare as comparing
    from ..diff import text
    from ..diff.recorded import Recording

    if failure := outcome["failure"]:
        if "not done after" in failure:  # it may wait forever, or it may be slow
            hint = "Pass a larger timeout, or find out with assert_never_hangs where ranks wait"
            return None, f"{script}: {title} {failure}. {hint}.", 0
        return f"{script}: {title} fails: {failure}.", None, 0
    proofs = outcome["proofs"]
    if other := _lines(proofs, "not_as_requested"):
        return f"{script}: {title} was requested, but the script trained differently: {'; '.join(other)}.", None, 0
    if not any(recording.glob("rank-*")):
        return None, f"{script}: {title} could not be compared with {REFERENCE}: {_why_no_proof(proofs)}.", 0
    # The names of the folders are shown, and these are gone when somebody reads them.
    a, b = (
        replace(Recording.read(folder), folder=Path(name))
        for folder, name in ((reference, REFERENCE), (recording, title))
    )
    result = comparing.compare(a, b)
    causes = [f"Cause: {line}" for line in _lines(proofs, "findings")]
    if result.verdict.num_findings:
        return (
            "\n".join(
                [
                    f"{script}: {title} does not train as {REFERENCE} does.",
                    *_first_tensors(result.differences),
                    *(f"Ranks differ: {line}." for line in result.replicas),
                    *(causes or [f"Likely cause: {line}" for line in result.causes]),
                    f"The comparison, in which A is {REFERENCE} and B is {title}:\n{text.text(result)}",
                ]
            ),
            None,
            result.num_steps,
        )
    if causes:
        return "\n".join([f"{script}: {title} trains wrongly, in the same way as {REFERENCE}.", *causes]), None, 0
    if not result.is_same:
        reasons = "; ".join(str(check) for check in result.not_checked if check.is_requested)
        return None, f"{script}: {title} could not be compared with {REFERENCE}: {reasons or 'no tensor'}.", 0
    if any(proof["step"] is None for proof in proofs) or not proofs:
        return None, f"{script}: it is not known whether the script trained with {title}: {_why_no_proof(proofs)}.", 0
    return None, None, result.num_steps


def _lines(proofs: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Return the texts of all ranks, each once."""
    return list(dict.fromkeys(line for proof in proofs for line in proof[key]))


def _why_no_proof(proofs: Sequence[Mapping[str, Any]]) -> str:
    return next((str(proof["reason"]) for proof in proofs if proof["reason"]), "no optimizer step was seen")


def _first_tensors(differences: Sequence[Any]) -> list[str]:
    """Return lines that name the first difference, and the first parameter that differs because of it."""
    from ..diff import text

    first, parameters = differences[:1], [difference for difference in differences if difference.kind in OF_PARAMETERS]
    firsts = {"First difference": first}
    if first and first[0].kind not in OF_PARAMETERS:
        firsts["First parameter that differs"] = parameters[:1]
    return [
        f"{name}: {text.describe(difference, [difference])}."
        for name, differing in firsts.items()
        for difference in differing
    ]
