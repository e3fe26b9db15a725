"""Remove from a parameter's name what wrappers add: one rule for all that compares names. Imports no torch."""

from __future__ import annotations

ADAPTER_PREFIX = "base_model.model."  # which PEFT adds to each name of its base model

# A wrapper's attribute that holds the wrapped module -> what wraps.
WRAPPERS = {
    "module": "DDP or DeepSpeed",
    "_orig_mod": "torch.compile",
    "_forward_module": "Lightning Fabric",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
_AT_THE_START = ("module",)  # a module of the model itself may have this name too, so it counts at the start only


def plain_name(name: str) -> str:
    """Return a parameter's name as the model itself has it: without the parts that wrappers and PEFT add."""
    parts = [part for part in name.split(".") if part not in WRAPPERS or part in _AT_THE_START]
    while parts:
        if parts[0] in _AT_THE_START:
            parts = parts[1:]
        elif parts[:2] == ["base_model", "model"]:
            parts = parts[2:]
        else:
            break
    return ".".join(parts)


def wrapper_of(name: str) -> tuple[str, str] | None:
    """Return the part of a name that a wrapper adds, and the wrapper, such as ("_orig_mod.", "torch.compile")."""
    parts = name.removeprefix(ADAPTER_PREFIX).split(".")
    wrapper_part = next((part for part in parts if part in WRAPPERS and part not in _AT_THE_START), None)
    if wrapper_part is None and parts[0] in _AT_THE_START:
        wrapper_part = parts[0]
    return None if wrapper_part is None else (f"{wrapper_part}.", WRAPPERS[wrapper_part])
