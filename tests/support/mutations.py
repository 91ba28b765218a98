"""Random edits of a checkpoint folder and of a GGUF file: what damaged, careless or hostile files look like.

Each edit is drawn from a `random.Random`, so that a seed gives the same file again. An edit returns a line that says
what it did. Edits of ``HARMLESS`` change nothing that a model computes.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf_bytes import ARRAY, SCALARS, STRING, GgufBytes, Pair

ODD_NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    2**31,
    2**32,
    2**63,
    2**70,
    10**400,
    0.5,
    -0.5,
    1e-30,
    1e30,
    float("nan"),
    float("inf"),
]
ODD_VALUES = [
    *ODD_NUMBERS, None, True, False, "", "1", "x", "none", "auto", "é" * 40, "a\nb", "\0", "\ud800", "../../etc/passwd",
    "x" * 10_000, [], [0], [1, "x"], [[]], [None] * 3, {}, {"type": "x"}, {"rope_type": "yarn"}, {"factor": 0},
]  # fmt: skip
ODD_KEYS = [
    "auto_map", "architectures", "attention_bias", "attn_logit_softcapping", "dtype", "eos_token_id", "head_dim",
    "hidden_act", "is_causal", "is_decoder", "is_encoder_decoder", "layer_types", "mlp_bias", "num_key_value_heads",
    "partial_rotary_factor", "quantization_config", "rope_parameters", "rope_scaling", "sliding_window", "text_config",
    "tie_word_embeddings", "torch_dtype", "transformers_weights", "use_bidirectional_attention", "vision_config",
    "chat_template", "extra_special_tokens", "tokenizer_class", "added_tokens_decoder", "model_max_length",
    "add_bos_token", "bos_token", "temperature", "top_k", "top_p", "do_sample", "suppress_tokens",
    "_attn_implementation",
]  # fmt: skip


# --- JSON files of a checkpoint folder ---


def _places(rng: random.Random, value: Any) -> tuple[Any, Any] | None:
    """A random (container, key) of a JSON value, by a walk that stops early as often as not."""
    place = None
    while isinstance(value, (dict, list)) and value and (place is None or rng.random() < 0.7):
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        place, value = (value, key), value[key]
    return place


def edit_json(rng: random.Random, file: Path) -> str:
    """Change one value of a JSON file."""
    document = json.loads(file.read_text(encoding="utf-8"))
    place = _places(rng, document)
    kind = rng.choice(["set", "set", "set", "delete", "add", "scale", "shape"])
    if place is None or kind == "add":
        key, value = rng.choice(ODD_KEYS), rng.choice(ODD_VALUES)
        if isinstance(document, dict):
            document[key] = value
        said = f"add {key} = {value!r:.60}"
    else:
        container, key = place
        old = container[key]
        if kind == "delete":
            del container[key]
            said = f"delete {key!r:.40}"
        else:
            container[key] = _changed(rng, old) if kind in ("scale", "shape") else rng.choice(ODD_VALUES)
            said = f"{key!r:.40}: {old!r:.40} -> {container[key]!r:.60}"
    file.write_text(json.dumps(document), encoding="utf-8", errors="surrogatepass")
    return f"{file.name}: {said}"


def _changed(rng: random.Random, value: Any) -> Any:
    """A value of the same type that is a little or very different."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return rng.choice([value + 1, value - 1, value * 2, -value, value * 10**6, value / 2, value // 2])
    if isinstance(value, str):
        return rng.choice([value + "x", value[:-1], value.upper(), value * 3])
    if isinstance(value, list):
        return rng.choice([value[::-1], value[:-1], value + value, [*value, None], value[:1]])
    if isinstance(value, dict):
        items = list(value.items())
        return dict(rng.choice([items[::-1], items[:-1], items[1:], [*items, ("x", None)]]))
    return rng.choice(ODD_VALUES)


def _edit_any_json(rng: random.Random, folder: Path) -> str:
    names = ["config.json"] * 4 + ["tokenizer.json"] * 2 + ["tokenizer_config.json", "generation_config.json"] * 2
    files = [folder / name for name in [*names, "model.safetensors.index.json"] if (folder / name).is_file()]
    return edit_json(rng, rng.choice(files))


def _damage_file(rng: random.Random, folder: Path) -> str:
    """Change a file as a whole: cut, emptied, other bytes, another encoding, gone."""
    file = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    content = file.read_bytes()
    kind = rng.choice(["cut", "empty", "flip", "encode", "mark", "gone", "folder", "lfs", "more"])
    if kind == "cut":
        file.write_bytes(content[: rng.randrange(len(content) or 1)])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "flip":
        file.write_bytes(flipped(rng, content))
    elif kind == "encode":
        file.write_bytes(content.decode("latin-1").encode("utf-16"))
    elif kind == "mark":
        file.write_bytes(b"\xef\xbb\xbf" + content)
    elif kind == "lfs":
        oid = "0" * 64
        file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(content)}\n")
    elif kind == "more":
        file.write_bytes(content + content[: rng.randrange(1, 64)])
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
    return f"{file.name}: {kind}"


