"""What became of the published protocol? Tables, figures and sentences from what its programs did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from study.claims.published import defects as effects
from study.claims.published import traps
from study.claims.published.defects import DEFECTS, GROUPS, METRICS, PROGRAMS, Effect, Metric
from study.compare.words import bytes_text, three_digits
from study.report import markup
from study.report.figures import Figure
from study.report.figures.effects import effects as draw_effects
from study.report.markup import Html
from study.report.pages import runs
from study.report.pages.cells import relative
from study.report.pages.opening import lead
from study.report.words import count

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
    return effects.read(runs.in_project(path))


def effects_of(results: Mapping[str, Any], metric: Metric) -> list[tuple[str, dict[str, Effect | None]]]:
    """Every comparison's effect on one metric, group by group."""
    return [
        (title, {name: effects.effect(results, comparison, metric) for name, comparison in comparisons.items()})
        for title, comparisons in GROUPS.items()
    ]


def protocol_first(results: Mapping[str, Any]) -> Html:
    """What the published program finds, as printed and mended, for who has not read it."""
    published, mended = (
        effects.effect(results, one, "validation loss") for one in (effects.AS_PUBLISHED, effects.MENDED)
    )
    if published is None or mended is None:
        return lead("The program's two arms could not be compared: see below which runs are missing.")
    agree = (
        "the two ways agree"
        if mended.word == "no difference"
        else f"what is left is {relative(mended.mean)}, {mended.word}"
    )
    arms = [arm for key, run in results["runs"].items() if key.startswith("published/") for arm in run["arms"]]
    shared = any(arm["ran"]["zero_stage"] is not None for arm in arms if "error" not in arm)
    none = "" if shared else ", though under today's versions no part of it shares anything out"
    return lead(
        "A published program says that a model learns better when its training is shared out by ZeRO. Run as printed, "
        f"it finds {relative(published.mean)} of validation loss ({published.word}){none}; with what is wrong in it "
        f"mended, {agree}."
    )


def protocol_scope(results: Mapping[str, Any]) -> Html:
    """How far what is found here reaches."""
    settings, body = results["settings"], results.get("body")
    head = effects.effect(results, effects.LEFT_ALONE["head-unseeded"], "validation loss")
    lines = [
        f"It shows what the defects do to a {settings['size']} BERT in {count(settings['epochs'], 'epoch')}. The "
        "published effects are BERT-large's at epoch 5 on a GPU, and need not come of them."
    ]
    if body is not None:
        lines.append(
            f"The given weights are a body trained here on {body['num_reviews']:,} other reviews of the same task, one "
            "body for all starts; the published program downloads one that has seen none."
        )
    if head is not None:
        lines.append(f"One start says little: arms that differ in the head's first weights alone are {_effect(head)}.")
    command = "python -m study.claims.published protocol --size large --epochs 5 --data hub"
    there = markup.paragraphs(Html(f"To run it there: <code>{command}</code>."))
    return Html(markup.items(lines) + there)


def protocol_in_words(results: Mapping[str, Any]) -> Html:
    """Say what the published program finds, what the mended one finds, and which faults make the difference."""
    lines = []
    for metric in METRICS:
        published, mended = (effects.effect(results, one, metric) for one in (effects.AS_PUBLISHED, effects.MENDED))
        left = {name: effects.effect(results, one, metric) for name, one in effects.LEFT_ALONE.items()}
        alone = [name for name, one in left.items() if one is not None and one.word == "better"]
        makes = (
            f"Left alone in a program that is otherwise mended, {_in_short(alone)} is enough to make ZeRO look better"
            if alone
            else "No fault alone is seen to make ZeRO look better"
        )
        if published is not None and published.word == "better":
            mending = {name: effects.effect(results, one, metric) for name, one in effects.MENDED_ALONE.items()}
            adds = {name: effects.added(results, name, metric) for name in mending}
            cures = [
                name for name, one in adds.items() if one and one.word == "better" and mending[name].word != "better"
            ]
            gone = f"the effect is gone once one of these is mended: {_in_short(cures, ', ')}"
            makes += f". In the printed program {gone if cures else 'no single mend removes the effect'}"
        lines.append(
            markup.led(
                metric.capitalize(),
                f"As printed, the program finds {_effect(published)}; with all of its faults mended, "
                f"{_effect(mended)}. {makes}.",
            )
        )
    lines.append(markup.led("What ran", _mislabelled(results)))
    return Html(markup.items(lines))


