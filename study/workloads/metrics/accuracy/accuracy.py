"""Compute the share of correct labels, as an `evaluate` metric that needs no download from the hub."""

from collections.abc import Sequence

import datasets
import evaluate


class Accuracy(evaluate.Metric):  # type: ignore[misc]
    """A metric whose `compute(predictions, references)` takes labels and returns {"accuracy": share}."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of predictions that equal their reference.",
            citation="",
            inputs_description="predictions: predicted labels; references: true labels.",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        right = sum(int(predicted == true) for predicted, true in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}
