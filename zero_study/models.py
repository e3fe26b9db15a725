"""Define the sizes and vocabularies of all models that this project trains."""

from __future__ import annotations

# GPTs of this study, with sizes between the published ones: (layers, hidden size), from small to large. They show which
# size still fits into memory.
_LADDER = {
    "11m": (2, 192), "15m": (2, 256), "19m": (2, 320), "27m": (4, 384), "36m": (3, 512), "45m": (6, 512),
    "62m": (6, 640), "82m": (6, 768), "110m": (10, 768), "139m": (14, 768), "162m": (12, 896), "181m": (14, 896),
    "204m": (12, 1024), "229m": (14, 1024), "254m": (16, 1024), "304m": (20, 1024), "400m": (17, 1280),
    "459m": (20, 1280), "538m": (24, 1280), "617m": (28, 1280),
}  # fmt: skip
OWN_SIZES = {"tiny", "mini", *_LADDER}  # GPT sizes without published weights

# The shapes of each workload's models. Checks use them before a model is built.
SIZES: dict[str, dict[str, dict[str, int]]] = {
    # Devlin et al., arXiv:1810.04805, and its miniatures, Turc et al., arXiv:1908.08962.
    "bert-imdb": {
        "tiny": {"layers": 2, "hidden": 128, "heads": 2, "positions": 512},
        "micro": {"layers": 4, "hidden": 128, "heads": 2, "positions": 512},
        "mini": {"layers": 4, "hidden": 256, "heads": 4, "positions": 512},
        "small": {"layers": 4, "hidden": 512, "heads": 8, "positions": 512},
        "medium": {"layers": 8, "hidden": 512, "heads": 8, "positions": 512},
        "base": {"layers": 12, "hidden": 768, "heads": 12, "positions": 512},
        "large": {"layers": 24, "hidden": 1024, "heads": 16, "positions": 512},
    },
    # The GPT-2 family, GPT-Neo 2.7B and GPT-J 6B as published; tiny and mini are the study's own.
    "gpt-wikitext": {
        "tiny": {"layers": 2, "hidden": 128, "heads": 2, "positions": 1024},
        "mini": {"layers": 4, "hidden": 128, "heads": 4, "positions": 1024},
        "124m": {"layers": 12, "hidden": 768, "heads": 12, "positions": 1024},
        "355m": {"layers": 24, "hidden": 1024, "heads": 16, "positions": 1024},
        "774m": {"layers": 36, "hidden": 1280, "heads": 20, "positions": 1024},
        "1.5b": {"layers": 48, "hidden": 1600, "heads": 25, "positions": 1024},
        "2.7b": {"layers": 32, "hidden": 2560, "heads": 20, "positions": 2048},
        "6b": {"layers": 28, "hidden": 4096, "heads": 16, "positions": 2048},
        **{
            name: {"layers": layers, "hidden": hidden, "heads": hidden // 64, "positions": 1024}
            for name, (layers, hidden) in _LADDER.items()
        },
    },
}

# Rows of the largest embedding of all workloads, rounded up. It limits the size of the largest parameter.
LARGEST_VOCABULARY = 50_432


def swap_buffer_size(hidden: int, world_size: int) -> int:
    """Return the number of elements in NVMe offload's swap buffers, which hold a rank's shard of any parameter.

    The size is an upper bound, because it follows from the largest vocabulary of all models.
    """
    return -(-LARGEST_VOCABULARY * hidden // world_size)


def suited_buckets(hidden: int) -> dict[str, int]:
    """Return the bucket sizes, in elements, that accelerate sets for "auto" in a model of this hidden size."""
    return {
        "reduce_bucket_size": hidden**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden**2),
        "stage3_param_persistence_threshold": 10 * hidden,
    }


# Rows of the embedding for the tokenizers of the bundled sample, and for the published tokenizers.
BUNDLED_VOCABULARY = 8192  # large enough that NVMe offload swaps the embedding of a tiny model
VOCABULARY = {"bert": 30522, "gpt2": 50257, "gpt-neo": 50257, "gpt-j": 50400}
