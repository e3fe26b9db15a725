"""Measure and predict what DDP, DeepSpeed ZeRO and FSDP2, with and without offload, cost and save."""

from .version import __version__ as __version__
