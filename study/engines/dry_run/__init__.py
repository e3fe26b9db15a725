"""The real engine at a pretended world size: a rank of many, alone on a laptop, and what it holds and says to whom.

`pretend` makes a process one rank of many, `watch` listens to its tensors and collectives, `allocator` plays them to a
card's, `training` is what it does without a script, `ranks` asks several, `order` compares their calls, `text` says it.
"""
