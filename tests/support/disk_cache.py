"""Engines that keep their prefix cache in a folder."""

from pathlib import Path

from desk import FORMATS, ask
from engine_state import nothing_left, scheduler

from lean import LLM, EngineConfig, SamplingParams


def engine(model: str, folder: Path | None, form: str, **config) -> LLM:
    options = {"kv_dtype": form.split()[0], "block_size": 16, "deterministic": True, "max_model_len": 256}
    options |= {"dtype": "float32", "max_num_seqs": 4, "prefix_cache_dir": folder and str(folder)}
    return LLM(model, EngineConfig(**options | FORMATS[form] | config))


def said(llm: LLM, ids: list[int], params: SamplingParams | None = None) -> tuple[int, list]:
    outputs = llm.generate([ids], params or ask(5))
    return outputs[0].cached_tokens, [(out.token_ids, out.logprobs, out.text) for out in outputs]


def written(llm: LLM) -> None:
    """The end of a process, except for its memory."""
    llm.close()
    nothing_left(llm)


def read_tokens(llm: LLM) -> int:
    return llm.stats().prefix.tokens_read


def files(llm: LLM) -> list[Path]:
    folder = scheduler(llm).disk.folder
    return [file.path for file in folder.folder.files(folder.path)]
