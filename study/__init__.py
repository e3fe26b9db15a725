"""Measure and predict what DDP, DeepSpeed ZeRO and FSDP2 save and cost, and find what trains wrongly."""

from .version import __version__ as __version__
