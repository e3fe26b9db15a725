"""Run a published program and the parity traps: `python tools/measure/published`.

`protocol` runs the program of the source a100-replication, and `program` is one process of it. `traps` runs pairs of
trainings that differ in a setting which nobody wrote down, and `trap_arm` trains one side of a pair. study/claims reads
their results.
"""
