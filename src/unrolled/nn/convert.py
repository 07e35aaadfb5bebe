"""Our layers in the place of torch's, inside any model."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from unrolled.nn.attention import MultiheadAttention
from unrolled.nn.norms import LayerNorm, RMSNorm
from unrolled.nn.recurrent import GRU, LSTM, RNN
from unrolled.nn.recurrent_cells import GRUCell, LSTMCell, RNNCell
from unrolled.nn.transformer import Transformer, TransformerDecoder, TransformerEncoder
from unrolled.nn.transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer

_RECURRENT: dict[type, type[nn.Module]] = {
    **{nn.RNN: RNN, nn.LSTM: LSTM, nn.GRU: GRU},
    **{nn.RNNCell: RNNCell, nn.LSTMCell: LSTMCell, nn.GRUCell: GRUCell},
}
# Those that have all that torch's have, under torch's names, and besides what stands here.
_ALIKE: dict[type, tuple[type[nn.Module], dict[str, Any]]] = {
    nn.LayerNorm: (LayerNorm, {}),
    nn.RMSNorm: (RMSNorm, {}),
    nn.MultiheadAttention: (MultiheadAttention, {"positions": None}),
    nn.TransformerEncoderLayer: (TransformerEncoderLayer, {"gate": None}),
    nn.TransformerDecoderLayer: (TransformerDecoderLayer, {"gate": None}),
    nn.TransformerEncoder: (TransformerEncoder, {}),
    nn.TransformerDecoder: (TransformerDecoder, {}),
    nn.Transformer: (Transformer, {}),
}
_PARAMETERS = {
    **{nn.LayerNorm: {"weight", "bias"}, nn.RMSNorm: {"weight"}},
    nn.MultiheadAttention: {
        *("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
        *("in_proj_bias", "bias_k", "bias_v"),
    },
}
_LAYERS = {
    nn.TransformerEncoder: (nn.TransformerEncoderLayer, TransformerEncoderLayer),
    nn.TransformerDecoder: (nn.TransformerDecoderLayer, TransformerDecoderLayer),
}


def convert(model: nn.Module) -> nn.Module:
    """Replace torch.nn's layers in `model` by ours, in place; returns it (of a bare one: ours).

    Those are RNN, LSTM, GRU and their cells, LayerNorm, RMSNorm, MultiheadAttention, the layers of the Transformer, its
    encoder and decoder, and the whole. The parameters are the same objects, so an optimizer that holds them keeps
    working, and hooks stay. What is not plainly one of these is left alone: a subclass, one whose parameters come from
    others (weight_norm, pruning); so is what holds such layers, but not what they hold.
    """
    replaced: dict[int, nn.Module] = {}

    def ours(module: nn.Module) -> nn.Module:
        if id(module) not in replaced:
            replaced[id(module)] = new = _from_torch(module) if _known(module) else module
            for name, child in list(new._modules.items()):
                if child is not None:
                    new._modules[name] = ours(child)
        return replaced[id(module)]

    return ours(model)


def _known(module: nn.Module) -> bool:
    kind: Any = type(module)
    if kind not in _RECURRENT and kind not in _ALIKE:
        return False
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if module._buffers:
        return False
    if kind in _RECURRENT:
        return own == {name for name, _ in _like(module).named_parameters()}
    if kind in _LAYERS:
        return all(type(layer) in _LAYERS[kind] and _fits(layer) for layer in module.layers)  # type: ignore[union-attr]
    return set(module._parameters) <= _PARAMETERS.get(kind, set()) and _fits(module)


def _fits(module: nn.Module) -> bool:
    """Whether attention in it is what our layers expect; any other foreign part they just call."""
    attentions = (child for name, child in module.named_children() if name.endswith("attn"))
    return all(type(child) is MultiheadAttention or _known(child) for child in attentions)


def _like(module: nn.Module) -> nn.Module:
    """Ours with the arguments of a recurrent `module`, without memory."""
    kind = _RECURRENT[type(module)]
    options = {name: vars(module)[name] for name in inspect.signature(kind).parameters if name in vars(module)}
    if options.get("num_layers") == 1:
        options["dropout"] = 0.0  # torch warns of dropout with one layer and ignores it; ours refuses it
    return kind(**options, device="meta")


def _from_torch(module: nn.Module) -> nn.Module:
    if type(module) in _ALIKE:
        kind, more = _ALIKE[type(module)]
        layer: nn.Module = kind.__new__(kind)
        vars(layer).update({n: v.copy() if isinstance(v, dict) else v for n, v in vars(module).items()} | more)
        return layer
    layer = _like(module)
    for name, parameter in module.named_parameters(recurse=False):
        layer.register_parameter(name, parameter)
    vars(layer).update({name: value for name, value in vars(module).items() if "_hooks" in name})
    return layer.train(module.training)
