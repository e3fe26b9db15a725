"""Examine the section `fsdp_config` of a Trainer's arguments or of an axolotl file, or a separate file with it.

The rules are those of transformers' `training_args.py` (`_process_fsdp_args`), which passes the section to accelerate's
FullyShardedDataParallelPlugin. Trainer removes the prefix fsdp_ from each key, and silently ignores unknown keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .findings import KEEP, REMOVE, Effect, Finding, Instead
from .kinds import FSDP_KEYS, FSDP_KEYS_OF_OTHERS, near, without_prefix

POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_BOOLEANS = {"y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"}  # accelerate's str_to_bool
_OF_VERSION_1 = ("forward_prefetch", "backward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers")
# ms-swift and axolotl read these themselves. Without ignored_modules, FSDP trains the same.
_OF_FOREIGN_TOOLS = ("activation_cpu_offload", "cpu_offload_pin_memory", "final_state_dict_type", "ignored_modules")
_OF_XLA = ("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt")


class _Effect(NamedTuple):
    """What a key does, if it does not simply work as written."""

    effect: Effect
    message: str
    remedy: str = ""
    matters: bool = True
    mend: Any = KEEP


@dataclass(frozen=True)
class Section:
    """The section `fsdp_config` of a file, with the FSDP version that it sets."""

    content: Mapping[str, Any]  # by the names without the prefix fsdp_
    version: int
    is_axolotl: bool = False

    @property
    def reader(self) -> str:
        return "axolotl" if self.is_axolotl else "Trainer"


def of_section(file: str, section: Mapping[str, Any], above: str = "", axolotl_version: Any = None) -> list[Finding]:
    """Return a finding for each key of a section `fsdp_config`.

    `above` is the dotted name of the section in its file, with a dot at its end. `axolotl_version` is the value of
    fsdp_version in an axolotl file, or 1 if it has none, and None if Trainer reads the section.
    """
    settings = {name: value for name, value in section.items() if not str(name).startswith("_")}  # others are comments
    content = {without_prefix(str(name)): value for name, value in settings.items()}
    version = content.get("version", 2) if axolotl_version is None else axolotl_version
    parsed = Section(content, 1 if str(version) == "1" else 2, axolotl_version is not None)
    return [
        _finding(file, f"{above}{name}", without_prefix(str(name)), value, parsed) for name, value in settings.items()
    ]


def _finding(file: str, key: str, name: str, value: Any, section: Section) -> Finding:
    if value is None and name != "version":
        outcome = _Effect("honoured", "", matters=False)
    else:
        outcome = (_RULES[name](value, section) if name in _RULES else None) or _of_name(name, value, section)
    mend = outcome.mend
    if isinstance(mend, Instead):  # the new key has the old one's section and prefix
        mend = Instead(key.removesuffix(name) + mend.key, mend.value)
    return Finding(
        file=file, key=key, value=value, effect=outcome.effect, message=outcome.message, remedy=outcome.remedy,
        matters=outcome.matters, mend=mend,
    )  # fmt: skip


def _of_name(name: str, value: Any, section: Section) -> _Effect:
    """Return what a key does according to its name: the reader of the section uses it or ignores it."""
    if name in _OF_XLA and value:
        return _Effect("not examined", "This key needs PyTorch/XLA.", matters=False)
    if name in _OF_VERSION_1 and section.version == 2:
        return _Effect("ignored", "Only FSDP1 reads this key.", matters=False)
    if name in FSDP_KEYS or (section.is_axolotl and name in FSDP_KEYS_OF_OTHERS):
        return _Effect("honoured", "", matters=False)
    message = f"{section.reader} does not know this key, and ignores it without a warning."
    right = near(name, FSDP_KEYS | ({"offload_params"} if section.is_axolotl else set()))
    if right is not None:
        return _Effect("ignored", message, f"Write {right}.", mend=Instead(right))
    if section.is_axolotl:
        return _Effect("not examined", "Doctor does not know what axolotl does with this key.", matters=False)
    if not value or name in _OF_FOREIGN_TOOLS:
        return _Effect("ignored", message, matters=False)
    return _Effect("ignored", message, "Remove the key.", mend=REMOVE)


def is_true(value: Any) -> bool:
    """Return whether accelerate reads a value as true (str_to_bool)."""
    return str(value).lower() in ("y", "yes", "t", "true", "on", "1")


def _version(value: Any, section: Section) -> _Effect | None:
    if str(value) in ("1", "2"):
        return None
    return _Effect("crashes", "Only the versions 1 and 2 of FSDP exist.", "Write 2.", mend=2)


def _policy(value: Any, section: Section) -> _Effect | None:
    if value in POLICIES:
        if value != "NO_WRAP":
            return None
        message = "The whole model is then one FSDP unit, so all its parameters are gathered at once."
        return _Effect("means something else", message, f"Write {POLICIES[0]}.", mend=POLICIES[0])
    message = f"{section.reader} has no wrapping policy of this name."
    mend = str(value).upper() if str(value).upper() in POLICIES else POLICIES[0]
    return _Effect("crashes", message, f"Write {mend}.", mend=mend)


def _state_dict(value: Any, section: Section) -> _Effect | None:
    allowed = [name for name in STATE_DICTS if section.version == 1 or name != "LOCAL_STATE_DICT"]
    if str(value).upper() in allowed or (str(value).isdigit() and not section.is_axolotl):
        return None
    message = "This version of FSDP has no state dict type of this name."
    return _Effect("crashes", message, "Write SHARDED_STATE_DICT or FULL_STATE_DICT.", mend="SHARDED_STATE_DICT")


def _reshard(value: Any, section: Section) -> _Effect | None:
    if section.version == 2:
        if str(value).lower() in _BOOLEANS:
            return None
        message = "FSDP2 expects true or false here."
        mend = str(value).upper() != "SHARD_GRAD_OP"
        return _Effect("crashes", message, "Write true for FULL_SHARD, or false for SHARD_GRAD_OP.", mend=mend)
    if section.is_axolotl or str(value).upper() in STRATEGIES or str(value).isdigit():
        return None
    message = "With FSDP1, Trainer expects the name of a sharding strategy here, not true or false."
    return _Effect("crashes", message, "Write full_shard, or version: 2.")


def _strategy(value: Any, section: Section) -> _Effect | None:
    """Return what the key `sharding_strategy` does. Trainer and FSDP2 ignore it.

    That changes nothing if the value is the default.
    """
    name = STRATEGIES[int(value) - 1] if str(value) in ("1", "2", "3", "4", "5") else str(value).upper()
    reshards = section.content.get("reshard_after_forward")
    agrees = name == "FULL_SHARD" or (name == "SHARD_GRAD_OP" and reshards is not None and not is_true(reshards))
    if section.is_axolotl and section.version == 1:
        return _Effect("not examined", "Doctor does not know what axolotl does with this key.", matters=False)
    message = f"{'FSDP2' if section.version == 2 else 'Trainer'} does not use this key."
    if agrees:
        return _Effect("ignored", message, matters=False)
    if section.version == 1:
        lower = name.lower()
        remedy = f"Write reshard_after_forward: {lower} instead."
        return _Effect("ignored", message, remedy, mend=REMOVE if "reshard_after_forward" in section.content else KEEP)
    remedy = "Write reshard_after_forward: true for FULL_SHARD, or false for SHARD_GRAD_OP."
    return _Effect("ignored", f"{message} Weights are sharded as with FULL_SHARD.", remedy)


def _offload(value: Any, section: Section) -> _Effect | None:
    if section.is_axolotl:
        return None
    message = "Trainer does not read this key of accelerate, so nothing is offloaded."
    if not is_true(value) or is_true(section.content.get("cpu_offload")):
        return _Effect("ignored", message, matters=False)
    return _Effect("ignored", message, "Write cpu_offload instead.", mend=Instead("cpu_offload"))


def _cpu_offload(value: Any, section: Section) -> _Effect | None:
    if section.is_axolotl:
        message = "axolotl does not read this key of Trainer, so nothing is offloaded."
        if not is_true(value):
            return _Effect("ignored", message, matters=False)
        return _Effect("ignored", message, "Write offload_params instead.", mend=Instead("offload_params"))
    if isinstance(value, str) and not is_true(value):
        message = "Trainer treats any text as true, so parameters are offloaded."
        return _Effect("means something else", message, "Write false without quotes.", mend=False)
    return None


def _boolean(value: Any, section: Section) -> _Effect | None:
    if section.is_axolotl or str(value).lower() in _BOOLEANS:
        return None
    return _Effect("crashes", "Trainer expects true or false here.", "Write true or false.")


def _boolean_of_version_1(value: Any, section: Section) -> _Effect | None:
    return _boolean(value, section) if section.version == 1 else None


def _classes(value: Any, section: Section) -> _Effect | None:
    if section.content.get("auto_wrap_policy", POLICIES[0]) != POLICIES[0]:
        return _Effect("ignored", "This key is read only with TRANSFORMER_BASED_WRAP.", matters=False)
    is_text = isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))
    if is_text:
        return None
    return _Effect("crashes", f"{section.reader} expects the name of a class, or a list of names.", "Write one.")


def _min_params(value: Any, section: Section) -> _Effect | None:
    if section.content.get("auto_wrap_policy", POLICIES[0]) == "SIZE_BASED_WRAP":
        return None
    return _Effect("ignored", "This key is read only with SIZE_BASED_WRAP.", matters=False)


_RULES: dict[str, Callable[[Any, Section], _Effect | None]] = {
    "version": _version,
    "auto_wrap_policy": _policy,
    "state_dict_type": _state_dict,
    "reshard_after_forward": _reshard,
    "sharding_strategy": _strategy,
    "offload_params": _offload,
    "cpu_offload": _cpu_offload,
    "transformer_layer_cls_to_wrap": _classes,
    "min_num_params": _min_params,
    "cpu_ram_efficient_loading": _boolean,
    "activation_checkpointing": _boolean,
    **dict.fromkeys(("forward_prefetch", "use_orig_params", "sync_module_states"), _boolean_of_version_1),
}
