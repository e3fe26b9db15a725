"""Count and predict every architecture of the installed transformers, and say which were refused.

Each is taken in its default configuration, and predicted under every strategy.

    python tools/collect/architectures.py [--write] [CLASS ...]

`--write` writes reports/architectures.json, from which the table in reports/planner-accuracy.md is made. Each model is
counted in a process of its own, without eager attention, which takes about a quarter of an hour for all of them.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from zero_study.dryrun import count
from zero_study.dryrun.build_model import in_words
from zero_study.errors import Refusal, RunFailed
from zero_study.files import ROOT, write_json
from zero_study.planner import Request, choose
from zero_study.ranks import forks
from zero_study.theory import shapes

PATH = ROOT / "reports" / "architectures.json"
KINDS = {
    "causal language model": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked language model": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "sequence-to-sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
# Default configurations that lack a setting without which transformers cannot build the model, and a valid value.
MISSING: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1},
    "EsmForMaskedLM": {"vocab_size": 33, "pad_token_id": 1},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128},
    "MinistralForCausalLM": {"head_dim": 128},
    "Lfm2MoeForCausalLM": {"layer_types": ["full_attention"] * 32},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "ReformerForMaskedLM": {"axial_pos_embds": False},
    "ReformerModelWithLMHead": {"axial_pos_embds": False, "is_decoder": True},
}


LENGTH = 512  # tokens
REQUEST = Request("h100-sxm", 8, sequence_length=LENGTH)


def classes() -> Iterator[tuple[str, str]]:
    """Yield the kind and the name of each model class, each name once."""
    seen = set()
    for kind, names in KINDS.items():
        for value in names.values():
            for name in (value,) if isinstance(value, str) else value[:1]:
                if name not in seen:
                    seen.add(name)
                    yield kind, name


def counted(name: str) -> dict[str, Any]:
    """Return the numbers of parameters by the trace and by transformers, or the reason of the refusal."""

    def program() -> dict[str, Any]:
        logging.disable(logging.CRITICAL)
        built: Any = getattr(transformers, name)
        try:
            config = built.config_class(**MISSING.get(name, {}))
        except Exception as error:  # a configuration may raise anything
            raise Refusal(f"transformers cannot make its default configuration ({in_words(error)})") from None
        counts = count.count(built, config, ["sdpa"])
        shape = shapes.shape_from_counts(name, counts, positions=LENGTH)
        choose.options_of(shape, REQUEST.box(), REQUEST)  # every strategy has to be predictable
        return {
            "num_params": counts.num_params,
            "num_active_params": counts.active_params,
            "blocks": len(counts.executed),
        }

    try:
        answer = forks.run(program, {0: nullcontext()})[0]
    except (Refusal, RunFailed) as refusal:
        return {"refused": str(refusal).removeprefix(f"{name}: ")}
    return {key: answer[key] for key in ("num_params", "num_active_params", "blocks")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CLASS")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = []
    for kind, name in classes():
        if not options.names or name in options.names:
            rows.append({"kind": kind, "class": name, **counted(name)})
            print(json.dumps(rows[-1]), flush=True)
    answered = Counter(row["kind"] for row in rows if "refused" not in row)
    for kind, total in Counter(row["kind"] for row in rows).items():
        print(f"{kind}: {answered[kind]} of {total} answered")
    if options.write and not options.names:
        write_json(PATH, {"transformers": transformers.__version__, "models": rows})


if __name__ == "__main__":
    main()
