"""Test the skill for coding agents: what it names exists, and how it is installed and printed."""

from __future__ import annotations

import hashlib
import json
import re
import shutil

import pytest
import yaml
from refusing import refusal

from zero_study import cli, skills
from zero_study.answers import models

FLAGS = re.compile(r"`(--[a-z0-9-]+)")
# The command that the options and the fields in a file are of, by a word that comes before them.
COMMAND = re.compile(r"zero-study ([a-z-]+)")


def test_the_front_matter_is_as_the_specification_says():
    text = skills.files()["SKILL.md"]
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["name"] == skills.NAME == skills.FOLDER.name
    assert 0 < len(front["description"]) <= 1024
    assert len(text.splitlines()) < 500


def test_links_lead_to_files_of_the_skill():
    links = {link for text in skills.files().values() for link in re.findall(r"\]\(([^)]+)\)", text)}
    assert links == set(skills.files()) - {"SKILL.md"}


def test_every_option_exists():
    for name, text in skills.files().items():
        commands = {word for word in COMMAND.findall(text) if word in cli.all_commands()}
        known = {flag for word in commands for option in cli.all_commands()[word].params for flag in option.opts}
        unknown = set(FLAGS.findall(text)) - known - {"--version", "--strict", "--steps", "--reference"}  # of prove
        assert not unknown, f"{name}: {unknown}"


@pytest.mark.parametrize(
    ("file", "answer"),
    [("SKILL.md", models.Answer), ("references/plan.md", models.AdviseAnswer),
     ("references/explain.md", models.WhyAnswer)],
)  # fmt: skip
def test_every_field_exists(file, answer):
    """A field is a word in code in a sentence that says to read it."""
    sentences = re.findall(r"[^.\n]*\b[Rr]ead\b[^.]*\.", skills.files()[file])
    fields = {word for sentence in sentences for word in re.findall(r"`([a-z_]+)`", sentence)}
    known = {info.alias or name for name, info in answer.model_fields.items()}
    open_fields = set(re.findall(r"`([a-z_]+)`", answer.__doc__ or ""))
    assert fields <= known | open_fields
    assert fields or file == "SKILL.md"


def test_the_skill_is_installed_and_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["skills", "install"]) == 0
    place = tmp_path / ".agents" / "skills" / "zero-study"
    earlier = place / "references" / "old.md"  # of an earlier release
    earlier.touch()
    digests = json.loads((place / skills.DIGESTS).read_text())
    digests["references/old.md"] = hashlib.sha256(b"").hexdigest()
    (place / skills.DIGESTS).write_text(json.dumps(digests))
    skills.install(tmp_path / ".agents" / "skills")
    assert {path.relative_to(place).as_posix() for path in place.rglob("*.md")} == set(skills.files())
    assert cli.run(["skills", "install", "--target", ".claude/skills"]) == 0
    assert (tmp_path / ".claude" / "skills" / "zero-study" / "SKILL.md").is_file()


@pytest.mark.parametrize("has_digests", [True, False])
@pytest.mark.parametrize("name", ["SKILL.md", "notes.md"])
def test_what_the_user_changed_is_never_deleted(name, has_digests, tmp_path):
    place = skills.install(tmp_path)
    if not has_digests:  # installed by an earlier release
        (place / skills.DIGESTS).unlink()
        skills.install(tmp_path)
    with open(place / name, "a") as file:
        file.write("Our own rule.")
    assert name in refusal(skills.install, tmp_path)
    assert (place / name).read_text().endswith("Our own rule.")


def test_what_is_not_a_copy_of_the_skill_stays(tmp_path):
    other = tmp_path / "zero-study"
    other.mkdir()
    (other / "notes.md").touch()
    assert "is not a copy of the skill" in refusal(skills.install, tmp_path)
    assert (other / "notes.md").is_file()
    shutil.rmtree(other)
    other.symlink_to(tmp_path)
    assert "is not a copy of the skill" in refusal(skills.install, tmp_path)


def test_the_printed_skill_has_every_file_without_front_matter(capsys):
    assert cli.run(["skills", "print"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# zero-study")
    assert "license:" not in printed
    assert printed.count("\n# ") == 3
    assert "--target" in refusal(cli.run, ["skills", "print", "--target", "x"])
