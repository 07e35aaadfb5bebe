"""Our layers in the place of torch's, inside any model."""

from __future__ import annotations

from torch import nn

from unrolled.nn.recurrent import GRU, LSTM, RNN, Recurrent

_OURS: dict[type, type[Recurrent]] = {nn.RNN: RNN, nn.LSTM: LSTM, nn.GRU: GRU}


def convert(model: nn.Module) -> nn.Module:
    """Replace each torch.nn.RNN, LSTM and GRU in `model` by ours, in place, and return it (of a bare one: ours).

    The parameters are the same objects, so an optimizer that holds them keeps working, and hooks stay. What is not
    plainly one of these is left alone: a subclass, one whose parameters come from others (weight_norm, pruning), an
    LSTM with `proj_size`.
    """
    replaced: dict[int, Recurrent] = {}

    def ours(module: nn.RNNBase) -> Recurrent:
        if id(module) not in replaced:
            replaced[id(module)] = _from_torch(module)
        return replaced[id(module)]

    if _known(model):
        return ours(model)  # type: ignore[arg-type]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and _known(child):
                parent._modules[name] = ours(child)  # type: ignore[arg-type]
    return model


def _known(module: nn.Module) -> bool:
    if type(module) not in _OURS or vars(module).get("proj_size"):
        return False
    own = [name for name, _ in module.named_parameters(recurse=False)]
    return sorted(own) == sorted(module._flat_weights_names) and not module._buffers  # type: ignore[arg-type]


def _from_torch(module: nn.RNNBase) -> Recurrent:
    names = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional"]
    names += ["nonlinearity"] if type(module) is nn.RNN else []
    # torch warns of dropout with one layer and ignores it; ours refuses it
    dropout = module.dropout if module.num_layers > 1 else 0.0
    options = {name: getattr(module, name) for name in names}
    layer = _OURS[type(module)](**options, dropout=dropout, device="meta")
    for name, parameter in module.named_parameters(recurse=False):
        layer.register_parameter(name, parameter)
    vars(layer).update({name: value for name, value in vars(module).items() if "_hooks" in name})
    return layer.train(module.training)
