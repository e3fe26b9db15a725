"""What was fixed about a study before its first run: arms, endpoints, margins, exclusions, sample size.

It is the section `protocol` of a study's file. Each outcome holds that file's digest, so a protocol that was changed
after a run is seen: what a run was started under is another text.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from study.files import Written


def _day(text: str) -> str:
    """A day as ISO 8601 writes it."""
    import datetime

    return datetime.date.fromisoformat(text).isoformat()


Names = Annotated[tuple[str, ...], Field(strict=False)]
Share = Annotated[float, Field(gt=0, lt=1)]


class Endpoint(Written):
    """One number of a run on which strategies are compared, and how far two may be apart to count as the same."""

    metric: Literal["loss", "accuracy", "perplexity"]  # held out
    step: int = Field(ge=1)  # at which it is taken
    margin: float = Field(gt=0)  # of loss and perplexity a share of the control's; of accuracy a share of the reviews
    primary: bool = False  # the verdict rests on it
    planned_sd: float = Field(gt=0)  # of one run's difference from its control, in the margin's unit; from the pilot


class Target(Written):
    """How many steps until the held-out loss is this low, as MLPerf's reference convergence points ask it?"""

    loss: float = Field(gt=0)
    every: int = Field(ge=1)  # steps between two looks


class Protocol(Written):
    """All of it."""

    fixed_on: Annotated[str, AfterValidator(_day)]  # the day on which it was committed
    pilot: str = Field(min_length=1)  # what was run before, and is not in the result
    # Labels of the parts that are the control again, from weights one unit in the last place away.
    neighbours: Annotated[tuple[str, ...], Field(min_length=2, strict=False)]
    endpoints: Annotated[tuple[Endpoint, ...], Field(min_length=1, strict=False)]
    target: Target
    same_as: dict[str, Names]  # arm -> strategies that train what it trains to the bit, shown once with one seed
    once: str = Field(min_length=1)  # the label of the part that shows it
    significance: Share = 0.05  # of each one-sided test, and of that against the neighbours after Holm's correction
    exclusions: Names  # in words: which runs are left out
    # Of the body that every run starts from. None: each machine trains its own by the study's command, and makes all
    # runs of a start, so that what is compared has one machine and one body.
    weights_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _check(self) -> Protocol:
        if (primary := sum(endpoint.primary for endpoint in self.endpoints)) != 1:
            raise ValueError(f"endpoints: {primary} are primary; mark one, on which the answer rests")
        return self
