"""Load a saved model or adapter without its values, as transformers and PEFT do, to learn which tensors they use.

The libraries' own functions decide on names and shapes. All tensors are on the meta device, which has no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..engines.readback.dtypes import dtype_name
from ..engines.readback.parameters import ADAPTER_PREFIX, TRAINED_COPY, name_of_copied
from . import expected
from .content import Tensor
from .expected import NotKnown

_ADAPTER = "default"  # the name under which PEFT loads an adapter
_SHARED = ("vblora_vector_bank", ".tinylora_v.", ".unilora_theta_d.")  # once in the file, in each layer of the model
_TOKENS = "trainable_tokens_delta"
PROMPT = "prompt_embeddings"  # the only tensor of the methods that train a prompt


class Loaded(NamedTuple):
    """The result of loading tensors with a library: which tensors are missing, ignored or of another shape."""

    missing: list[str]  # of the model, which has no values for them
    unexpected: list[str]  # of the file, which are ignored
    reshaped: dict[str, tuple[list[int], list[int]]]  # of the model -> the file's shape, the model's shape
    dtypes: Mapping[str, str] = MappingProxyType({})  # of the model -> the type to which values are converted

    @property
    def is_whole(self) -> bool:
        return not (self.missing or self.unexpected or self.reshaped)


def model(config: dict[str, Any], tensors: Iterable[Tensor]) -> Loaded:
    """Return which tensors `from_pretrained` reports as missing, ignored or of another shape. Raises NotKnown."""
    built, model_class = expected.class_of(config)
    if _is_under_zero3():
        raise NotKnown("this process trains under ZeRO-3, for which transformers would distribute the model")
    try:
        with expected.quiet():
            filled, info = model_class.from_pretrained(
                None,
                config=built,
                state_dict=_without_values(tensors),
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # of a model that cannot be built, or of a conversion of its tensors
        raise NotKnown(f"transformers cannot build it on the meta device ({type(error).__name__})") from None
    reshaped = {
        name: (list(saved_shape), list(needed_shape)) for name, saved_shape, needed_shape in info["mismatched_keys"]
    }
    dtypes = {name: dtype_name(tensor.dtype) for name, tensor in filled.state_dict().items()}
    missing, unexpected = set(info["missing_keys"]) - reshaped.keys(), set(info["unexpected_keys"])
    return Loaded(sorted(missing), sorted(unexpected), reshaped, dtypes)


def _is_under_zero3() -> bool:
    try:
        from transformers.integrations import deepspeed
    except ImportError:
        return False
    is_enabled: Any = deepspeed.is_deepspeed_zero3_enabled
    return bool(is_enabled())


def _without_values(tensors: Iterable[Tensor]) -> dict[str, torch.Tensor]:
    return {
        tensor.name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta") for tensor in tensors
    }


def resize(base: Any, rows: int) -> None:
    """Resize the token embedding of a model on the meta device to `rows` tokens. Raises NotKnown."""
    try:
        with expected.quiet(), torch.device("meta"):
            base.resize_token_embeddings(rows, mean_resizing=False)
    except Exception as error:
        raise NotKnown(
            f"transformers cannot resize its embedding on the meta device ({type(error).__name__})"
        ) from None


class NoSuchModules(Exception):
    """Raised if an adapter's configuration names modules that its base model does not have."""


def base_class(settings: dict[str, Any]) -> Any:
    """Return the class of an adapter's base model. None if it is the one in the base model's configuration."""
    import transformers

    class_name = (settings.get("auto_mapping") or {}).get("base_model_class")
    task = settings.get("task_type")
    auto = {
        "CAUSAL_LM": "AutoModelForCausalLM",
        "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
        "SEQ_CLS": "AutoModelForSequenceClassification",
        "TOKEN_CLS": "AutoModelForTokenClassification",
        "QUESTION_ANS": "AutoModelForQuestionAnswering",
        "FEATURE_EXTRACTION": "AutoModel",
    }.get(task if isinstance(task, str) else "")
    if auto is not None:
        return getattr(transformers, auto)
    return expected.class_called(class_name) if isinstance(class_name, str) else None


