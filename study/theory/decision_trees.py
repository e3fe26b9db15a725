"""What do the published decision trees advise, and does their advice fit and keep up with the best?

The rules stand as `hf-analysis`, `zero3-blog` and `stages-analysis` have them. Where rules of one source answer the
same question in different ways, each is a tree of its own. What a rule leaves open, so that it had to be read into it,
is in its function's docstring. Billions are of counted parameters: a model called 7B may have more than 7e9.

Not coded, because there is nothing to measure them by or they choose nothing: "easily fit ... with room to spare" and
what longer sequences favour (hf-analysis); NVMe where "CPU bandwidth is saturated" and none where it is slow, ZeRO with
pipeline parallelism (zero3-blog); "standard scenarios", "most production environments" (stages-analysis).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

BILLION = 1e9
WEIGHT_BYTES = 2  # per parameter of zero3-blog's "model size", which names no unit: weights of 16 bits
KEEPS_UP = 0.95  # of the best strategy's speed; a choice, and less than models of time err by


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the trees ask of a model and a box."""

    num_params: int
    num_gpus: int  # of all nodes
    gpu_memory_bytes: float  # of one
    has_fast_link: bool  # NVLink or NVSwitch between GPUs; else PCIe
    fits: Mapping[str, bool]  # by strategy, as the planner finds
    purpose: Literal["production", "research"]
    speed_critical: bool  # else capacity is
    num_nodes: int = 1
    global_batch_size: int | None = None  # sequences per optimizer step

    def __post_init__(self) -> None:
        for name in ("num_params", "num_gpus", "gpu_memory_bytes", "num_nodes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} {getattr(self, name)}: must be positive")
        if self.purpose not in ("production", "research"):
            raise ValueError(f"purpose {self.purpose!r}: must be 'production' or 'research'")

    def does_fit(self, strategy: str) -> bool:
        """Look up whether a strategy fits; raises ValueError where `fits` says nothing of it."""
        if strategy not in self.fits:
            raise ValueError(f"fits: nothing of {strategy}, which the tree asks for; add what the planner finds")
        return self.fits[strategy]


@dataclass(frozen=True)
class Recommendation:
    """What a tree advises, by a file of accelerate_configs, and the rule that says so."""

    strategy: str | None  # None: no rule names one
    section: str  # heading of the source under which the rule stands
    phrase: str | None  # of the rule; None: no rule is for this case


Tree = Callable[[Question], Recommendation]

# ---------------------------------------------------------------- hf-analysis


def _for_several_gpus(tree: Tree) -> Tree:
    """Put the source's clarification, that ZeRO is for several GPUs only, before one of its trees."""

    def decide(question: Question) -> Recommendation:
        if question.num_gpus == 1:
            return Recommendation("single", "When NOT to Use ZeRO", "Single GPU training")
        return tree(question)

    return decide


def _hf_tree(question: Question) -> Recommendation:
    """Follow the arrows: they end at questions 1 and 2, and lead to none of questions 3 to 5."""
    section = "Decision Tree: A Systematic Approach"
    if question.does_fit("ddp"):
        return Recommendation("ddp", section, "Consider ZeRO-0 for maximum speed")
    if question.does_fit("zero2"):
        return Recommendation("zero2", section, "Consider ZeRO-2 for balanced performance")
    return Recommendation("zero3", section, "Must use ZeRO-3")


def _hf_purpose(question: Question) -> Recommendation:
    """Ask question 3 alone."""
    section = "Decision Tree: A Systematic Approach, 3"
    if question.purpose == "production":
        return Recommendation("zero2", section, "Prefer ZeRO-2 for reliability")
    return Recommendation("zero3", section, "Consider ZeRO-3 for larger model experiments")


def _hf_priority(question: Question) -> Recommendation:
    """Ask question 4 alone. Its answers are orders; the first that fits is taken."""
    section = "Decision Tree: A Systematic Approach, 4"
    if question.speed_critical:
        order, phrase = ("ddp", "zero2", "zero3"), "ZeRO-0 > ZeRO-2 > ZeRO-3"
    else:
        order, phrase = ("zero3", "zero2", "ddp"), "ZeRO-3 > ZeRO-2 > ZeRO-0"
    return Recommendation(next((name for name in order if question.does_fit(name)), None), section, phrase)


def _hf_bandwidth(question: Question) -> Recommendation:
    """Ask question 5 alone, with the guidance on hardware that says the same and names what to use instead.

    A fast link makes ZeRO-3 "viable", which chooses nothing. Necessity is read as: ZeRO-2 does not fit.
    """
    if question.has_fast_link:
        return Recommendation(None, "Decision Tree: A Systematic Approach, 5", "ZeRO-3 viable")
    if question.does_fit("zero2"):
        return Recommendation("zero2", "Hardware-Specific Guidance", "Prefer ZeRO-2 unless memory-constrained")
    return Recommendation("zero3", "Decision Tree: A Systematic Approach, 5", "Avoid ZeRO-3 unless necessary")


