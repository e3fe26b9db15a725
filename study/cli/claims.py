"""Define the command that shows and decides published claims."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from zero_study import progress, terminal
from zero_study.cli.options import Statuses, command, json_option, require
from zero_study.command_line import argument
from zero_study.errors import Refusal
from zero_study.files import require_clone

if TYPE_CHECKING:
    from zero_study.answers.envelope import Answer
    from zero_study.verdict import Verdict


@command(
    "claims",
    "What do measurements say about a published sentence on ZeRO?",
    'claims --search "communication volume"',
    statuses=Statuses(
        "the answer was printed (with --check or --write: every verdict follows from the records)",
        "with --check or --write, a verdict does not follow from the records, or differs from the verdict that the "
        "ledger states for a sentence",
        "the request is refused",
        "with --check or --write, a claim could not be decided because its records are absent",
    ),
)
@argument("name", required=False, metavar="[SOURCE|CLAIM]", help="The name of a source, or of a claim.")
@click.option("--search", metavar="WORDS", help="List the published sentences that contain all these words.")
@json_option
@click.option(
    "--check",
    is_flag=True,
    help="Decide every claim again, and list the verdicts that differ from the committed verdicts.",
)
@click.option("--write", is_flag=True, help="Decide every claim again, and write the new verdicts.")
def _claims(name: str | None, search: str | None, as_json: bool, check: bool, write: bool) -> Verdict | Answer | None:
    """Show the verdicts on published claims.

    With the name of a source or of a claim, the command prints the verdicts on it. Without a name, it prints a summary
    of all publications whose claims were checked.
    """
    from study.claims import in_terminal, json_answer

    if sum([check, write, search is not None]) > 1 or ((check or write or search is not None) and name):
        raise Refusal(
            "--check, --write and --search cannot be combined with each other, or with the name of a claim. Give "
            "only one of these options."
        )
    if check or write:
        require_clone("the records by which claims are decided")
        require("pandas", "scipy")
        with progress.after_two_seconds("Deciding every claim again from the committed records"):
            return _decide_claims(write, as_json)
    if as_json:
        return json_answer.of_sentences(name, search)
    print(in_terminal.text(name) if search is None else in_terminal.search(search))
    return None


def _decide_claims(write: bool, as_json: bool) -> Verdict | Answer:
    from study.claims import json_answer, ledger, verdicts

    missing: dict[str, str] = {}
    sources, now = ledger.read(), verdicts.decide_all(missing=missing)
    if write and missing:
        name, reason = next(iter(missing.items()))
        raise Refusal(
            f"{len(missing)} claims could not be decided, {name} among them ({reason}). Nothing was written, because "
            "the verdicts on these claims would be lost. Restore the records."
        )
    if write:
        verdicts.write(now)
        print(f"Wrote {len(now)} verdicts to {verdicts.VERDICTS}.")
    committed = {name: verdict for name, verdict in verdicts.read().items() if name not in missing}
    wrong = verdicts.disagreeing(sources, now) | verdicts.outdated(committed, now)
    verdict = verdicts.check(now, wrong, missing)
    if as_json:
        return json_answer.of_check(verdict, wrong)
    if wrong:
        print(f"{len(wrong)} of {len(now)} claims differ from their committed verdicts:")
    elif now and not missing:
        print(f"All {len(now)} committed verdicts follow from the records.")
    for name, difference in wrong.items():
        print(terminal.wrap(f"{name}: {difference}", "  ", "    "))
    print(terminal.wrap(f"Checked: {verdict.coverage()}."))
    for reason, number in Counter(missing.values()).most_common():
        print(terminal.wrap(f"{terminal.count(number, 'claim')} could not be decided: {reason}.", "  ", "    "))
    return verdict


COMMANDS = (_claims,)
