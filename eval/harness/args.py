"""lm-eval's model and generation arguments, converted to engine options and sampling parameters."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from lm_eval.models.utils import normalize_gen_kwargs

from lean.config import EngineConfig
from lean.errors import ConfigError, RequestError, one_line, shown
from lean.llm import LLM
from lean.sampling_params import SamplingParams
from lean.units import parse_size

# Generation arguments with the same meaning in lean; do_sample, until and max_gen_toks are converted.
SAMPLING_KEYS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


def engine_config(args: Mapping[str, Any]) -> EngineConfig:
    """Model arguments to an EngineConfig. Values are text, or numbers that lm-eval has parsed (``-1`` as a float).

    Raises ConfigError: an unknown name, or a value that the field cannot have.
    """
    kinds = {field.name: str(field.type).split(" | ") for field in fields(EngineConfig)}
    unknown = [name for name in args if name not in kinds]
    if unknown:
        raise ConfigError(
            f"unknown model argument {one_line(unknown[0], 40)!r}: use pretrained, max_gen_toks, add_bos_token, "
            f'prefix_token_id, {", ".join(kinds)}; put a value with commas in quotes: kv_dtype="k=int8,v=int4"'
        )

    def convert(name: str, value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        text = str(value).strip()
        if "None" in kinds[name] and text.lower() in ("none", "null"):
            return None
        if "str" in kinds[name]:
            return text
        if name in ("kv_memory", "prefix_tail_memory", "prefix_cache_size") and isinstance(value, str):
            return parse_size(value)
        if "bool" in kinds[name]:
            return {"true": True, "false": False}.get(text.lower(), value)
        return int(text) if text.lstrip("+-").isdecimal() else value

    return EngineConfig(**{name: convert(name, value) for name, value in args.items()})


def sampling_params(llm: LLM, given: Mapping[str, Any], max_gen_toks: int) -> SamplingParams:
    """Generation arguments of a task to sampling parameters; greedy unless the task asks for sampling.

    Args:
        max_gen_toks: most new tokens for a task that sets no limit.

    Raises:
        RequestError: an unknown argument, or an impossible value.
    """
    try:
        args: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), max_gen_toks))
    except (ValueError, TypeError, OverflowError, AttributeError) as error:
        raise RequestError(f"generation arguments {shown(given, 80)} cannot be read: {one_line(error)}") from None
    stop = [text for text in args.pop("until") if text]
    eos = llm.model.tokenizer.eos_token_id
    if eos is not None:
        stop.append(llm.model.tokenizer.decode([eos]))  # the text of EOS ends an answer too, as in lm-eval's ``hf``
    max_tokens, sample = args.pop("max_gen_toks"), args.pop("do_sample")
    if args.get("num_beams") == 1:
        del args["num_beams"]
    unknown = sorted(args.keys() - set(SAMPLING_KEYS))
    if unknown:
        raise RequestError(f"unknown generation argument {unknown[0]!r}: use {', '.join(SAMPLING_KEYS)}")
    if sample:
        args.setdefault("temperature", llm.model.generation.get("temperature", 1.0))
        # lm-eval seeds torch, so a run is repeatable, and copies of a request get different seeds.
        args.setdefault("seed", int(torch.randint(2**63 - 1, ())))
    else:
        args["temperature"] = 0.0
    return SamplingParams(max_tokens=max_tokens, stop=tuple(dict.fromkeys(stop)), **args)
