"""lean's rotary angles: position times frequency, in float64 for every dtype of the module.

transformers multiplies in float32, which at position 5,000,000 is off by 0.03. Frequencies and attention scaling stay
the model's own; only the product, its cosine and its sine are taken in float64.

Under a window, the distance from a query to the sinks shrinks by the number of tokens evicted in between (in-cache
positions of StreamingLLM, arXiv:2309.17453). Stored keys stay as they are: rotations commute, so the query is turned
back for the sink keys, by the angle alone and on the rotary dims only (`SinkRotary`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lean.errors import ConfigError, ModelError

_LENGTH_DEPENDENT = ("dynamic", "longrope")

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


def _rope_type(module: torch.nn.Module, layer_type: str | None) -> str:
    return module.rope_type if layer_type is None else module.rope_type[layer_type]  # type: ignore[return-value, index]


def frequencies(module: torch.nn.Module, layer_type: str | None, max_model_len: int) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [rotary_dim / 2] float64, attention scaling) of one layer type.

    Where frequencies depend on the current length, those of ``max_model_len`` are used: keys in the cache cannot
    change their frequencies later.
    """
    rope_type = _rope_type(module, layer_type)
    prefix = "" if layer_type is None else f"{layer_type}_"
    inv_freq, scaling = getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}attention_scaling")
    if rope_type in _LENGTH_DEPENDENT:
        extra = {} if layer_type is None else {"layer_type": layer_type}
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](
            module.config, inv_freq.device, seq_len=max_model_len, **extra
        )
    return inv_freq.double(), float(scaling)


def _layout(module: torch.nn.Module, layer_type: str | None, name: str) -> tuple[str, bool]:
    """(name of the layout, whether cos and sin come back wider than a bf16 input), found by trying the module."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    inv_freq = getattr(module, f"{prefix}original_inv_freq")
    positions = torch.arange(1, 8, device=inv_freq.device)[None]
    extra = () if layer_type is None else (layer_type,)
    try:
        cos, sin = module(torch.zeros(1, 1, 1, device=inv_freq.device), positions, *extra)
        narrow, _ = module(torch.zeros(1, 1, 1, device=inv_freq.device, dtype=torch.bfloat16), positions, *extra)
    except Exception as error:
        raise ModelError(f"{name}: rotary embedding {type(module).__name__} cannot be read ({error})") from None
    angle = positions[..., None].double() * getattr(module, f"{prefix}inv_freq").double()
    scaling = getattr(module, f"{prefix}attention_scaling")
    for layout, spread in _LAYOUTS.items():
        want = spread(angle)
        pairs = ((cos, want.cos()), (sin, want.sin()))
        if all(a.shape == b.shape and torch.allclose(a.double(), b * scaling, atol=1e-5) for a, b in pairs):
            return layout, narrow.dtype is torch.float32
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
        notes += [
            _regime(module, kind, max_model_len) for kind in tables if _rope_type(module, kind) in _LENGTH_DEPENDENT
        ]
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
        module.lean_layouts = {kind: layout for kind, (layout, _) in layouts.items()}  # type: ignore[assignment]
        spreads = {kind: (_LAYOUTS[layout], wide) for kind, (layout, wide) in layouts.items()}
        module.forward = _forward(tables, spreads)  # type: ignore[assignment]
    return notes


@dataclass(frozen=True)
class SinkTurn:
    """Turns the query rows of one step back. ``cos``, ``sin``: [num_tokens, 1, rotary_dim / 2], float64."""

    cos: torch.Tensor
    sin: torch.Tensor
    pairs: bool

    def __call__(self, query: torch.Tensor) -> torch.Tensor:
        """query [num_tokens, heads, head_dim] -> the same, turned; rows without a shift keep their bits."""
        half = self.cos.shape[-1]
        dtype = torch.promote_types(query.dtype, torch.float32)
        cos, sin = self.cos.to(dtype), self.sin.to(dtype)
        first, second = (
            (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if self.pairs else (slice(0, half), slice(half, 2 * half))
        )
        a, b = query[..., first].to(dtype), query[..., second].to(dtype)
        turned = query.clone()
        turned[..., first] = (a * cos + b * sin).to(query.dtype)
        turned[..., second] = (b * cos - a * sin).to(query.dtype)
        return turned


@dataclass(frozen=True)
class SinkRotary:
    """The rotation of the full-attention layers: ``inv_freq`` float64 [rotary_dim / 2], and how dims pair up."""

    inv_freq: torch.Tensor
    pairs: bool

    @classmethod
    def of(cls, model: torch.nn.Module, name: str) -> "SinkRotary":
        """Read from a model after `install`. Raises ModelError unless it has one rotary and full-attention layers."""
        modules = rotary_modules(model)
        if len(modules) != 1:
            raise ModelError(f"{name}: it has no rotary positions that lean can shift for the sinks: remove --window")
        tables: dict = modules[0].lean_tables  # type: ignore[assignment]
        layouts: dict = modules[0].lean_layouts  # type: ignore[assignment]
        kind = None if None in tables else "full_attention"
        if kind not in tables:
            raise ModelError(f"{name}: it has no full-attention layers for --window to bound: remove --window")
        return cls(tables[kind][0].cpu(), layouts[kind] == "pairs")

    def back(self, shifts: torch.Tensor, device: torch.device) -> SinkTurn:
        """shifts: int64 [num_tokens], by how many positions each row's query is turned back."""
        angle = (shifts[:, None, None].double() * self.inv_freq).to(device)
        return SinkTurn(angle.cos(), angle.sin(), self.pairs)


def _regime(module: torch.nn.Module, layer_type: str | None, max_model_len: int) -> str:
    """The line for the user that says which frequencies were fixed."""
    rope_type = _rope_type(module, layer_type)
    factors = ""
    if rope_type == "longrope":
        parameters: dict = module.config.rope_parameters  # type: ignore[assignment, union-attr]
        original = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
        factors = "long factors " if max_model_len > original else "short factors "
    return f"{rope_type} rotary frequencies: {factors}fixed for max-model-len {max_model_len}"


def _forward(tables: dict, spreads: dict) -> Callable:
    def forward(
        x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x gives the dtype; position_ids [batch, tokens] -> cos, sin [batch, tokens, ...]."""
        inv_freq, scaling = tables[layer_type]
        spread, wide = spreads[layer_type]
        dtype = torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
        angle = spread(position_ids[..., None].double() * inv_freq.to(x.device))
        return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)

    return forward
