"""What the published program measures as published, and after its defects are repaired."""

from __future__ import annotations

import math
from collections.abc import Callable

from committed_runs import PROTOCOL, SEEDS, of_published_program
from wording import span, tabulate, whole_percent

from study.claims import defects
from zero_study.terminal import significant


def published_program() -> str:
    """Compare the losses of both sides: as published, repaired, and with each defect that alone changes them."""
    results = defects.read(PROTOCOL)
    programs = {"as published": defects.AS_PUBLISHED, "all defects repaired": defects.MENDED}
    programs |= {f"all repaired except `{name}`": comparison for name, comparison in defects.LEFT_ALONE.items()}
    rows = []
    for name, comparison in programs.items():
        effects = [defects.effect(results, comparison, metric) for metric in defects.LOSSES]
        if name in list(programs)[:2] or {effect.word for effect in effects if effect} != {"no difference"}:
            rows.append([name, *map(in_words, effects)])
    settings, machine = results["settings"], results["machine"]
    tokens = f"{settings['num_train_examples']} reviews of {settings['sequence_length']} tokens"
    epochs = f"{settings['epochs']} epoch{'s' * (settings['epochs'] > 1)}"
    setting = f"BERT {settings['size']}, {tokens}, {epochs}; {machine['cpu']}, one thread."
    head = "version of the program", *(f"{metric}, ZeRO compared with plain training" for metric in defects.LOSSES)
    return f"{tabulate(head, rows)}\n\n{setting}"


def seeds() -> str:
    """Compare the losses with and without ZeRO over the registered seeds, and those of two plain trainings."""
    results = defects.read(SEEDS)
    comparisons = {
        "with ZeRO, compared with plain training (all defects repaired)": defects.MENDED,
        "plain training, compared with plain training that begins with another classification head": defects.TWICE,
    }
    rows = []
    for name, comparison in comparisons.items():
        effects = [defects.effect(results, comparison, metric) for metric in defects.LOSSES]
        (number,) = {len(effect.values) for effect in effects if effect}
        rows.append([name, number, *map(in_words, effects)])
    return tabulate(["comparison", "seeds", *defects.LOSSES], rows)


def in_words(effect: defects.Effect | None) -> str:
    if effect is None:
        return "has no value"
    has_interval = None not in (effect.low, effect.high) and effect.low != effect.high
    between = f" ({relative(effect.low)} to {relative(effect.high)})" if has_interval else ""
    return f"{relative(effect.mean)}{between}, {effect.word}"


def relative(value: float) -> str:
    """Format a ratio in percent, or as a power of ten if it is very small."""
    digits = f"{significant(100 * value)} %" if abs(value) >= 1e-3 or value == 0 else significant(value)
    return f"+{digits}" if value > 0 else digits


def repaired_losses() -> str:
    """Return a power of ten above the difference of the validation losses with and without ZeRO, after the repair."""
    effect = of_published_program(defects.MENDED, "validation loss")
    return f"1e{math.floor(math.log10(abs(effect.mean))) + 1}"


def repaired_time() -> str:
    """Return the step time with ZeRO divided by the one without ZeRO, after the repair, with its interval."""
    effect = of_published_program(defects.MENDED, "time")
    return f"{1 + effect.mean:.2f} times as long ({span((1 + effect.low, 1 + effect.high), 2)})"


def published_loss() -> str:
    """Compare the validation losses of the two trainings of the published program."""
    effect = of_published_program(defects.AS_PUBLISHED, "validation loss")
    interval = span((-100 * effect.low, -100 * effect.high), 0)
    return f"{whole_percent(-effect.mean)} lower (95 % interval {interval} %, {len(effect.values)} repeats)"


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("reports/claims.md", "protocol"): published_program,
    ("reports/claims.md", "seeds"): seeds,
}


NUMBERS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/claims.md", "published_loss"): published_loss,
    ("docs/claims.md", "repaired_losses"): repaired_losses,
    ("docs/claims.md", "repaired_time"): repaired_time,
}
