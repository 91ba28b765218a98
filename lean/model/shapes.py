"""What a model's attention layers are: its forward pass is followed on tensors without data.

The model calls an attention function that notes the shapes it is given. So the shapes and windows of layers are what
the code of the model computes, not what its configuration seems to say, and no weight is read.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from lean.cache.plan import LayerShape
from lean.cache.states import StateShape, bytes_of, layers_of
from lean.errors import ModelError, shown
from lean.model.attention import unsupported_arguments
from lean.model.carrier import as_cache, takes_cache
from lean.model.latent import LatentProjection
from lean.model.state_shapes import NotedStates
from lean.store.library import attempt
from lean.units import mib

NAME = "lean_shapes"
NOT_CUSTOM = "its transformers class does not support custom attention functions"
_FOLLOW = "its forward pass cannot be followed without weights"
_NUM_TOKENS = 3
_WINDOW = "lean_window"  # an attribute of masks
# Names of layer types: of attention layers that keep K/V alone, and of layers that compute every token for itself.
_WITHOUT_STATE = {"full_attention", "sliding_attention"}
_TOKENWISE = {"mlp", "moe"}
_aten = torch.ops.aten


class _Call(NamedTuple):
    """One call of the attention function. Key and value are kept to recognise a layer that reads another layer's."""

    layer: int | None
    shape: LayerShape
    key: torch.Tensor
    value: torch.Tensor
    module: torch.nn.Module


