"""A model's layers are read from its code, before its weights."""

import pytest
import torch
from census_models import small_config
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from lean.cache.plan import LayerShape
from lean.cache.states import StateKey, StateShape
from lean.errors import ModelError
from lean.model import shapes


def follow(name: str, dtype: torch.dtype = torch.float32) -> shapes.Followed:
    config = small_config(name)
    shapes.register()
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(
            config, attn_implementation=shapes.NAME, experts_implementation="batched_mm"
        )
    return shapes.follow(skeleton.eval(), config.get_text_config(), name, dtype)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama", [LayerShape(4, 2, 16, 16)] * 4),
        ("gemma2", [LayerShape(4, 2, 16, 16, 32), LayerShape(4, 2, 16, 16)] * 2),
        ("laguna", [LayerShape(4, 2, 16, 16), *[LayerShape(8, 2, 16, 16, 32)] * 3]),
        ("mimo_v2_flash", [LayerShape(4, 2, 24, 16), *[LayerShape(4, 4, 24, 16, 32)] * 4, LayerShape(4, 2, 24, 16)]),
        ("deepseek_v3", [LayerShape(4, 4, 24, 16)] * 4),  # expanded: nothing was installed
        ("gpt_bigcode", [LayerShape(4, 1, 16, 16)] * 4),
        ("phimoe+sliding", [LayerShape(4, 2, 16, 16, 32)] * 4),  # the window stands in the mask alone
        ("jetmoe", [LayerShape(4, 2, 16, 16)] * 4),
    ],
)
def test_shapes_and_windows_are_those_of_the_calls(name, layers):
    found = follow(name)
    if name == "jetmoe":  # its number of heads is a product
        layers = [LayerShape(found.layers[0].num_q_heads, found.layers[0].num_kv_heads, 16, 16)] * 4
    assert list(found.layers) == layers
    assert not found.carried


def test_layers_that_read_the_kv_of_another_name_it():
    readers = {index: layer.kv_layer for index, layer in enumerate(follow("gemma3n_text").layers)}
    assert {index: owner for index, owner in readers.items() if owner is not None} == {6: 5, 7: 5, 8: 5, 9: 4}


@pytest.mark.parametrize("name", ["nemotron", "stablelm"])
def test_layers_that_drop_keyword_arguments_get_them_by_their_cache(name):
    found = follow(name)
    assert found.carried
    assert len(found.layers) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_have_the_shapes_and_dtypes_that_the_layers_write(dtype):
    found = follow("qwen3_5_text", dtype)
    config = small_config("qwen3_5_text")
    linear = [index for index, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    channels += config.linear_num_value_heads * config.linear_value_head_dim
    heads = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    assert set(found.states) == {
        *(StateShape(StateKey(i, "conv"), (channels, config.linear_conv_kernel_dim), dtype) for i in linear),
        *(StateShape(StateKey(i, "recurrent"), heads, torch.float32) for i in linear),  # in float32 at every dtype
    }
    assert found.carried
    assert found.mixers == tuple(f"model.layers.{i}.linear_attn" for i in linear)
    others = [index for index in range(config.num_hidden_layers) if index not in linear]
    assert found.modules == tuple(f"model.layers.{i}.self_attn" for i in others)
    assert len(found.layers) == len(others)


def test_layers_that_have_attention_and_states_are_both():
    found = follow("falcon_h1")
    assert len(found.layers) == len(found.mixers) == small_config("falcon_h1").num_hidden_layers
    assert len(found.states) == 2 * len(found.layers)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("doge", "an attention mask"),
        ("diffllama", "layer 0 calls attention 2 times"),
        ("hrm_text", "layer 0 calls attention"),
        ("recurrent_gemma", "layer 0 calls neither attention nor the cache .found attention in 2 of 6 layers"),
        ("jamba", "code of layer 0 forgets its recurrent state"),
        ("zaya", "more than one tensor"),
        ("minimax", "get_linear_cache"),
        ("bloom", "no position ids"),
        ("openai-gpt", "custom attention functions"),
        ("inkling_text", "position_bias"),
    ],
)
def test_what_lean_would_drop_is_refused_by_name(name, reason):
    with pytest.raises(ModelError, match=reason):
        follow(name)


class _Plain(PreTrainedModel):
    """A decoder whose forward is given to the test."""

    config_class = PreTrainedConfig

    def forward(self, input_ids=None, position_ids=None, use_cache=None, **kwargs):
        x = torch.zeros(1, 3, 4)
        assert (x > 0).nonzero().shape == (12, 3)
        assert x[x > 0].shape == (12,)
        assert x.sum().item() == 0
        assert x.long().flatten().tolist() == [0] * 12
        assert [part.shape[1] for part in x.split(x[0, 0].long().tolist()[:3], dim=1)] == [3, 0, 0]
        self.heads(4, 2, **kwargs)

    def heads(self, heads, kv_heads, **kwargs):
        module = torch.nn.Module()
        module.layer_idx = 0
        shapes._note_call(module, torch.zeros(1, heads, 3, 8), *[torch.zeros(1, kv_heads, 3, 8)] * 2, **kwargs)

    def get_decoder(self):
        return self


def test_what_depends_on_data_has_an_answer():
    config = PreTrainedConfig(num_hidden_layers=1)
    assert shapes.follow(_Plain(config), config, "plain", torch.float32).layers == (LayerShape(4, 2, 8, 8),)


def test_an_error_of_the_models_code_is_one_line():
    config = PreTrainedConfig(num_hidden_layers=1)
    model = _Plain(config)
    model.forward = lambda **_: 1 / 0
    with pytest.raises(ModelError, match=r"^plain \(.*\): its forward pass cannot be followed .*: division by zero"):
        shapes.follow(model, config, "plain", torch.float32)
