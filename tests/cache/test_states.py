"""States of sequences lie in slots: read and written as a slice where the slots follow each other, else by copies."""

import pytest
import torch

from lean.cache.block_manager import StateCopy
from lean.cache.states import StateCache, StateKey, StateShape, StateSlots

CPU = torch.device("cpu")
CONV, RECURRENT = StateKey(3, "conv"), StateKey(3, "recurrent", 1)
SHAPES = [StateShape(CONV, (4, 2), torch.bfloat16), StateShape(RECURRENT, (2, 3, 5), torch.float32)]


def filled():
    cache = StateCache(SHAPES, 5, CPU)
    for key in (CONV, RECURRENT):
        cache[key].copy_(torch.arange(6.0).view(6, *[1] * (cache[key].dim() - 1)).expand_as(cache[key]))
    return cache


def test_bytes_are_those_of_the_shapes():
    assert [shape.nbytes for shape in SHAPES] == [16, 120]
    assert StateCache(SHAPES, 5, CPU).nbytes == 6 * (16 + 120)  # and those of padding


@pytest.mark.parametrize(("slots", "first"), [([2, 3, 4], 2), ([1], 1), ([3, 2], None), ([1, 3], None), ([2, 2], None)])
def test_slots_that_follow_each_other_are_a_slice(slots, first):
    found = StateSlots.of(slots, CPU)
    assert found.ids.tolist() == slots
    assert found.first == first
    cache = filled()
    for key in (CONV, RECURRENT):
        values = cache.read(key, found)
        assert values.flatten(1)[:, 0].tolist() == slots
        assert (values.untyped_storage().data_ptr() == cache[key].untyped_storage().data_ptr()) == (first is not None)


@pytest.mark.parametrize("slots", [[2, 3], [4, 1]])
def test_what_is_written_takes_the_dtype_of_the_state_and_changes_no_other_slot(slots):
    cache = filled()
    cache.write(CONV, StateSlots.of(slots, CPU), torch.tensor([7.0, 8.0]).view(2, 1, 1).expand(2, 4, 2))
    wanted = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    wanted[slots[0]], wanted[slots[1]] = 7.0, 8.0
    assert cache[CONV].flatten(1)[:, 0].tolist() == wanted
    assert cache[CONV].dtype is torch.bfloat16
    assert cache[RECURRENT].flatten(1)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_copies_are_made_in_order():
    cache = filled()
    cache.copy([StateCopy(1, 2), StateCopy(2, 3)])
    for key in (CONV, RECURRENT):
        assert cache[key].flatten(1)[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0, 4.0, 5.0]
