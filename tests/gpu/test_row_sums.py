"""Deterministic mode on a GPU: no sum over a row is left to torch, whose order there depends on the number of rows."""

import math

import pytest
import torch
from fake_cuda import Operators, fake_gpu
from tiny import tokens

from lean import LLM, EngineConfig, SamplingParams
from lean.engine import deterministic, reductions
from lean.engine.deterministic import RowTiledProducts
from lean.engine.reductions import tree_sum
from lean.errors import ModelError
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.store.source import resolve

F = torch.nn.functional
DENSE = ("llama", "qwen3", "gemma3", "phi3", "olmo2", "cohere", "starcoder2")
LAYERS = {"gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}}


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors of the CPU are treated as a GPU's."""
    monkeypatch.setattr(
        deterministic, "adds_by_company", lambda x: isinstance(x, torch.Tensor) and x.dtype.is_floating_point
    )


@pytest.mark.parametrize("kind", DENSE)
def test_no_sum_of_a_step_on_a_gpu_depends_on_other_rows(monkeypatch, tiny, kind):
    folder = tiny(kind, **LAYERS.get(kind, {"num_hidden_layers": 2}))
    fake = fake_gpu(monkeypatch, folder, deterministic=True)
    for rows in (1, 3, 40):
        operators = Operators()
        fake.decoded(rows, operators)
        assert not operators.reducing


def loaded(tiny, kind: str) -> LoadedModel:
    folder = tiny(kind, **LAYERS.get(kind, {"num_hidden_layers": 2}))
    info = inspect_model(resolve(str(folder)), EngineConfig(dtype="float32"))
    return load_model(info, torch.device("cpu"), deterministic=True)


def run(model: LoadedModel, chunk: int) -> torch.Tensor:
    llm = LLM(model, EngineConfig(kv_dtype="fp32", deterministic=True, prefill_chunk=chunk))
    hidden = torch.cat([rows for _, rows in llm.hidden_states(tokens(38))])
    return torch.cat((hidden, llm.logits(hidden)), dim=1)


@pytest.mark.parametrize("kind", [*DENSE, "gemma2", "mixtral", "gpt_oss", "qwen3_moe"])
def test_composed_sums_give_a_row_its_numbers_in_any_chunk(on_gpu, monkeypatch, tiny, kind):
    model, operators = loaded(tiny, kind), Operators()
    with operators:
        found = run(model, 512)
    assert not operators.reducing
    assert torch.equal(found.view(torch.int32), run(model, 7).view(torch.int32))
    with monkeypatch.context() as patched:
        patched.setattr(deterministic, "adds_by_company", lambda x: False)
        plain = run(model, 512)
    assert (found - plain).abs().max() < 1e-4 * plain.abs().max()


def test_draws_and_log_probabilities_of_a_step_are_composed_too(on_gpu, tiny):
    llm = LLM(loaded(tiny, "llama"), EngineConfig(kv_dtype="fp32", deterministic=True))
    options = {"max_tokens": 2, "temperature": 0.8, "seed": 1, "logprobs": 2, "prompt_logprobs": 1}
    for filters in ({}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}):
        llm.add_request(tokens(9), SamplingParams(**options, **filters))
    operators, steps = Operators(), 0
    with operators:
        while llm.has_work:
            llm.step()
            steps += 1
    assert steps >= 2
    assert not operators.reducing


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_cpu_adds_each_row_alone_and_keeps_its_bits(tiny, kind):
    operators = Operators()
    with operators:
        run(loaded(tiny, kind), 512)
    assert operators.reducing


# --- the compositions ---


@pytest.mark.parametrize("dims", [-1, [1], [0, 2], [-1, -2], [], None], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_a_tree_adds_the_dims_asked_for(dims, keepdim):
    x = torch.randint(-50, 50, (3, 7, 13)).float()  # sums of such numbers are exact
    every = dims or [0, 1, 2]
    assert torch.equal(tree_sum(x, dims, keepdim), x.sum(every, keepdim=keepdim))


def test_a_tree_of_no_rows_and_of_one_number():
    assert tree_sum(torch.zeros(0, 5)).shape == (0,)
    assert tree_sum(torch.zeros(0, 5), [0]).tolist() == [0] * 5
    assert tree_sum(torch.tensor(5.0), None).item() == 5


@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 64, 577])
def test_a_tree_rounds_like_its_depth(count):
    x = torch.rand(5, count, generator=torch.Generator().manual_seed(0))
    for row, found in zip(x.tolist(), tree_sum(x).tolist()):
        assert found == pytest.approx(math.fsum(row), rel=1e-6)


X = torch.randn(4, 33, generator=torch.Generator().manual_seed(1)) * 3
W, B = torch.arange(1, 34) / 32, torch.arange(-16, 17) / 16  # exact in bfloat16
CASES = {
    "sum": lambda x: x.sum(-1),
    "sum of all": lambda x: x.sum(),
    "sum in another dtype": lambda x: x.sum(0, dtype=torch.float64),
    "mean": lambda x: x.pow(2).mean(-1, keepdim=True),
    "mean of all": lambda x: x.mean(),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum across": lambda x: x.cumsum(0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax across": lambda x: torch.softmax(x, 0),
    "softmax in another dtype": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, (33,), W.to(x.dtype), B.to(x.dtype), 1e-5),
    "layer_norm without a weight": lambda x: F.layer_norm(x, (33,)),
    "rms_norm": lambda x: F.rms_norm(x, (33,), W.to(x.dtype), 1e-5),
    "rms_norm without a weight": lambda x: F.rms_norm(x, (33,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_compositions_give_the_numbers_of_torch(on_gpu, case, dtype):
    x, operators = X.to(dtype), Operators()
    with torch.inference_mode(), operators, RowTiledProducts():
        found = CASES[case](x)
    wanted = CASES[case](x.double())
    assert found.dtype is CASES[case](x).dtype
    assert not operators.reducing
    step = 2e-6 if found.dtype is not torch.bfloat16 else 2**-8
    assert torch.allclose(found.double(), wanted.double(), rtol=step, atol=step)


@pytest.mark.parametrize(
    "function",
    [lambda x: x.var(-1), lambda x: x.cumprod(-1), lambda x: x.norm(p=1, dim=-1), lambda x: x.logsumexp(-1),
     lambda x: F.group_norm(x[None], 4)],
    ids=["var", "cumprod", "norm of 1", "logsumexp", "group_norm"],
)  # fmt: skip
def test_a_reduction_without_a_composition_is_refused(on_gpu, function):
    with torch.inference_mode(), RowTiledProducts(), pytest.raises(ModelError, match="deterministic"):
        function(X)


def test_sums_of_integers_are_exact_and_stay(on_gpu):
    counts = torch.arange(6)
    with torch.inference_mode(), RowTiledProducts():
        assert counts.cumsum(0).tolist() == [0, 1, 3, 6, 10, 15]
        assert counts.sum().item() == 15


def test_every_reduction_of_torch_is_composed_or_refused_or_the_same_in_any_order():
    known = reductions.LEFT_OUT | {func.overloadpacket for func in reductions.COMPOSED}
    known |= {getattr(torch.ops.aten, name) for name in ("amax", "amin", "max", "min", "aminmax", "argmax", "argmin")}
    known |= {getattr(torch.ops.aten, name) for name in ("any", "all", "count_nonzero")}
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = packet.overloads() if hasattr(packet, "overloads") else ()
        if any(torch.Tag.reduction in getattr(packet, overload).tags for overload in overloads):
            assert packet in known, name
