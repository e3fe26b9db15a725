"""Packed rows in the proof: attention must not cross the borders between documents."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zero_study import prove

RESTARTS = [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 3, 4]]
PADDED = [[1, 1, 1, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 1, 2, 3]]  # on the left: two ways to number the padding
BLOCKS = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool().tril()


def findings(
    positions: list[list[int]] | None, attention: str = "sdpa", use_cache: bool = False, **inputs: Any
) -> list[str]:
    """Return the findings, and the checks that were not made, of a training of four steps on these position ids."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        use_cache=use_cache, attn_implementation=attention,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters())
    prove.watch(model, optimizer)
    tokens = torch.randint(0, 50, (2, 8))
    if positions is not None:
        inputs["position_ids"] = torch.tensor(positions)
    for _ in range(4):
        model(tokens, labels=tokens, **inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with open("proof.json") as file:
        proof = json.load(file)
    return [*proof["findings"], *(f"not checked: {each['what']}" for each in proof["could_not_check"])]


@pytest.mark.parametrize(
    ("named", "crosses"),
    [
        ({}, False),
        ({"attention": "eager"}, False),
        ({"use_cache": True}, True),  # transformers then makes no mask from position ids
        ({"attention_mask": torch.ones(2, 8, dtype=torch.long)}, True),
        ({"attention": "eager", "attention_mask": torch.ones(2, 8, dtype=torch.long)}, True),
        ({"positions": [[0, 1, 2, 3] * 2] * 2, "use_cache": True, "attention_mask": BLOCKS[None, None]}, False),
        ({"positions": [[*range(8)]] * 2, "use_cache": True}, False),
        ({"positions": [[0, 1, 2, 3] * 2], "use_cache": True}, True),
        ({"positions": [[2, 3, 4, 5] * 2] * 2, "use_cache": True}, True),
        ({"positions": [[0, 1, 2, 1, 0, 1, 2, 1]] * 2, "attention_mask": torch.tensor([[1, 1, 1, 0] * 2] * 2)}, True),
        ({"positions": [[0, 1, 2, 3] * 2] * 2, "attention_mask": torch.ones(8, 8).bool()[None, None]}, None),
        ({"positions": None, "attention_mask": (torch.arange(8) < 5).expand(2, 8).long()}, False),
        ({"positions": None, "attention": "eager"}, False),
        ({"positions": PADDED, "attention_mask": (torch.arange(8) > 2).expand(2, 8).long()}, False),
    ],
)
def test_attention_of_packed_rows_stays_within_documents(named, crosses, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    """A bidirectional mask may be intended, so it is not judged: None."""
    found = findings(**{"positions": RESTARTS} | named)
    expected = {True: ["attention crosses documents"], False: [], None: ["not checked"]}[crosses]
    assert [text.partition(":")[0] for text in found] == expected


def test_an_error_of_the_check_does_not_end_the_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zero_study.prove.packing._Border", lambda *_: 1 / 0)
    assert findings(RESTARTS) == ["not checked: attention between packed documents"]


def test_attention_that_cannot_be_read_is_reported_as_not_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zero_study.prove.packing._SOFTMAX", ())
    assert findings(RESTARTS, "eager") == ["not checked: attention between packed documents"]
