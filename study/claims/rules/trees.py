"""What comes of published advice over the planner's grid of models, boxes and batches?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from study.claims.observed import Observed
from study.planner.trees import Grid, evaluate
from study.theory.decision_trees import KEEPS_UP, TREES, Recommendation, TreeOutcome, compare
from study.theory.trust import EVIDENCE


def tree_share(tree: str) -> Observed:
    """In which share of the planner's cases that it answers a tree's advice fits and keeps up with the fastest.

    Its interval is from where the advice is the fastest itself to where it is no further behind than times may be off.
    """
    _check_tree(tree)
    return _agreeing(tree, [judged.outcome for judged in _grid().judged[tree]])


def strategy_share(strategy: str) -> Observed:
    """In which share of the planner's cases one strategy, always advised, does what `tree_share` asks of a tree."""
    results = [case.results for case in _grid().cases if any(fits for fits, _ in case.results.values())]
    results = [by_strategy for by_strategy in results if strategy in by_strategy]
    if not results:
        raise ValueError(f"strategy {strategy!r}: is not in the planner's grid")
    advice = Recommendation(strategy, "", None)
    return _agreeing(strategy, [compare(advice, by_strategy) for by_strategy in results])


def trees_agree(first: str, second: str, purpose: str) -> Observed:
    """Whether two published trees give one answer in every case of the planner's grid of this purpose."""
    _check_tree(first)
    _check_tree(second)
    questions = [question for case in _grid().cases for question in case.questions() if question.purpose == purpose]
    if not questions:
        raise ValueError(f"purpose {purpose!r}: is none of the grid's; take production or research")
    equal = sum(TREES[first](question).strategy == TREES[second](question).strategy for question in questions)
    return Observed(equal == len(questions), (f"{equal:,} of {len(questions):,} cases have one answer",))


def _check_tree(name: str) -> None:
    if name not in TREES:
        raise ValueError(f"tree {name!r} is unknown; take one of {', '.join(TREES)}")


def _agreeing(name: str, outcomes: Iterable[TreeOutcome]) -> Observed:
    outcomes = list(outcomes)
    kinds = Counter(outcome.kind for outcome in outcomes)
    answered = kinds.total() - kinds["no answer"]
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    behind = [outcome.left_behind for outcome in outcomes if outcome.left_behind is not None]
    nearly = 1 - KEEPS_UP / EVIDENCE["fsdp", "known"].spread
    low, high = (sum(share <= most for share in behind) / answered for most in (0, nearly))
    told = "only where it is the fastest, to where predicted times cannot tell"
    return Observed(kinds["agrees"] / answered, (f"{name}, {kinds.total():,} cases: {counts}",), (low, high), told=told)


@lru_cache(maxsize=1)
def _grid() -> Grid:
    return evaluate()
