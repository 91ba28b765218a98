"""Runs one step: packs the scheduled chunks, calls the model, and computes logits from hidden states."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch

from lean.cache.block_manager import BlockManager
from lean.cache.kv_cache import KVCache
from lean.cache.tables import block_table, slots
from lean.engine.cuda_graphs import Recorder
from lean.engine.decode_batch import DecodeBatch
from lean.engine.decode_steps import DecodeSteps, buckets
from lean.engine.deterministic import RowTiledProducts
from lean.engine.host import send
from lean.engine.layer_programs import Backend, LayerPrograms
from lean.engine.logprobs import TokenLogprob, measure, token_logprobs
from lean.engine.onednn import favours_single_row, onednn_as_it_is, single_row_products
from lean.engine.request import Request
from lean.engine.sampling import Sample, Turn, sample
from lean.engine.scheduler import Chunk
from lean.kernels.layout import sink_shift
from lean.kernels.parts import read_slots
from lean.model.attention import AttentionBatch, Observer
from lean.model.expansion import FEW_ROWS, PromptRows, may_expand
from lean.model.load import LoadedModel
from lean.model.mixers import StateGroup, state_groups
from lean.model.sink_turn import SinkRotary, SinkTurn


class StepResult(NamedTuple):
    """What one step computed, chunk by chunk.

    Attributes:
        hidden: the last hidden states of each chunk's rows, [rows, hidden_size].
        samples: the next token of the chunk's request, and of each of its siblings that wait for it; empty for a chunk
            that draws no token.
        prompt_logprobs: of the prompt's tokens that the chunk's rows predict; empty where not requested.
        finite: whether all hidden states, logits and log-probabilities of the chunk are finite numbers.
    """

    hidden: Sequence[torch.Tensor]
    samples: Sequence[Sequence[Sample]]
    prompt_logprobs: Sequence[Sequence[TokenLogprob | None]]
    finite: Sequence[bool]


class Measured(NamedTuple):
    """Log-probabilities of a prompt's tokens, see `measure`; and whether each row is ``finite``. Both in parts."""

    logprobs: list[torch.Tensor]
    finite: list[torch.Tensor]


def finite_rows(rows: torch.Tensor) -> torch.Tensor:
    """bool [n]: whether rows [n, dim] hold finite numbers only. 20 times faster than testing every number."""
    return rows.amax(-1).isfinite() & rows.amin(-1).isfinite()  # a NaN is both extremes


def _turns(request: Request, row: int) -> list[Turn]:
    """The request, and siblings that start as its forks, draw from the same row of logits."""
    family = [request, *request.siblings]
    return [Turn(one.sampler, row, one.params.logprobs) for one in family if one.sampler is not None]


def _prompt_logprobs(chunk: Chunk, measured: Sequence[numpy.ndarray]) -> list[TokenLogprob | None]:
    """What `_measure_prompt` found, with the None of the prompt's first token before its own."""
    request = chunk.request
    found: list[TokenLogprob | None] = [] if request.prompt_logprobs else [None]
    for part in measured:
        found += token_logprobs(part, request.params.prompt_logprobs or 0)
    return found


