"""What do published programs and settings do when they run?

The a100-replication's protocol: `effects` has its programs and comparisons as data, `protocol` starts the programs, and
`program` is one start. Traps, which are settings that differ unseen: `traps` has the arms as data and launches them,
`trap_arm` is one launch, and `trap_effects` compares the arms. Either starts its programs through `child`.
"""
