"""Sizes in GiB of the large tensors of one micro batch, from the shapes that the log prints."""

BATCH, LENGTH, HIDDEN, INNER, VOCABULARY, PARAMETERS = 4, 8192, 4096, 14336, 128256, 8_030_261_248
for name, elements, size in (
    ("logits, float32", BATCH * LENGTH * VOCABULARY, 4),
    ("logits, bfloat16", BATCH * LENGTH * VOCABULARY, 2),
    ("hidden states, bfloat16", BATCH * LENGTH * HIDDEN, 2),
    ("inner activations of the MLP, bfloat16", BATCH * LENGTH * INNER, 2),
    ("weights, bfloat16", PARAMETERS, 2),
    ("one GPU's share of a float32 optimizer state", PARAMETERS // 8, 4),
    ("logits of micro batch 1, float32", LENGTH * VOCABULARY, 4),
):
    print(f"{elements * size / 2**30:6.2f} GiB  {name}")