def _in_short(names: Sequence[str], between: str = " or ") -> str:
    """Defects as a sentence names them, each with its label in the tables."""
    return between.join(f"{DEFECTS[name]['short']} ({name})" for name in names)


def _mislabelled(results: Mapping[str, Any]) -> str:
    """Say in how many programs an arm was not what it is called, and why."""
    ran = {
        (key.partition("/")[0], arm["arm"].partition("-")[0], arm["ran"]["zero_stage"])
        for key, run in results["runs"].items()
        for arm in run["arms"]
        if "error" not in arm
    }
    with_zero = {name for name, kind, _ in ran if kind == "zero"}
    no_zero = {name for name, kind, stage in ran if (kind, stage) == ("zero", None)}
    words = []
    if no_zero:
        words = [
            f"In {len(no_zero)} of {len(with_zero)} programs with an arm that is called ZeRO, it was plain training"
        ]
        if no_zero == {name for name in with_zero if not PROGRAMS[name].honoured}:
            words[0] += ": the printed one, and every other that hands over the settings in the printed way"
    words += [
        f"In one, plain training was ZeRO of stage {stage}, because the engine before it in that process had left its "
        f"setting in the environment ({name})"
        for name, kind, stage in sorted(ran, key=lambda one: list(PROGRAMS).index(one[0]))
        if kind == "plain" and stage is not None
    ]
    return f"{'. '.join(words)}." if words else "Every arm was what it is called."


def what_ran(results: Mapping[str, Any]) -> Html:
    """Tabulate one start of each program: what its table prints, and what the engine says that it was."""
    first, *others = [(name, _arms(results, name)) for name in PROGRAMS if f"{name}/0" in results["runs"]]
    note = (
        f" First repeat. {_clock(results)} Losses: training and validation, as Trainer logs them last. Peak: since the "
        "program started."
    )
    head = ["printed", "what ran", "starts from", "steps", "evaluations", "time", "peak", "losses"]
    words = ("what ran", "starts from", "steps", "losses")
    published = markup.table("The published program", head, [("", first[1])], note, words)
    rest = markup.table("The programs with defects mended", head, others, note, words) if others else ""
    return Html(published + (markup.details("The programs with defects mended", rest) if rest else ""))


def _arms(results: Mapping[str, Any], program: str) -> list[list[Any]]:
    arms = results["runs"][f"{program}/0"]["arms"]
    rows = []
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


def effects_drawn(results: Mapping[str, Any], metric: Metric) -> Figure:
    """Draw every comparison's effect on one metric."""
    num_repeats = len({name.partition("/")[2] for name in results["runs"]})
    return draw_effects(
        metric,
        effects_of(results, metric),
        f"Effect on the {metric}, below 0 where ZeRO's arm is better: mean and 95 % interval over "
        f"{count(num_repeats, 'repeat')}. {_setting(results)}",
    )


def effects_table(results: Mapping[str, Any]) -> Html:
    """Tabulate every comparison's effects."""
    of = {metric: effects_of(results, metric) for metric in METRICS}
    groups = [
        (title, [[name, *(_cell(of[metric][number][1][name]) for metric in METRICS)] for name in comparisons])
        for number, (title, comparisons) in enumerate(GROUPS.items())
    ]
    return Html(
        markup.table(
            "ZeRO's arm against plain training",
            ["", *METRICS],
            groups,
            " Relative difference with its 95 % interval; below 0 ZeRO is better. As published, repeats differ in the "
            "head alone; mended, in split, order and dropout too. Of so many intervals some leave out 0 by chance, and "
            "two starts of one program differ in time by some per cent, as the row of plain training twice shows. Left "
            "alone, same-model and peak-kept are in one process besides, without which they cannot be. "
            f"{_setting(results)} {_clock(results)}",
        )
    )


