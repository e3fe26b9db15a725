"""Does what a person reads at the end of a run say what its record says?"""

from __future__ import annotations

import launching
import pytest
import synthetic
from test_parity import CLIPPED

from study.compare import brief


@pytest.mark.launches
def test_five_lines_of_a_real_run():
    run = launching.run("zero3_cpu_offload", **CLIPPED)
    lines = dict(line.split(maxsplit=1) for line in brief.text(run.run_dir).splitlines())
    assert list(lines) == ["proven", "learned", "held", "sent", "took", "record", "next"]
    offloads = "optimizer on cpu, parameters on cpu"
    assert lines["proven"] == f"zero3_cpu_offload: DeepSpeed's ZeRO stage 3, {offloads}, 2 processes on cpu, fp32"
    first, last = run.steps[0]["loss"], run.record.final_loss
    assert lines["learned"].startswith(
        f"loss {first:.4f} at first, {last:.4f} after 8 steps of synthetic text; held out: loss "
    )
    fullest = max(rank.model_states for rank in run.record.model_state_bytes) / run.record.num_params
    assert lines["held"].startswith(f"{fullest:.2f} bytes of model states per parameter on the fullest rank ")
    assert "(arXiv:1910.02054: 8.00)" in lines["held"]  # fp32 Adam over two ranks
    assert "(arXiv:1910.02054: 3.00)" in lines["sent"]
    assert lines["took"].endswith(")")
    assert lines["record"] == str(run.run_dir / "record.json")
    assert lines["next"].startswith("zero-study train --strategy ddp; then both: zero-study compare ")


@pytest.mark.launches
def test_what_was_not_measured_is_said():
    text = brief.text(launching.run("ddp", **CLIPPED, measure=False).run_dir)
    assert text.count("not measured (--no-measure)") == 2
    assert "zero-study train --strategy zero2; then both" in text


def test_a_run_without_distribution_sends_nothing(tmp_path):
    text = brief.text(synthetic.write_run(tmp_path, strategy="single", world_size=1).parent)
    assert "single: no distribution, 1 process on cpu, fp32" in text
    assert "sent      0.00 times the parameters' bytes per step and rank (arXiv:1910.02054: 0.00)" in text
