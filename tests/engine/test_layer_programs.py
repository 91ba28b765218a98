"""Compiled layers: which of them share a program, what it is given, and compiling beside an engine that answers."""

import functools
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from engine_state import runner
from tiny import tokens

from lean import LLM, EngineConfig, SamplingParams
from lean.engine.compiling import Compiling
from lean.engine.layer_programs import LayerPrograms
from lean.errors import ModelError
from lean.model.info import inspect_model
from lean.model.layer_calls import Layer
from lean.model.load import LoadedModel, load_model
from lean.store.source import resolve

pytestmark = pytest.mark.usefixtures("home")

CONFIG = EngineConfig(kv_dtype="fp32", dtype="float32", max_num_seqs=2, max_model_len=128, block_size=8)


@pytest.fixture
def model(tiny):
    @functools.cache
    def read(kind: str, **config: object) -> LoadedModel:
        return load_model(inspect_model(resolve(str(tiny(kind, **config))), CONFIG), torch.device("cpu"))

    return read


class Counting:
    """torch.compile's ``eager`` back end. ``calls``: of the graphs, in order, by number."""

    def __init__(self, before=lambda: None) -> None:
        self.graphs, self.calls, self._before = 0, [], before

    def __call__(self, graph, inputs):
        self._before()
        number, self.graphs = self.graphs, self.graphs + 1

        def run(*arguments):
            self.calls.append(number)
            return graph.forward(*arguments)

        return run