def shares(results: Mapping[str, Any]) -> Html:
    """Tabulate how much of the published effect is gone with each defect mended."""
    rows = []
    for name in effects.MENDED_ALONE:
        rows.append([name, *(_points(effects.added(results, name, metric)) for metric in METRICS)])
    return Html(
        markup.table(
            "What each defect adds to the published effect",
            ["defect", *METRICS],
            [("", rows)],
            " Percentage points, with a 95 % interval over repeats: the effect as published less that with this defect "
            "mended. Defects act on one another, so a column need not add up.",
        )
    )


def markdown(results: Mapping[str, Any]) -> list[str]:
    """Tabulate in Markdown what is learned: as published, mended, and with each defect that alone changes it."""
    rows = {"as published": effects.AS_PUBLISHED, "all defects mended": effects.MENDED}
    rows |= {f"all mended but `{name}`": one for name, one in effects.LEFT_ALONE.items()}
    lines = [f"| program | {' | '.join(effects.LOSSES)} |", f"| --- |{' --- |' * len(effects.LOSSES)}"]
    for name, comparison in rows.items():
        cells = [effects.effect(results, comparison, metric) for metric in effects.LOSSES]
        if comparison in (effects.AS_PUBLISHED, effects.MENDED) or {one.word for one in cells} != {"no difference"}:
            lines.append(f"| {name} | {' | '.join(map(_effect, cells))} |")
    return [*lines, "", _setting(results)]


def defects() -> Html:
    """List what is wrong in the program and what the mended one does."""
    rows = [[name, defect["published"], defect["mended"]] for name, defect in DEFECTS.items()]
    return Html(markup.table("Defects", ["", "as published", "mended"], [("", rows)], words=("as published", "mended")))


def trapped(path: str) -> Html:
    """Tabulate the difference that each parity trap makes, and what is left of it once the setting is matched."""
    place = runs.in_project(path)
    content, effects_found = traps.read(place), traps.effects(place)
    groups = []
    for name, of_trap in effects_found.groupby("trap", sort=False):
        rows = []
        for quantity, both in of_trap.groupby("quantity", sort=False):
            cells = both.set_index("arm")
            size = f"{three_digits(100 * cells.loc['trapped', 'size'])} %"
            shown = (_trap_cell(cells.loc[arm]) for arm in ("trapped", "matched"))
            rows.append([quantity.replace("_", " "), size, *shown])
        groups.append((f"{name}: {content['traps'][name]['what']}", rows))
    data, settings = content["data"], content["settings"]
    note = (
        " Difference from the control, without its sign, and its mean and 95 % interval over "
        f"{effects_found['n_seeds'].min()} seeds. BERT {settings['size']} from scratch, "
        f"{settings['num_train_examples']} reviews of {settings['sequence_length']} tokens ({data['source']}), "
        f"{count(settings['epochs'], 'epoch')}, one or two processes on a CPU."
    )
    head = ["", "in one pair of runs", "mean with the trap", "mean with the setting matched"]
    return Html(markup.table("Traps", head, groups, note))


def _trap_cell(comparison: Any) -> Html:
    if comparison.verdict == "no difference":
        return Html(comparison.verdict)
    return Html(f"{markup.escape(relative(comparison.difference))}<small>{markup.escape(comparison.verdict)}</small>")


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
    return f"{_interval(effect)}, {effect.word}"


def _interval(effect: Effect) -> str:
    if effect.low is None or effect.low == effect.high:
        return relative(effect.mean)
    return f"{relative(effect.mean)} ({relative(effect.low)} to {relative(effect.high)})"


def _cell(effect: Effect | None) -> Html | None:
    if effect is None:
        return None
    below = [] if effect.low is None else [f"{relative(effect.low)} to {relative(effect.high)}"]
    below.append(effect.word)
    return Html(relative(effect.mean) + "".join(f"<small>{markup.escape(line)}</small>" for line in below))


def _points(effect: Effect | None) -> Html | None:
    if effect is None:
        return None
    mean, low, high = (
        "" if value is None else f"{'+' if value > 0 else ''}{three_digits(100 * value)}"
        for value in (effect.mean, effect.low, effect.high)
    )
    return Html(f"{mean}<small>{low} to {high}</small>" if low else mean)