def _mark_window(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """The mask function of a followed forward pass: the mask of a window names it. Some models say it nowhere else."""
    if local_size is None:
        return None
    mask = torch.empty(1, 1, _NUM_TOKENS, _NUM_TOKENS, device="meta")
    setattr(mask, _WINDOW, local_size)
    return mask


class _ArgumentsLost(ModelError):
    """The layers of the model do not hand keyword arguments on to the attention function."""


def _note_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    shape_calls: list[_Call] | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: Any = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a followed forward pass. Arguments as of `lean.model.attention.lean_attention`."""
    if shape_calls is None:
        raise _ArgumentsLost("its layers do not hand keyword arguments on to the attention function")
    in_mask = getattr(attention_mask, _WINDOW, None)
    unknown = unsupported_arguments(kwargs, attention_mask if in_mask is None else None, dropout)
    if unknown:
        raise ModelError(f"its attention uses {', '.join(unknown)}")
    if getattr(module, "is_causal", True) is False:
        raise ModelError("bidirectional attention")
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % kv_heads:
        raise ModelError(f"{heads} query heads on {kv_heads} key heads")
    if in_mask is not None and sliding_window not in (None, in_mask):
        raise ModelError(f"a window of {sliding_window} under a mask of {in_mask}")
    window = in_mask if sliding_window is None else sliding_window
    if window is not None and not (type(window) is int and 0 < window < 2**31):
        raise ModelError(f"its sliding_window is {shown(window)}, not a whole number from 1 to {2**31 - 1}")
    shape = LayerShape(heads, kv_heads, key.shape[-1], value.shape[-1], window or 0)
    v_head_dim = value.shape[-1]
    projection = getattr(module, "kv_b_proj", None)
    if isinstance(projection, LatentProjection):
        shape, v_head_dim = replace(shape, v_in_k=True), projection.v_head_dim
    layer = getattr(module, "layer_idx", None)
    shape_calls.append(_Call(layer if isinstance(layer, int) else None, shape, key, value, module))
    return query.new_empty(1, query.shape[2], heads, v_head_dim), None


def register() -> None:
    """Make the attention implementation NAME known to transformers."""
    AttentionInterface.register(NAME, _note_call)
    AttentionMaskInterface.register(NAME, _mark_window)


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    """The module that turns token ids into hidden states.

    transformers' own method takes any attribute named ``decoder`` for it, which may be the head.
    """
    found = model.get_decoder()  # type: ignore[operator]
    return model.base_model if isinstance(found, torch.nn.Linear) else found  # type: ignore[return-value]


@dataclass(frozen=True)
class Followed:
    """What the forward pass of a model shows.

    Attributes:
        layers: the shapes of its attention layers, in their order.
        carried: a `Carrier` must bring them the keyword arguments of a step.
        modules: the names of the attention modules, where other layers lie between them; their numbers are places here.
        states: of the layers that keep states. mixers: the names of these layers' modules.
    """

    layers: tuple[LayerShape, ...]
    carried: bool = False
    modules: tuple[str, ...] = ()
    states: tuple[StateShape, ...] = ()
    mixers: tuple[str, ...] = ()


def follow(skeleton: torch.nn.Module, config: Any, name: str, dtype: torch.dtype) -> Followed:
    """Follow the forward pass of a model on the meta device.

    Args:
        skeleton: built with the attention implementation NAME.
        config: its text configuration.
        name: of the model, for errors.
        dtype: of its weights; some layers keep their states in it.

    Raises:
        ModelError: a kind of model that lean refuses.
    """
    what = f"{name} ({config.model_type})"
    if "position_ids" not in inspect.signature(type(decoder_of(skeleton)).forward).parameters:
        raise ModelError(f"{what}: its decoder takes no position ids: not supported by lean")
    try:
        return _follow(skeleton, config, dtype)
    except ModelError as error:
        raise ModelError(f"{what}: {error}: not supported by lean") from None


def _may_have_states(skeleton: torch.nn.Module, kinds: Iterable[str]) -> bool:
    """Whether a model with attention in every layer may keep states beside. Code from its own folder always may."""
    if not takes_cache(decoder_of(skeleton)):
        return False
    ours = type(skeleton).__module__.startswith("transformers.")
    return not ours or getattr(skeleton, "_is_stateful", False) or not _WITHOUT_STATE.issuperset(kinds)


def _follow(skeleton: torch.nn.Module, config: Any, dtype: torch.dtype) -> Followed:
    every = set(range(config.num_hidden_layers))
    kinds = dict(enumerate(getattr(config, "layer_types", None) or []))
    plain: list[_Call] = []
    with suppress(_ArgumentsLost):
        plain = attempt(_FOLLOW, _run, skeleton)
    complete = every == {call.layer for call in plain}
    if complete and not _may_have_states(skeleton, kinds.values()):
        return Followed(_checked(plain))
    noted = NotedStates(skeleton)
    calls = attempt(_FOLLOW, noted.begin, dtype, lambda cache: _run(skeleton, cache, handed_on=complete))
    if complete and not noted.shapes:
        return Followed(_checked(plain))
    if not calls:
        raise ModelError("none of its layers calls custom attention functions")
    layers, missing = _checked(calls), every - {call.layer for call in calls}
    if not missing and not noted.shapes:
        return Followed(layers, carried=True)
    unknown = sorted(layer for layer in missing - noted.layers if kinds.get(layer) not in _TOKENWISE)
    if unknown:
        raise ModelError(
            f"layer {unknown[0]} calls neither attention nor the cache (found attention in "
            f"{config.num_hidden_layers - len(missing)} of {config.num_hidden_layers} layers)"
        )
    names = {module: name for name, module in skeleton.named_modules()}
    modules = [names[call.module] for call in sorted(calls, key=lambda call: call.layer or 0)]
    for module in modules:
        if any(f"{module}.".startswith(f"{mixer}.") for mixer in noted.mixers):
            raise ModelError(f"{module} keeps a state beside its K/V")
    attempt(_FOLLOW, noted.go_on, lambda cache: _run(skeleton, cache, handed_on=False))
    return Followed(layers, True, tuple(modules), noted.shapes, noted.mixers)


def _run(skeleton: torch.nn.Module, carrier: Any = None, handed_on: bool = True) -> list[_Call]:
    """The calls of the attention function in one forward pass.

    Args:
        carrier: makes a cache that carries arguments.
        handed_on: layers hand keyword arguments on, so that they need not be carried.
    """
    calls: list[_Call] = []
    decoder = decoder_of(skeleton)
    own = {"shape_calls": calls}
    arguments: dict[str, Any] = dict(own) if handed_on else {}
    if carrier is not None:
        arguments |= as_cache(decoder, carrier(own))
    ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device="meta")
    with torch.device("meta"), torch.no_grad(), _WithoutData():
        decoder(input_ids=ids, position_ids=ids, use_cache=False, **arguments)
    return calls


def _checked(calls: list[_Call]) -> tuple[LayerShape, ...]:
    """The shapes in order of the layers. Raises ModelError unless every layer calls attention once."""
    found = [call.layer for call in calls if call.layer is not None]
    repeated = sorted({layer for layer in found if found.count(layer) > 1})
    if repeated:
        raise ModelError(other_calls(repeated[0], found.count(repeated[0])))
    if len(found) != len(calls):
        raise ModelError("an attention module without a layer index")
    places = {layer: place for place, layer in enumerate(sorted(found))}
    owners: dict[tuple[int, int], int] = {}  # the layer that computed a key and a value, by their identities
    shapes: dict[int, LayerShape] = {}
    for call in calls:
        assert call.layer is not None
        layer, shape = places[call.layer], call.shape
        owner = owners.setdefault((id(call.key), id(call.value)), layer)
        if owner != layer:
            if replace(shape, num_q_heads=1) != replace(shapes[owner], num_q_heads=1):
                raise ModelError(f"layer {layer} reads the K/V of layer {owner}, which has another window or shape")
            shape = replace(shape, kv_layer=owner)
        shapes[layer] = shape
    return tuple(shape for _, shape in sorted(shapes.items()))


def other_calls(layer: int, count: int) -> str:
    """Why a layer that does not call attention once per step is refused."""
    return f"layer {layer} calls attention {count} times per step; lean supports one call"


def notes(followed: Followed, config: Any) -> list[str]:
    """What a user should know about the K/V of these layers: one line for each."""
    layers, found = followed.layers, []
    if followed.modules:
        about = f"{len(layers)} of {config.num_hidden_layers} layers have K/V: lean numbers these from 0"
        if followed.states:
            about += f"; {layers_of(followed.states)} keep states: {mib(bytes_of(followed.states))} a sequence"
        found.append(about)
    readers = sum(layer.kv_layer is not None for layer in layers)
    if readers:
        found.append(f"{readers} of {len(layers)} layers read the K/V of an earlier layer, which is stored once")
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        vector = rank + getattr(config, "qk_rope_head_dim", 0)
        if any(layer.v_in_k for layer in layers):
            head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
            latent = sum(2 * layer.k_dim for layer in layers)
            expanded = sum(2 * layer.num_q_heads * head for layer in layers)
            found.append(
                f"latent attention (MLA): its latent vectors take {latent:,} bytes a token in bf16; expanded K/V would "
                f"take {expanded:,}"
            )
        else:
            expanded = sum(2 * layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in layers)
            found.append(
                f"latent attention (MLA) runs with expanded K/V: {expanded:,} bytes a token in bf16; its latent "
                f"vectors would take {2 * len(layers) * vector:,}"
            )
    return found


class _WithoutData(TorchDispatchMode):
    """While active, what depends on the data of a meta tensor gets an answer: numbers are 0, and masks select all."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], torch.Tensor) and args[0].is_meta else None
        if first is None:
            return func(*args, **kwargs)
        if func in _ELEMENTWISE:  # torch's own shape functions for these take ten times as long
            other = args[1] if len(args) > 1 else first
            if not isinstance(other, torch.Tensor) or other.shape == first.shape:
                return first.new_empty(first.shape, dtype=torch.result_type(first, other))
        if func is _aten._local_scalar_dense.default:
            return torch.zeros((), dtype=first.dtype).item()
        if func is _aten.nonzero.default:
            return first.new_empty(first.numel(), first.dim(), dtype=torch.long)
        if func is _aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type != "meta":
            return torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype, device=kwargs["device"])
        if func is _aten.split_with_sizes.default and not any(args[1]):  # sizes that were read from a tensor are 0
            args = first, [first.shape[_dim(args, kwargs)], *[0] * (len(args[1]) - 1)], *args[2:]
        if func is _aten.index.Tensor:
            args = first, [part for index in args[1] for part in _as_integers(index)]
        found = func(*args, **kwargs)
        if hasattr(first, _WINDOW) and isinstance(found, torch.Tensor):  # a slice of a mask is a mask
            setattr(found, _WINDOW, getattr(first, _WINDOW))
        return found


_ELEMENTWISE = {
    _aten.add.Tensor, _aten.mul.Tensor, _aten.sub.Tensor, _aten.neg.default, _aten.silu.default, _aten.rsqrt.default,
    _aten.pow.Tensor_Scalar,
}  # fmt: skip


def _dim(args: Any, kwargs: Any) -> int:
    """The argument ``dim`` of a split."""
    return args[2] if len(args) > 2 else kwargs.get("dim", 0)


def _as_integers(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """An index; in place of a mask as many positions as the mask has elements, in each of its dimensions."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.dim())]
