"""One token of each sequence, in evaluation, through layers whose parts are all plain: the core's calls in a row.

For so few rows the way to the core (checks, the dispatcher, views) costs as much as the core. Here the views of the
weights are made once. The numbers are those of the layers' own calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from unrolled.equations.positions import frequencies
from unrolled.nn._hooks import hooked
from unrolled.nn._layer import DROPOUT, LAYER_NORM, LINEAR, RMS_NORM, kind_of
from unrolled.nn.attention import MultiheadAttention
from unrolled.nn.decoding import Held, State, for_core
from unrolled.nn.transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer
from unrolled.ops import _arrays
from unrolled.ops._arrays import Array
from unrolled.ops._backend import core, equations_only, forward_mode
from unrolled.ragged import readable

SubLayer = Callable[[Array, Held, int], Array]  # of (B, D), what the state holds, and the layer's number
Norm = Callable[[Array, Array | None], tuple[Array, Array]]


class NotPlain(Exception):
    """Something here is to be called, or lies where the core cannot read it."""


class _Layer(NamedTuple):
    sub_layers: list[SubLayer]
    norms: list[Norm]
    norm_first: bool


def one_token(model: Any, x: Any, state: State, batch_first: bool) -> Tensor | None:
    """What the model makes of one token of each sequence, (B, 1, D) or (1, B, D); None where it goes another way."""
    if core is None or equations_only() or type(x) is not Tensor or x.is_nested:
        return None
    if forward_mode() or not readable(x) or is_in_torch_dispatch_mode():
        return None
    step = _steps.get(model)
    if step is None or not step.as_it_was():
        step = _steps[model] = Step(model)
    shape = (len(state.lengths), 1, step.width) if batch_first else (1, len(state.lengths), step.width)
    if step.layers is None or x.shape != shape or x.dtype is not step.dtype:
        return None
    held = None if step.busy() else state.held(x.dtype, len(step.layers), step.memories)
    if held is None:
        return None
    y = step(x.detach().reshape(-1, step.width).contiguous().numpy(), held)
    state.advance(1)
    return torch.from_numpy(y).view(shape)


class Step:
    """What a model's weights are to the core; `layers` is None where not all parts are plain."""

    layers: list[_Layer] | None

    def __init__(self, model: Any) -> None:
        self._modules = list(model.modules())[1:]  # not the model: it may go while this stays
        self._names = list(_names(model))
        self._views: list[tuple[Tensor, Tensor]] = []
        first = model.layers[0]
        like: Any = next(first.parameters())
        self.dtype, self.width = like.dtype, first.self_attn.embed_dim
        self.memories = len(model.layers) if type(first) is TransformerDecoderLayer else 0
        try:
            self.layers = [self._layer(layer) for layer in model.layers]
            self._norm = None if model.norm is None else self._norm_of(model.norm)
        except NotPlain:
            self.layers = None

    def as_it_was(self) -> bool:
        """Whether everything that the layers compute with stands where it stood."""
        return (
            all(len(names) == count for names, count, _ in self._names)
            and all(names.get(name) is value for names, _, values in self._names for name, value in values)
            and all(p.is_set_to(view) for p, view in self._views)
        )

    def busy(self) -> bool:
        """Whether something is dropped or called besides."""
        return any(m.training or hooked(m) for m in self._modules)

    def __call__(self, x: Array, held: Held) -> Array:
        assert self.layers is not None
        for n, layer in enumerate(self.layers):
            x = _around(layer, x, held, n)
        return x if self._norm is None else self._norm(x, None)[1]

    def _layer(self, layer: Any) -> _Layer:
        own, kind = type(layer), kind_of(layer.activation)
        if own not in (TransformerEncoderLayer, TransformerDecoderLayer) or kind is None:
            raise NotPlain
        if any(type(getattr(layer, name)) not in DROPOUT for name in layer._parts[0]):
            raise NotPlain
        parts = [self._attention(layer.self_attn, True)]
        if own is TransformerDecoderLayer:
            parts.append(self._attention(layer.multihead_attn, False))
        gate = (None, None) if layer.gate is None else self._linear(layer.gate)
        weights = *self._linear(layer.linear1), *self._linear(layer.linear2), *gate
        parts.append(lambda x, held, n: _arrays.feed_forward(x, kind, weights))
        norms = [self._norm_of(getattr(layer, f"norm{n + 1}")) for n in range(len(parts))]
        return _Layer(parts, norms, layer.norm_first)

    def _attention(self, part: Any, itself: bool) -> SubLayer:
        weight, bias, heads, width = part.in_proj_weight, part.in_proj_bias, part.num_heads, part.embed_dim
        if (type(part), type(part.out_proj)) != (MultiheadAttention, NonDynamicallyQuantizableLinear):
            raise NotPlain
        if weight is None or part.bias_k is not None or part.add_zero_attn or (part.positions and not itself):
            raise NotPlain
        both = self._array(weight), self._array(bias)
        q, kv = (tuple(w if w is None else w[rows] for w in both) for rows in (slice(width), slice(width, None)))
        out = self._array(part.out_proj.weight), self._array(part.out_proj.bias)
        turned = None
        if part.positions == "rotary":
            turned = frequencies(width // heads, weight.device).numpy()
        slopes = self._array(part.slopes) if part.positions == "alibi" else None
        read = partial(_arrays.attention, heads=heads)

        def attend(x: Array, held: Held, n: int) -> Array:
            """The new keys and values go to their rows of those that are kept."""
            new, keys = _arrays.linear(x, *q), _arrays.linear(x, *kv)
            if turned is not None:
                new, keys = (_arrays.rotary(a, held.t, turned, heads, width) for a in (new, keys))
            kept = held.key_value[n]
            kept[held.row] = keys
            o = read(new, kept, held.queries, held.keys, causal=True, seen=None, added=None, slopes=slopes)
            return _arrays.linear(o, *out)

        def look_up(x: Array, held: Held, n: int) -> Array:
            """Keys and values are those of the memory."""
            seen, added = held.masks
            kept, keys = held.memory[n]
            asked = _arrays.linear(x, *q)
            o = read(asked, kept, held.queries, keys, causal=False, seen=seen, added=added, slopes=None)
            return _arrays.linear(o, *out)

        return attend if itself else look_up

    def _linear(self, part: Any) -> tuple[Array, Array | None]:
        if type(part) not in LINEAR:
            raise NotPlain
        return self._array(part.weight), self._array(part.bias)

    def _norm_of(self, part: Any) -> Norm:
        centred = type(part) in LAYER_NORM
        if not (centred or type(part) in RMS_NORM) or tuple(part.normalized_shape) != (self.width,):
            raise NotPlain
        epsilon = torch.finfo(self.dtype).eps if part.eps is None else part.eps
        gain, bias = self._array(part.weight), self._array(part.bias) if centred else None
        return lambda x, s: _arrays.norm(x, s, gain, bias, centred, epsilon)

    def _array(self, p: Tensor | None) -> Array | None:
        if p is None:
            return None
        if type(p) not in (Tensor, nn.Parameter) or not for_core(p, self.dtype):
            raise NotPlain
        self._views.append((p, p.detach()))
        return self._views[-1][1].numpy()


_steps: WeakKeyDictionary[nn.Module, Step] = WeakKeyDictionary()


def _around(layer: _Layer, x: Array, held: Held, n: int) -> Array:
    """`_layer.Layer._around`, without what drops or is called."""
    if not layer.norm_first:
        for sub_layer, norm in zip(layer.sub_layers, layer.norms, strict=True):
            _, x = norm(x, sub_layer(x, held, n))
        return x
    _, y = layer.norms[0](x, None)
    for sub_layer, norm in zip(layer.sub_layers[:-1], layer.norms[1:], strict=True):
        x, y = norm(x, sub_layer(y, held, n))
    return x + layer.sub_layers[-1](y, held, n)


_OPTIONS = (
    "activation",
    "norm_first",
    "eps",
    "normalized_shape",
    "positions",
    "num_heads",
    "add_zero_attn",
    "approximate",
)


def _names(model: nn.Module) -> Iterator[tuple[dict[str, Any], int, list[tuple[str, Any]]]]:
    """Where everything stands that the model computes with: names, how many there are, and what they stand for."""
    for m in model.modules():
        for names in (m._modules, m._parameters, m._buffers):
            yield names, len(names), list(names.items())
        own = vars(m)
        options = [(name, own[name]) for name in _OPTIONS if name in own]
        if options:
            yield own, len(own), options
