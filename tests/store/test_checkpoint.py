"""A checkpoint that transformers would load wrongly, partly or by running its code is refused before it is loaded."""

import json
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from helpers import refusal
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from lean.store.checkpoint import INDEX, SINGLE, check_checkpoint

FIRST = "model-00001-of-00003.safetensors"


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """One tiny model in one file and in three, with a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, dtype="float32"
    )
    model = LlamaForCausalLM(config)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    root = tmp_path_factory.mktemp("saved")
    for name, size in {"single": "1GB", "sharded": "8KB"}.items():
        model.save_pretrained(root / name, max_shard_size=size)
        tokenizer.save_pretrained(root / name)
    assert (root / "sharded" / FIRST).is_file()
    return root


@pytest.fixture
def single(saved, tmp_path):
    return Path(shutil.copytree(saved / "single", tmp_path / "single"))


@pytest.fixture
def sharded(saved, tmp_path):
    return Path(shutil.copytree(saved / "sharded", tmp_path / "sharded"))


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def remap(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def write_safetensors(file, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_whole_checkpoints_pass(single, sharded):
    check_checkpoint(single)
    check_checkpoint(sharded)


def test_a_missing_or_unreadable_config_is_named(single):
    (single / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(check_checkpoint, single)
    (single / "config.json").write_text("[" * 100_000)
    assert "config.json is not JSON" in refusal(check_checkpoint, single)
    (single / "config.json").write_text("[]")
    assert "not a JSON object" in refusal(check_checkpoint, single)
    (single / "config.json").unlink()
    assert "no config.json" in refusal(check_checkpoint, single)
    assert "no such folder" in refusal(check_checkpoint, single / "absent")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pth", "last.ckpt"])
def test_pickled_weights_are_refused_and_never_unpickled(single, tmp_path, name):
    marker = tmp_path / "marker"
    (single / SINGLE).unlink()
    (single / name).write_bytes(pickle.dumps(Touch(marker)))
    assert "save_pretrained" in refusal(check_checkpoint, single)
    (single / "config.json").unlink()
    assert "unpickling runs" in refusal(check_checkpoint, single)
    assert not marker.exists()
    pickle.loads((single / name).read_bytes())
    assert marker.exists(), "the trap itself must work"


def test_a_pickle_beside_renamed_safetensors_is_no_way_in(single):
    (single / SINGLE).rename(single / "model.fp16.safetensors")
    (single / "pytorch_model.bin").write_bytes(b"")
    assert f"neither {SINGLE}" in refusal(check_checkpoint, single)


def test_a_folder_of_gguf_files_names_the_file_to_pass(tmp_path):
    for name in ("a-mmproj-f16.gguf", "m.Q4.GGUF"):
        (tmp_path / name).touch()
    assert str(tmp_path / "m.Q4.GGUF") in refusal(check_checkpoint, tmp_path)


def test_a_long_name_in_a_header_makes_no_long_message(single):
    content = json.dumps({"x" * 5000: {"dtype": "F32", "shape": "x" * 5000, "data_offsets": [0, 4]}}).encode()
    (single / SINGLE).write_bytes(struct.pack("<Q", len(content)) + content + b"\0" * 4)
    assert len(refusal(check_checkpoint, single)) < 600


@pytest.mark.parametrize("change", [{"weight_map": {}}, {"weight_map": ["a"]}, {"metadata": None}])
def test_a_malformed_index_is_refused(sharded, change):
    edit(sharded / INDEX, **change)
    assert "malformed" in refusal(check_checkpoint, sharded)
    (sharded / INDEX).write_bytes(b"\xff")
    assert f"{INDEX} is not JSON" in refusal(check_checkpoint, sharded)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "..", "", "a/x.safetensors", "..\\x.safetensors", "x\0", "x.bin", 7]
)
def test_the_index_names_only_safetensors_files_of_its_folder(sharded, name):
    for place in (sharded.parent / "x.safetensors", sharded / "x.bin"):
        shutil.copy(sharded / FIRST, place)
    remap(sharded, lambda weights: weights.update({next(iter(weights)): name}))
    assert f"{INDEX} names" in refusal(check_checkpoint, sharded)


def test_links_as_in_the_hub_cache_are_followed_and_dangling_ones_are_missing(sharded, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0"
    shutil.move(sharded, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    check_checkpoint(snapshot)
    (blobs / FIRST).unlink()
    assert f"1 of 3 weight files are missing: '{FIRST}'" in refusal(check_checkpoint, snapshot)


def test_only_indexed_files_are_read(sharded):
    expected = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    strays = {name: torch.zeros_like(tensor) for name, tensor in load_file(sharded / FIRST).items()}
    save_file(strays, sharded / "model-00009-of-00009.safetensors", metadata={"format": "pt"})
    (sharded / "broken.safetensors").write_bytes(b"not safetensors")
    check_checkpoint(sharded)
    found = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_one_file_goes_before_an_index_for_us_as_for_transformers(single, sharded):
    (sharded / FIRST).unlink()
    shutil.copy(single / SINGLE, sharded)
    check_checkpoint(sharded)
    AutoModelForCausalLM.from_pretrained(sharded)
    (sharded / SINGLE).write_bytes(b"")
    assert SINGLE in refusal(check_checkpoint, sharded)


def test_config_and_file_names_cannot_send_transformers_elsewhere(single):
    shutil.copy(single / SINGLE, single / "shard-00000-model-00001-of-00001.safetensors")
    assert "distributed" in refusal(check_checkpoint, single)
    edit(single / "config.json", transformers_weights="other.safetensors")
    assert "transformers_weights" in refusal(check_checkpoint, single)
    (single / "adapter_config.json").write_text("{}")
    assert "PEFT" in refusal(check_checkpoint, single)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4711\n"
DAMAGE = {
    "one byte short": lambda data: (data[:-1], len(data), len(data) - 1),
    "half": lambda data: (data[: len(data) // 2], len(data), len(data) // 2),
    "one byte more": lambda data: (data + b"\0", len(data), len(data) + 1),
    "cut in the header": lambda data: (data[:100], 8 + int.from_bytes(data[:8], "little"), 100),
    "empty": lambda data: (b"", 8, 0),
    "LFS pointer": lambda data: (POINTER, 4711, len(POINTER)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", [SINGLE, FIRST])
def test_a_damaged_file_is_named_with_expected_and_actual_size(saved, tmp_path, name, damage):
    folder = shutil.copytree(saved / ("single" if name == SINGLE else "sharded"), tmp_path / "damaged")
    data, expected, actual = damage((folder / name).read_bytes())
    (folder / name).write_bytes(data)
    message = refusal(check_checkpoint, folder)
    assert message.startswith(f"{name}: expected ")
    assert f"{expected} bytes, found {actual}: incomplete download or LFS pointer?" in message


def entry(begin, end, shape=(1,)):
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 4), "b": entry(0, 8, (2,))},
        {"a": entry(4, 8)},
        {"a": entry(0, 8)},
        {"a": entry(-4, 8, (3,))},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a\nb": entry(0, 8)},
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, Infinity]}}',
        b"[" * 100_000,
        b"[]",
        b"\xff",
    ],
    ids=["overlap", "gap", "shape", "negative", "no offsets", "newline", "infinite", "deep", "list", "not text"],
)
def test_a_header_that_contradicts_itself_is_refused(single, header):
    write_safetensors(single / SINGLE, header, b"\0" * 8)
    assert "header" in refusal(check_checkpoint, single)


def test_a_header_beyond_the_limit_is_not_read(single):
    with (single / SINGLE).open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(1 << 31)
    assert f"not {1 << 30}" in refusal(check_checkpoint, single)


def test_a_stale_index_is_refused(sharded):
    remap(sharded, lambda weights: weights.update({"model.layers.7.mlp.up_proj.weight": FIRST}))
    assert "'model.layers.7.mlp.up_proj.weight'" in refusal(check_checkpoint, sharded)


def test_a_tensor_in_two_files_is_refused(sharded):
    shutil.copy(sharded / FIRST, sharded / "model-00004-of-00003.safetensors")
    remap(sharded, lambda weights: weights.update({"extra": "model-00004-of-00003.safetensors"}))
    assert "both hold" in refusal(check_checkpoint, sharded)


@pytest.fixture
def trapped(single, tmp_path, monkeypatch):
    """A checkpoint with `auto_map` in both files; its code creates a marker, and a question on stdin fails the test."""
    marker = tmp_path / "marker"
    (single / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit(single / "config.json", auto_map=names)
    edit(single / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]})
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asked a question"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return single, marker


def test_code_beside_a_known_architecture_never_runs(trapped):
    folder, marker = trapped
    check_checkpoint(folder)
    AutoConfig.from_pretrained(folder, trust_remote_code=False)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, use_safetensors=True)
    assert isinstance(model, LlamaForCausalLM)
    assert not marker.exists()


def test_a_tokenizer_that_needs_code_is_refused_unless_trusted(trapped):
    folder, marker = trapped
    edit(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer")
    assert "--trust-remote-code" in refusal(check_checkpoint, folder)
    with pytest.raises(ValueError, match="custom code"):
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert not marker.exists()
    check_checkpoint(folder, trust_remote_code=True)


def test_an_architecture_that_needs_code_is_refused_unless_trusted(trapped):
    folder, marker = trapped
    edit(folder / "config.json", model_type="foo")
    assert "--trust-remote-code" in refusal(check_checkpoint, folder)
    assert not marker.exists()
    check_checkpoint(folder, trust_remote_code=True)
    with pytest.raises(AttributeError):
        AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert marker.exists(), "the trap itself must work"


@pytest.mark.parametrize("model_type", ["foo", None, ["llama"]])
def test_an_unknown_architecture_is_not_guessed(single, model_type):
    edit(single / "config.json", model_type=model_type)
    assert "is unknown to transformers" in refusal(check_checkpoint, single)
    assert "is unknown to transformers" in refusal(check_checkpoint, single, trust_remote_code=True)
