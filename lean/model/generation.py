"""How a model wants its tokens chosen: `generation_config.json`, or the metadata of a GGUF file."""

import logging
from typing import Any

from lean.errors import ModelError, RequestError, one_line, shown
from lean.sampling_params import SamplingParams
from lean.store.checkpoint import read_object
from lean.store.gguf.file import GgufFile, read_gguf
from lean.store.gguf.sampling import sampling_defaults
from lean.store.library import attempt
from lean.store.source import ModelSource

log = logging.getLogger("lean")

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")  # only where do_sample is set
# Fields that change which tokens transformers generates and that lean does not have, with the values that leave them
# off. null always does.
_NOT_SERVED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "penalty_alpha", "top_h"), (0,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale"), (1,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "sequence_bias"), ([],)),
    **dict.fromkeys(("exponential_decay_length_penalty", "stop_strings", "watermarking_config"), ([],)),
}


def generation_defaults(source: ModelSource, gguf: GgufFile | None = None) -> tuple[Any, dict[str, Any]]:
    """(end-of-sequence entry, sampling defaults); greedy unless the model says that it samples.

    ``gguf``: the source's file, where it is read already.

    Raises ModelError for files that are damaged, or values that no sampling can have.
    """
    path = source.folder / (source.gguf_file or "generation_config.json")
    if not path.is_file():
        return None, {}
    ends = None
    if source.gguf_file is not None:
        defaults = sampling_defaults(gguf or read_gguf(path))
    else:
        raw = attempt(f"cannot read {path}", read_object, path)
        defaults, ends = _of_checkpoint(raw, str(path)), raw.get("eos_token_id")
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ModelError(f"{path}: {error}") from None
    return ends, defaults


def _of_checkpoint(raw: dict[str, Any], path: str) -> dict[str, Any]:
    if not isinstance(raw.get("do_sample"), bool | None):
        raise ModelError(f"{path}: do_sample {shown(raw['do_sample'], 40)} must be true or false")
    defaults = {"repetition_penalty": raw.get("repetition_penalty")}
    if raw.get("do_sample"):
        defaults |= {key: raw.get(key) for key in _SAMPLING}
        defaults["temperature"] = 1.0 if defaults["temperature"] is None else defaults["temperature"]
    others = [
        f"{key} {shown(raw[key], 40)}"
        for key, off in _NOT_SERVED.items()
        if raw.get(key) is not None and raw[key] not in off
    ]
    if others:
        log.warning("%s: lean does not follow %s", path, one_line(", ".join(others), 200))
    return {key: value for key, value in defaults.items() if value is not None}
