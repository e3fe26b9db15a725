"""What do DDP and DeepSpeed ZeRO, with and without offload, really cost and save?"""

__version__ = "0.1.0"
