"""Compute the perplexity of a language model, as an `evaluate` metric that takes losses instead of texts."""

import math
from collections.abc import Sequence

import datasets
import evaluate


class Perplexity(evaluate.Metric):  # type: ignore[misc]
    """A metric whose `compute` takes mean losses as predictions and token counts as references.

    It returns {"validation_loss", "perplexity"}.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Mean next-token loss in nats, weighted by tokens, and its exponential.",
            citation="",
            inputs_description="predictions: mean loss of each sequence; references: its number of predicted tokens.",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Sequence[float], references: Sequence[int]) -> dict[str, float]:
        total = math.fsum(loss * tokens for loss, tokens in zip(predictions, references, strict=True))
        loss = total / sum(references)
        # math.exp raises an error above 709, so larger losses have an infinite perplexity. NaN stays NaN.
        return {"validation_loss": loss, "perplexity": math.inf if loss > 700 else math.exp(loss)}
