"""Trace a training step of the real engine without GPUs, as a few ranks of a simulated world.

`world` makes a process one rank of many, and `fake` does without memory. `models` and `prepare` build what is trained,
`step` trains it, `tracker` follows its tensors and collectives, `allocator` plays the tensors to a card's allocator.
`ranks` runs several ranks, `real_ranks` lets them exchange values, `deadlock` compares their calls.
`trace` serves the planner; `command` is `zero-study dry-run`.
"""
