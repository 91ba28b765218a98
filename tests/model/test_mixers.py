"""Layers with states get a packed step group by group, and each sequence goes on from its own state."""

import itertools

import pytest
import torch
from helpers import refusal

from lean.cache.states import StateCache, StateKey, StateShape
from lean.engine.scheduler import Chunk
from lean.model.mixers import PackedStates, hand_over_by_group, state_groups, with_new

CPU = torch.device("cpu")
WIDTH = 3
SHAPES = [
    StateShape(StateKey(0, "conv"), (2, WIDTH), torch.float32),
    StateShape(StateKey(0, "recurrent"), (2,), torch.float32),
]


class Mixer(torch.nn.Module):
    """Sums of the last WIDTH inputs, plus the sum of all inputs: written as transformers writes such layers."""

    def forward(self, hidden_states, cache=None, attention_mask=None):
        assert attention_mask is None
        count = hidden_states.shape[1]
        conv, total = cache.get_conv_state(0), cache.get_recurrent_state(0)
        inputs = hidden_states.transpose(1, 2)
        if conv is not None and count == 1 and not cache.is_recording_past(0):
            whole = torch.cat([conv, inputs], -1)
            conv.copy_(whole[..., -WIDTH:])  # in place, as the fused kernels do
        else:
            whole = cache.update_conv_state(inputs, 0, conv_kernel_size=WIDTH)
        window = torch.nn.functional.pad(whole, (WIDTH - 1, 0)).unfold(-1, WIDTH, 1).sum(-1)[..., -count:]
        sums = inputs.cumsum(-1) + (0 if total is None else total[..., None])
        if total is not None and count == 1:
            total.copy_(sums[..., -1])
        else:
            cache.update_recurrent_state(sums[..., -1], 0)
        return (window + sums).transpose(1, 2)


def wanted(inputs):
    """[tokens, 2] of one sequence."""
    padded = torch.nn.functional.pad(inputs, (0, 0, WIDTH - 1, 0))
    return padded.unfold(0, WIDTH, 1).sum(-1) + inputs.cumsum(0)


# Lengths of the chunks of each sequence; None: the sequence rests in this step.
PLANS = [
    [(5, 1, 1, 1), (1, 1, 1, 1), (2, 3, 1, 1)],
    [(1, 1, None, 1), (4, None, 1, 2), (None, 1, 1, 1)],
    [(7,), (3,), (1,)],
    [(2, 1, 1), (2, 1, 1), (2, 1, 1)],
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("slots", [(1, 2, 3), (3, 1, 2), (2, 4, 3)])
def test_packed_steps_give_each_sequence_its_own_outcome(plan, slots):
    module = Mixer()
    hand_over_by_group(module)
    states = StateCache(SHAPES, 4, CPU)
    for key in (shape.key for shape in SHAPES):
        states[key].fill_(float("nan"))  # what was never written must not be read
    inputs = [
        torch.randn(sum(n or 0 for n in own), 2, generator=torch.Generator().manual_seed(i))
        for i, own in enumerate(plan)
    ]
    done, out = [0, 0, 0], [[], [], []]
    for lengths in itertools.zip_longest(*plan):
        running = [index for index, length in enumerate(lengths) if length]
        chunks = [Chunk(None, done[i], done[i] + lengths[i], False) for i in running]
        rows = torch.cat([inputs[i][chunk.start : chunk.end] for i, chunk in zip(running, chunks)])
        cache = PackedStates({}, states, state_groups(chunks, [slots[i] for i in running], CPU))
        found = module(hidden_states=rows[None], cache=cache, attention_mask=None)[0]
        for i, part in zip(running, found.split([lengths[i] for i in running])):
            out[i].append(part)
            done[i] += lengths[i]
    for own, parts in zip(inputs, out):
        torch.testing.assert_close(torch.cat(parts), wanted(own))


def test_sequences_that_add_one_token_run_together():
    chunks = [Chunk(None, 4, 5, True), Chunk(None, 0, 3, True), Chunk(None, 2, 3, True), Chunk(None, 0, 1, True)]
    groups = state_groups(chunks, [4, 1, 3, 2], CPU)
    assert [(group.num_seqs, group.fresh, group.slots.ids.tolist()) for group in groups] == [
        (1, True, [1]), (1, True, [2]), (2, False, [3, 4]),
    ]  # fmt: skip
    assert groups[2].rows.tolist() == [4, 0]  # in the order of their slots, so that their states are one slice
    assert groups[2].slots.first == 3


def test_a_convolution_sees_zeros_before_the_first_token():
    new = torch.ones(1, 2, 2)
    whole, last = with_new(None, new, 4)
    assert whole[0, 0].tolist() == last[0, 0].tolist() == [0, 0, 1, 1]
    whole, last = with_new(last, 2 * new, 4)
    assert whole[0, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert last[0, 0].tolist() == [1, 1, 2, 2]


def test_a_state_that_the_first_pass_did_not_have_is_refused():
    class Odd(torch.nn.Module):
        def forward(self, hidden_states, cache=None):
            cache.update_recurrent_state(hidden_states[:, -1], 7)
            return hidden_states

    module = Odd()
    hand_over_by_group(module)
    groups = state_groups([Chunk(None, 0, 3, True)], [1], CPU)
    cache = PackedStates({}, StateCache(SHAPES, 2, CPU), groups)
    assert "layer 7 keeps a recurrent state" in refusal(module, torch.zeros(1, 3, 2), cache)
