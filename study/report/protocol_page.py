"""The page of the published program: what its arms were, its defects, and the effect of each, as printed and mended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from study.claims.published import defects as effects
from study.claims.published import traps
from study.claims.published.defects import DEFECTS, GROUPS, METRICS, PROGRAMS, Effect
from study.compare.words import bytes_text, three_digits
from study.report import markup
from study.report.markup import Html, count, relative
from study.report.run_rows import in_project

# As the program prints them; it has no plain training at 16.
LABELS = {
    "plain-8": "Standard BS=8",
    "plain-16": "Standard BS=16",
    "zero-8": "ZeRO Stage2 BS=8",
    "zero-16": "ZeRO Stage2 BS=16",
}
HIDDEN = "zero-8"  # the row that is commented out


def load_protocol(path: str) -> dict[str, Any]:
    """Read the results of the protocol; a file that is not there is looked for in the project. Raises Refusal."""
    return effects.read(in_project(path))


def what_ran(results: Mapping[str, Any]) -> Html:
    """Tabulate one start of each program: what its table prints, and what the engine says that it was."""
    first, *others = [(name, _arms(results, name)) for name in PROGRAMS if f"{name}/0" in results["runs"]]
    note = (
        f"First repeat. {_clock(results)} Losses: training and validation, as Trainer logs them last. Peak: since the "
        "program started."
    )
    head = ["printed", "what ran", "starts from", "steps", "evaluations", "time", "peak", "losses"]
    words = ("what ran", "starts from", "steps", "losses")
    published = markup.table("The published program", head, [("", first[1])], note, words)
    rest = markup.table("The programs with defects mended", head, others, note, words)
    return markup.lines(published, markup.details("The programs with defects mended", rest) if others else "")


def _arms(results: Mapping[str, Any], program: str) -> list[list[Any]]:
    arms = results["runs"][f"{program}/0"]["arms"]
    rows: list[list[Any]] = []
    for arm in arms:
        label = LABELS[arm["arm"]] + (" (commented out)" if arm["arm"] == HIDDEN and program == "published" else "")
        if "error" in arm:
            rows.append([label, arm["error"], *[None] * 6])
            continue
        ran = arm["ran"]
        stage = "no ZeRO" if ran["zero_stage"] is None else f"stage {ran['zero_stage']}"
        rows.append(
            [
                label,
                f"{stage}, {ran['engine_class']}, {ran['optimizer_class']}",
                _start(program, arms, arm),
                f"{ran['num_steps']} of {ran['batch_size']}",
                ran["num_evaluations"],
                f"{arm[f'{effects.clock_of(results)}seconds']:.1f} s",
                bytes_text(arm["life_peak_bytes"]),
                f"{arm['logged_train_loss']:.4f}, {arm['logged_eval_loss']:.4f}",
            ]
        )
    return rows


def _start(program: str, arms: list[dict[str, Any]], arm: dict[str, Any]) -> str:
    before = arms[: arms.index(arm)]
    if not before or before[0]["first_weights"] == arm["first_weights"]:
        return "the given weights"
    if PROGRAMS[program].fresh_model:
        return "the given body, another head"
    return f"what {LABELS[before[-1]['arm']]} left"


def effects_table(results: Mapping[str, Any]) -> Html:
    """Tabulate every comparison's effects."""
    groups = [
        (
            title,
            [[name, *(_cell(effects.effect(results, one, metric)) for metric in METRICS)] for name, one in of.items()],
        )
        for title, of in GROUPS.items()
    ]
    note = (
        "Relative difference with its 95 % interval; below 0 ZeRO is better. As published, repeats differ in the head "
        "alone; mended, in split, order and dropout too. Of so many intervals some leave out 0 by chance. Left alone, "
        f"same-model and peak-kept are in one process besides, without which they cannot be. {_setting(results)} "
        f"{_clock(results)}"
    )
    return markup.table("ZeRO's arm against plain training", ["", *METRICS], groups, note)


def shares(results: Mapping[str, Any]) -> Html:
    """Tabulate how much of the published effect is gone with each defect mended."""
    rows = [
        [name, *(_points(effects.added(results, name, metric)) for metric in METRICS)] for name in effects.MENDED_ALONE
    ]
    note = "Percentage points, with a 95 % interval: the effect as published less that with this defect mended."
    caption = "What each defect adds to the published effect"
    return markup.table(caption, ["defect", *METRICS], [("", rows)], note)