def _hf_recommendations(question: Question) -> Recommendation:
    """Go by purpose: research by size, production by what is set up.

    Several nodes are taken before the established architecture, which all models of the study have.
    """
    if question.purpose == "production":
        section = "Recommendations, For Production Training"
        if question.num_nodes > 1:
            return Recommendation("zero3", section, "ZeRO-3 with careful communication optimization")
        return Recommendation("zero2", section, "ZeRO-2 for reliability and performance")
    section = "Recommendations, For Research and Development"
    if question.num_params <= 7 * BILLION:
        return Recommendation("ddp", section, "Models ≤7B: ZeRO-0 for maximum iteration speed")
    if question.num_params <= 13 * BILLION:
        return Recommendation("zero2", section, "Models 7-13B: ZeRO-2 for balanced performance")
    return Recommendation("zero3", section, "Models >13B: ZeRO-3 (only viable option)")


def _hf_sizes(question: Question) -> Recommendation:
    """Go by size in the section on costs, which leaves out 7B to 9B and small models that do not fit."""
    section = "Cost-Performance Trade-offs"
    if question.num_params <= 7 * BILLION:
        phrase = "Best for models ≤7B parameters where memory permits"
        return Recommendation("ddp" if question.does_fit("ddp") else None, section, phrase)
    if 9 * BILLION <= question.num_params <= 13 * BILLION:
        return Recommendation("zero2", section, "Optimal sweet spot for 9-13B models")
    if question.num_params > 13 * BILLION:
        return Recommendation("zero3", section, "Essential for models >13B parameters")
    return Recommendation(None, section, None)


# Effective batch from, to and including; the table's last column. Of "ZeRO-2/ZeRO-3" the first is taken.
_HF_BATCHES = (
    (32, 64, "ddp", "ZeRO-0"),
    (96, 144, "zero2", "ZeRO-2"),
    (192, 384, "zero2", "ZeRO-2/ZeRO-3"),
    (512, float("inf"), "zero3", "ZeRO-3 viable"),
)


def _hf_batch(question: Question) -> Recommendation:
    """Go by the table of effective batch sizes, which has gaps between its rows."""
    section = "Communication Amortization Effects, Optimal Choice"
    if question.global_batch_size is not None:
        for least, most, strategy, phrase in _HF_BATCHES:
            if least <= question.global_batch_size <= most:
                return Recommendation(strategy, section, phrase)
    return Recommendation(None, section, None)


def _hf_conclusion(question: Question) -> Recommendation:
    """Go by the conclusion, which speaks of production and of small models, without a number: read as of any."""
    if question.purpose == "production":
        return Recommendation("zero3", "Conclusion", "this trade-off often favors ZeRO-3")
    return Recommendation(None, "Conclusion", None)


# ---------------------------------------------------------------- zero3-blog


def _blog_insight(question: Question) -> Recommendation:
    """Go by size, with the optimizer offloaded in setups short of memory, read as: the stage alone does not fit.

    The study's file for stage 3 offloads the parameters too.
    """
    section = "Why ZeRO-3 Outperforms Previous Iterations"
    if question.num_params > 10 * BILLION:
        stage, phrase = "zero3", "Use ZeRO-3 for models >10B parameters"
    else:
        stage, phrase = "zero2", "ZeRO-2 suffices for smaller scales"
    if question.does_fit(stage):
        return Recommendation(stage, section, phrase)
    return Recommendation(f"{stage}_cpu_offload", section, "offload_optimizer for memory-constrained setups")


def _blog_offload(question: Question) -> Recommendation:
    """Offload by size or by memory; ZeRO-Offload is there called a feature of ZeRO-3.

    The guide ("Tune Offloading for Large Models") has the same threshold, for parameters and optimizer both.
    """
    section = "Parameter Offloading: Balancing CPU and GPU Workloads"
    if question.num_params > 10 * BILLION:
        return Recommendation("zero3_cpu_offload", section, "Use ZeRO-Offload for models >10B parameters")
    if question.gpu_memory_bytes < 1.5 * WEIGHT_BYTES * question.num_params:
        return Recommendation("zero3_cpu_offload", section, "when GPU memory is <1.5x model size")
    return Recommendation(None, section, None)


def _blog_takeaways(question: Question) -> Recommendation:
    section = "Key Takeaways for Practitioners"
    if question.num_params > BILLION:
        return Recommendation("zero3", section, "Use ZeRO-3 for models >1B parameters")
    return Recommendation(None, section, None)


def _blog_nvme(question: Question) -> Recommendation:
    """Offload to NVMe from one billion parameters on.

    Its example keeps optimizer states on the host; the study's file has them on the disk as well.
    """
    section = "Case Study: Training Billion-Parameter Models"
    if question.num_params >= BILLION:
        return Recommendation(
            "zero3_nvme_offload", section, "For billion-parameter models, combine ZeRO-3 with NVMe offload"
        )
    return Recommendation(None, section, None)


def _blog_multi_node(question: Question) -> Recommendation:
    """Choose where to offload on several nodes; capacity is read as "extreme memory savings"."""
    section = "Overcoming Bottlenecks in Distributed Systems"
    if question.num_nodes == 1:
        return Recommendation(None, section, None)
    if question.speed_critical:
        return Recommendation("zero3_cpu_offload", section, "prioritize CPU offload for speed")
    return Recommendation("zero3_nvme_offload", section, "NVMe offload for extreme memory savings")


