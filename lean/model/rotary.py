"""lean's rotary angles: position times frequency, in float64 for every dtype of the module.

transformers multiplies in float32, which at position 5,000,000 is off by 0.03. Frequencies and attention scaling stay
the model's own; only the product, its cosine and its sine are taken in float64.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lean.errors import ConfigError, ModelError

# How transformers models lay the angles of a head out, [..., dim / 2] -> what their apply function expects.
_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "halves": lambda f: torch.cat((f, f), dim=-1),
    "pairs": lambda f: f.repeat_interleave(2, dim=-1),
    "bare": lambda f: f,
}


def rotary_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules of the model that turn position ids into (cos, sin)."""
    return [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding") and hasattr(m, "rope_type")]


def layer_types(module: torch.nn.Module) -> list[str | None]:
    """Layer types with separate frequencies; [None] where all layers share the same."""
    return list(module.rope_type) if isinstance(module.rope_type, dict) else [None]


def all_frequencies(model: torch.nn.Module) -> list[torch.Tensor]:
    """The inverse frequencies that the layers of a model may use, after `install`: those of full attention first."""
    found: list[torch.Tensor] = []
    for module in rotary_modules(model):
        tables: dict[str | None, tuple[torch.Tensor, float]] = module.lean_tables  # type: ignore[assignment]
        for kind in sorted(tables, key=lambda kind: kind != "full_attention"):
            inv_freq = tables[kind][0].cpu()
            if not any(torch.equal(inv_freq, other) for other in found):
                found.append(inv_freq)
    return found


def _rope_type(module: torch.nn.Module, layer_type: str | None) -> str:
    return module.rope_type if layer_type is None else module.rope_type[layer_type]  # type: ignore[return-value, index]


def _length_dependent(module: torch.nn.Module, layer_type: str | None) -> bool:
    """Whether the frequencies depend on the current length; longrope's may be the same for all lengths."""
    rope_type = _rope_type(module, layer_type)
    if rope_type != "longrope":
        return rope_type == "dynamic"
    parameters = _parameters(module, layer_type)
    return parameters["long_factor"] != parameters["short_factor"]


def _parameters(module: torch.nn.Module, layer_type: str | None) -> dict:
    parameters: dict = module.config.rope_parameters  # type: ignore[assignment, union-attr]
    return parameters if layer_type is None else parameters[layer_type]


def frequencies(module: torch.nn.Module, layer_type: str | None, max_model_len: int) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [rotary_dim / 2] float64, attention scaling) of one layer type.

    Where frequencies depend on the current length, those of ``max_model_len`` are used: keys in the cache cannot
    change their frequencies later.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    if not _length_dependent(module, layer_type):
        return getattr(module, f"{prefix}inv_freq").double(), float(getattr(module, f"{prefix}attention_scaling"))
    # transformers' functions, unless the module says that it uses something else at that length.
    device = getattr(module, f"{prefix}inv_freq").device
    extra = {} if layer_type is None else {"layer_type": layer_type}
    usual, usual_scaling = ROPE_INIT_FUNCTIONS[_rope_type(module, layer_type)](
        module.config, device, seq_len=max_model_len, **extra
    )
    last = max_model_len - 1
    asked, cos, _ = _ask(module, layer_type, [0, last])
    own_scaling = float(cos[0, 0, 0])
    own = (getattr(asked, prefix + which).to(device) for which in ("inv_freq", "original_inv_freq"))
    for inv_freq, scaling in ((usual, float(usual_scaling)), *((each, own_scaling) for each in own)):
        want = (last * inv_freq.double().cpu()).cos() * scaling
        near = 0.02 * max(1.0, last / 131_072)  # transformers multiplies in float32
        found = cos[0, 1, : len(want)], cos[0, 1, ::2]  # halves or bare, pairs
        fits = any(part.shape == want.shape and torch.allclose(part.double(), want, atol=near) for part in found)
        if fits and abs(scaling - own_scaling) < 1e-4 * own_scaling:
            return inv_freq.double(), scaling
    raise ModelError(f"rotary embedding {type(module).__name__} uses frequencies that lean cannot read")


