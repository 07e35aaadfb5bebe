"""Our layers in the place of torch's, inside any model."""

from __future__ import annotations

from torch import nn

from unrolled.nn.recurrent import RNN


def convert(model: nn.Module) -> nn.Module:
    """Replace each torch.nn.RNN in `model` by ours, in place, and return the model (a bare RNN: its replacement).

    The parameters are the same objects, so an optimizer that holds them keeps working. A subclass of torch.nn.RNN is
    left alone: it may do something else.
    """
    replaced: dict[int, RNN] = {}

    def ours(module: nn.RNN) -> RNN:
        if id(module) not in replaced:
            replaced[id(module)] = _from_torch(module)
        return replaced[id(module)]

    if type(model) is nn.RNN:
        return ours(model)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is nn.RNN:
                parent._modules[name] = ours(child)
    return model


def _from_torch(module: nn.RNN) -> RNN:
    names = ("input_size", "hidden_size", "num_layers", "nonlinearity", "bias", "batch_first", "bidirectional")
    # torch warns of dropout with one layer and ignores it; ours refuses it
    dropout = module.dropout if module.num_layers > 1 else 0.0
    rnn = RNN(**{name: getattr(module, name) for name in names}, dropout=dropout, device="meta")
    for name, parameter in module.named_parameters(recurse=False):
        rnn.register_parameter(name, parameter)
    return rnn.train(module.training)
