"""What a refusal suggests would fit, and nothing less would."""

from dataclasses import replace
from itertools import product

import pytest
from suggestions import suggestions

from lean.cache.advice import Room, what_fits
from lean.cache.plan import LayerShape, plan_cache
from lean.cache.size import DoesNotFit, size_cache
from lean.config import EngineConfig
from lean.errors import ConfigError
from lean.quant import BF16

MIB = 2**20
FULL = (LayerShape(9, 3, 64, 64),) * 30
MIXED = tuple(LayerShape(4, 1, 256, 256, window) for window in [512] * 5 + [0] + [512] * 5 + [0])
SLIDING = (LayerShape(4, 1, 256, 256, 512),) * 5
LENGTH = 32_768


def size(layers, config, free, share):
    return size_cache(plan_cache(layers, config, BF16), config, LENGTH, free, share)


OPTIONS = [
    {"max_model_len": 29_024},
    {"max_model_len": LENGTH + 1},
    {"max_model_len": 20_000, "kv_dtype": "bf16"},
    {"max_model_len": 20_000, "kv_dtype": "int4", "sinks": 8},
    {"max_model_len": 4000, "kv_memory": 1 * MIB},
    {"max_model_len": 4000, "num_blocks": 3},
    {"num_blocks": 10**9},
    {"max_model_len": 4000, "num_blocks": 10**9},
    {"kv_memory": 2**50},
    {"kv_memory": 4096},
    {"window": 10**6, "max_model_len": 10**7},
    {"prefill_chunk": 10**6, "max_num_batched_tokens": 10**6},
    {"max_num_seqs": 10**5},
    {"kv_residual_length": 30_000, "max_model_len": 32_000},
    {},
]


@pytest.mark.parametrize("layers", [FULL, MIXED, SLIDING], ids=["full", "mixed", "sliding"])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_every_suggestion_starts_with_the_length_that_was_asked_for(layers, share):
    refused = 0
    for free, options in product((2 * MIB, 40 * MIB, 200 * MIB, 900 * MIB), OPTIONS):
        config = EngineConfig(**options)
        try:
            size(layers, config, free, share)
            continue
        except DoesNotFit as error:
            message = str(error)
        except ConfigError:  # an option without effect
            continue
        assert f"{free / MIB:,.1f} MiB" in message or "positions of this model" in message
        told = what_fits(Room(layers, BF16, LENGTH, free, share), config, config.max_model_len)
        if told.startswith("nothing else fits"):
            continue
        refused += 1
        for change in suggestions(told):
            found = size(layers, replace(config, **change), free, share)
            assert found.nbytes <= free
            wanted = change.get("max_model_len", config.max_model_len)
            assert wanted is None or found.max_model_len >= wanted
    assert refused > 5


def test_the_numbers_are_the_largest_and_the_smallest_that_fit():
    room, config = Room(FULL, BF16, LENGTH, 400 * MIB, 0.25), EngineConfig(max_model_len=29_024)
    length, memory, kv_dtype = suggestions(what_fits(room, config, 29_024))[:3]
    free = int(400 * MIB * 0.98)
    assert size(FULL, replace(config, **length), free, 0.25).max_model_len == length["max_model_len"]
    with pytest.raises(DoesNotFit):
        size(FULL, EngineConfig(max_model_len=length["max_model_len"] + 32), free, 0.25)
    with pytest.raises(DoesNotFit):
        size(FULL, replace(config, kv_memory=memory["kv_memory"] - MIB), free, 0.25)
    assert set(kv_dtype) == {"kv_dtype", "max_model_len"} or set(kv_dtype) == {"kv_dtype"}


def test_another_format_is_named_with_the_length_that_it_allows():
    room, config = Room(FULL, BF16, LENGTH, 100 * MIB, 1.0), EngineConfig(max_model_len=29_024)
    changes = suggestions(what_fits(room, config, 29_024))
    assert [set(change) for change in changes[:3]] == [{"max_model_len"}, {"kv_dtype", "max_model_len"}, {"window"}]
    assert changes[1]["max_model_len"] > changes[0]["max_model_len"]


def test_where_nothing_fits_that_is_said():
    room = Room(FULL, BF16, LENGTH, 1000, 1.0)
    assert what_fits(room, EngineConfig(), None).startswith("nothing else fits")


def test_a_window_is_suggested_only_where_the_model_allows_one():
    config = EngineConfig(max_model_len=LENGTH + 1)
    room = Room(FULL, BF16, LENGTH, 900 * MIB, 1.0)
    assert any("window" in change for change in suggestions(what_fits(room, config, LENGTH + 1)))
    told = what_fits(replace(room, windows=False), config, LENGTH + 1)
    assert not any("window" in change for change in suggestions(told))
