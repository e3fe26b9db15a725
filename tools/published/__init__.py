"""Run a published program, and pairs of settings that differ unseen: `python tools/published`.

`protocol` starts the a100-replication's program, of which `program` is one process; `traps` starts the pairs, of which
`trap_arm` trains one side. study/claims reads their results.
"""