def markdown(results: Mapping[str, Any]) -> list[str]:
    """Tabulate in Markdown what is learned: as published, mended, and with each defect that alone changes it."""
    rows = {"as published": effects.AS_PUBLISHED, "all defects mended": effects.MENDED}
    rows |= {f"all mended but `{name}`": one for name, one in effects.LEFT_ALONE.items()}
    lines = [f"| program | {' | '.join(effects.LOSSES)} |", f"| --- |{' --- |' * len(effects.LOSSES)}"]
    for name, comparison in rows.items():
        cells = [effects.effect(results, comparison, metric) for metric in effects.LOSSES]
        if comparison in (effects.AS_PUBLISHED, effects.MENDED) or {one.word for one in cells if one} != {
            "no difference"
        }:
            lines.append(f"| {name} | {' | '.join(map(_effect, cells))} |")
    return [*lines, "", _setting(results)]


def defects() -> Html:
    """List what is wrong in the program and what the mended one does."""
    rows = [[name, defect["published"], defect["mended"]] for name, defect in DEFECTS.items()]
    head = ["defect", "as published", "mended"]
    return markup.table("Defects", head, [("", rows)], words=head)


def trapped(path: str) -> Html:
    """Tabulate the difference that each parity trap makes, and what is left of it once the setting is matched."""
    place = in_project(path)
    content, found = traps.read(place), traps.effects(place)
    groups = []
    for name, of_trap in found.groupby("trap", sort=False):
        rows = []
        for quantity, both in of_trap.groupby("quantity", sort=False):
            cells = both.set_index("arm")
            size = f"{three_digits(100 * cells.loc['trapped', 'size'])} %"
            shown = (_trap_cell(cells.loc[arm]) for arm in ("trapped", "matched"))
            rows.append([quantity.replace("_", " "), size, *shown])
        groups.append((f"{name}: {content['traps'][name]['what']}", rows))
    data, settings = content["data"], content["settings"]
    note = (
        f"Difference from the control, without its sign, and its mean and 95 % interval over {found['n_seeds'].min()} "
        f"seeds. BERT {settings['size']} from scratch, {settings['num_train_examples']} reviews of "
        f"{settings['sequence_length']} tokens ({data['source']}), {count(settings['epochs'], 'epoch')}, one or two "
        "processes on a CPU."
    )
    head = ["", "in one pair of runs", "mean with the trap", "mean with the setting matched"]
    return markup.table("Traps", head, groups, note)


def _trap_cell(comparison: Any) -> str:
    if comparison.verdict == "no difference":
        return "no difference"
    return markup.below(relative(comparison.difference), comparison.verdict)


def _clock(results: Mapping[str, Any]) -> str:
    return "Times are the processor's." if effects.clock_of(results) else "Times are the wall's."


def _setting(results: Mapping[str, Any]) -> str:
    settings, machine = results["settings"], results["machine"]
    where = ", ".join(gpu["name"] for gpu in machine["gpus"]) or f"{machine['cpu']}, one thread"
    return (
        f"BERT {settings['size']}, {settings['num_train_examples']} reviews of {settings['sequence_length']} tokens, "
        f"{count(settings['epochs'], 'epoch')}; {where}."
    )


def _effect(effect: Effect | None) -> str:
    if effect is None:
        return "has no value"
    between = _between(effect) if effect.low != effect.high else ""
    return f"{relative(effect.mean)}{f' ({between})' if between else ''}, {effect.word}"


def _between(effect: Effect) -> str:
    """The interval; empty where one repeat has none."""
    if effect.low is None or effect.high is None:
        return ""
    return f"{relative(effect.low)} to {relative(effect.high)}"


def _cell(effect: Effect | None) -> Html | None:
    return None if effect is None else markup.below(relative(effect.mean), _between(effect), effect.word)


def _points(effect: Effect | None) -> Html | None:
    if effect is None:
        return None
    if effect.low is None or effect.high is None:
        return markup.below(_signed(effect.mean))
    return markup.below(_signed(effect.mean), f"{_signed(effect.low)} to {_signed(effect.high)}")


def _signed(share: float) -> str:
    return f"{'+' if share > 0 else ''}{three_digits(100 * share)}"
