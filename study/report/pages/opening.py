"""What does a page say first? One sentence for who knows none of the project's words, and what follows for a choice."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from study.compare.words import bytes_text, in_order, processes, three_digits
from study.report import markup
from study.report.markup import Html
from study.report.pages.cells import named, peak_column
from study.report.pages.runs import blocks, by_box, worlds
from study.report.words import percent

# Relative. Where equal runs are further apart, a strategy could not be told from one that takes half as long again.
NOISE = 0.5
SHOWN = 0.001  # relative; smaller differences would read as 0.0 %


def title(question: str, *answers: Html) -> Html:
    """The question, and what answers it, the first in one sentence."""
    return Html("\n".join([f"<h1>{markup.escape(question)}</h1>", *(answer.text for answer in answers)]))


def lead(sentence: str | Html) -> Html:
    return Html(markup.paragraphs(sentence, kind="lead"))


def noise(compared: pd.DataFrame) -> float:
    """How far the times of equal runs may be apart, in the setting where that is most; 0 where nothing was repeated."""
    largest = compared.loc[compared["metric"] == "seconds_per_step", "relative_margin"].max()
    return 0.0 if pd.isna(largest) else float(largest)


def times_decide(compared: pd.DataFrame) -> bool:
    """Whether times are worth drawing: no repeats of the control are further apart than `NOISE`."""
    return noise(compared) <= NOISE


def memory_and_price(runs: pd.DataFrame, times: pd.DataFrame, control: str) -> Html:
    """By how much memory falls, at what price; `times`: the comparisons of times that count."""
    price = slowest(times, control) if times_decide(times) else ""
    return Html(markup.paragraphs(f"{_memory(runs)}{'; ' if price else ''}{price}."))


def losses_first(compared: pd.DataFrame, control: str) -> Html:
    words = _learned(compared, control)
    return lead(f"{words[0].upper()}{words[1:]}.")


def memory_first(runs: pd.DataFrame) -> Html:
    return lead(f"{_memory(runs)}{_peaks(runs)}.")


def time_first(compared: pd.DataFrame, control: str) -> Html:
    """The times' sentence; where they decide nothing, that."""
    if times_decide(compared):
        words = slowest(compared, control) or f"no time could be compared with that of {control}"
        return lead(f"{words[0].upper()}{words[1:]}.")
    return lead(f"These times decide nothing, as two equal runs may differ by {percent(noise(compared))}.")


def processes_first(runs: pd.DataFrame) -> Html:
    """What the strategies that share the most and the least leave on each process, by their number."""
    shares: dict[int, list[tuple[float, str]]] = {}
    for size, share, strategy in _shares(runs):
        shares.setdefault(size, []).append((share, strategy))
    if not shares:
        return lead("What a process holds was not measured here.")
    said = []
    for size, found in sorted(shares.items()):
        (least, by), (most, other) = (choose(found, key=lambda one: one[0]) for choose in (min, max))
        said.append(f"on {processes(size)} as little as {percent(least)} ({by})")
        said[-1] += f", and by other ways up to {percent(most)} ({other})" if percent(most) != percent(least) else ""
    words = "The more processes share a training, the less each need hold of what a full copy takes"
    return lead(f"{words}: {'; '.join(said)}.")


def learned_choice(compared: pd.DataFrame, control: str) -> Html:
    """What of the losses follows for a choice: which could be told from the control."""
    of_loss = compared[compared["metric"] == "final_loss"]
    apart = of_loss[of_loss["verdict"].isin(["higher", "lower"])]
    if of_loss.empty:
        return Html("")
    if apart.empty:
        words = f"No strategy can be told from {control} by its loss here, which is not to say that all are equal: "
        words += "an interval says how large a difference could still be. Choose by memory and time."
    else:
        words = f"{named(apart['strategy'])} can be told from {control} by the loss; the others cannot."
    return Html(markup.paragraphs(words))


def memory_choice(runs: pd.DataFrame) -> Html:
    """Who needs the least and the most memory at the peak, for each setting and number of processes."""

    def make(here: pd.DataFrame) -> str:
        lines = []
        for block in blocks(here):
            for size, members in worlds(block.runs):
                of_size = members[members["world_size"] == size]
                peaks = of_size.groupby("strategy")[peak_column(here)].max().dropna()
                if len(peaks) > 1:
                    lines.append(
                        f"{block.words}, {processes(size)}: {peaks.idxmin()} takes the least memory at its peak "
                        f"({bytes_text(peaks.min())}), {peaks.idxmax()} the most ({bytes_text(peaks.max())})."
                    )
        return markup.items(lines) if lines else ""

    return by_box(runs, make)


