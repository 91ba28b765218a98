"""One model of the census: what lean computes with it beside transformers' eager attention, or why lean refuses it.

The bound on an error is 1e-4 of the standard deviation of transformers' logits, or 1e-5 where that is larger. An
error beyond it that is at most four times the error which transformers itself makes in float32 says little: both are
then compared in float64, with nothing rounded to float32 inside.
"""

import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import census_models
import pytest
import torch
from doubled import Doubled
from tiny import BOS, tokens
from transformers import AutoModelForCausalLM

from lean import LLM, EngineConfig, LeanError, SamplingParams
from lean.engine import assemble
from lean.errors import one_line
from lean.scoring import hidden_states_of

LENGTH = 112  # beyond every window
WINDOW, SINKS = 32, 4
ANSWER = 12
DRAWN = 259  # ids below are tokens; lean draws no others
CHUNKS = {"prefill_chunk": 16, "max_num_batched_tokens": 40, "max_num_seqs": 4}

IDS = [BOS, *tokens(LENGTH - 1)]
PACKED = [IDS[:70], IDS[20:], IDS[5:17]]


@dataclass
class Row:
    """What the census found out about one type or variant.

    Attributes:
        transformers: empty, or why transformers itself cannot build or run the model.
        state: "served", "refused", "wrong", "traceback", or "not run" where transformers gives nothing to compare with.
        why: of a state that is not "served", in one line. late: whether weights had been read by then.
        dtype: what both were compared in. error: the largest difference of logits, and spread: their standard
            deviation.
        window: state with ``--window 32 --sinks 4``, and window_why.
    """

    name: str
    state: str = "not run"
    why: str = ""
    late: bool = False
    transformers: str = ""
    parameters: int = 0
    dtype: str = ""
    error: float | None = None
    spread: float | None = None
    window: str = ""
    window_why: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing is left to mend: served right, or refused by a line before weights are read."""
        states = self.state in ("served", "refused", "not run") and self.window in ("", "served", "refused")
        return states and not (self.state == "refused" and self.late)


class Wrong(Exception):
    """lean's result differs from that of transformers. The message says in what."""


def described(error: BaseException) -> str:
    """An error and where it was raised, on one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{one_line(f'{type(error).__name__}: {error}', 240)} ({Path(frame.filename).name}:{frame.lineno})"


def precision(dtype: torch.dtype) -> AbstractContextManager:
    """Nothing is rounded to float32 in a model in float64."""
    return Doubled() if dtype is torch.float64 else nullcontext()


class Reference:
    """transformers' model with eager attention, which computes whole sequences without a cache."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        # Grouped products of experts do not support float64.
        arguments = {"experts_implementation": "eager"} if dtype is torch.float64 else {}
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", **arguments
        ).eval()
        self.dtype = dtype

    @torch.inference_mode()
    def logits(self, ids: list[int], visible: torch.Tensor | None = None) -> torch.Tensor:
        """[len(ids), vocab]. ``visible``: bool [rows, keys], in the place of the model's own masks."""
        mask = {}
        if visible is not None:
            zeros = torch.zeros(1, 1, *visible.shape, dtype=self.dtype)
            mask["attention_mask"] = zeros.masked_fill(~visible, torch.finfo(self.dtype).min)
        with precision(self.dtype):
            return self.model(input_ids=torch.tensor([ids]), use_cache=False, **mask).logits[0]

    def check_answer(self, prompt: list[int], answer: list[int], bound: float, what: str) -> None:
        """Raise Wrong unless every token of a greedy answer is the likeliest one after those before it.

        Two tokens whose logits are closer than twice the bound on errors may stand for each other.
        """
        if len(answer) != ANSWER:
            raise Wrong(f"{what}: {len(answer)} tokens instead of {ANSWER}")
        rows = self.logits([*prompt, *answer])[len(prompt) - 1 : -1, :DRAWN]
        behind = rows.amax(-1) - rows.gather(1, torch.tensor(answer)[:, None])[:, 0]
        if behind.max() > 2 * bound:
            raise Wrong(f"{what}: token {int(behind.argmax())} is behind the likeliest one by {behind.max():.2g}")


def bound_of(logits: torch.Tensor) -> float:
    return max(1e-4 * float(logits.std()), 1e-5)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite for numbers that are not finite."""
    return float((a - b).abs().max()) if a.isfinite().all() else float("inf")


def engine(model: object, **options: object) -> LLM:
    return LLM(model, EngineConfig(**{"kv_dtype": "auto", "max_model_len": 400, **options}))


def logits(llm: LLM, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab], after every token."""
    with precision(llm.model.info.dtype):
        return llm.logits(torch.cat([rows for _, rows in llm.hidden_states(ids)]))


def packed_logits(llm: LLM) -> list[torch.Tensor]:
    """Logits of the packed sequences, computed together in chunks."""
    parts: list[list[torch.Tensor]] = [[] for _ in PACKED]
    with precision(llm.model.info.dtype):
        for index, _, rows in hidden_states_of(llm.engine, PACKED):
            parts[index].append(rows)
        return [llm.logits(torch.cat(rows)) for rows in parts]


def greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers of prompts that are decoded together."""
    with precision(llm.model.info.dtype):
        outputs = llm.generate(prompts, SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True))
    failed = [output.error for output in outputs if output.error]
    if failed:
        raise Wrong(failed[0])
    return [list(output.token_ids) for output in outputs]


@contextmanager
def weights_read() -> Iterator[list[bool]]:
    """The list gets an item when an engine begins to read weights."""
    seen: list[bool] = []
    load = assemble.load_model

    def observed(*args: object, **kwargs: object) -> object:
        seen.append(True)
        return load(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "load_model", observed)
        yield seen


def _outcome(compute: Callable[[], None]) -> tuple[str, str]:
    """(state, why) of something that lean serves, refuses or fails at."""
    try:
        compute()
    except LeanError as error:
        line = str(error)
        return ("refused", line) if "\n" not in line and line else ("traceback", f"not one line: {line!r}")
    except Wrong as error:
        return "wrong", str(error)
    except Exception as error:
        return "traceback", described(error)
    return "served", ""


class Check:
    """The checks of one checkpoint, in the order in which they run."""

    def __init__(self, folder: Path, row: Row) -> None:
        self.folder, self.row = folder, row
        self.reference = Reference(folder, torch.float32)
        self.want = self.reference.logits(IDS)
        if not self.want.isfinite().all():
            raise ValueError("its logits are not finite")
        others = [token if index % 8 else token + 1 for index, token in enumerate(IDS)]
        if distance(self.reference.logits(others)[-1], self.want[-1]) < 20 * self.bound:
            raise ValueError("its logits hardly depend on earlier tokens: nothing would be compared")

    @property
    def bound(self) -> float:
        return bound_of(self.want)

    def run(self) -> None:
        with weights_read() as seen:
            self.row.state, self.row.why = _outcome(self._serve)
        self.row.late = self.row.state == "refused" and bool(seen)
        if self.row.state == "served":
            self.row.window, self.row.window_why = _outcome(self._serve_window)

    def _serve(self) -> None:
        """Start an engine, or be refused; one that has started must compute right."""
        self.llm = engine(str(self.folder), dtype="float32")
        try:
            self._compare()
        except LeanError as error:
            raise Wrong(str(error)) from None

    def _compare(self) -> None:
        """Exact caches give the numbers of transformers; int8 gives finite ones."""
        self._measure()
        if self.row.error > self.bound and self.row.error <= 4 * self._error_of_float32():
            self._compare_in_float64()
        if self.row.error > self.bound:
            raise Wrong(f"logits differ by {self.row.error:.2g}, their standard deviation is {self.row.spread:.2g}")
        together = engine(self.llm.model, **CHUNKS)
        for what, prompts, answers in (
            ("greedy decoding", [IDS[:60]], greedy(self.llm, [IDS[:60]])),
            ("batched decoding", PACKED, greedy(together, PACKED)),
        ):
            for prompt, answer in zip(prompts, answers):
                self.reference.check_answer(prompt, answer, self.bound, what)
        quantized = engine(self.llm.model, kv_dtype="int8")
        if not logits(quantized, IDS).isfinite().all():
            raise Wrong("logits over an int8 cache are not finite")
        greedy(quantized, [IDS[:60]])

    def _measure(self) -> None:
        """The error of one shot, and of packed sequences in chunks."""
        row, reference = self.row, self.reference
        row.dtype = str(reference.dtype).removeprefix("torch.")
        row.spread = float(self.want.std())
        row.error = distance(logits(self.llm, IDS), self.want)
        packed = packed_logits(engine(self.llm.model, **CHUNKS))
        row.error = max(row.error, *(distance(got, reference.logits(ids)) for got, ids in zip(packed, PACKED)))

    def _error_of_float32(self) -> float:
        """How far transformers in float32 is from transformers in float64."""
        exact = Reference(self.folder, torch.float64)
        found = (distance(self.reference.logits(ids).double(), exact.logits(ids)) for ids in (IDS, *PACKED))
        return max(found)

    def _compare_in_float64(self) -> None:
        self.reference = Reference(self.folder, torch.float64)
        self.want = self.reference.logits(IDS)
        self.llm = engine(str(self.folder), dtype="float64")
        self._measure()

    def _serve_window(self) -> None:
        """Without sinks a window is a mask that transformers takes too. With sinks the first rows still see all."""
        options = {"window": WINDOW, "dtype": self.row.dtype}
        got = logits(engine(self.llm.model, sinks=SINKS, **options), IDS)
        if not got.isfinite().all():
            raise Wrong("logits are not finite")
        error = distance(got[: WINDOW + SINKS], self.want[: WINDOW + SINKS])
        if error > self.bound:
            raise Wrong(f"with {SINKS} sinks the first {WINDOW + SINKS} rows differ by {error:.2g}")
        index = torch.arange(LENGTH)
        age = index[:, None] - index[None]
        want = self.reference.logits(IDS, (age >= 0) & (age < WINDOW))
        error = distance(logits(engine(self.llm.model, sinks=0, **options), IDS), want)
        if error > self.bound:
            raise Wrong(f"without sinks logits differ by {error:.2g}")


def check(name: str) -> Row:
    """Build a model of the census and compare. What transformers or lean raise is in the row."""
    row = Row(name)
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / name.partition("+")[0]
        try:
            row.parameters = census_models.build(name, folder)
            checks = Check(folder, row)
        except Exception as error:
            row.transformers = described(error)
            return row
        checks.run()
    own_name = re.compile(rf"^{folder.name}( \([\w-]+\))?: ")  # said by the row already
    row.why, row.window_why = own_name.sub("", row.why), own_name.sub("", row.window_why)
    return row