# ---------------------------------------------------------------- stages-analysis

_STAGES_OFFLOAD = (
    "DeepSpeed Training Parameters, offload_optimizer_device and offload_param_device",
    "offloading to CPU strikes the best balance",
)


def _stages_by_need(question: Question) -> Recommendation:
    """Take the lowest stage that memory allows, and offload where stage 3 does not fit.

    A constraint is read as "not severe" where stage 1 fits, and as "critical" where stage 2 does not. The source knows
    no plain data parallelism.
    """
    if question.does_fit("zero1"):
        return Recommendation("zero1", "ZeRO Stage 1", "when memory constraints are present but not severe")
    if question.does_fit("zero2"):
        return Recommendation("zero2", "ZeRO Stage 2", "models that need more memory-efficient solutions")
    if question.does_fit("zero3"):
        return Recommendation("zero3", "ZeRO Stage 3", "where device memory is a critical bottleneck")
    return Recommendation("zero3_cpu_offload", *_STAGES_OFFLOAD)


def _stages_start(question: Question) -> Recommendation:
    """Start as the section on parameters recommends, with the offload that it recommends where that does not fit."""
    if question.does_fit("zero2"):
        return Recommendation(
            "zero2", "DeepSpeed Training Parameters, zero_optimization", "the recommended starting point"
        )
    return Recommendation("zero2_cpu_offload", *_STAGES_OFFLOAD)


# Names begin with the source's.
TREES: dict[str, Tree] = {
    "hf-analysis-tree": _for_several_gpus(_hf_tree),
    "hf-analysis-purpose": _for_several_gpus(_hf_purpose),
    "hf-analysis-priority": _for_several_gpus(_hf_priority),
    "hf-analysis-bandwidth": _for_several_gpus(_hf_bandwidth),
    "hf-analysis-recommendations": _for_several_gpus(_hf_recommendations),
    "hf-analysis-sizes": _for_several_gpus(_hf_sizes),
    "hf-analysis-batch": _for_several_gpus(_hf_batch),
    "hf-analysis-conclusion": _for_several_gpus(_hf_conclusion),
    "zero3-blog-insight": _blog_insight,
    "zero3-blog-offload": _blog_offload,
    "zero3-blog-takeaways": _blog_takeaways,
    "zero3-blog-nvme": _blog_nvme,
    "zero3-blog-multi-node": _blog_multi_node,
    "stages-analysis-need": _stages_by_need,
    "stages-analysis-start": _stages_start,
}

# ---------------------------------------------------------------- beside the planner

Kind = Literal["agrees", "slower", "out of memory", "no answer", "nothing fits"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class TreeOutcome:
    """What came of one tree's advice in one case."""

    kind: Kind
    advised: str | None
    best: str | None  # the fastest that fits; None where nothing does
    left_behind: float | None  # share of the best one's speed; None where nothing advised fits


def compare(advice: Recommendation, results: Mapping[str, tuple[bool, float]]) -> TreeOutcome:
    """Hold advice against what the planner finds: by strategy, whether it fits and its tokens per second and GPU.

    The best is the best of `results`: leave out what is not to be chosen. The speed of what does not fit is not read.
    Where nothing fits, no advice could have been right, and none is judged. Raises ValueError where the strategy
    advised is not among the results.
    """
    advised = advice.strategy
    if advised is not None and advised not in results:
        raise ValueError(f"results: nothing of {advised}, which is advised; add what the planner finds of it")
    speeds = {name: speed for name, (fits, speed) in results.items() if fits}
    if not speeds:
        return TreeOutcome("nothing fits", advised, None, None)
    best = max(speeds, key=speeds.__getitem__)
    if advised is None:
        return TreeOutcome("no answer", None, best, None)
    if advised not in speeds:
        return TreeOutcome("out of memory", advised, best, None)
    kind: Kind = "agrees" if speeds[advised] >= KEEPS_UP * speeds[best] else "slower"
    return TreeOutcome(kind, advised, best, 1 - speeds[advised] / speeds[best])


@dataclass(frozen=True)
class Summary:
    """What came of one tree's advice over a grid."""

    num_cases: int
    shares: dict[Kind, float]  # of all cases; every kind is there
    median_left_behind: float | None  # share of the best one's speed, over the slower cases; None where there are none
    worst_left_behind: float | None


def summarize(outcomes: Iterable[TreeOutcome]) -> Summary:
    """Count a tree's outcomes over a grid; raises ValueError where there are none."""
    outcomes = list(outcomes)
    if not outcomes:
        raise ValueError("outcomes: none; a grid needs at least one case")
    counts = Counter(outcome.kind for outcome in outcomes)
    lost = [outcome.left_behind for outcome in outcomes if outcome.kind == "slower"]
    return Summary(
        num_cases=len(outcomes),
        shares={kind: counts[kind] / len(outcomes) for kind in KINDS},
        median_left_behind=statistics.median(lost) if lost else None,
        worst_left_behind=max(lost, default=None),
    )