def answer(llm: LLM, count: int = 9) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their log-probabilities."""
    params = SamplingParams(count, temperature=0, ignore_eos=True, logprobs=0)
    [output] = llm.generate([tokens(11)], params)
    return output.token_ids, torch.tensor([entry.logprob for entry in output.logprobs])


def same(one, other) -> None:
    assert one[0] == other[0]
    assert (one[1] - other[1]).abs().max() < 1e-4


def compiled(model: LoadedModel, backend) -> LLM:
    llm = LLM(model, CONFIG)
    runner(llm).prepare_decode(2, 128, backend, None)
    return llm


def test_layers_that_are_built_alike_share_a_program_and_keep_their_weights(model):
    backend = Counting()
    llm = compiled(model("llama", num_hidden_layers=5), backend)
    assert backend.graphs == 2  # for one row and for two
    backend.calls.clear()
    same(answer(llm), answer(LLM(model("llama", num_hidden_layers=5), CONFIG)))
    assert len(backend.calls) == 5 * 8
    assert len(set(backend.calls)) == 1


def test_a_layer_with_another_constant_has_a_program_of_its_own(model):
    loaded = model("llama", num_hidden_layers=4)
    loaded.module.model.layers[2].post_attention_layernorm.variance_epsilon = 0.5
    backend = Counting()
    llm = compiled(loaded, backend)
    assert backend.graphs == 2 * 2
    same(answer(llm), answer(LLM(loaded, CONFIG)))


def test_a_layer_that_uses_its_number_has_a_program_of_its_own(model):
    loaded = model("llama", num_hidden_layers=3)
    for layer in loaded.module.model.layers:
        forward = type(layer.mlp).forward
        layer.mlp.forward = functools.partial(_scaled, layer.mlp, layer.self_attn, forward)
    backend = Counting()
    llm = compiled(loaded, backend)
    assert backend.graphs == 2 * 3
    same(answer(llm), answer(LLM(loaded, CONFIG)))


def _scaled(mlp, attention, forward, x):
    return forward(mlp, x) / (1 + attention.layer_idx)


class Gated(torch.nn.Module):
    """A layer that hands more than hidden states on, and changes what it is given or keeps."""

    def __init__(self, change: str | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 3.0))
        self.change, self.last, self.seen = change, None, []

    def forward(self, hidden, shared, scale=None, **batch):
        out = hidden * self.weight * scale[0]
        if self.change == "argument":
            shared["hidden"] = out
        if self.change == "attribute":
            self.last = out
        if self.change == "container":
            self.seen.append(out)
        return out, scale[1], "text"


def call(programs: LayerPrograms, layer: Gated, value: float):
    from lean.model.attention import AttentionBatch

    empty = torch.zeros(1, dtype=torch.int32)
    batch = AttentionBatch(empty, empty, empty, (), ())
    given = {"scale": (torch.tensor(2.0), torch.tensor(value)), "attention_batch": batch, "kv_cache": None}
    return programs.run(Layer(layer, layer.forward, (), ()), (torch.full((1, 4), value), {}), given)


@torch.inference_mode()
def test_a_program_takes_the_arguments_and_returns_what_the_layer_does():
    class NoCache:
        layers, states = {}, None

    layer, programs = Gated(), LayerPrograms("eager", NoCache())
    _, program = call(programs, layer, 1.0)
    assert program is not None
    scale = torch.tensor(5.0), torch.tensor(7.0)
    out, second, text = program.run((torch.full((1, 4), 2.0), {}), {"scale": scale})
    assert out.tolist() == [[30.0] * 4]
    assert second is scale[1]
    assert text == "text"
    for change in ("argument", "attribute", "container"):
        found, program = call(LayerPrograms("eager", NoCache()), Gated(change), 2.0)
        assert found[0].tolist() == [[12.0] * 4]
        assert program is None, f"{change}: its change would be left out of later steps"


class Elsewhere(Counting):
    """A back end whose graphs are made in another process first, when the file ``go`` exists."""

    def __init__(self, go: Path, fails: bool = False) -> None:
        super().__init__(self._wait)
        self._go, self._fails, self._here = go, fails, os.getpid()

    def _wait(self) -> None:
        if os.getpid() == self._here:
            assert self._go.exists(), "compiled by the engine itself"
            return
        while not self._go.exists():
            time.sleep(0.01)
        if self._fails:
            raise RuntimeError("no compiler")


forks = pytest.mark.skipif(sys.platform != "linux", reason="compiles in a fork on Linux alone")


def beside(model: LoadedModel, backend: Elsewhere) -> LLM:
    llm = LLM(model, CONFIG)
    runner(llm).compile_beside(2, 128, backend)
    return llm


def pid_of(llm: LLM) -> int:
    """The process that compiles."""
    return llm.engine.runner.decode_steps._compiling._end.peek()[2][0]


@forks
def test_an_engine_answers_while_its_steps_are_compiled_and_then_uses_them(model, tmp_path):
    loaded, backend = model("llama"), Elsewhere(tmp_path / "go")
    llm, want = beside(loaded, backend), answer(LLM(loaded, CONFIG))
    same(answer(llm), want)
    assert backend.graphs == 0
    (tmp_path / "go").touch()
    llm.wait_until_compiled()
    assert backend.graphs == 2
    backend.calls.clear()
    same(answer(llm), want)
    assert len(backend.calls) == 3 * 8


@forks
def test_steps_that_are_ready_are_loaded_without_being_waited_for(model, tmp_path):
    backend = Elsewhere(tmp_path / "go")
    llm = beside(model("llama"), backend)
    (tmp_path / "go").touch()
    llm.engine.runner.decode_steps._compiling.look(wait=True)
    same(answer(llm), answer(LLM(model("llama"), CONFIG)))
    assert backend.graphs == 1  # of one row: no step has had two


@forks
def test_steps_stay_uncompiled_where_compiling_fails_and_a_line_says_so(model, tmp_path, caplog):
    llm = beside(model("llama"), Elsewhere(tmp_path / "go", fails=True))
    (tmp_path / "go").touch()
    with pytest.raises(ModelError, match=r"cannot be compiled layer by layer .*no compiler.*leave --compile out"):
        llm.wait_until_compiled()
    same(answer(llm), answer(LLM(model("llama"), CONFIG)))
    [record] = [record for record in caplog.records if record.name == "lean"]
    assert "decode steps are not all compiled, and those run as before" in record.getMessage()


@forks
def test_a_compiling_process_that_is_killed_is_told(model, tmp_path, caplog):
    llm = beside(model("llama"), Elsewhere(tmp_path / "go"))
    os.kill(pid_of(llm), signal.SIGKILL)
    with pytest.raises(ModelError, match="ended from outside"):
        llm.wait_until_compiled()
    same(answer(llm), answer(LLM(model("llama"), CONFIG)))


@forks
def test_the_process_ends_with_the_engine(model, tmp_path):
    llm = beside(model("llama"), Elsewhere(tmp_path / "go"))
    pid = pid_of(llm)
    os.kill(pid, 0)
    llm.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ModelError, match="closed before all decode steps were compiled"):
        llm.wait_until_compiled()
    same(answer(llm), answer(LLM(model("llama"), CONFIG)))
    pid = pid_of(beside(model("llama"), Elsewhere(tmp_path / "go")))
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@forks
def test_the_process_ends_when_the_engine_s_process_is_killed(tmp_path):
    script = f"""
import os, sys, time
sys.path[:0] = {sys.path!r}
from lean.engine.compiling import Compiling
found = Compiling({{1: lambda: time.sleep(600)}})
print(found._end.peek()[2][0], flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        os.kill(pid, 0)
        process.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@forks
def test_a_long_reason_and_a_strange_one_arrive_whole(caplog):
    reason = "a\\n7" + 400 * "x" + " the end"

    def fail():
        raise ModelError(reason)

    found = Compiling({1: fail})
    found.look(wait=True)
    assert found.failure == reason
    assert not found.runs
