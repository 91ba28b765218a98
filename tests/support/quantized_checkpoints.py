"""Checkpoints as GPTQ, AWQ and compressed-tensors write them, with codes that are drawn, so their weights are known.

Packed here by sums of shifted whole numbers, and not by the code under test.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column whose code lies in each place of a word, lowest bits first
LAYER = re.compile(r"(.+\.layers\.\d+\.(?:self_attn|mlp)\..+_proj)\.weight")  # neither norms nor routers
FORMS = ("gptq", "gptq_v2", "awq", "packed", "packed_asym", "packed8", "int8")


def words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[rows, n] whole numbers of 4 bits (of 8 bits where ``order`` has 4 places) -> [rows, n / places] int32."""
    places, bits = len(order), 32 // len(order)
    wide = np.pad(codes.astype(np.int64), ((0, 0), (0, -codes.shape[1] % places)))
    wide = wide.reshape(len(codes), -1, places)
    total = sum(wide[:, :, column] << bits * place for place, column in enumerate(order))
    return torch.from_numpy(np.ascontiguousarray(total).astype(np.uint32).view(np.int32).copy())


class Drawn:
    """One layer's codes [out, in], scales and zeros [out, groups], all numpy; ``weight``: float64."""

    def __init__(self, shape, form, group, random):
        outputs, inputs = shape
        self.eight = form in ("packed8", "int8")
        self.group = inputs if group == -1 or self.eight else group
        scale = random.uniform(0.5, 1.5, (outputs, inputs // self.group)) * (0.0005 if self.eight else 0.008)
        self.scale = scale.astype(np.float16)
        self.codes = random.integers(*((-128, 128) if self.eight else (0, 16)), shape)
        self.zero = random.integers(5, 12, self.scale.shape)
        if form == "packed":
            self.zero[:] = 8
        if self.eight:
            self.zero[:] = 0
        wide = [part.astype(np.float64).repeat(self.group, axis=1) for part in (self.scale, self.zero)]
        self.weight = torch.from_numpy((self.codes - wide[1]) * wide[0])

    def tensors(self, form):
        scale = torch.from_numpy(self.scale)
        outputs, inputs = self.codes.shape
        if form in ("gptq", "gptq_v2"):
            return {
                "qweight": words(self.codes).t().contiguous(),
                "qzeros": words((self.zero - (form == "gptq")).T),
                "scales": scale.t().contiguous(),
                "g_idx": (torch.arange(inputs) // self.group).to(torch.int32),
            }
        if form == "awq":
            found = {"qweight": self.codes.T, "qzeros": self.zero.T}
            packed = {name: words(np.ascontiguousarray(part), AWQ_COLUMNS) for name, part in found.items()}
            return packed | {"scales": scale.t().contiguous()}
        if form == "int8":
            return {"weight": torch.from_numpy(self.codes.astype(np.int8)), "weight_scale": scale}
        shape = torch.tensor([outputs, inputs])
        if form == "packed8":
            packed = words(self.codes + 128, (0, 1, 2, 3))
            return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}
        found = {"weight_packed": words(self.codes), "weight_scale": scale, "weight_shape": shape}
        if form == "packed_asym":
            found["weight_zero_point"] = words(self.zero.T).t().contiguous()
        return found


def settings(form: str, group: int) -> dict:
    """The ``quantization_config`` of a form."""
    if form.startswith("gptq"):
        return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "checkpoint_format": form}
    if form == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    eight = form in ("packed8", "int8")
    weights = {
        "num_bits": 8 if eight else 4,
        "type": "int",
        "symmetric": form != "packed_asym",
        "strategy": "channel" if eight or group == -1 else "group",
        "group_size": None if eight or group == -1 else group,
        "dynamic": False,
        "actorder": None,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    kind = "int-quantized" if form == "int8" else "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def write_quantized(
    folder: Path, target: Path, form: str, group: int = 32, also: tuple[str, ...] = (), dtype: str = "float16"
) -> dict[str, torch.Tensor]:
    """Copy a checkpoint to ``target`` with quantized layers; returns their weights in float64, by the layers' names.

    Args:
        also: names of further tensors that are quantized.
        dtype: of config.json.
    """
    shutil.copytree(folder, target)
    tensors, random, weights = load_file(folder / "model.safetensors"), np.random.default_rng(0), {}
    for name in sorted(tensors):
        if (LAYER.fullmatch(name) and tensors[name].dim() == 2) or name in also:
            stem = name.removesuffix(".weight")
            drawn = Drawn(tuple(tensors.pop(name).shape), form, group, random)
            weights[stem] = drawn.weight
            tensors |= {f"{stem}.{part}": tensor for part, tensor in drawn.tensors(form).items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    change_config(target, quantization_config=settings(form, group), dtype=dtype)
    return weights


def write_plain(folder: Path, target: Path, weights: dict[str, torch.Tensor]) -> Path:
    """The same checkpoint with those weights, unquantized."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{stem}.weight": weight.float() for stem, weight in weights.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def change_config(folder: Path, **changes: object) -> None:
    """Set keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder: Path, change) -> None:
    """Rewrite the tensors: ``change(tensors)`` edits the dict in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


SHAPE = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


class Shelf:
    """``shelf(form, group)``: (folder of a quantized tiny llama, its layers' weights in float64), each made once."""

    def __init__(self, plain: Path, folder: Path) -> None:
        self.plain, self.folder = plain, folder
        self.made: dict[tuple[str, int], tuple[Path, dict[str, torch.Tensor]]] = {}

    def __call__(self, form: str, group: int = 32) -> tuple[Path, dict[str, torch.Tensor]]:
        if (form, group) not in self.made:
            target = self.folder / f"{form}{group}"
            self.made[form, group] = target, write_quantized(self.plain, target, form, group)
        return self.made[form, group]

    def copy(self, target: Path, form: str) -> Path:
        """A copy that a test may change."""
        return shutil.copytree(self(form)[0], target)
