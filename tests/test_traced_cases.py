"""Does the planner predict what was traced, case by case of the committed grid? No torch is needed to ask."""

from __future__ import annotations

import launching
import traced_cases

GRID = launching.ROOT / "reports" / "predicted" / "validation" / "traces.json"
MARGIN = 0.03  # of the traced peak; fixed when 144 cases were traced, and all were within
# Of the 240 that were traced after that, those that are not: the planner's error is as large as MOST. The planner lacks
# a moment of theirs: most are FSDP2's on several ranks with checkpointed blocks in fp32, predicted too low.
MISSED = {
    "bert-imdb-base-fsdp2-8x-fp32-checkpointed",
    "bert-imdb-large-ddp-2x-bf16",
    "bert-imdb-large-single-1x-bf16",
    "gpt-wikitext-124m-fsdp2-1x-bf16-checkpointed",
    "gpt-wikitext-355m-fsdp2-2x-fp32-checkpointed",
    "gpt-wikitext-355m-fsdp2-4x-fp32-checkpointed",
    "gpt-wikitext-355m-fsdp2-8x-fp32-checkpointed",
    "gpt-wikitext-355m-fsdp2_hybrid-4x-fp32-checkpointed",
    "gpt-wikitext-774m-fsdp2-4x-fp32-checkpointed",
    "gpt-wikitext-774m-fsdp2-8x-fp32-checkpointed",
}
MOST = 0.08


def points() -> list[traced_cases.TracedPoint]:
    return traced_cases.read(GRID).traces


def test_the_planner_predicts_what_was_traced():
    errors = {}
    for traced in points():
        point = traced_cases.point_of(traced)
        errors[point.name] = abs(point.predicted.total / traced.traced.total - 1)
    assert len(errors) == 384
    assert max(errors.values()) <= MOST
    assert {name for name, error in errors.items() if error > MARGIN} == MISSED  # one that is mended leaves the list