def flipped(rng: random.Random, content: bytes) -> bytes:
    """The content with one to eight other bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _edit_header(rng: random.Random, folder: Path) -> str:
    """Change the header of a safetensors file."""
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    container, key = _places(rng, header) or (header, next(iter(header)))
    said = f"{key!r:.40}: {container[key]!r:.40}"
    container[key] = rng.choice([_changed(rng, container[key]), rng.choice(ODD_VALUES)])
    packed = json.dumps(header).encode("utf-8", "surrogatepass")
    packed += b" " * (-len(packed) % 8)
    file.write_bytes(struct.pack("<Q", len(packed)) + packed + content[8 + length :])
    return f"{file.name}: {said} -> {container[key]!r:.40}"


def edit_checkpoint(rng: random.Random, folder: Path) -> str:
    """One to three random edits of a checkpoint folder, in place. The last one may damage a file as a whole."""
    edits = [_edit_any_json] * rng.choice([1, 1, 1, 2, 3])
    edits[-1] = rng.choice([_edit_any_json] * 8 + [_damage_file, _edit_header])
    return "; ".join(edit(rng, folder) for edit in edits)


# --- GGUF files ---


def _set_pair(rng: random.Random, gguf: GgufBytes) -> str:
    """Give a pair another value, or another type and value."""
    pair = rng.choice(gguf.pairs)
    old = pair.value
    if pair.kind == ARRAY and rng.random() < 0.7:
        element, items = pair.value
        changed = list(items)
        what = rng.choice(["cut", "more", "swap", "element"])
        if what == "cut":
            changed = changed[: rng.randrange(len(changed) + 1)]
        elif what == "more":
            changed += changed[: rng.randint(1, 3)]
        elif what == "swap":
            rng.shuffle(changed)
        elif changed:
            changed[rng.randrange(len(changed))] = _odd(rng, element)
        pair.value = element, changed
    else:
        if rng.random() < 0.3:
            pair.kind = rng.choice([*SCALARS, STRING])
        if pair.kind == ARRAY:
            element = rng.choice([*SCALARS, STRING])
            pair.value = element, [_odd(rng, element) for _ in range(rng.randrange(4))]
        else:
            pair.value = _odd(rng, pair.kind)
    return f"{pair.key.decode(errors='replace')}: {old!r:.40} -> type {pair.kind} {pair.value!r:.60}"


def _odd(rng: random.Random, kind: int) -> Any:
    """An unusual value that a metadata type can hold."""
    if kind == STRING:
        text = rng.choice([value for value in ODD_VALUES if isinstance(value, str)])
        return text.encode("utf-8", "surrogatepass")
    if kind == 7:
        return rng.random() < 0.5
    if kind in (6, 12):
        return float(rng.choice([n for n in ODD_NUMBERS if n != 10**400]))
    bits = 8 * struct.calcsize(SCALARS[kind])
    low, high = (0, 2**bits - 1) if SCALARS[kind].isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return rng.choice([0, 1, 2, 3, 5, 7, 100, high, low, high // 2, high - 1])


def _rename_pair(rng: random.Random, gguf: GgufBytes) -> str:
    pair = rng.choice(gguf.pairs)
    old = pair.key
    pair.key = rng.choice([old + b"x", old[:-1], old.upper(), rng.choice(gguf.pairs).key, b"", b"\xff\xfe"])
    return f"{old!r} -> {pair.key!r:.40}"


def _drop_pair(rng: random.Random, gguf: GgufBytes) -> str:
    return f"drop {gguf.pairs.pop(rng.randrange(len(gguf.pairs))).key!r}"


def _add_pair(rng: random.Random, gguf: GgufBytes) -> str:
    """Add a key of an architecture that other writers use."""
    names = [
        "attention.clamp_kqv", "attention.causal", "attention.scale", "attention.sliding_window", "expert_count",
        "logit_scale", "rope.scaling.type", "rope.scaling.factor", "attention.key_length", "pooling_type",
        "no_such_key", "residual_scale", "embedding_scale", "final_logit_softcapping", "rope.dimension_count",
        "vocab_size",
    ]  # fmt: skip
    architecture = gguf.pair("general.architecture").value if any(
        pair.key == b"general.architecture" and pair.kind == STRING for pair in gguf.pairs) else b"llama"  # fmt: skip
    key, kind = architecture + b"." + rng.choice(names).encode(), rng.choice([*SCALARS, STRING])
    pair = Pair(key, kind, _odd(rng, kind))
    gguf.pairs.insert(rng.randrange(len(gguf.pairs) + 1), pair)
    return f"add {key!r} type {kind} {pair.value!r:.40}"


def _edit_tensor(rng: random.Random, gguf: GgufBytes) -> str:
    index = rng.randrange(len(gguf.tensors))
    row = gguf.tensors[index]
    old = f"{row.name!r} {row.dims} type {row.kind} at {row.offset}"
    what = rng.choice(["name", "dims", "kind", "offset", "drop", "twice", "permute"])
    if what == "name":
        row.name = rng.choice(
            [row.name + b"x", b"", rng.choice(gguf.tensors).name, b"rope_freqs.weight", b"v.x", b"\xff"]
        )
    elif what == "dims":
        row.dims = rng.choice(
            [row.dims[::-1], (*row.dims, 1), row.dims[:1], tuple(d * 2 for d in row.dims), (0,), (2**40,)]
        )
    elif what == "kind":
        row.kind = rng.choice([0, 1, 2, 3, 8, 12, 14, 30, 39, 99, 2**31])
    elif what == "offset":
        row.offset = rng.choice([0, 1, 32, row.offset + 32, 2**40, 2**63])
    elif what == "drop":
        del gguf.tensors[index]
    elif what == "twice":
        gguf.tensors.append(row)
    else:
        rng.shuffle(gguf.tensors)
    return f"tensor {old}: {what}"


GGUF_EDITS: list[Callable[[random.Random, GgufBytes], str]] = (
    [_set_pair] * 6 + [_add_pair] * 2 + [_edit_tensor] * 2 + [_rename_pair, _drop_pair]
)


def edit_gguf(rng: random.Random, gguf: GgufBytes) -> tuple[str, bytes]:
    """(what was done, the bytes of the file) after one to three random edits of a copy."""
    gguf = gguf.copy()
    said = [
        rng.choice(GGUF_EDITS)(rng, gguf) for _ in range(rng.choice([1, 1, 1, 2, 3])) if gguf.pairs and gguf.tensors
    ]
    content = gguf.pack()
    if rng.random() < 0.1:
        head = max(1, len(content) - len(gguf.data))
        what = rng.choice(["flip", "cut", "version", "magic"])
        if what == "flip":
            content = flipped(rng, content[:head]) + content[head:]
        elif what == "cut":
            content = content[: rng.randrange(len(content))]
        elif what == "version":
            content = content[:4] + struct.pack("<I", rng.choice([0, 1, 2, 4, 2**24 * 3])) + content[8:]
        else:
            content = rng.choice([b"", b"GGML", b"PK\3\4", b"\x89PNG"]) + content[4:]
        said.append(what)
    return "; ".join(said), content


# --- edits that change nothing ---


def harmless_checkpoint_edit(rng: random.Random, folder: Path) -> str:
    """Edit a checkpoint folder so that every answer stays the same."""
    what = rng.choice(["order", "layout", "unknown", "files", "padding"])
    files = [folder / name for name in ("config.json", "tokenizer_config.json", "generation_config.json")]
    if what == "files":
        for name in ("README.md", ".gitattributes", "notes.json", "training_args.txt"):
            (folder / name).write_bytes(rng.randbytes(50))
        return what
    if what == "padding":
        file = rng.choice(sorted(folder.glob("*.safetensors")))
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        packed = content[8 : 8 + length] + b" " * 8 * rng.randint(1, 9)
        file.write_bytes(struct.pack("<Q", len(packed)) + packed + content[8 + length :])
        return what
    for file in (file for file in files if file.is_file()):
        items = list(json.loads(file.read_text()).items())
        if what == "order":
            rng.shuffle(items)
        elif what == "unknown":
            items.insert(rng.randrange(len(items) + 1), ("x_made_by", rng.choice(["someone", 3, None, {"a": [1]}])))
        indent = rng.choice([None, 1, 4, "\t"]) if what == "layout" else None
        file.write_text(json.dumps(dict(items), indent=indent))
    return what


def harmless_gguf_edit(rng: random.Random, gguf: GgufBytes) -> tuple[str, bytes]:
    """(what was done, the bytes of the file); every answer stays the same."""
    gguf = gguf.copy()
    what = rng.choice(["order", "tensors", "unknown", "alignment", "tail"])
    if what == "order":
        rng.shuffle(gguf.pairs)
    elif what == "tensors":
        rng.shuffle(gguf.tensors)
    elif what == "unknown":
        for key in (b"general.made_by", b"general.x", b"quantize.imatrix.file", b"mradermacher.note"):
            gguf.pairs.insert(rng.randrange(len(gguf.pairs) + 1), Pair(key, STRING, b"someone"))
    elif what == "alignment":
        gguf.alignment = 128
        gguf.pairs = [pair for pair in gguf.pairs if pair.key != b"general.alignment"]
        gguf.pairs.append(Pair(b"general.alignment", 4, 128))
        # Every tensor must begin at a multiple of the alignment: move each to a place of its own.
        data, begins = bytearray(), sorted({row.offset for row in gguf.tensors})
        moved = {}
        for begin, end in zip(begins, [*begins[1:], len(gguf.data)], strict=True):
            data += b"\0" * (-len(data) % 128)
            moved[begin] = len(data)
            data += gguf.data[begin:end]
        gguf.data = bytes(data)
        for row in gguf.tensors:
            row.offset = moved[row.offset]
    else:
        gguf.data += b"\0" * rng.randrange(1, 100)
    return what, gguf.pack()


def fresh_copy(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint folder, in place of an older one."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(folder, target))