def _ask(
    module: torch.nn.Module, layer_type: str | None, positions: list[int], dtype: torch.dtype = torch.float32
) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A copy of the module after its own forward; its cos and sin [1, positions, ...].

    For a module that gives complex numbers: their real and imaginary parts, which are not contiguous. The copy runs on
    the CPU: a GPU may multiply in TF32, which is too coarse to compare angles.
    """
    module = copy.deepcopy(module).cpu()
    extra = () if layer_type is None else (layer_type,)
    found = type(module).forward(module, torch.zeros(1, 1, 1, dtype=dtype), torch.tensor([positions]), *extra)
    cos, sin = (found.real, found.imag) if isinstance(found, torch.Tensor) else found
    return module, cos, sin


class _Layout(NamedTuple):
    """How a rotary module lays out its angles.

    name: a key of `_LAYOUTS`. wide: its output is wider than a bf16 input. is_complex: it gives cos + i sin, for pairs.
    """

    name: str
    wide: bool
    is_complex: bool


def _layout(module: torch.nn.Module, layer_type: str | None, name: str) -> _Layout:
    """The layout of a rotary module, found by trying it."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    positions = list(range(8))
    try:
        asked, cos, sin = _ask(module, layer_type, positions)
        narrow = _ask(module, layer_type, positions, torch.bfloat16)[1]
    except Exception as error:
        raise ModelError(f"{name}: rotary embedding {type(module).__name__} cannot be read ({error})") from None
    angle = torch.tensor(positions)[None, :, None].double() * getattr(asked, f"{prefix}inv_freq").double()
    scaling = getattr(asked, f"{prefix}attention_scaling")  # what `frequencies` returns
    if _length_dependent(module, layer_type):
        scaling = float(cos[0, 0, 0])
    for layout, spread in _LAYOUTS.items():
        want = spread(angle)
        pairs = ((cos, want.cos()), (sin, want.sin()))
        if all(a.shape == b.shape and torch.allclose(a.double(), b * scaling, atol=1e-5) for a, b in pairs):
            return _Layout(layout, narrow.dtype is torch.float32, not cos.is_contiguous())
    raise ModelError(f"{name}: rotary embedding {type(module).__name__} uses a layout that lean does not know")


def install(model: torch.nn.Module, max_model_len: int, name: str = "model") -> list[str]:
    """Replace the forward of every rotary module. Returns one line for each kind that had to be fixed at load.

    Raises:
        ModelError: a rotary embedding whose output is not understood.
        ConfigError: another engine uses the model, and its max_model_len fixed other frequencies.
    """
    notes = []
    for module in rotary_modules(model):
        tables = {kind: frequencies(module, kind, max_model_len) for kind in layer_types(module)}
        notes += [_regime(module, kind, max_model_len) for kind in tables if _length_dependent(module, kind)]
        installed = getattr(module, "lean_tables", None)
        if installed is not None:
            same = [torch.equal(t[0], installed[kind][0]) and t[1] == installed[kind][1] for kind, t in tables.items()]
            if not all(same):
                raise ConfigError(
                    f"{name}: its rotary frequencies are fixed for another max-model-len: load the model again"
                )
            continue
        layouts = {kind: _layout(module, kind, name) for kind in tables}
        module.lean_tables = tables  # type: ignore[assignment]
        module.lean_layouts = layouts  # type: ignore[assignment]
        module.forward = _forward(tables, layouts)  # type: ignore[assignment]
    return notes


def _regime(module: torch.nn.Module, layer_type: str | None, max_model_len: int) -> str:
    """The line for the user that says which frequencies were fixed."""
    rope_type = _rope_type(module, layer_type)
    factors = ""
    if rope_type == "longrope":
        original = _parameters(module, layer_type)["original_max_position_embeddings"]
        factors = "long factors " if max_model_len > original else "short factors "
    return f"{rope_type} rotary frequencies: {factors}fixed for max-model-len {max_model_len}"


def _forward(tables: dict, layouts: dict[str | None, _Layout]) -> Callable:
    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """x gives the dtype; position_ids [batch, tokens] -> cos, sin [batch, tokens, ...], or cos + i sin.

        Models for images and video give one position for each of three axes, [axes, batch, tokens]. Of a text all three
        are the same.
        """
        if position_ids.ndim == 3:
            position_ids = position_ids[0]
        inv_freq, scaling = tables[layer_type]
        layout = layouts[layer_type]
        angle = _LAYOUTS[layout.name](position_ids[..., None].double() * inv_freq.to(x.device))
        cos, sin = angle.cos() * scaling, angle.sin() * scaling
        if layout.is_complex:
            wide = torch.promote_types(x.dtype, torch.float32)
            return torch.complex(cos.to(wide), sin.to(wide))
        dtype = torch.promote_types(x.dtype, torch.float32) if layout.wide else x.dtype
        return cos.to(dtype), sin.to(dtype)

    return forward
