"""What stands at the head of a file of results: what was run, when and where."""

from pathlib import Path

from study.records import results


def test_the_command_is_given_without_the_machine_s_folders():
    options = {"launches": 3, "bare": True, "data_dir": Path("/home/me/data"), "compile": False, "size": None}
    line = results.command_line("python -m study.benchmarks.x", {**options, "output": Path("x.json"), "minutes": "30"})
    assert line == "python -m study.benchmarks.x --launches 3 --bare --data-dir DIR"


def test_header():
    header = results.header("advise", "python -m study.benchmarks.advise")
    assert list(header) == ["benchmark", "command", "finished_at", "machine"]
    assert header["machine"]["num_cores"]
