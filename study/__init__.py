"""Choose how to train with DDP, DeepSpeed ZeRO or FSDP2, and check that the training is correct."""

from .version import __version__ as __version__
