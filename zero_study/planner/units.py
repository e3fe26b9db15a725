"""The unit in which a training is counted: tokens of texts, or images."""

from __future__ import annotations

from dataclasses import dataclass

from zero_study import terminal
from zero_study.theory.prediction import Prediction
from zero_study.theory.shapes import ModelShape


@dataclass(frozen=True)
class Unit:
    """The unit that a model reads (tokens or images), in words and as columns of tables.

    For a model that reads only images, the token counts in predictions are counts of images.
    """

    name: str  # in the singular
    priced: float  # so many units have the price of the table
    price_column: str
    rate_column: str  # of one GPU
    total_rate_column: str  # of all GPUs

    @property
    def plural(self) -> str:
        return f"{self.name}s"

    def dollars(self, prediction: Prediction) -> float | None:
        """Return the price in US dollars of training on `priced` units. None if the price of the GPU is not known."""
        price = prediction.dollars_per_billion_tokens
        return None if price is None else price * self.priced / 1e9

    def batch(self, count: int, length: float) -> str:
        """Return a batch in words, such as "8 sequences of 1,024 tokens" or "8 images"."""
        if self.name == "token":
            return f"{terminal.count(count, 'sequence')} of {length:,.0f} tokens"
        return terminal.count(count, self.name)


TOKENS = Unit("token", 1e9, "$/1e9 tok", "tokens/s/GPU", "tokens/s")
IMAGES = Unit("image", 1e6, "$/1e6 images", "images/s/GPU", "images/s")


def price_in_words(dollars: float | None) -> str:
    """Return an amount of US dollars with all digits before the point, and at least two digits."""
    return "?" if dollars is None else terminal.significant(dollars, 2)


def unit_of(shape: ModelShape) -> Unit:
    """Return the unit in which a training of a model is counted."""
    return IMAGES if shape.reads_images else TOKENS
