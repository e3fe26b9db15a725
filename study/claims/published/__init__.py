"""What do a published program, and pairs of settings that differ unseen, do when they run?

`defects` has the a100-replication's program and its comparisons, of which `program` is one start; `traps` has the
pairs, of which `trap_arm` trains one side. `python -m study.claims.published` runs either.
"""
