"""Run one training step of the real engine without GPUs, as a few ranks of a simulated world, and record it.

* `world` makes a process one rank of many, and `fake` makes tensors that have no memory.
* `models` and `prepare` build the training, and `step` runs it.
* `tracker` records tensors and collectives. `allocator` finds how much GPU memory the tensors would reserve.
* `ranks` runs several ranks. `real_ranks` lets them exchange real values. `deadlock` compares their collectives.
* `trace` is used by the planner. `command` is `zero-study dry-run`.
"""
