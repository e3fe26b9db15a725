"""What do DDP and DeepSpeed ZeRO, with and without offload, really cost and save?"""

from .version import __version__ as __version__