def slowest(compared: pd.DataFrame, control: str) -> str:
    """How much longer the slowest comparable strategy takes; empty where none is."""
    times = compared[(compared["metric"] == "seconds_per_step") & compared["relative_difference"].notna()]
    if times.empty:
        return ""
    fast, slow = (
        times.loc[place] for place in (times["relative_difference"].idxmin(), times["relative_difference"].idxmax())
    )
    plain = f"where every process holds a full copy ({control})" if control == "ddp" else f"under {control}"
    least = f"{three_digits(1 + fast['relative_difference'])} times" if fast["verdict"] == "lower" else "about as long"
    return (
        f"{_step(times)} took from {least} ({fast['strategy']}) to "
        f"{three_digits(1 + slow['relative_difference'])} times ({slow['strategy']}) as long as {plain}"
    )


def _step(times: pd.DataFrame) -> str:
    """A training step, with its model and box where there is one of each."""
    where = times[["workload", "size", "box", "control_world_size"]].drop_duplicates()
    if len(where) > 1:
        return "a training step"
    workload, size, box, world_size = where.iloc[0]
    return f"a training step ({workload} {size}, {processes(world_size)}; {box})"


def _learned(compared: pd.DataFrame, control: str) -> str:
    of_loss = compared[(compared["metric"] == "final_loss") & compared["relative_difference"].notna()]
    of_loss = of_loss[of_loss["limit"].isna()]
    if of_loss.empty:
        return f"what was learned could not be compared with {control}"
    largest = of_loss["relative_difference"].abs().max()
    most = percent(largest, 1) if largest >= SHOWN else f"less than {percent(SHOWN, 1)}"
    at_most = "at most " if largest >= SHOWN else ""
    reach = of_loss[["relative_low", "relative_high"]].abs().max().max()
    few = "" if pd.isna(reach) or reach < SHOWN else f", and so few runs leave room for {percent(reach, 1)}"
    return (
        "how a training was spread over processes moved its error on the training text at the end by "
        f"{at_most}{most} on average{few}"
    )


def _shares(runs: pd.DataFrame) -> Iterator[tuple[int, float, str]]:
    """What a process holds of parameters, gradients and optimizer states, over what a full copy takes.

    By processes and strategy, of those that hold less.
    """
    for block in blocks(runs):
        for size, members in worlds(block.runs):
            held = members.groupby("strategy")["model_state_bytes"].max()
            full = held[held.index.isin(["single", "ddp"])].max()
            for strategy in in_order(held.index):
                if held[strategy] < full:  # not where either is unknown
                    yield size, float(held[strategy] / full), strategy


def _peaks(runs: pd.DataFrame) -> str:
    """Between what factors the peaks are of a full copy's; empty where that has none."""
    found = []
    for block in blocks(runs):
        for _, members in worlds(block.runs):
            shared = members[members["strategy"] != "single"]
            peaks = shared.groupby("strategy")[peak_column(runs)].max().dropna()
            if "ddp" in peaks and len(peaks) > 1:
                found += [(peak / peaks["ddp"], strategy) for strategy, peak in peaks.items()]
    if not found:
        return ""
    (least, saves), (most, costs) = min(found), max(found)
    buckets = ": DeepSpeed's buckets, as large for a small model as for a large one, outweigh it"
    why = buckets if most > 1 and costs.startswith("zero") and not costs.endswith("_tuned") else ""
    return (
        f". At its peak, with buffers and activations, a process needed {three_digits(least)} times ({saves}) to "
        f"{three_digits(most)} times ({costs}) what one with a full copy (ddp) did{why}"
    )


def _memory(runs: pd.DataFrame) -> str:
    found = list(_shares(runs))
    if not found:
        return "What each process holds was not measured here beside a full copy"
    size, share, strategy = min(found, key=lambda one: one[1])
    return (
        f"Sharing a model and what its training keeps between {processes(size)} left each with as little as "
        f"{percent(share)} of what a full copy takes ({strategy})"
    )
