"""Make the texts and tables of the notebook about a published article: answer, main faults, and all verdicts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import Markdown

from study.claims import defects, ledger, sentences, traps, verdicts
from study.claims.ledger import Source
from study.claims.sentences import JudgedSentence
from study.report.pages.shown import markdown
from study.report.sentences import bullets
from zero_study import terminal
from zero_study.files import ROOT

# JavaScript that hides the rows of the table of sentences that do not contain the typed text.
_ROWS = "document.querySelectorAll('tr:has(q)')"
_HIDE = "row.hidden = !row.textContent.toLowerCase().includes(this.value.toLowerCase())"


DEFECTS = """## The program of the article, defect by defect

The article prints its program. This project ran it as printed, with all defects repaired, and with all defects repaired
except one. The numbers compare the final loss of the training called ZeRO with that of plain training. If a number is
negative, the loss with ZeRO is lower. With all defects repaired, both trainings reach the same loss. The model is a
tiny BERT, trained for one epoch on a CPU. Measured by this project."""
TRAPS = """## Settings that differ unnoticed

Two programs can look like the same training under two strategies, but differ in a setting that neither states. The
table shows how much the losses of such pairs differ, and how much they differ after the setting is made equal. *Not
distinguishable from 0* means that the 95 % interval over seeds contains 0. The models are small and were trained on a
CPU. Measured by this project."""
# What differs in each pair. A trap without an entry is described by its record.
TRAP_PAIRS = {
    "unmatched-clipping": "DDP without clipping, and ZeRO-2 with an accelerate file that has no gradient_clipping",
    "clip-grad-norm-ignored": "a script that calls accelerator.clip_grad_norm_(..., 0.1), under DDP and under ZeRO-2",
    "bf16-stage-0": "bf16 at ZeRO stage 0, which serves as the baseline of stage 2, and bf16 at stage 2",
    "two-kinds-of-bf16": "mixed_precision bf16 without DeepSpeed (autocast), and with DeepSpeed (bf16 parameters)",
    "bf16-accumulation": "four micro batches in bf16: at ZeRO-2 with gradients accumulated in fp32, and at ZeRO-1 "
    "without this setting",
    "optimizer-replaced": "PyTorch's SGD under ZeRO-2, without and with optimizer offload",
    "optimizer-in-config": "the script's AdamW without weight decay for biases and norms, and AdamW in the "
    "DeepSpeed file",
    "adam-in-config": "the script's Adam, and type Adam in the DeepSpeed file, which is AdamW",
    "scheduler-steps-twice": "a scheduler that is passed to prepare, on one process and on two",
    "other-initial-weights": "a model from the same seed, built whole and built under zero.Init (ZeRO-3)",
    "other-sample-order": "DataLoader(shuffle=True), on one process and on two",
    "accumulation-ignored": "four micro batches per step in the script, and one in the DeepSpeed file",
    "one-process-instead-of-two": "one process with batches of 16, and two processes with 8, of which "
    "distributed_type MULTI_CPU starts only one",
    "clipping-auto": "one process without clipping, and ZeRO-2 with gradient_clipping: auto in the accelerate file",
    "clipping-zero": "one process without clipping, and ZeRO-2 with gradient_clipping: 0.0 in the accelerate file",
}
PRINTS_ITS_PROGRAM = "a100-replication"  # the only such article


class Verdicts:
    """The content of the notebook `article`: the verdicts on the sentences of one published article."""

    def __init__(self, source: str) -> None:
        self.judged = sentences.read(source)
        (self.source,) = (entry for entry in ledger.read() if entry.source == source)

    def answer(self) -> Markdown:
        """Return which statements of the article can be trusted, as Markdown."""
        return markdown(answer(self.source))

    def main_faults(self, number: int) -> Markdown:
        """Return the most important faults of the article, as a Markdown list."""
        return markdown(main_faults(self.judged, number))

    def counts(self) -> Markdown:
        """Return a table of how many sentences have each verdict."""
        return markdown(verdict_counts(self.judged))

    def table(self) -> Markdown:
        """Return a table of all sentences with their verdicts and reasons."""
        return markdown(verdict_table(self.judged))

    def defects(self) -> Markdown:
        """Return a table of the losses of the program that the article publishes. Empty if it publishes none."""
        if self.source.source != PRINTS_ITS_PROGRAM:
            return markdown()
        return markdown(DEFECTS, defect_table(ROOT / "reports/cpu/published/protocol.json"))

    def traps(self) -> Markdown:
        """Return a table of loss differences between programs that seem equal. Empty if the article has no program."""
        if self.source.source != PRINTS_ITS_PROGRAM:
            return markdown()
        return markdown(TRAPS, trap_table(ROOT / "reports/cpu/published/traps.json"))


def plain(text: str) -> str:
    """Return a text without TeX, in which `|` and `*` cannot break a Markdown table."""
    return re.sub(r"\$([^$]+)\$", r"\1", text).replace("|", "/").replace("*", "\\*")


def answer(source: Source) -> str:
    """Return which statements of an article can be trusted, as Markdown."""
    lines = []
    for head, key in sentences.ON_TOP:
        text = getattr(source, key) or ""
        points = text.removesuffix(".").split("; ") if key != "believe" else []
        listed = bullets(f"{point[:1].upper()}{point[1:]}." for point in points)
        lines.append(f"**{head}**\n\n{listed}" if points else f"**{head}** {text}")
    return "\n\n".join(lines)


def main_faults(judged: Sequence[JudgedSentence], number: int = 3) -> str:
    """Return a Markdown list of the most important faults: sentence, verdict, reason, and what to do instead."""
    return "\n".join(
        f"1. **{fault.says}** {fault.word} ({fault.by}): *{plain(fault.head.claim.phrase)}*\n"
        f"    - Why: {fault.sentence.reason}\n    - Do this instead: {fault.sentence.remedy}"
        for fault in sentences.faults(judged)[:number]
        if fault.sentence is not None
    )


def filter_field() -> str:
    """Return the HTML of a search field that filters the table of sentences and suggests the verdicts."""
    options = "".join(f'<option value="{conclusion.word}">' for conclusion in verdicts.Conclusion)
    return (
        '<input type="search" list="verdicts" placeholder="filter the sentences" aria-label="filter the sentences" '
        f'style="width: 100%; padding: .5em; border: 1px solid" oninput="for (const row of {_ROWS}) {_HIDE}">'
        f'<datalist id="verdicts">{options}</datalist>'
    )


def verdict_counts(judged: Sequence[JudgedSentence]) -> str:
    """Return a table of the verdicts: how many sentences have each verdict, and what it means.

    A sentence below the table names the kinds of evidence.
    """
    counts = Counter(sentence.word for sentence in judged if sentence.counts)
    rows = [(kind.word, counts[kind.word], kind.meaning) for kind in verdicts.Conclusion]
    return "\n".join(
        [
            *_left(["verdict", "number of sentences", "what the verdict means"], rows),
            "",
            sentences.basis_of_verdicts(judged),
        ]
    )


def verdict_table(judged: Sequence[JudgedSentence]) -> str:
    """Return a Markdown table of all sentences of the article with their verdicts and reasons."""
    rows = [f"| {_quoted(sentence)} | {_judgement(sentence)} |" for sentence in judged]
    return "\n".join(["| sentence of the article | verdict and reason |", "| --- | --- |", *rows])


def _quoted(judged: JudgedSentence) -> str:
    phrase = judged.head.claim.phrase
    line = f", line {judged.sentence.line}" if judged.sentence else ""
    meaning = "" if judged.says == phrase else f"**{plain(judged.says)}**<br>"
    return f"{meaning}<q>{plain(phrase).replace('<', '&lt;')}</q>{line}"


def _judgement(judged: JudgedSentence) -> str:
    verdict = f"{judged.word} ({judged.by})" if judged.by else judged.word
    slip = "" if judged.counts else ", a slip that is not counted"
    remedy = judged.sentence.remedy if judged.sentence else None
    instead = f" Do this instead: {remedy}" if remedy else ""
    return f"**{verdict}{slip}.** {plain(f'{judged.why}{instead}')}"


def defect_table(path: Path) -> str:
    """Return a Markdown table of the losses with ZeRO relative to those without, per version of a published program.

    `path` is the file of the results of the protocol. Each version corrects other defects of the published program.
    """
    results = defects.read(path)
    versions = {"as printed": defects.AS_PUBLISHED, "all defects repaired": defects.MENDED, **defects.LEFT_ALONE}
    rows = []
    for name, comparison in versions.items():
        effects = [defects.effect(results, comparison, metric) for metric in defects.LOSSES]
        losses = ["" if effect is None else _change(effect.mean, 0.0005) for effect in effects]
        known = defects.DEFECTS.get(name)
        rows.append(
            (f"all repaired except: {known['short']}" if known else name, *losses, known["published"] if known else "")
        )
    losses_heads = [f"{metric} with ZeRO, relative to plain training" for metric in defects.LOSSES]
    return "\n".join(_left(["version of the program", *losses_heads, "what the defect is"], rows))


def trap_table(path: Path) -> str:
    """Return a Markdown table of loss differences between pairs of programs that look like the same training.

    `path` is the file of the measured traps.
    """
    effects = traps.effects(path)
    effects["text"] = effects.apply(_trap_text, axis="columns")
    wide = effects.pivot(index="trap", columns=["quantity", "arm"], values="text").reindex(effects["trap"].unique())
    columns = {
        "difference of training loss": ("train_loss", "trapped"),
        "difference of held-out loss": ("eval_loss", "trapped"),
        "training loss, setting made equal": ("train_loss", "matched"),
    }
    described: Mapping[str, Any] = traps.read(path)["traps"]
    pairs = [TRAP_PAIRS.get(trap, described[trap]["what"].partition("; matched")[0]) for trap in wide.index]
    rows = [(pair, *values) for pair, values in zip(pairs, wide[[*columns.values()]].to_numpy(), strict=True)]
    return "\n".join(terminal.markdown(["the pair, and the setting that differs", *columns], rows))


def _trap_text(effect: pd.Series) -> str:
    if effect["verdict"] == "no difference":
        return "none"
    if not effect["low"] * effect["high"] > 0:  # also if one seed has no interval
        return "not distinguishable from 0"
    return _change(effect["difference"], 0.0005, "less than 0.1 %")


def _change(relative: float, least: float, below: str = "0 %") -> str:
    return f"{100 * relative:+.1f} %" if abs(relative) >= least else below


def _left(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table whose columns are all aligned to the left."""
    return terminal.markdown(head, rows, num_texts=len(head))
