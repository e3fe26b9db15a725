"""Test that the grader applies the rules of the tasks, leaves the rest to a person, and counts correctly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import skill_uplift
from click.testing import CliRunner

TASKS = skill_uplift.load_tasks()


def right_answer(task: skill_uplift.Task) -> dict[str, object]:
    values: dict[str, object] = {}
    for field, rule in task.rules.items():
        ((name, expected),) = rule.items()
        values[field] = sum(expected) / 2 if name == "range" else expected[0] if name == "word" else expected
    return values


def attempt(task: str, answer: object, arm: str = "alone", number: int = 1, **more: object) -> str:
    return json.dumps({"task": task, "arm": arm, "attempt": number, "answer": answer, **more})


def grades(*lines: str) -> list[bool | None]:
    return [graded.right for graded in skill_uplift.grade_lines(lines, TASKS)]


@pytest.mark.parametrize(
    ("folder", "num_kinds", "of_a_kind"),
    [(skill_uplift.TASKS, 6, 2), (skill_uplift.HARDER_TASKS, 6, 2), (skill_uplift.AGENT_TASKS, 4, 5)],
)
def test_as_many_tasks_of_each_kind_with_small_files_and_without_answers(folder, num_kinds, of_a_kind):
    questions = skill_uplift.load_questions(folder)
    kinds = [entry["kind"] for entry in questions]
    assert len(questions) == num_kinds * of_a_kind
    assert {kinds.count(kind) for kind in kinds} == {of_a_kind}
    for entry in questions:
        assert set(entry) - {"make", "processes", "checkpoints"} == {"id", "kind", "question", "files"}
        for name in entry["files"]:
            assert ("make" in entry) != (folder / name).exists()  # what a program makes is not committed
            assert "make" in entry or (folder / name).stat().st_size < 200_000, name
            assert Path(name).name not in ("make.py", "check.py", "answers.yaml")


@pytest.mark.parametrize("identifier", TASKS)
def test_every_field_of_the_right_answer_is_needed(identifier):
    answer = right_answer(TASKS[identifier])
    question = next(
        entry["question"]
        for folder in (skill_uplift.TASKS, skill_uplift.HARDER_TASKS, skill_uplift.AGENT_TASKS)
        for entry in skill_uplift.load_questions(folder)
        if entry["id"] == identifier
    )
    assert all(f'"{field}"' in question for field in answer)  # the question says which fields it wants
    assert grades(attempt(identifier, answer)) == [True]
    assert grades(attempt(identifier, f"I computed it.\n```json\n{json.dumps(answer)}\n```\nDone {{x}}.")) == [True]
    for field in answer:
        assert grades(attempt(identifier, {**answer, field: "nonsense"})) == [False]
        if len(answer) > 1:
            assert grades(attempt(identifier, {k: v for k, v in answer.items() if k != field})) == [False]


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        ({"range": [28.3, 29.3]}, [28.75, "28.8 GiB", "about 29"], [28.2, True, None, "28 or 29", ""]),
        ({"range": [1000, 1000]}, ["1,000", 1000], ["1,001", 1]),
        ({"bool": False}, [False, "no", "False"], [True, "yes", "maybe", None, 0]),
        ({"word": ["odd"]}, ["odd", " `Odd`. "], ["oddly", "even", None]),
        ({"set": ["a.b", "c"]}, [["c", "a.b"], "- a.b\n- c", "m.c, x.a.b"], [["c"], "a.b, c, d", ["c", "x.c"], []]),
    ],
)
def test_rules(rule, right, wrong):
    assert [skill_uplift.apply_rule(rule, value) for value in right] == [True] * len(right)
    assert [skill_uplift.apply_rule(rule, value) for value in wrong] == [False] * len(wrong)


def test_a_person_judges_only_what_no_rule_decides():
    text = "The key adam_w_mode is missing, so it is AdamW."
    assert grades(attempt("conf-adam", text)) == [None]
    assert grades(attempt("conf-adam", text, right=True)) == [True]
    assert grades(attempt("conf-adam", {"l2": True, "key": None, "value": None}, right=True)) == [False]
    assert grades(attempt("conf-adam", "")) == [False]
    assert grades(attempt("conf-accumulation", "256")) == [True]  # a single field needs no JSON


def test_evals_of_another_form(tmp_path):
    evals = tmp_path / "evals.json"
    checks = {"number": {"gib": [1, 2], "fits": True}, "count": 12, "word": "1.0", "text": "the loader is not prepared"}
    evals.write_text(json.dumps([{"id": key, "kind": "log", "check": check} for key, check in checks.items()]))
    tasks = skill_uplift.load_tasks([evals])
    answers = {
        "number": {"gib": 1.5, "fits": "yes"},
        "count": "12",
        "word": {"norm": "1.0"},
        "text": "unprepared loader",
    }
    lines = [attempt(key, answer) for key, answer in answers.items()]
    assert [graded.right for graded in skill_uplift.grade_lines(lines, tasks)] == [True, True, True, None]


def test_wilson_interval():
    assert skill_uplift.wilson_interval(5, 6) == pytest.approx((0.4365, 0.9699), abs=1e-4)
    assert skill_uplift.wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert skill_uplift.wilson_interval(10, 10)[1] == pytest.approx(1.0)


def test_command_prints_the_table_and_what_to_judge(tmp_path):
    results = tmp_path / "results.jsonl"
    lines = [attempt("conf-accumulation", 64), attempt("conf-accumulation", 256, "skill", seconds=30)]
    results.write_text("\n".join(lines))
    completed = CliRunner().invoke(skill_uplift.main, ["grade", str(results)])
    assert completed.exit_code == 0
    assert "| configuration | 0 of 1 (0 % to 79 %) | - | 1 of 1 (21 % to 100 %) |" in completed.stdout
    assert "| median seconds per attempt | - | - | 30 |" in completed.stdout
    results.write_text("\n".join([*lines, attempt("conf-adam", "It depends.", "tool")]))
    completed = CliRunner().invoke(skill_uplift.main, ["grade", str(results)])
    assert completed.exit_code == 3
    assert "conf-adam, tool, attempt 1" in completed.stderr


@pytest.mark.parametrize(
    "line",
    [
        "{", attempt("no-such-task", 1), attempt("conf-adam", {}, arm="both"), json.dumps({"task": "conf-adam"}), "",
        attempt("conf-adam", {}) + "\n" + attempt("conf-adam", {}),
    ],
)  # fmt: skip
def test_damaged_results_are_refused(tmp_path, line):
    results = tmp_path / "results.jsonl"
    results.write_text(line)
    completed = CliRunner().invoke(skill_uplift.main, ["grade", str(results)])
    assert completed.exit_code == 2
    assert completed.stdout == ""


def test_old_results_are_still_graded():
    completed = CliRunner().invoke(skill_uplift.main, ["grade", str(skill_uplift.TASKS / "results.jsonl")])
    assert completed.exit_code in (0, 3)
    assert "| **all** | " in completed.stdout


@pytest.fixture
def sessions(tmp_path, monkeypatch):
    def made(entry, folder):
        (folder / entry["id"] / entry["files"][0]).mkdir(parents=True)

    monkeypatch.setattr(skill_uplift, "make_files", made)
    folder = tmp_path / "sessions"
    options = ["--python", "some-python", "--command", "some-zero-study"]
    completed = CliRunner().invoke(skill_uplift.main, ["prepare", str(folder), *options])
    assert completed.exit_code == 0
    assert CliRunner().invoke(skill_uplift.main, ["prepare", str(folder), *options]).exit_code == 2  # nothing is lost
    return folder


def test_sessions_have_all_questions_and_no_answers(sessions):
    assert {path.name for path in sessions.iterdir()} == {f"{arm}-{n}" for arm in skill_uplift.ARMS for n in (1, 2, 3)}
    questions = skill_uplift.load_questions(skill_uplift.HARDER_TASKS)
    texts = {}
    for folder in sessions.iterdir():
        text = (folder / "INSTRUCTIONS.md").read_text()
        assert all(entry["question"].strip() in text for entry in questions)
        for entry in questions:
            for name in skill_uplift.session_names(entry):
                assert (folder / entry["id"] / name).exists()
                assert f"{entry['id']}/{name}" in text
        names = {path.name for path in folder.rglob("*")}
        assert not names & {"answers.yaml", "make.py", "check.py", "tasks.yaml", "expectations.md"}
        arm = folder.name.rpartition("-")[0]
        assert (folder / "skill" / "SKILL.md").exists() == (arm == "skill")
        assert ("some-zero-study" in text) == (arm != "alone")
        texts.setdefault(arm, set()).add(text)
    assert all(len(of_arm) == 1 for of_arm in texts.values())
    lines = [set(text.splitlines()) for of_arm in texts.values() for text in of_arm]
    assert {len(one - other) for one in lines for other in lines if one != other} == {1}


def test_collected_answers_are_graded_by_attempt_and_way(sessions, tmp_path):
    right = {key: right_answer(task) for key, task in TASKS.items() if key.startswith("hard-")}
    for arm, answers in {"alone-1": {}, "tool-2": right, "skill-3": {**right, "hard-log-1": {"cause": "a"}}}.items():
        (sessions / arm / "answers.json").write_text(json.dumps(answers))
    results = tmp_path / "results.jsonl"
    assert CliRunner().invoke(skill_uplift.main, ["collect", str(sessions), str(results)]).exit_code == 0
    assert len(results.read_text().splitlines()) == 9 * 12
    completed = CliRunner().invoke(skill_uplift.main, ["grade", str(results)])
    assert completed.exit_code == 0
    assert "| own knowledge | 0 of 36 (0 % to 10 %) | 0 of 12, 0 of 12, 0 of 12 | 0 of 12 |" in completed.stdout
    assert "| 0 of 12, 12 of 12, 0 of 12 | 0 of 12 |" in completed.stdout
    assert "| 0 of 12, 0 of 12, 11 of 12 | 0 of 12 |" in completed.stdout
    (sessions / "tool-1" / "answers.json").write_text("{")
    results.unlink()
    assert CliRunner().invoke(skill_uplift.main, ["collect", str(sessions), str(results)]).exit_code == 2
    assert not results.exists()
