"""A decode step waits for the GPU once, when its tokens are read; nothing that a CUDA graph records needs the host."""

import pytest
from fake_cuda import Operators, fake_gpu

from lean import SamplingParams

KINDS = ("llama", "qwen3", "gemma3", "phi3", "mixtral", "gpt_oss")
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1)
STEPS = {
    "greedy": [SamplingParams(temperature=0)],
    "greedy, five": [SamplingParams(temperature=0)] * 5,
    "sampled": [SAMPLED],
    "sampled, eight": [SAMPLED] * 8,
    "mixed": [
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=0.8, top_k=20, min_p=0.1, seed=1, logprobs=5),
        SAMPLED,
        SamplingParams(
            temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={3: 1.0, 4: 1.0}, seed=1
        ),
        SamplingParams(temperature=0, frequency_penalty=0.5),
    ],
}


@pytest.fixture
def gpu(monkeypatch, tiny):
    def start(kind: str, **options: object):
        return fake_gpu(monkeypatch, tiny(kind), **options)

    return start


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_step_makes_no_tensor_on_the_cpu_and_reads_no_number(gpu, kind):
    fake, operators = gpu(kind), Operators()
    hidden = fake.decoded(3, operators)
    assert hidden.device.type == "cuda"
    assert hidden.shape[0] == 3
    assert operators.all["lean::paged_attention"] == len(fake.runner.cache.layers)
    assert not operators.on_cpu


def test_nor_does_one_that_turns_queries_back_for_the_sinks(gpu):
    fake, operators = gpu("llama", window=64), Operators()
    assert fake.runner.sink_rotary is not None
    fake.decoded(3, operators)
    assert not operators.on_cpu


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_the_host_waits_once_in_a_step_however_many_sequences_draw(gpu, monkeypatch, kind, step):
    fake, operators = gpu(kind), Operators()
    chunks, result = fake.stepped(monkeypatch, STEPS[step], operators)
    assert len(fake.reads) == 1
    assert not operators.waiting
    assert [len(own) for own in result.samples] == [1] * len(chunks)
    assert result.finite == [True] * len(chunks)


def test_sampled_rows_share_their_operators(gpu, monkeypatch):
    counts = []
    for rows in (1, 8):
        operators = Operators()
        gpu("llama").stepped(monkeypatch, [SAMPLED] * rows, operators)
        counts.append(sum(operators.all.values()))
    assert counts[1] <= counts[0] + 7  # a view for each row