class Runner:
    """Binds a model to a cache. Holds no request state."""

    def __init__(self, model: LoadedModel, cache: KVCache, manager: BlockManager, deterministic: bool) -> None:
        self.model = model
        self.cache = cache
        self._manager = manager
        self._deterministic = deterministic
        self._may_expand = may_expand(model.info.is_latent, model.device, deterministic)
        self._favours_single_row = favours_single_row(model.module, model.info.dtype, model.device)
        self.sink_rotary: SinkRotary | None = None  # set where sinks stay visible beyond a window
        self.position_offset = 0  # added to every position; attention is relative, so the self-test can move it
        self.decode_steps: DecodeSteps | None = None  # set where decode steps are compiled or recorded

    def _matmul_backend(self, rows: int) -> AbstractContextManager:
        """Selects the kernels with which torch multiplies ``rows`` rows."""
        if self._deterministic:
            return onednn_as_it_is()
        return single_row_products() if rows == 1 and self._favours_single_row else nullcontext()

    @contextmanager
    def _products(self, rows: int) -> Iterator[None]:
        """Selects how ``rows`` rows are multiplied with the weights."""
        with self._matmul_backend(rows), self.row_bits():
            yield

    def row_bits(self) -> AbstractContextManager:
        """In deterministic mode, what is computed for a row does not depend on the other rows."""
        return RowTiledProducts() if self._deterministic else nullcontext()

    @torch.inference_mode()
    def prepare_decode(
        self,
        max_num_seqs: int,
        max_model_len: int,
        backend: Backend | None,
        record: Recorder | None,
    ) -> float:
        """From now on run decode steps of up to ``max_num_seqs`` sequences compiled by torch.compile's ``backend``,
        recorded, or both. Returns the seconds that this took. Raises ModelError where the model allows neither."""
        steps = self._decode_steps(max_num_seqs, max_model_len, backend, record)
        seconds = steps.warm_up()
        self.decode_steps = steps
        return seconds

    def compile_beside(self, max_num_seqs: int, max_model_len: int, backend: Backend) -> None:
        """Compile decode steps in another process. Until they are ready, the others go on as before."""
        self.decode_steps = self._decode_steps(max_num_seqs, max_model_len, backend, None)
        self.decode_steps.compile_beside()

    def _decode_steps(
        self, max_num_seqs: int, max_model_len: int, backend: Backend | None, record: Recorder | None
    ) -> DecodeSteps:
        model, cache, info = self.model, self.cache, self.model.info

        def decoder(input_ids: torch.Tensor, position_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
            return model.hidden(input_ids, position_ids, attention_batch=batch, kv_cache=cache)

        def tiled(*inputs: Any) -> torch.Tensor:
            with RowTiledProducts():
                return decoder(*inputs)

        batches = [
            DecodeBatch(self._manager, rows, max_model_len, model.device, info.dtype, self.sink_rotary)
            for rows in buckets(max_num_seqs)
        ]
        return DecodeSteps(
            info.source.name,
            tiled if self._deterministic else decoder,
            batches,
            compiled=None if backend is None else partial(LayerPrograms, backend, cache),
            record=record,
        )

    def _shifts(self, positions: list[int]) -> list[int]:
        """By how many positions each query is turned back for the sinks; empty without sinks beyond a window."""
        if self.sink_rotary is None:
            return []
        group = next(group for group in self.cache.plan.groups if group.num_sink_tokens)
        return [sink_shift(position, group.window, group.num_sink_tokens) for position in positions]

    def batch(self, chunks: list[Chunk], observer: Observer | None = None) -> AttentionBatch:
        """Where the chunks' tokens lie in the cache."""
        manager, device = self._manager, self.model.device
        lengths = [chunk.end - chunk.start for chunk in chunks]
        positions = numpy.concatenate([numpy.arange(chunk.start, chunk.end) for chunk in chunks])
        rows = numpy.repeat(numpy.arange(len(chunks)), lengths)
        seq_ids = [chunk.request.seq_id for chunk in chunks]
        slot_mapping, block_tables = [], []
        for pool_id in range(len(manager.pools)):
            table = block_table(manager, seq_ids, pool_id)
            block_tables.append(torch.from_numpy(table).to(device))
            slot_mapping.append(torch.from_numpy(slots(table, rows, positions, manager.block_size)).to(device))
        groups: tuple[StateGroup, ...] = ()
        if manager.slots is not None:
            groups = state_groups(chunks, [manager.slot(seq_id) for seq_id in seq_ids], device)
        starts, prompts = [0, *itertools.accumulate(lengths)], []
        if self._may_expand:
            rows_of = zip(itertools.count(), starts, lengths, (chunk.end for chunk in chunks))
            prompts = [own for own in itertools.starmap(PromptRows, rows_of) if own.num_rows >= FEW_ROWS]
        turn, shifts = None, self._shifts(positions.tolist())
        if self.sink_rotary is not None and any(shifts):
            turn = self._turn(self.sink_rotary.back(torch.tensor(shifts), device))
        return AttentionBatch(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32, device=device),
            positions=torch.from_numpy(positions).to(device),
            slot_mapping=tuple(slot_mapping),
            block_tables=tuple(block_tables),
            sink_turn=turn,
            observer=observer,
            states=groups,
            prompts=tuple(prompts),
        )

    def _turn(self, turn: SinkTurn) -> SinkTurn:
        """Converted once to the dtype that every layer computes in."""
        wide = torch.promote_types(self.model.info.dtype, torch.float32)
        return replace(turn, cos=turn.cos.to(wide), sin=turn.sin.to(wide))

    @torch.inference_mode()
    def execute(self, chunks: list[Chunk]) -> StepResult:
        """Compute a step, and read all that the host needs of it at once.

        Writes nothing but the cache and, when nothing can fail any more, the tokens into their samplers: after an error
        the same chunks can be computed again.
        """
        hidden = self.run(chunks)
        rows = hidden.split([chunk.end - chunk.start for chunk in chunks])
        drawing = [index for index, chunk in enumerate(chunks) if chunk.draws]
        num_tokens = self.model.token_limit
        last = torch.cat([rows[index][-1:] for index in drawing]) if drawing else hidden[:0]
        logits = self.logits(last) if drawing else last.new_zeros(0, self.model.vocab_size)
        scoring = [i for i, chunk in enumerate(chunks) if chunk.request.params.prompt_logprobs is not None]
        measured = {i: self._measure_prompt(chunks[i], rows[i]) for i in scoring}
        tests = [self._good_draws(logits, [chunks[index].request for index in drawing]), finite_rows(hidden)]
        tests += itertools.chain(*(own.finite for own in measured.values()))
        turns = [turn for row, index in enumerate(drawing) for turn in _turns(chunks[index].request, row)]
        with self.row_bits():
            logprobs = itertools.chain(*(own.logprobs for own in measured.values()))
            drawn, others = sample(logits, turns, [torch.cat(tests), *logprobs], num_tokens)
        samples = iter(drawn)
        found = {index: [*itertools.islice(samples, 1 + len(chunks[index].request.siblings))] for index in drawing}
        good = iter(others[0].astype(bool).tolist())
        of_draws = {index: next(good) for index in drawing}
        of_rows = [all([*itertools.islice(good, len(own))]) for own in rows]
        of_prompts = {i: all([*itertools.islice(good, sum(map(len, own.finite)))]) for i, own in measured.items()}
        finite = [own and of_draws.get(i, True) and of_prompts.get(i, True) for i, own in enumerate(of_rows)]
        parts = iter(others[1:])
        scored = {i: [*itertools.islice(parts, len(own.logprobs))] for i, own in measured.items()}
        return StepResult(
            rows,
            [found.get(index, []) for index in range(len(chunks))],
            [_prompt_logprobs(chunk, scored[i]) if finite[i] and i in scored else () for i, chunk in enumerate(chunks)],
            finite,
        )

    def _good_draws(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """bool [rows]: whether tokens can be drawn from each row, and, where asked for, their log-probabilities told.

        These are of the whole head: numbers that stand for no token count too.
        """
        good = finite_rows(logits[:, : self.model.token_limit])
        untold = [request.params.logprobs is None for request in requests]
        if not all(untold):
            good &= logits.amax(-1).isfinite() | send(untold, torch.bool, logits.device)  # amax keeps a NaN
        return good

    def _measure_prompt(self, chunk: Chunk, hidden: torch.Tensor) -> Measured:
        """Log-probabilities of the prompt's tokens that the chunk's rows ``hidden`` predict.

        A request that is computed again after a preemption keeps those it has.
        """
        request = chunk.request
        first = max(1, len(request.prompt_logprobs))  # nothing predicts the first token
        targets = send(request.prompt_token_ids[first : chunk.end + 1], torch.long, hidden.device)
        start, top = first - 1 - chunk.start, request.params.prompt_logprobs or 0
        found = Measured([], [])
        for part in self.model.logit_slices(len(targets)):
            logits = self.logits(hidden[start + part.start : start + part.stop])
            with self.row_bits():
                logprobs = measure(logits, targets[part], top, self.model.token_limit)
            # Finite logits that differ by more than the largest number give a log-probability of -inf.
            finite = finite_rows(logits[:, : self.model.token_limit]) & logprobs[:, 2, 0].isfinite()
            found.logprobs.append(logprobs)
            found.finite.append(finite)
        return found

    @torch.inference_mode()
    def run(self, chunks: list[Chunk], observer: Observer | None = None) -> torch.Tensor:
        """Write the chunks' K/V. Returns the last hidden state of every row, [num_tokens, hidden_size]."""
        self.cache.make_copies(self._manager)
        steps = self.decode_steps
        if steps is not None and observer is None and not self.position_offset and steps.takes(chunks):
            with self._matmul_backend(len(chunks)):  # row tiles are part of a compiled step
                return steps.run(chunks, self._shifts([chunk.start for chunk in chunks]))
        return self.compute([token for chunk in chunks for token in chunk.token_ids], self.batch(chunks, observer))

    @torch.inference_mode()
    def compute(self, token_ids: list[int], batch: AttentionBatch) -> torch.Tensor:
        """Write the K/V of a batch's tokens, without a graph. Returns hidden states [num_tokens, hidden_size]."""
        with self._products(len(token_ids)):
            return self.model.hidden(
                torch.tensor([token_ids], device=self.model.device),
                batch.positions[None] + self.position_offset,
                attention_batch=batch,
                kv_cache=self.cache,
            )

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32 (float64 for a float64 model) logits [rows, vocab]."""
        with self._products(hidden.shape[0]):
            logits = self.model.logits(hidden)
        return logits if logits.dtype is torch.float64 else logits.float()

    @torch.inference_mode()
    def first_bad_layer(self, chunk: Chunk) -> int | None:
        """The first layer with non-finite K/V of the chunk's tokens in the cache; None where all are finite."""
        batch = self.batch([chunk])
        for index, layer in sorted(self.cache.layers.items()):
            pool, pool_id = layer.pool, layer.group.pool_id
            # K by channel is stored when its group is complete; the exact copies are there at once.
            if pool.layout.k_format.by_channel and layer.exact is not None and layer.group.exact_pool_id is not None:
                pool, pool_id = layer.exact, layer.group.exact_pool_id
            k, v = read_slots(pool.arena, pool.layout, pool.offset, batch.slot_mapping[pool_id])
            if not (k.isfinite().all() and v.isfinite().all()):
                return index
        return None
