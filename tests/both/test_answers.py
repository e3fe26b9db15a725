"""What commands print with --json: the envelope, the schemas, the ids of findings, and the exit statuses."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import jsonschema
import launching
import pytest
import schemas
from test_diff_verdicts import put

from study.compare import json_answer as of_compare
from study.compare.verdict_text import Judged
from study.running import plan
from zero_study import __main__, cli
from zero_study.answers import envelope, ids, models
from zero_study.answers.envelope import Finding
from zero_study.command_line import ALL
from zero_study.conformance import json_answer as of_conformance
from zero_study.conformance import results
from zero_study.doctor import checkup
from zero_study.doctor import json_answer as of_doctor
from zero_study.errors import Refusal, RunFailed
from zero_study.prove import json_answer as of_prove
from zero_study.saved import json_answer as of_saved
from zero_study.verdict import MEANINGS, Checked, NotChecked, Verdict

EXAMPLES = launching.ROOT / "docs" / "examples"
LOGS = launching.ROOT / "tests" / "fixtures" / "logs"


def checked(content: dict[str, Any]) -> dict[str, Any]:
    """Return an answer after it was compared with its type, its schema, and the list of ids."""
    models.validated(content)
    command = content["schema"].removeprefix(envelope.PREFIX)
    jsonschema.validate(content, models.json_schema(command))
    known = json.loads(schemas.IDS.read_text())
    assert [finding["id"] for finding in content["findings"] if finding["id"] not in known] == []
    if content["verdict"] == "found" and not content["error"]:
        assert {finding["severity"] for finding in content["findings"]} & {"error", "warning"}
    return content


@pytest.fixture
def answer(capfd: pytest.CaptureFixture[str]):
    """Return a function that runs a command with --json, and returns its answer and its exit status."""

    def run(*words: Any) -> tuple[dict[str, Any], int]:
        capfd.readouterr()
        status = cli.run([*map(str, words), "--json"])
        content = checked(json.loads(capfd.readouterr().out))
        assert content["exit_status"] == status
        assert content["schema"] == f"zero-study/{words[0]}"
        return content, status

    return run


# ---------------------------------------------------------------- every command


def test_every_command_that_answers_takes_json():
    takes = {name for name, command in cli.all_commands().items() if "as_json" in {p.name for p in command.params}}
    assert takes == set(envelope.VERSIONS) == set(models.ANSWERS)


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        (["--model", "gpt2", "--gpu", "h100-sxm", "--gpus", "8"], "sound"),
        (["--model", "llama-2-70b", "--gpu", "t4", "--gpus", "1", "--strategy", "ddp"], "found"),
        (["--model", "gpt2", "--gpu", "l4"], "sound"),
        (["--model", "gpt2", "--gpu", "l4,t4", "--gpus", "1"], "sound"),
        (["--model", "gpt2", "--gpu", "l4,t4", "--gpus", "1", "--tokens", "1e13", "--budget", "1"], "found"),
        (["--gpu", "l4", "--gpus", "2"], "sound"),
        (["--gpu", "list"], None),
        (["--model", "list"], None),
    ],
)
def test_advise(words, verdict, answer):
    content, status = answer("advise", *words)
    assert content["verdict"] == verdict
    assert status == (verdict == "found")
    if verdict == "found":
        assert content["findings"][0]["id"] in ("advise/nothing-fits", "advise/beyond-limits")
    if words == ["--gpu", "list"]:
        assert {"name", "memory_bytes", "dollars_per_hour"} <= content["gpus"][0].keys()
    if words == ["--model", "list"]:
        (gpt2,) = [model for model in content["models"] if model["name"] == "gpt2"]
        assert gpt2["num_params"] == 124_439_808


def test_doctor_names_file_line_key_and_remedy(tmp_path, monkeypatch, answer):
    monkeypatch.chdir(tmp_path)
    path = Path("ds.json")
    path.write_text((EXAMPLES / "my_zero3.json").read_text())
    content, status = answer("doctor", path, "--fix", "fixed.json")
    assert (status, content["verdict"], content["checks"]) == (1, "found", [])
    (typo,) = [finding for finding in content["findings"] if finding["place"]["key"] == "gradient_cliping"]
    assert (typo["id"], typo["severity"], typo["place"]["file"]) == ("doctor/ignored-key", "warning", "ds.json")
    assert "gradient_cliping" in path.read_text().splitlines()[typo["place"]["line"] - 1]
    assert "gradient_clipping" in typo["remedy"]
    assert content["fixed"]["file"] == "fixed.json"
    assert {change["key"] for change in content["fixed"]["changes"]} >= {"gradient_cliping", "gradient_clipping"}
    (file,) = content["files"]
    assert {finding["effect"] for finding in file["findings"]} >= {"honoured", "ignored"}


def test_doctor_of_files_of_which_one_cannot_be_read(tmp_path, answer):
    (tmp_path / "broken.json").write_text("{")
    content, status = answer("doctor", EXAMPLES / "zero2_bf16.json", tmp_path / "broken.json")
    assert status == 3
    assert [bool(file.get("error")) for file in content["files"]] == [False, True]


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        (
            "a.yaml", "# first\na: 1\nb:\n  c: &x {d: 2}\n  e: *x\n",
            {"a": 2, "b": 3, "b.c": 4, "b.c.d": 4, "b.e": 5, "b.e.d": 4},
        ),
        ("a.json", '{"a": 1,\n "b": {\n\t"c": [1]}}', {"a": 1, "b": 2, "b.c": 3}),
        ("a.yaml", "a: [", {}),
        ("a.yaml", "- a\n", {}),
        ("a.yaml", "&x {a: *x}", {}),
        ("a.toml", "[a]\nb = 1\n", {}),
    ],
)  # fmt: skip
def test_lines_of_keys(tmp_path, name, text, lines):
    (tmp_path / name).write_text(text)
    found = of_doctor.key_lines(tmp_path / name)
    assert found == lines or (not lines and len(found) <= 20_000)


def test_doctor_of_this_machine():
    checks = [
        checkup.Check("packages", "bites", "torch not installed.", "Install it."),
        checkup.Check("known of deepspeed", "note", "It has a known fault."),
        checkup.Check("NVIDIA L4", "note", "It is used by process 3."),
        checkup.Check("port", "ok", "Port 29500 is free."),
        checkup.Check("two gloo ranks", "unknown", "torch is not installed."),
    ]
    content = checked(of_doctor.of_machine(checks, checkup.verdict(checks)).content)
    found = [(finding["id"], finding["severity"]) for finding in content["findings"]]
    assert found == [
        ("doctor/missing-packages", "error"),
        ("doctor/installed-release-fault", "note"),
        ("doctor/gpu", "note"),
    ]
    assert len(content["checks"]) == len(checks)


def test_upgrade(answer):
    content, status = answer("upgrade", EXAMPLES / "old.lock", EXAMPLES / "new.lock")
    assert status == 1
    names = [finding["place"]["name"] for finding in content["findings"]]
    assert {name.partition("/")[0] for text in names for name in text.split(", ")} <= set(content["packages"])
    ids = {change["id"] for change in content["vulns"]}
    assert {f"ZS-{name.replace('/', '-')}" for name in names if "/" in name} <= ids
    assert all(finding["remedy"] for finding in content["findings"] if finding["severity"] == "error")
    severities = [finding["severity"] for finding in content["findings"]]
    assert "error" in severities
    assert severities == sorted(severities, key=lambda severity: severity != "error")


def test_why(answer):
    content, status = answer("why", EXAMPLES / "oom.log")
    assert status == 1
    first = content["findings"][0]
    assert (first["id"], first["severity"]) == ("why/first-failure", "error")
    assert first["place"]["file"] == str(EXAMPLES / "oom.log")
    assert first["place"]["line"] == content["first_failure"]["line"]
    assert content["cause"] is None
    assert {each["certainty"] for each in content["other_causes"]} == {"stated", "computed"}


@pytest.mark.parametrize("words", [[], ["zero3-blog"], ["--search", "zero stage memory"]])
def test_claims(words, answer):
    content, _ = answer("claims", *words)
    assert content["verdict"] is None
    assert content["sentences"]
    claim = content["sentences"][0]["readings"][0]["id"]
    of_claim, _ = answer("claims", claim)
    assert claim in [reading["id"] for reading in of_claim["sentences"][0]["readings"]]


def test_claims_that_differ():
    from study.claims import json_answer

    verdict = Verdict.of(1, [Checked(3, "claim")])
    content = checked(json_answer.of_check(verdict, {"a-claim": "is committed as right, and is wrong"}).content)
    assert content["findings"][0]["place"]["name"] == "a-claim"


def test_plan(answer, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "_of_reports", lambda root: [])
    content, _ = answer("plan", "smoke", "--runs-dir", tmp_path, "--only", "single")
    runs = content["runs"]
    assert len(runs) == content["num_to_run"] + content["num_kept"] + content["num_skipped"]
    assert all(run["estimated_seconds"] for run in runs if run["action"] == "run")
    content, _ = answer("plan", "smoke", "--runs-dir", tmp_path, "--slurm")
    assert content["slurm_script"].startswith("#!")


def test_predict(answer, tmp_path):
    content, _ = answer("predict", "single-gpu", "--gpu", "l4", "--output", tmp_path)
    (path,) = content["written"]
    assert content["studies"] == [json.loads(Path(path).read_text())]


def test_import_and_compare(answer, tmp_path):
    log = tmp_path / "mine.csv"
    log.write_text("step,loss,memory_allocated (MiB)\n1,3.0,2\n2,2.5,2\n3,2.25,2\n")
    content, status = answer("import", log, "--output", tmp_path / "runs")
    (run,) = content["runs"]
    assert (status, run["name"], run["is_new"], run["num_logged_steps"]) == (0, "mine", True, 3)
    columns = json.loads(Path(run["file"]).read_text())["training"]["columns"]
    assert columns["allocated_bytes"] == [2 << 20] * 3
    assert not answer("import", log, "--output", tmp_path / "runs")[0]["runs"][0]["is_new"]
    content, _ = answer("compare", tmp_path / "runs")
    assert content["verdict"] is None
    assert any("mine" in cell for table in content["tables"] for row in table["rows"] for cell in row)


@pytest.mark.parametrize("view", ["short", "model-states"])
def test_compare(view, answer):
    content, _ = answer("compare", launching.ROOT / "reports" / "cpu" / "records" / "smoke", "--view", view)
    assert bool(content["groups"]) == (view == "short")
    assert bool(content["tables"]) == (view != "short")
    for row in (row for group in content["groups"] for row in group["rows"]):
        assert row["runs"]
        assert row["peak_bytes"]["low"] <= row["peak_bytes"]["median"] <= row["peak_bytes"]["high"]


def test_compare_judges_a_study():
    page = "# A study\n\n## Arms\n\n| a | b |\n| --- | --- |\n| `zero2` | 1 % |\n"
    verdict = Verdict.of(1, [Checked(9, "run")])
    content = checked(of_compare.of_verdict("learned", Judged(page, verdict, ["zero2"])).content)
    assert content["tables"] == [{"heading": "Arms", "columns": ["a", "b"], "rows": [["zero2", "1 %"]]}]
    assert content["findings"][0]["place"]["name"] == "zero2"


def test_diff(answer, tmp_path):
    put(tmp_path / "a")
    put(tmp_path / "b", entries=json.loads(json.dumps(_changed_entries(tmp_path))))
    content, status = answer("diff", tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert content["findings"][0]["id"] in set(of_diff_ids())
    assert content["findings"][0]["place"]["step"] == content["differences"][0]["step"]
    content, status = answer("diff", tmp_path / "a", tmp_path / "a")
    assert (content["same"], content["findings"]) == (status == 0, [])
    (tmp_path / "a" / "rank-0.json.gz").write_bytes(b"not gzip")
    content, status = answer("diff", tmp_path / "a", tmp_path / "b")
    assert (status, content["verdict"], content["error"]["kind"]) == (3, "unknown", "not checked")


def _changed_entries(folder: Path) -> list[Any]:
    """Return the entries of the recording in a folder, with other gradients in step 2."""
    import gzip

    entries = json.loads(gzip.decompress((folder / "a" / "rank-0.json.gz").read_bytes()))["entries"]
    return [
        [*entry[:6], [2 * value for value in entry[6]], entry[7]] if entry[:2] == [2, "gradient"] else entry
        for entry in entries
    ]


def of_diff_ids() -> list[str]:
    from zero_study.diff import json_answer

    return [*json_answer.IDS.values(), json_answer.OTHER, json_answer.RANKS]


def test_saved(answer, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"a.weight": torch.full((2, 2), float("nan")), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    content, status = answer("saved", tmp_path)
    assert (status, content["status"]) == (1, 1)
    assert [(finding["id"], finding["place"]["name"]) for finding in content["findings"]] == [
        ("saved/not-finite", "a.weight")
    ]
    assert content["saved"][0]["findings"][0]["kind"] == "not finite"


def test_conformance():
    newest = {key: value for key, value in results.newest().items() if key != "loss_scales"}  # which was added later
    content = checked(of_conformance.of(newest, results.verdict(newest)).content)
    failed = results.failed_cells(newest)
    assert [finding["place"]["name"] for finding in content["findings"]] == failed
    with_known = of_conformance.of(newest, results.verdict(newest, newest), newest).content
    assert {finding["id"] for finding in checked(with_known)["findings"]} <= {"conformance/known-failure"}


@pytest.mark.launches
def test_exact():
    completed = launching.command_line(["exact", "--only", "ddp", "--ranks", "1", "--json"])
    content = checked(json.loads(completed.stdout))
    assert (completed.returncode, content["exit_status"]) == (0, 0)
    assert content["cells"]


@pytest.mark.launches
@pytest.mark.parametrize(("script", "status"), [pytest.param("train_hang.py", 1, marks=pytest.mark.slow), (None, 0)])
def test_dry_run(script, status, tmp_path):
    words = ["dry-run", "--world", "2", "--json", "ddp"]
    words[3:3] = [] if script else ["--model", "gpt2", "--sequence-length", "8"]
    completed = launching.command_line([*words, *([EXAMPLES / script] if script else [])], cwd=tmp_path)
    content = checked(json.loads(completed.stdout))
    assert (completed.returncode, content["exit_status"]) == (status, status)
    if script:
        assert content["findings"][0]["id"] in ("dry-run/hang", "dry-run/waiting-rank")
    else:
        assert {"before_bytes", "peak_bytes"} <= content["ranks"]["0"].keys()


SCRIPT = """
import torch
print("a line of the script")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
for step in range(4):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
END
"""


@pytest.mark.launches
@pytest.mark.parametrize(
    ("change", "words", "status", "verdict"),
    [
        pytest.param(("END", ""), [], 0, "sound", marks=pytest.mark.slow),
        pytest.param(("END", "raise SystemExit(5)"), [], 5, "sound", marks=pytest.mark.slow),
        pytest.param(("END", "1 / 0"), [], 1, "sound", marks=pytest.mark.slow),
        (("    optimizer.step()\n", ""), ["--strict"], 1, "found"),
    ],
)
def test_prove(tmp_path, change, words, status, verdict):
    (tmp_path / "train.py").write_text(SCRIPT.replace(*change).replace("END", "").replace("LR", "0.1"))
    completed = launching.command_line(["prove", *words, "--json", "train.py", "--json"], cwd=tmp_path)
    content = checked(json.loads(completed.stdout))
    assert (completed.returncode, content["exit_status"], content["verdict"]) == (status, status, verdict)
    assert "a line of the script" in completed.stderr
    assert ("ZeroDivisionError" in completed.stderr) == (change[1] == "1 / 0")
    if verdict == "found":
        assert [finding["id"] for finding in content["findings"]] == ["prove/nothing-trained"]
    else:
        assert content["proofs"] == [json.loads((tmp_path / "proof.json").read_text())]


BEGIN = "dist.init_process_group('gloo')"


@pytest.mark.launches
def test_prove_on_two_ranks_prints_one_answer(tmp_path):
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("import torch\n", f"import torch\nimport torch.distributed as dist\n{BEGIN}\n")
        .replace("Linear(4, 1)", "Linear(4, 1)\nmodel = torch.nn.parallel.DistributedDataParallel(model)")
        .replace("END", "dist.destroy_process_group()").replace("LR", "0.1")
    )  # fmt: skip
    completed = launching.torchrun(["-m", "zero_study.prove", "--json", "train.py"], tmp_path)
    content = checked(json.loads(completed.stdout))
    assert content["proofs"][0]["built"]["world_size"] == 2


def test_findings_of_a_proof():
    proof = {
        "known_wrong": ["deepspeed 0.18.1 loses gradients"], "findings": ["a fault of a kind without an id"],
        "not_as_asked": ["precision: a file requests bf16"], "notes": ["not checked: weights", "7 of 9 are trained"],
        "step": {"number": 3},
    }  # fmt: skip
    verdict = Verdict.of(3, [Checked(1, "optimizer step")])
    content = checked(of_prove.of(verdict, [proof], None, 0).content)
    assert [(finding["id"], finding["severity"]) for finding in content["findings"]] == list(of_prove.IDS.values())
    assert content["exit_status"] == 0


def test_every_part_that_names_a_fault_of_prove_is_in_a_text_of_prove():
    """The trainings of test_prove.py show that each fault that they find has an id."""
    sources = Path(of_prove.__file__).parent.glob("*.py")
    texts = " ".join(
        "".join(
            str(part.value) if isinstance(part, ast.Constant) else "..." for part in getattr(node, "values", [node])
        )
        for path in sources
        if path.name != "json_answer.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant | ast.JoinedStr)
    )
    assert [part for part in of_prove.FAULTS if part not in texts] == []


# ---------------------------------------------------------------- refusals and errors


def printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: Sequence[str]
) -> tuple[Any, int]:
    monkeypatch.setattr(sys, "argv", ["zero-study", *words])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    out = capfd.readouterr().out
    return json.loads(out) if out else None, int(end.value.code or 0)


@pytest.mark.parametrize(
    ("words", "schema"),
    [
        (["doctor", "--json", "gone.json"], "doctor"),
        (["advise", "--json", "--gpu", "nothing-like-it", "--model", "gpt2", "--gpus", "1"], "advise"),
        (["advise", "--json", "--no-such-option"], "advise"),
        (["advise", "--no-such-option", "--json"], "advise"),
        (["why", "gone.log", "--json"], "why"),
        (["compare", "--json"], "compare"),
        (["plan", "no-such-study", "--json"], "plan"),
        (["diff", "gone", "gone", "--json"], "diff"),
        (["saved", "gone", "--json"], "saved"),
        (["prove", "--json", "gone.py"], "prove"),
        (["dry-run", "--json", "--world", "0", "ddp"], "dry-run"),
    ],
)
def test_a_refusal_is_json(words, schema, monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    content, status = printed(monkeypatch, capfd, words)
    assert checked(content)["schema"] == f"zero-study/{schema}"
    assert (status, content["exit_status"], content["verdict"]) == (2, 2, "refused")
    assert content["error"]["kind"] == "refused"
    assert "\n" not in content["error"]["message"]


@pytest.mark.parametrize(
    "words",
    [
        ["prove", "gone.py", "--json"],
        ["dry-run", "--world", "2", "nothing-like-it", "train.py", "--json"],
        ["dry-run", "--output", "--json", "nothing-like-it"],
        ["doctor", "--", "--json"],
        ["doctor", "gone.json"],
    ],
)
def test_what_is_not_an_option_of_the_command_asks_for_no_json(words):
    assert not cli.asks_for_json(words)


def test_a_misspelt_command_is_refused_as_json(monkeypatch, capfd):
    content, status = printed(monkeypatch, capfd, ["doctr", "--json"])
    assert (content["schema"], status) == (envelope.OTHER, 2)
    models.validated(content)


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (ZeroDivisionError("\x1b[2J"), "internal", 3),
        (RunFailed("a rank ended"), "failed", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (PermissionError(13, "Permission denied", "a/file"), "refused", 2),
        (OSError(28, "No space left on device", "a/file"), "not checked", 3),
        (Refusal("two\nlines"), "refused", 2),
    ],
)
def test_an_error_is_json(error, kind, status, monkeypatch, capfd):
    def run(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "run", run)
    content, ended = printed(monkeypatch, capfd, ["why", "--json"])
    assert (checked(content)["error"]["kind"], content["exit_status"], ended) == (kind, status, status)


def test_nothing_else_is_on_standard_output(monkeypatch, capfd):
    """Output of other processes goes to standard error, too."""

    def callback(**_: Any) -> envelope.Answer:
        print("printed")
        subprocess.run(["echo", "from a process"], check=True)
        return envelope.answer("why", None)

    monkeypatch.setattr(cli.all_commands()["why"], "callback", callback)
    assert cli.run(["why", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["schema"] == "zero-study/why"
    assert {"printed", "from a process"} <= set(err.splitlines())
    print("again")
    assert capfd.readouterr().out == "again\n"


# ---------------------------------------------------------------- the envelope


def test_an_answer_without_a_verdict_ends_with_0():
    made = envelope.answer("plan", None)
    assert (made.status, made.content["verdict"], made.content["error"]) == (0, None, None)


def test_the_envelope_keeps_its_keys_and_json_has_no_odd_numbers():
    verdict = Verdict.of(1, [Checked(2, "tensor")], [NotChecked("names", "no model")])
    finding = Finding("saved/zero", "error", "Zero.", name="\x1b[2J\ud800")
    fields = {"verdict": "sound", "worst": [float("nan"), (float("inf"), 1.5)], "by": {3: Path("a")}}
    made = envelope.answer("saved", verdict, [finding], fields)
    content = json.loads(made.text())
    assert (content["verdict"], content["worst"], content["by"]) == ("found", [None, [None, 1.5]], {"3": "a"})
    assert made.text().isascii()
    assert "\x1b" not in made.text()
    assert content["findings"][0]["place"]["name"] == "\x1b[2J\ud800"


# ---------------------------------------------------------------- schemas and ids


def test_the_committed_ids_are_those_that_the_program_writes():
    assert schemas.IDS.read_text() == schemas.texts()[schemas.IDS], "run: python tools/derive/schemas.py"


def test_the_page_names_each_schema():
    page = (launching.ROOT / "docs" / "json.md").read_text()
    assert [path.name for path in schemas.texts() if path.name not in page] == []


@pytest.mark.parametrize("command", models.ANSWERS)
def test_each_schema_is_a_valid_one_that_accepts_new_keys(command):
    schema = models.json_schema(command)
    jsonschema.Draft202012Validator.check_schema(schema)
    refused = envelope.error(command, "refused", "No.", 2).content | {"new": 1}
    jsonschema.validate(refused, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(refused | {"error": None}, schema)


def test_no_id_was_removed_or_renamed():
    """Programs and settings name ids. docs/json.md promises that they stay."""
    committed = json.loads(schemas.IDS.read_text())
    assert sorted(committed.keys() - schemas.all_ids().keys()) == []
    assert sorted(schemas.all_ids().keys() - committed.keys()) == [], "run: python tools/derive/schemas.py"


def test_every_id_in_the_code_is_listed_and_every_listed_id_is_in_the_code():
    commands = tuple(f"{name}/" for name in envelope.VERSIONS)
    package = launching.ROOT / "zero_study"
    paths = [path for name in ("study", "zero_study") for path in (launching.ROOT / name).rglob("json_answer.py")]
    written = {
        node.value
        for path in (*paths, package / "check" / "examine.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(commands)
    } - {"saved/", "why/"}  # whose other part is that of a kind or of a rule
    assert written | set(of_saved.IDS.values()) == set(ids.IDS)


# ---------------------------------------------------------------- exit statuses


@pytest.mark.parametrize("name", sorted(cli.all_commands()))
def test_each_help_ends_with_the_same_four_exit_statuses(name):
    command = cli.all_commands()[name]
    with click.Context(command, info_name=name) as context:
        context.meta[ALL] = True
        lines = command.get_help(context).splitlines()
    statuses = lines[lines.index("Exit status:") + 1 : -2]  # an example follows
    begins = [line for line in statuses if line[2:3].strip()]
    assert [line.split(":")[0].split(".")[0].split() for line in begins] == [
        [str(status), *meaning.split()] for status, meaning in MEANINGS.items()
    ]
