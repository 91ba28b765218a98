"""lean and other engines on the same model and tokens. One interface: read a prompt, then make one token per step."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from lean.config import EngineConfig
from lean.errors import EngineError, UserError
from lean.eval.decoding import greedy
from lean.llm import LLM
from lean.model.load import LoadedModel


class Decoder(Protocol):
    """An engine with one sequence. ``read`` drops the previous sequence and computes a prompt; ``step`` makes one
    greedy token."""

    def read(self, token_ids: Sequence[int]) -> None: ...

    def step(self) -> None: ...


def decode_room(config: EngineConfig, rows: int, context: int, steps: int) -> int:
    """Tokens that each of ``rows`` sequences must have room for.

    The first sequences already decode while the last prompts of ``context`` tokens are read, and all sequences must
    run for ``steps`` common steps after that.
    """
    chunk = max(1, min(config.chunk_tokens, config.step_tokens - rows))
    return steps + rows * (-(-context // chunk) + 1) + 8


class Lean:
    """lean itself, with ``rows`` sequences of the same prompt that share no blocks."""

    def __init__(self, model: LoadedModel, config: EngineConfig, rows: int = 1) -> None:
        self.llm = LLM(model, replace(config, prefix_cache=False, prefix_tail_memory=None))
        self.llm.wait_until_compiled()
        self._rows = rows
        self._ids: list[int] = []

    def read(self, token_ids: Sequence[int]) -> None:
        for request_id in self._ids:
            self.llm.abort(request_id)
        self.llm.step()
        params = greedy(self.llm.size.max_model_len - len(token_ids))
        self._ids = [self.llm.add_request(list(token_ids), params) for _ in range(self._rows)]
        started: set[int] = set()
        while len(started) < self._rows:
            started |= {output.request_id for output in self.llm.step()}

    def step(self) -> None:
        found = {output.request_id for output in self.llm.step()}
        if len(found) < self._rows:
            raise EngineError(f"only {len(found)} of {self._rows} sequences decode together: raise --kv-memory")


class Transformers:
    """transformers with its own attention and cache; with ``bits``, its quantized cache."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, bits: int | None = None) -> None:
        from transformers import AutoModelForCausalLM

        # New releases rename the argument to `cache`; older releases that lean supports know only the old name.
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model.to(device).eval()
        self._make_cache = self._quantized(bits) if bits else self._dynamic
        self.cache: Any = None

    def _dynamic(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _quantized(self, bits: int) -> Callable[[], Any]:
        from transformers import QuantizedCache

        reasons = []
        for backend in ("quanto", "hqq"):
            try:
                QuantizedCache(backend, self.model.config, nbits=bits)
            except Exception as error:
                reasons.append(f"{backend}: {type(error).__name__}")
                continue
            return lambda: QuantizedCache(backend, self.model.config, nbits=bits)
        raise UserError(
            f"transformers' QuantizedCache finds no back end ({', '.join(reasons)}): pip install optimum-quanto"
        )

    @torch.inference_mode()
    def read(self, token_ids: Sequence[int]) -> None:
        self.cache = self._make_cache()
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.token = out.logits[:, -1:].argmax(-1)

    @torch.inference_mode()
    def step(self) -> None:
        out = self.model(self.token, past_key_values=self.cache, use_cache=True)
        self.token = out.logits[:, -1:].argmax(-1)


class LlamaCpp:
    """llama.cpp through llama-cpp-python, with flash attention."""

    def __init__(self, gguf: Path, cache_type: str, max_model_len: int, threads: int, chunk: int) -> None:
        try:
            import llama_cpp
        except ImportError:
            raise UserError(
                "--against llama.cpp needs llama-cpp-python: pip install llama-cpp-python (where the CPU has AMX and "
                "the operating system does not allow it, build with CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX512=ON "
                "-DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON')"
            ) from None
        kind = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}[cache_type]
        self._llama = llama_cpp.Llama(
            str(gguf),
            n_ctx=max_model_len,
            n_batch=chunk,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,
            type_k=kind,
            type_v=kind,
            logits_all=False,
            verbose=False,
        )

    def read(self, token_ids: Sequence[int]) -> None:
        self._llama.reset()
        self._llama.eval(list(token_ids))
        self.token = self._llama.sample(temp=0.0)

    def step(self) -> None:
        self._llama.eval([self.token])
        self.token = self._llama.sample(temp=0.0)


PEERS = ("transformers", "transformers-quantized", "llama.cpp", "expanded")
