"""Names of strategies are taken apart in one place."""

import pytest

from zero_study.engines.strategy_names import StrategyName, in_order
from zero_study.strategy import file


@pytest.mark.parametrize("name", file.names())
def test_a_name_says_what_its_file_configures(name):
    strategy, parsed = file.read_by_name(name), StrategyName.parse(name)
    assert str(parsed) == name
    assert parsed.zero_stage == strategy.zero_stage
    if parsed.zero_stage is not None:
        assert parsed.offload == strategy.offload_optimizer_device
        assert StrategyName.of_zero(parsed.zero_stage, parsed.offload) == StrategyName.parse(
            name if parsed.offload != "none" else parsed.engine
        )


def test_names_are_sorted_from_nothing_sharded_to_everything_offloaded():
    shuffled = ["mine_tuned", "fsdp2", "zero3_tuned", "zero3", "zero3_cpu_offload", "zero1", "ddp", "single", "ddp"]
    assert in_order(shuffled) == [
        "single", "ddp", "zero1", "zero3", "zero3_cpu_offload", "zero3_tuned", "fsdp2", "mine_tuned",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["zero4", "zero12", "zerox", "myzero3"])
def test_another_word_is_no_stage(name):
    assert StrategyName.parse(name).zero_stage is None
