"""Define the verdict of a command that checks something: what it found, what it compared, what it could not check.

Every command that ends with a verdict returns a `Verdict`, which determines its exit status. A command that compared
nothing is therefore never "sound".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

SOUND, FOUND, REFUSED, UNKNOWN = 0, 1, 2, 3  # the exit statuses of every command; a refusal is an exception
# What the exit statuses mean, for help texts and pages. Each command adds what that is in its case.
MEANINGS = {
    SOUND: "Sound",
    FOUND: "Something found",
    REFUSED: "Refused",
    UNKNOWN: "Could not be checked",
}


class Checked(NamedTuple):
    """The number of things that a check compared, their noun, and what they were compared with."""

    number: int
    noun: str  # what was compared, in the singular, such as "tensor"
    against: str = ""  # how it was checked, such as "compared with the file that transformers loads"
    plural: str | None = None  # needed if it is not the noun with an "s"

    def __str__(self) -> str:
        noun = self.noun if self.number == 1 else self.plural or f"{self.noun}s"
        return f"{self.number:,} {noun} {self.against}".rstrip()


class NotChecked(NamedTuple):
    """A check that was not made, with the reason."""

    what: str
    why: str = ""
    is_requested: bool = False  # the user asked for this check, or the verdict means nothing without it

    def __str__(self) -> str:
        return f"{self.what} ({self.why})" if self.why else self.what


@dataclass(frozen=True)
class Verdict:
    """The result of a check, from which the exit status follows."""

    num_findings: int  # what is wrong, or different, or needs a change; notes do not count
    checked: tuple[Checked, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()

    @classmethod
    def of(cls, num_findings: int, checked: Iterable[Checked] = (), not_checked: Iterable[NotChecked] = ()) -> Verdict:
        """Return the verdict for a number of findings, what was compared, and the checks that were not made.

        Repeated reasons are dropped.
        """
        return cls(num_findings, tuple(checked), tuple(dict.fromkeys(not_checked)))

    @property
    def num_checked(self) -> int:
        return sum(each.number for each in self.checked)

    @property
    def result(self) -> Literal["sound", "found", "unknown"]:
        """Return "found" if there is a finding, "unknown" if nothing or too little was compared, otherwise "sound"."""
        if self.num_findings:
            return "found"
        is_open = any(each.is_requested for each in self.not_checked)
        return "unknown" if is_open or not self.num_checked else "sound"

    @property
    def status(self) -> int:
        """Return the exit status: 0 sound, 1 something was found, 3 it could not be checked."""
        return {"sound": SOUND, "found": FOUND, "unknown": UNKNOWN}[self.result]

    def coverage(self) -> str:
        """Return a text that says what was compared, and how many checks could not be made."""
        compared = ", ".join(str(each) for each in self.checked if each.number) or "nothing was compared"
        count = len(self.not_checked)
        missing = f"{count} check{'s' * (count != 1)} could not be made"
        return f"{compared}; {missing}" if count else compared

    def content(self) -> dict[str, Any]:
        """Return the verdict for JSON: `verdict`, `exit_status`, `checked` and `could_not_check`."""
        return {
            "verdict": self.result,
            "exit_status": self.status,
            "checked": [{"number": each.number, "what": str(each)} for each in self.checked],
            "could_not_check": [
                {"what": each.what, "why": each.why, "requested": each.is_requested} for each in self.not_checked
            ],
        }


class Inputs:
    """What a command was asked to check, or found to check, and the verdict on each of these inputs.

    An input is for instance a file, a lock file of a commit, a checkpoint or a rank. It is listed before it is read, so
    that nothing that was named can be passed over.
    """

    def __init__(self, *names: str) -> None:
        self._verdicts: dict[str, Verdict | None] = dict.fromkeys(names)

    def end(self, name: str, verdict: Verdict) -> None:
        """Record the verdict on an input, which need not be listed yet."""
        self._verdicts[name] = verdict

    def skip(self, name: str, why: str) -> None:
        """Record that an input could not be checked."""
        self.end(name, Verdict.of(0, not_checked=[NotChecked(name, why, True)]))

    def ended(self, names: Iterable[str]) -> bool:
        """Return whether one of these inputs has a verdict."""
        return any(self._verdicts.get(name) is not None for name in names)

    def verdict(self) -> Verdict:
        """Return one verdict on all inputs. If nothing was compared for one of them, it could not be checked.

        Raises RuntimeError if a listed input has no verdict, which is a fault of the command.
        """
        num_findings = 0
        checked: list[Checked] = []
        not_checked: list[NotChecked] = []
        for name, verdict in self._verdicts.items():
            if verdict is None:
                raise RuntimeError(f"{name} was neither checked nor reported as not checked")
            num_findings += verdict.num_findings
            checked += verdict.checked
            not_checked += verdict.not_checked
            if not verdict.num_checked and not any(entry.is_requested for entry in verdict.not_checked):
                reason = str(verdict.not_checked[0]) if verdict.not_checked else "nothing was compared"
                not_checked.append(NotChecked(name, reason, True))
        return Verdict.of(num_findings, checked, not_checked)
