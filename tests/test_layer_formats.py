"""Every layer gets the format that the options name for it; options that cannot be read are refused."""

import pytest
from helpers import refusal

from lean.config import EngineConfig
from lean.layer_formats import layer_formats, parse_formats, split_formats
from lean.quant import BF16, FP8, FP32, INT4, INT8


def names(*arguments) -> list[str]:
    return [k.name if k == v else f"{k.name}/{v.name}" for k, v in layer_formats(*arguments, FP32)]


def test_a_name_a_pair_or_the_dtype_of_the_model():
    assert parse_formats("int8", FP32) == (INT8, INT8)
    assert parse_formats(" Auto", FP32) == (FP32, FP32)
    assert parse_formats("auto", BF16) == (BF16, BF16)
    assert parse_formats("K=FP8, V=int4", BF16) == (FP8, INT4)


def test_a_comma_list_is_split_between_formats_and_not_inside_a_pair():
    assert split_formats("int8,k=int8,v=fp8,v=int4,k=int8,bf16") == ["int8", "k=int8,v=fp8", "v=int4,k=int8", "bf16"]
    assert split_formats(" K=fp8, V=int4 , auto") == ["K=fp8,V=int4", "auto"]
    for text in ("int8,int2", "k=int8,int4", "v=int4,auto", "k=int8,k=int8,v=int4", "k=int8,v=int4,v=fp8"):
        assert "KV format" in refusal(split_formats, text)
    for text in ("", "int8,", ",int8", "int8,,int4"):
        assert "empty item" in refusal(split_formats, text)


def test_ranges_have_their_own_format_and_the_other_layers_have_the_common_one():
    assert names(3, "int8", None, None) == ["int8"] * 3
    assert names(6, "int8", "0-1:bf16,2-3:k8v4,4-:int4", None) == [*["bf16"] * 2, *["int8/int4"] * 2, *["int4"] * 2]
    assert names(4, "int8", "-1:fp8", None) == ["int8", "int8", "int8", "fp8"]
    assert names(4, "int8", "1--1:k=fp8,v=int4, 0:auto", None) == ["fp32", *["fp8/int4"] * 3]
    assert names(2, "fp8", "0-:int4", None) == ["int4", "int4"]


def test_skipped_layers_stay_as_the_model_has_them():
    assert names(4, "int8", None, "0,1,-1") == ["fp32", "fp32", "int8", "fp32"]
    assert names(4, "int8", "1-2:int4", "0, 3") == ["fp32", "int4", "int4", "fp32"]


@pytest.mark.parametrize(
    ("kv_layers", "kv_skip_layers", "word"),
    [
        ("0-9:int8", None, "layer 9"),
        ("-5:int8", None, "layer -5"),
        ("3-2:int8", None, "3-2"),
        ("0-2:int8,2:int4", None, "named twice"),
        ("0:int8", "0", "named twice"),
        (None, "4", "layer 4"),
        (None, "1,1", "named twice"),
    ],
)
def test_layers_that_do_not_exist_or_are_named_twice_are_refused(kv_layers, kv_skip_layers, word):
    assert word in refusal(layer_formats, 4, "int8", kv_layers, kv_skip_layers, FP32)


@pytest.mark.parametrize("text", ["0", "0:", ":int8", "a:int8", "0-1:int2", "0..1:int8", "0:int8;1:int4", ",", "-"])
def test_layer_formats_that_cannot_be_read_are_refused_before_a_model_is_known(text):
    refusal(EngineConfig, kv_layers=text)


@pytest.mark.parametrize("layers", ["a", "0-1-2", "1,,2", " ", "1.5"])
def test_skipped_layers_that_cannot_be_read_are_refused_before_a_model_is_known(layers):
    assert "layers" in refusal(EngineConfig, kv_skip_layers=layers)
