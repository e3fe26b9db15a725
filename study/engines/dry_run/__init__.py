"""The real engine at a pretended world size: a rank of many, alone on a laptop, and what it holds and says to whom.

`pretend` makes a process one rank of many, `watch` listens to its tensors and collectives, `training` is what it does
where no script is named, `ranks` asks several ranks, `order` compares their calls, and `text` says it all.
"""
