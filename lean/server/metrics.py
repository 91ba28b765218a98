"""Metrics for Prometheus: vLLM's names and labels, and lean's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lean.server.loop import Job, Part, Snapshot

if TYPE_CHECKING:
    from lean.llm import LLM

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's buckets, so that its dashboards show the same steps.
_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_STEP = (1, *(2**power for power in range(3, 15)))
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))

_LABELS = ("model_name", "engine")


class Metrics:
    """Counts what requests do, and reads the engine's last snapshot when it is asked.

    Args:
        model_name: the label of every metric. snapshot: gives the engine's last one.
    """

    def __init__(self, model_name: str, snapshot: Callable[[], Snapshot]) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._snapshot = snapshot
        self._llm: LLM | None = None

        def seconds(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=buckets).labels(
                *self._labels
            )

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, _LABELS, registry=self.registry).labels(*self._labels)

        self._latency = seconds("e2e_request_latency_seconds", "Seconds from a request's arrival to its end.")
        self._first = seconds("time_to_first_token_seconds", "Seconds to the first token.", _FIRST)
        self._inter = seconds("inter_token_latency_seconds", "Seconds between two tokens of a sequence.", _TOKEN)
        self._each = seconds(
            "request_time_per_output_token_seconds",
            "Mean seconds between two tokens of a sequence that ended; 0 where it has fewer than two.",
            _TOKEN,
        )
        self._queue = seconds("request_queue_time_seconds", "Seconds that a request waited for its first step.")
        self._prefill = seconds("request_prefill_time_seconds", "Seconds from the first step to the first token.")
        self._decode = seconds("request_decode_time_seconds", "Seconds from the first token to the last.")
        self._prompt_size = seconds("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._answer_size = seconds("request_generation_tokens", "Generated tokens of a sequence.", _TOKENS)
        self._step = seconds("iteration_tokens_total", "Prompt tokens and generated tokens of a step.", _STEP)
        self._most = seconds("request_max_num_generation_tokens", "Tokens that a request asked for.", _TOKENS)
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of requests that gave a first token.")
        self._generated = counter("vllm:generation_tokens", "Generated tokens.")
        self._cached = counter("vllm:prompt_tokens_cached", "Prompt tokens that were read from the cache.")
        self._success = Counter(
            "vllm:request_success",
            "Sequences that ended.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._unknown = counter("lean_ignored_fields", "Fields of requests that nobody knows, and that were ignored.")
        self._responses = Counter(
            "lean_http_responses", "HTTP responses by status.", ("status",), registry=self.registry
        )
        self.registry.register(_State(self))

    def attach(self, llm: LLM) -> None:
        """The engine is ready: its formats and pools can be told."""
        self._llm = llm

    def response(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def step(self, tokens: int) -> None:
        """A step of the engine has computed prompt tokens and generated others; the engine's thread says how many."""
        self._step.observe(tokens)

    def ignored(self, fields: int) -> None:
        self._unknown.inc(fields)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def follow(self, job: Job) -> JobMetrics:
        """What counts the outputs of one job."""
        return JobMetrics(self, job)

    def state(self) -> Iterator[Metric]:
        """Gauges of the engine's last step."""
        now = self._snapshot()

        def sample(kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, value: float) -> Metric:
            family = kind(name, text, labels=_LABELS)
            family.add_metric(self._labels, value)
            return family

        gauge, counter = partial(sample, GaugeMetricFamily), partial(sample, CounterMetricFamily)
        used = max((used / total for used, total in now.blocks if total), default=0.0)
        yield gauge("vllm:num_requests_running", "Sequences that run.", now.running)
        yield gauge("vllm:num_requests_waiting", "Requests that wait.", now.waiting)
        yield gauge(
            "vllm:kv_cache_usage_perc", "Share of the cache blocks in use, of the fullest pool; 1 is full.", used
        )
        yield counter("vllm:num_preemptions", "Requests that gave their blocks back.", now.preemptions)
        yield gauge("lean_steps", "Steps of the engine since its start.", now.steps)
        prefix = now.prefix
        if prefix is None or self._llm is None:
            return
        yield counter("vllm:prefix_cache_queries", "Prompt tokens that were looked for.", prefix.tokens_asked)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens that were found.", prefix.tokens_found)
        yield counter("lean_prefix_cache_evictions", "Blocks whose content was forgotten.", prefix.evictions)
        yield counter("lean_prefix_cache_tails_kept", "Ends of prefixes that were kept.", prefix.tails_kept)
        yield counter("lean_prefix_cache_tails_used", "Prefixes that were found by such an end.", prefix.tails_used)
        found = CounterMetricFamily(
            "lean_prefix_cache_hits", "Prompt tokens that were found, by tier.", labels=["tier"]
        )
        found.add_metric(["memory"], prefix.tokens_found - prefix.tokens_read)
        found.add_metric(["disk"], prefix.tokens_read)
        yield found
        if now.disk is not None:
            yield counter("lean_prefix_cache_disk_blocks_written", "Blocks written to disk.", now.disk.blocks_written)
            yield counter("lean_prefix_cache_disk_blocks_read", "Blocks read from disk.", now.disk.blocks_read)
            yield counter("lean_prefix_cache_disk_blocks_dropped", "Blocks not written.", now.disk.blocks_dropped)
            yield counter("lean_prefix_cache_disk_damaged", "Damaged files, which were removed.", now.disk.damaged)
            yield counter("lean_prefix_cache_disk_slower", "Prefixes not read: computing is faster.", now.disk.slower)
        labels = ("pool", "format", "exact")
        held = GaugeMetricFamily("lean_kv_pool_bytes_held", "Bytes of a pool's blocks in use.", labels=labels)
        room = GaugeMetricFamily("lean_kv_pool_bytes", "Bytes of a pool's blocks.", labels=labels)
        for number, (spec, (used, total)) in enumerate(zip(self._llm.plan.pools, now.blocks)):
            names = (str(number), spec.name, str(spec.exact).lower())
            held.add_metric(names, used * spec.block_bytes)
            room.add_metric(names, total * spec.block_bytes)
        yield held
        yield room


