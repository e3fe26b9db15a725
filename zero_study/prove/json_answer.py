"""Make the answer of `zero-study prove --json`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..answers import envelope
from ..answers.envelope import Answer
from ..verdict import Verdict
from .text import NOT_CHECKED

NOT_TRAINED, NOTE, OTHER_FAULT = "prove/nothing-trained", "prove/note", "prove/training-fault"
# A part of the text of each training fault, and the id of this kind of fault.
FAULTS = {
    "only one process trains": "prove/single-process",
    "gradients were not averaged": "prove/gradients-not-averaged",
    "clipped before unscaling": "prove/clipped-before-unscaling",
    "clipped too early": "prove/clipped-too-early",
    "clipped too often": "prove/clipped-too-often",
    "clipped nothing": "prove/clipped-nothing",
    "the norm of the gradients is wrong": "prove/wrong-norm",
    "not unscaled": "prove/not-unscaled",
    "gradients were lost": "prove/lost-gradients",
    "zero_grad is missing": "prove/missing-zero-grad",
    "gradients were replaced": "prove/replaced-gradients",
    "gradient ascent": "prove/gradient-ascent",
    "gradients are too large": "prove/grown-gradients",
    "every gradient is zero": "prove/zero-gradients",
    "the same gradients are used twice": "prove/repeated-update",
    "parameters are not trained": "prove/untrained-parameters",
    "weights are not finite": "prove/not-finite-weights",
    "no weight moved": "prove/no-weight-moved",
    "weights are put back": "prove/restored-weights",
    "parameters take part in the forward pass but get no gradient": "prove/detached-parameters",
    "attention crosses documents": "prove/packed-documents-mixed",
    "embedding and head are not tied": "prove/lost-tie",
    "are no longer tied": "prove/lost-tie",
    "data is divided twice": "prove/data-divided-twice",
    "have different optimizer settings": "prove/ranks-have-other-settings",
    "train separately": "prove/ranks-train-separately",
    "gradients of ranks differ": "prove/gradients-differ",
    "ranks differ": "prove/ranks-differ",
    "are multiplied by different numbers before the update": "prove/ranks-scale-differently",
    "every rank trains on the same batch": "prove/same-batch",
    "the update is not": "prove/other-update",
    "Muon trains no matrix": "prove/muon-without-matrices",
    "keeps no states for": "prove/missing-states",
    "optimizer states are not what the formula gives": "prove/other-states",
    "optimizer states are not those of the last update": "prove/reset-states",
    "ranks keep different kinds of optimizer states": "prove/ranks-have-other-states",
    "the schedule ends before the training": "prove/schedule-ends-early",
    "the gradient is not that of one process": "prove/other-gradient",
    "each rank clips by its own norm": "prove/clipped-per-rank",
    "the optimizer makes no step any more": "prove/missing-update",
    "the gradients of": "prove/carried-gradients",
    "the loss is not finite": "prove/not-finite-loss",
    "trains in evaluation mode": "prove/evaluation-mode",
    "rows are trained on more than one rank": "prove/overlapping-data",
    "the loss is scaled": "prove/scaled-loss",
    "states are lost on loading": "prove/lost-states",
    "are not those that were loaded": "prove/lost-states",
}
# The id and the severity of the entries of a list in proof.json.
IDS: dict[str, tuple[str, envelope.Severity]] = {
    "known_wrong": ("prove/known-fault", "error"),
    "findings": (OTHER_FAULT, "error"),
    "not_as_asked": ("prove/not-as-requested", "warning"),
    "notes": (NOTE, "note"),
}


def of(verdict: Verdict, proofs: Sequence[Mapping[str, Any]], why_not_made: str | None, status: int) -> Answer:
    """Return the JSON answer on a checked script and its exit status. `proofs` has the content of each proof.json."""
    found = list(findings(proofs))
    if verdict.num_findings and not found and why_not_made is not None:
        found.append(envelope.Finding(NOT_TRAINED, "error", f"{why_not_made}."))
    fields = {"proofs": list(proofs), "why_not_made": why_not_made}
    return envelope.answer("prove", verdict, found, fields, status)


def findings(proofs: Sequence[Mapping[str, Any]]) -> Iterator[envelope.Finding]:
    """Yield the training faults, the differences from the request, and the notes of each proof as findings."""
    for proof in proofs:
        step = (proof.get("step") or {}).get("number")
        for kind, (identifier, severity) in IDS.items():
            for text in proof.get(kind, []):
                if not text.startswith(NOT_CHECKED):
                    name = fault_id(text) if kind == "findings" else identifier
                    of_watch = re.match(r"update (\d+)", text)
                    yield envelope.Finding(name, severity, text, step=int(of_watch[1]) if of_watch else step)


def fault_id(text: str) -> str:
    """Return the stable id of a training fault from its text."""
    return next((identifier for part, identifier in FAULTS.items() if part in text), OTHER_FAULT)