def adapter(base: Any, settings: dict[str, Any], tensors: Iterable[Tensor]) -> Loaded:
    """Return which tensors of an adapter `PeftModel.from_pretrained` loads. The base model is on the meta device.

    Raises NoSuchModules if the base model does not have the adapter's modules, and NotKnown if PEFT is not installed or
    cannot do it without values.
    """
    try:
        import peft
        from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
        from peft.utils.save_and_load import set_peft_model_state_dict
    except ImportError:
        raise NotKnown("PEFT is not installed") from None
    file_tensors = _without_values(tensors)
    try:
        with expected.quiet(), torch.device("meta"):
            wrapped = _wrap(peft, base, settings)
            result: Any = set_peft_model_state_dict(
                wrapped, dict(file_tensors), adapter_name=_ADAPTER, ignore_mismatched_sizes=True, low_cpu_mem_usage=True
            )
    except NoSuchModules:
        raise
    except KeyError as error:  # of a module that was trained as a whole
        name = str(error.args[0]) if error.args else ""
        if name != PROMPT and not name.startswith(ADAPTER_PREFIX):
            raise NotKnown("PEFT cannot build it on the meta device (KeyError)") from None
        return Loaded([name], [], {})
    except Exception as error:
        raise NotKnown(f"PEFT cannot build it on the meta device ({type(error).__name__})") from None
    unexpected = {_in_file(name, file_tensors) for name in result.unexpected_keys}
    # PEFT saves some copies, and ignores them.
    unexpected -= {name for name in unexpected if (copied := name_of_copied(name)) != name and copied in file_tensors}
    if wrapped.peft_config[_ADAPTER].is_prompt_learning:
        lost = [] if PROMPT in file_tensors else [PROMPT]
        return Loaded(lost, sorted(unexpected - {PROMPT}), {})
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(wrapped.peft_config[_ADAPTER].peft_type, "")
    missing, reshaped = _lacking(wrapped, prefix, result.missing_keys, file_tensors)
    return Loaded(missing, sorted(unexpected), reshaped)


def _lacking(
    wrapped: Any, prefix: str, names: Iterable[str], file_tensors: dict[str, torch.Tensor]
) -> tuple[list[str], dict[str, tuple[list[int], list[int]]]]:
    """Return those of these names that the file lacks, and those that it has in another shape."""
    shapes = {name: list(tensor.shape) for name, tensor in wrapped.state_dict().items()}
    missing: list[str] = []
    reshaped = {}
    for name in names:
        if not _is_of_adapter(wrapped, prefix, name):
            continue
        plain = name.replace(f".{_ADAPTER}", "")
        saved_shape = None if plain not in file_tensors else list(file_tensors[plain].shape)
        if saved_shape is None or saved_shape == shapes[name]:
            missing.append(plain)
        else:
            reshaped[plain] = (saved_shape, shapes[name])
    return sorted(missing), reshaped


def with_defaults(settings: dict[str, Any], is_adapter: bool) -> dict[str, Any]:
    """Return the settings of a model or an adapter with what its library derives from them. Raises NotKnown."""
    if not is_adapter:
        return dict(expected.configuration(settings).to_dict())
    try:
        import peft

        with expected.quiet():
            return {**settings, **_peft_config(peft, settings).to_dict()}
    except Exception as error:
        raise NotKnown(f"PEFT cannot read the configuration ({type(error).__name__})") from None


def _peft_config(peft: Any, settings: dict[str, Any]) -> Any:
    return peft.PeftConfig.from_peft_type(**getattr(peft.PeftConfig, "check_kwargs", dict)(**settings))


def _wrap(peft: Any, base: Any, settings: dict[str, Any]) -> Any:
    """Return the base model with an adapter that has no values. Raises NoSuchModules."""
    chosen = _peft_config(peft, settings)
    chosen.inference_mode = True
    if isinstance(getattr(chosen, "init_lora_weights", None), str):
        chosen.init_lora_weights = True  # others compute with the values of the base model
    peft_class = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(chosen.task_type, peft.PeftModel)
    try:
        return peft_class(base, chosen, _ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        text = str(error)
        if "not found in the base model" in text or "No modules were targeted" in text:
            raise NoSuchModules(text.splitlines()[0]) from None
        raise


def _is_of_adapter(wrapped: Any, prefix: str, name: str) -> bool:
    """Return whether a tensor has to be in an adapter's file. Others are derived, or those of the base model."""
    if f".{_ADAPTER}" not in name:
        return False
    if any(part in name for part in _SHARED):
        return False
    if _TOKENS in name:  # those of a tied embedding are the other embedding's
        return getattr(wrapped.get_submodule(name.partition(f".{_TOKENS}")[0]), "tied_adapter", None) is None
    return f"{TRAINED_COPY}{_ADAPTER}" in name or (bool(prefix) and prefix in name)


def _in_file(name: str, file_tensors: dict[str, torch.Tensor]) -> str:
    """Return the name that a tensor has in the file, without the name of the adapter that PEFT inserts."""
    shorter = name.replace(f".{_ADAPTER}", "", 1)
    return shorter if name not in file_tensors and shorter in file_tensors else name
