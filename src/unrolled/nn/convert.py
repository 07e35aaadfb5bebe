"""Our layers in the place of torch's, inside any model."""

from __future__ import annotations

import inspect

from torch import nn

from unrolled.nn.norms import LayerNorm, RMSNorm
from unrolled.nn.recurrent import GRU, LSTM, RNN
from unrolled.nn.recurrent_cells import GRUCell, LSTMCell, RNNCell

_OURS: dict[type, type[nn.Module]] = {
    **{nn.RNN: RNN, nn.LSTM: LSTM, nn.GRU: GRU},
    **{nn.RNNCell: RNNCell, nn.LSTMCell: LSTMCell, nn.GRUCell: GRUCell},
    **{nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm},
}


def convert(model: nn.Module) -> nn.Module:
    """Replace torch.nn's layers in `model` by ours, in place; returns it (of a bare one: ours).

    Those are RNN, LSTM, GRU and their cells, LayerNorm and RMSNorm.
    The parameters are the same objects, so an optimizer that holds them keeps working, and hooks stay. What is not
    plainly one of these is left alone: a subclass, one whose parameters come from others (weight_norm, pruning).
    """
    replaced: dict[int, nn.Module] = {}

    def ours(module: nn.Module) -> nn.Module:
        if id(module) not in replaced:
            replaced[id(module)] = _from_torch(module)
        return replaced[id(module)]

    if _known(model):
        return ours(model)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and _known(child):
                parent._modules[name] = ours(child)
    return model


def _known(module: nn.Module) -> bool:
    if type(module) not in _OURS:
        return False
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return own == {name for name, _ in _ours_like(module).named_parameters()} and not module._buffers


def _ours_like(module: nn.Module) -> nn.Module:
    """Ours with the arguments of `module`, without memory."""
    kind = _OURS[type(module)]
    options = {name: vars(module)[name] for name in inspect.signature(kind).parameters if name in vars(module)}
    if "bias" in module._parameters:  # an argument of this name is kept as whether there is one
        options["bias"] = module._parameters["bias"] is not None
    if options.get("num_layers") == 1:
        options["dropout"] = 0.0  # torch warns of dropout with one layer and ignores it; ours refuses it
    return kind(**options, device="meta")


def _from_torch(module: nn.Module) -> nn.Module:
    layer = _ours_like(module)
    for name, parameter in module.named_parameters(recurse=False):
        layer.register_parameter(name, parameter)
    vars(layer).update({name: value for name, value in vars(module).items() if "_hooks" in name})
    return layer.train(module.training)
