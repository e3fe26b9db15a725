"""Draw sentences of the project's text at random, for a reader who has not seen them.

    python tools/measure/sample_sentences.py --seed 7
    python tools/measure/sample_sentences.py --docstrings --number 60 --seed 7
    python tools/measure/sample_sentences.py --kind verdicts --kind faults --number 40 --seed 7

The sentences come from everything that a user can read: README, guides, the changelog, notebooks, reports, help texts,
messages, the ledger of published claims, its corrections and the reasons of its verdicts, the questions of the studies,
the rules of `zero-study why`, known faults of engines, the keys that `doctor` describes, and the evidence lines of
`advise`. From each kind of text the same number is drawn, because otherwise the longest kind would hide the others.
`--kind` draws only from some kinds, and `--docstrings` draws first paragraphs of public docstrings. The same seed draws
the same sentences of the same commit.

A reader marks each sentence that they had to read twice. The goal is at most 8 of 150, and 3 of 60 docstrings.
"""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).resolve().parents[2]
_KEYS = "zero_study/engines/keys/keys.yaml"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LEAST_WORDS = 5
QUESTIONS = (  # of advise, whose evidence lines are drawn
    "--model llama-3.1-8b --gpu h100 --gpus 8 --all",
    "--model gpt2-xl --gpu a100-40gb --gpus 2 --all",
    "--model llama-3.1-8b --gpu rtx-4090 --gpus 1 --lora-rank 16 --load-in-4bit --all",
)
PROSE_KEYS = {"note", "reason", "remedy", "condition", "question", "what", "why", "change", "check", "text", "cause"}


def of_markdown(text: str) -> Iterator[str]:
    """Yield the sentences of paragraphs, list items and cells of tables. Code and comments are left out."""
    text = re.sub(r"```.*?```|<!--.*?-->|<[^>]+>", " ", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.)\s)", text):
        if block.lstrip().startswith("#"):
            continue
        for cell in block.strip().strip("|").split(" | "):
            if re.search(r", line \d+$", cell.strip()):
                continue  # a quotation of a source
            yield from of_prose(re.sub(r"^[-*] |^\d+\. |\*\*", "", cell.strip()))


def of_prose(text: str) -> Iterator[str]:
    """Yield the sentences of a text without markup that have at least five words."""
    for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z`\"])", " ".join(text.split())):
        if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= LEAST_WORDS:
            yield sentence


def of_pages(*patterns: str) -> Iterator[tuple[str, str]]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            for sentence in of_markdown(path.read_text(encoding="utf-8")):
                yield path.relative_to(ROOT).as_posix(), sentence


def of_notebooks() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "reports").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            place = path.relative_to(ROOT).as_posix()
            if cell["cell_type"] == "markdown":
                yield from ((place, sentence) for sentence in of_markdown("".join(cell["source"])))
            for output in cell.get("outputs", ()):
                shown = output.get("data", {}).get("text/markdown", ())
                yield from ((place, sentence) for sentence in of_markdown("".join(shown)))


def of_help() -> Iterator[tuple[str, str]]:
    from zero_study.cli import all_commands

    for command in all_commands().values():
        texts = [command.help or "", *(getattr(option, "help", None) or "" for option in command.params)]
        for text in texts:
            yield from ((f"{command.name} --help", sentence) for sentence in of_prose(text))


def of_messages() -> Iterator[tuple[str, str]]:
    """Yield the sentences of texts in code that are not docstrings. A value that is filled in is shown as `...`."""
    for path in sorted(path for name in ("study", "zero_study") for path in (ROOT / name).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        parts = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
        for node in ast.walk(tree):
            if id(node) in docstrings or id(node) in parts:
                continue
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else "..." for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            for sentence in of_prose(text):
                if sentence.endswith((".", "?", "!")) and not set("\\^<>") & set(sentence):
                    yield path.relative_to(ROOT).as_posix(), sentence


def of_data(pattern: str, keys: Collection[str] = PROSE_KEYS) -> Iterator[tuple[str, str]]:
    """Yield the sentences of YAML and JSON files, from the values of `keys`. No keys means all keys."""

    def texts(value: Any, key: str = "") -> Iterator[str]:
        if isinstance(value, Mapping):
            for name, part in value.items():
                yield from texts(part, str(name))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for part in value:
                yield from texts(part, key)
        elif isinstance(value, str) and (not keys or key.rstrip("s") in keys):
            yield value

    for path in sorted(ROOT.glob(pattern)):
        for text in texts(yaml.load(path.read_text(encoding="utf-8"), _LOADER)):
            yield from ((path.relative_to(ROOT).as_posix(), sentence) for sentence in of_prose(text))


def of_verdicts() -> Iterator[tuple[str, str]]:
    """Yield the reason of every verdict as a whole, because its last sentence alone says nothing."""
    path = ROOT / "study" / "claims" / "verdicts.json"
    for name, verdict in json.loads(path.read_text(encoding="utf-8")).items():
        yield name, verdict["why"]


def of_advice() -> Iterator[tuple[str, str]]:
    for question in QUESTIONS:
        command = [sys.executable, "-m", "zero_study", "advise", *question.split()]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
        for block in answer.split("\n\n"):
            yield from (("advise " + question, sentence) for sentence in of_prose(block) if sentence.endswith("."))


def of_docstrings() -> Iterator[tuple[str, str]]:
    """Yield the first paragraph of every public docstring."""
    for path in sorted(path for name in ("study", "zero_study") for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                continue
            name = "" if isinstance(node, ast.Module) else node.name
            if not name.startswith("_") and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)} {name}", " ".join(text.split("\n\n")[0].split())


KINDS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "README": lambda: of_pages("README.md"),
    "guides": lambda: of_pages("docs/**/*.md"),
    "reports": lambda: of_pages("reports/*.md"),
    "notebooks": of_notebooks,
    "help": of_help,
    "messages": of_messages,
    "ledger": lambda: of_data("study/claims/ledger/*.yaml"),
    "corrections": lambda: of_data("study/claims/corrections.yaml"),
    "verdicts": of_verdicts,
    "questions": lambda: of_data("study/studies/*.yaml"),
    "rules": lambda: of_data("zero_study/why/rules/*.yaml"),
    "faults": lambda: of_data("zero_study/upgrade/faults.json", {"summary", "what", "model"}),
    "keys": lambda: (each for each in of_data(_KEYS, ()) if each[1].endswith(".")),
    "changelog": lambda: of_pages("CHANGELOG.md"),
    "advice": of_advice,
}


@click.command(help=__doc__)
@click.option("--seed", type=int, required=True, help="The seed of the random choice.")
@click.option("--number", default=150, show_default=True, help="The number of sentences.")
@click.option("--docstrings", is_flag=True, help="Draw from docstrings.")
@click.option("--kind", "only", type=click.Choice(list(KINDS)), multiple=True, help="A kind of text; can be repeated.")
def main(seed: int, number: int, docstrings: bool, only: tuple[str, ...]) -> None:
    choice = random.Random(seed)
    kinds = {"docstrings": of_docstrings} if docstrings else {kind: KINDS[kind] for kind in only or KINDS}
    for place, (kind, sentences) in enumerate(kinds.items()):
        population = sorted(set(sentences()))
        share = number // len(kinds) + (place < number % len(kinds))
        click.echo(f"\n## {kind}: {min(share, len(population))} of {len(population):,}\n")
        for source, sentence in choice.sample(population, min(share, len(population))):
            click.echo(f"- [{source}] {sentence}")


if __name__ == "__main__":
    main()
