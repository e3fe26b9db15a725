"""Define the commands for a whole project: its check, and the skill for coding agents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zero_study import files
from zero_study.cli.options import PATH, Statuses, command, json_option
from zero_study.command_line import argument
from zero_study.errors import Refusal
from zero_study.verdict import Verdict

if TYPE_CHECKING:
    from zero_study.answers.envelope import Answer


@command(
    "check",
    "Do configuration files and lock files of my project have known problems?",
    "check",
    statuses=Statuses(
        "nothing needs a change",
        "something needs a change",
        "a path, an option or a setting is refused",
        "nothing in the project could be checked, or something that was named could not be",
    ),
)
@argument("paths", type=PATH, nargs=-1, metavar="[PATH]...", help="Files and folders. [default: this folder]")
@click.option("--since", metavar="COMMIT", help="Compare lock files with those of this commit. [default: HEAD]")
@click.option("--all", "everything", is_flag=True, help="Also list notes that require no change.")
@json_option
@click.option(
    "--sarif", type=PATH, metavar="FILE", help="Also write the findings as SARIF, for code hosts and editors."
)
@click.option(
    "--markdown", type=PATH, metavar="FILE", help="Also write the report as Markdown, for a comment on a pull request."
)
@click.option("--accept", is_flag=True, help="Print the lines for pyproject.toml that accept all findings, and exit.")
def _check(
    paths: tuple[Path, ...], since: str | None, everything: bool, as_json: bool, sarif: Path | None,
    markdown: Path | None, accept: bool,
) -> Verdict | Answer | int:  # fmt: skip
    """Check a project: its configuration files, its lock files, and the checkpoints that you name.

    In a folder, the command finds the configuration files of all tools that `zero-study doctor` knows. It skips files
    that git ignores. The command compares lock files (requirements, uv, poetry, conda and others) with those of the
    last commit, as `zero-study upgrade` does. If a lock file pins a release of DeepSpeed, the configuration files are
    also checked for the known faults of this release. If you name a folder with a checkpoint, the command checks it
    like `zero-study saved`.

    The table [tool.zero-study] of pyproject.toml can contain the settings `exclude`, `checkpoints` and `since`, and the
    findings that the project accepts, each with a reason.
    """
    from zero_study import check

    for option, path in {"--sarif": sarif, "--markdown": markdown}.items():
        if path is not None:
            files.require_folder(path, option)
    if accept and as_json:
        raise Refusal("--accept prints lines of TOML, so it cannot be combined with --json. Remove one of them.")
    report = check.examine(paths, since)
    if accept:
        print(check.baseline(report), end="")
        return 0
    if sarif is not None:
        files.write_json(sarif, check.sarif(report))
    if markdown is not None:
        files.write_whole(markdown, check.markdown(report).encode())
    if as_json:
        return check.answer(report)
    print(check.text(report, everything))
    return report.verdict


@command(
    "skills",
    "How does my coding agent learn to use zero-study?",
    "skills install",
    statuses=Statuses("the skill was printed or installed", None, "the folder is refused, and nothing was written"),
)
@argument("action", type=click.Choice(("install", "print")), help="Install the skill, or print its text.")
@click.option(
    "--target",
    type=PATH,
    metavar="DIR",
    help="Folder of skills, such as .claude/skills. [default: .agents/skills]",
)
def _skills(action: str, target: Path | None) -> int:
    """Install the skill for coding agents, or print it.

    The skill tells an agent which command answers which question, and how to read the answer. `zero-study skills print`
    prints the skill as text for the AGENTS.md of your project.
    """
    from zero_study import skills

    if action == "print":
        if target is not None:
            raise Refusal(f"--target {target} is only for `zero-study skills install`. Remove --target.")
        sys.stdout.write("\n\n".join(skills.texts()) + "\n")
        return 0
    place = skills.install(target or skills.DEFAULT_TARGET)
    print(f"Wrote the skill to {place}")
    return 0


COMMANDS = (_check, _skills)
