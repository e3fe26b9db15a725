"""What stands at the head of a file of results: what was run, when and where."""

from study.records import machine


def test_header():
    header = machine.header("throughput", "python tools/throughput.py")
    assert list(header) == ["benchmark", "command", "finished_at", "machine"]
    assert header["machine"]["num_cores"]