class _State:
    """Makes the registry ask for the engine's state when metrics are read."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.state()


class JobMetrics:
    """Counts the outputs of one job."""

    def __init__(self, metrics: Metrics, job: Job) -> None:
        self._metrics, self._job = metrics, job
        self._first: dict[tuple[int, int], float] = {}
        self._last: dict[tuple[int, int], float] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        self._prompts: set[int] = set()
        metrics._most.observe(job.params.max_tokens)

    def add(self, part: Part) -> None:
        """Count one output."""
        metrics, output, key = self._metrics, part.output, (part.prompt, part.output.index)
        if output.token_ids:
            metrics._generated.inc(len(output.token_ids))
            self._tokens[key] = self._tokens.get(key, 0) + len(output.token_ids)
            if key in self._last:
                metrics._inter.observe(part.time - self._last[key])
            else:
                self._begin(part, key)
            self._last[key] = part.time
        if output.finish_reason is not None:
            metrics._success.labels(*metrics._labels, output.finish_reason).inc()
            tokens = self._tokens.get(key, 0)
            metrics._answer_size.observe(tokens)
            if key in self._first:
                decode = self._last[key] - self._first[key]
                metrics._decode.observe(decode)
                metrics._each.observe(decode / max(1, tokens - 1))

    def _begin(self, part: Part, key: tuple[int, int]) -> None:
        metrics, job = self._metrics, self._job
        self._first[key] = part.time
        if part.prompt in self._prompts:
            return
        self._prompts.add(part.prompt)
        metrics._first.observe(part.time - job.arrived)
        metrics._prompt.inc(part.output.prompt_tokens)
        metrics._prompt_size.observe(part.output.prompt_tokens)
        metrics._cached.inc(part.output.cached_tokens)
        if job.started is not None:
            metrics._queue.observe(job.started - job.arrived)
            metrics._prefill.observe(part.time - job.started)

    def end(self, now: float, aborted: bool) -> None:
        """The answer has ended: completely, or because the client has left or the engine failed."""
        self._metrics._latency.observe(now - self._job.arrived)
        if aborted:
            self._metrics._success.labels(*self._metrics._labels, "abort").inc()
