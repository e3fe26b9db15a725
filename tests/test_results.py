"""What stands at the head of a file of results: what was run, when and where."""

from study import cli
from study.records import results


def test_the_command_is_given_without_the_machine_s_folders():
    words = ["benchmark", "throughput", "--pairs", "3", "--compile", "--data-dir", "/home/me/data"]
    line = cli._recorded(cli.parse([*words, "--output", "x.json", "--minutes", "30"]))
    assert line.startswith("zero-study benchmark throughput ")
    assert "--pairs 3" in line
    assert "--compile" in line
    assert "--data-dir DIR" in line
    assert not [word for word in ("/home/me", "--output", "x.json", "--minutes", "--size") if word in line]


def test_header():
    header = results.header("throughput", "zero-study benchmark throughput")
    assert list(header) == ["benchmark", "command", "finished_at", "machine"]
    assert header["machine"]["num_cores"]
