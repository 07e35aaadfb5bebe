"""Peers beyond torch, on request: Keras on JAX, a jitted JAX scan, ONNX Runtime (inference). Padded cases."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from benchmarks.harness import Job, Run
    from benchmarks.recurrent import Shape

# What to install, and what must then be importable
PACKAGES = {"keras": ("keras", "jax"), "jax": ("jax",), "onnxruntime": ("onnx", "onnxruntime")}
REST = 0.01  # seconds between two sides, since each library has threads of its own that spin for a while


class Side(NamedTuple):
    """One call to be timed, and how its result reads in torch's layout."""

    call: Callable[[], Any]
    read: Callable[[Any], Sequence[Any]]


def missing(names: Sequence[str]) -> str | None:
    """What is wrong with this choice of peers, and what to do about it."""
    if unknown := [name for name in names if name not in PACKAGES]:
        return f"--peers knows {', '.join(PACKAGES)}; found {', '.join(unknown)}"
    wanted = dict.fromkeys(package for name in names for package in PACKAGES[name])
    absent = [package for package in wanted if importlib.util.find_spec(package) is None]
    return f"--peers {','.join(names)} needs packages: pip install {' '.join(absent)}" if absent else None


def jobs(run: Run, names: Sequence[str]) -> list[Job]:
    from benchmarks.harness import Job
    from benchmarks.recurrent import PADDED, name
    from benchmarks.sides import CELLS

    cases = [(cell, shape) for cell in CELLS for shape, *_ in PADDED]
    return [Job(name(cell, shape, "peers"), partial(peers, cell, shape, run, names)) for cell, shape in cases]


def peers(cell: str, shape: Shape, run: Run, names: Sequence[str]) -> list[dict[str, Any]]:
    import torch

    from benchmarks.harness import goal, measured, over, race, same
    from benchmarks.recurrent import name
    from benchmarks.sides import Training, check, inference, pair

    os.environ["KERAS_BACKEND"] = "jax"
    t, b, i, h = shape
    ours, theirs = pair(cell, i, h)
    x, dy = torch.randn(t, b, i), torch.randn(t, b, h)
    training: dict[str, Any] = {"ours": Training(ours, x, dy), "torch padded": Training(theirs, x, dy)}
    calls: dict[str, Any] = {"ours": inference(ours, x), "torch padded": inference(theirs, x)}
    check(training["ours"](), training["torch padded"]())
    check(calls["ours"](), calls["torch padded"]())
    weights = [p.detach().numpy() for p in theirs.parameters()]  # weight_ih, weight_hh, bias_ih, bias_hh
    dx, y = training["torch padded"]()[0], calls["torch padded"]()[0]
    for peer in names:
        build = {"keras": keras_sides, "jax": jax_sides, "onnxruntime": onnxruntime_sides}[peer]
        for what, side in build(cell, weights, x.numpy(), dy.numpy(), run.threads).items():
            expected = {"training": [dx, *theirs.parameters()], "inference": [y]}[what]
            for a, e in zip(side.read(side.call()), expected, strict=False):
                same(torch.from_numpy(a), e if what == "inference" or e is dx else e.grad)
            (training if what == "training" else calls)[peer] = side.call
    rows = []
    for what, sides in (("training", training), ("inference", calls)):
        if len(sides) > 2:
            times = race(sides, run.repeats, REST)
            asked = {"onnxruntime": 1.0} if what == "inference" else {}
            others = [side for side in sides if side != "ours"]
            goals = [goal(f"{side} / ours", over(times, side, "ours"), at_least=asked.get(side)) for side in others]
            rows.append(measured("peers", name(cell, shape, "peers"), what, times, goals))
    return rows


def blocks(weight: Any, order: Sequence[int]) -> Any:
    """The gates of a weight or bias (G*H, ...) in another order."""
    import numpy as np

    parts = np.split(weight, len(order))
    return np.concatenate([parts[gate] for gate in order])


# torch: RNN (a), GRU (r, z, n), LSTM (i, f, g, o)
KERAS_GATES = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 1, 2, 3)}
ONNX_GATES = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2)}


def keras_sides(cell: str, weights: Sequence[Any], x: Any, dy: Any, threads: int) -> dict[str, Side]:
    """Batch-major, as Keras is. Its one bias stands for torch's two, so gradients of biases are not compared."""
    import jax
    import keras
    import numpy as np

    weight_ih, weight_hh, *biases = (blocks(w, KERAS_GATES[cell]) for w in weights)
    hidden, inputs = weight_hh.shape[1], weight_ih.shape[1]
    kind = {"RNN": keras.layers.SimpleRNN, "GRU": keras.layers.GRU, "LSTM": keras.layers.LSTM}[cell]
    layer = kind(hidden, return_sequences=True)
    layer.build((None, None, inputs))
    layer.set_weights([weight_ih.T, weight_hh.T, np.stack(biases) if cell == "GRU" else sum(biases)])
    trained = [v.value for v in layer.trainable_variables]
    fixed = [v.value for v in layer.non_trainable_variables]
    batch, dbatch = (jax.device_put(np.ascontiguousarray(a.swapaxes(0, 1))) for a in (x, dy))

    def forward(variables: Any, x: Any) -> Any:
        return layer.stateless_call(variables, fixed, x)[0]

    step = jax.jit(jax.value_and_grad(lambda v, x, dy: (forward(v, x) * dy).sum(), argnums=(0, 1)))
    infer = jax.jit(forward)

    def read(result: Any) -> list[Any]:
        (dweight_ih, dweight_hh, *_), dx = result[1]
        back = np.argsort(KERAS_GATES[cell])
        return [np.array(dx).swapaxes(0, 1), *(blocks(np.array(d).T, back) for d in (dweight_ih, dweight_hh))]

    return {
        "training": Side(lambda: jax.block_until_ready(step(trained, batch, dbatch)), read),
        "inference": Side(lambda: jax.block_until_ready(infer(trained, batch)), lambda y: [np.array(y).swapaxes(0, 1)]),
    }


def jax_sides(cell: str, weights: Sequence[Any], x: Any, dy: Any, threads: int) -> dict[str, Side]:
    """One product for the inputs of all steps, then `lax.scan`: what a careful JAX user writes."""
    import jax
    import numpy as np
    from jax import numpy as jnp

    def step(state: Any, a: Any, weight_hh: Any, bias_hh: Any) -> tuple[Any, Any]:
        h = state[0]
        b = h @ weight_hh.T + bias_hh
        if cell == "RNN":
            h = jnp.tanh(a + b)
            return (h,), h
        if cell == "GRU":
            (ar, az, an), (br, bz, bn) = jnp.split(a, 3, -1), jnp.split(b, 3, -1)
            z = jax.nn.sigmoid(az + bz)
            h = (1 - z) * jnp.tanh(an + jax.nn.sigmoid(ar + br) * bn) + z * h
            return (h,), h
        i, f, g, o = jnp.split(a + b, 4, -1)
        c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def forward(weights: Any, x: Any) -> Any:
        weight_ih, weight_hh, bias_ih, bias_hh = weights
        zeros = jnp.zeros((x.shape[1], weight_hh.shape[1]), x.dtype)
        initial = (zeros, zeros) if cell == "LSTM" else (zeros,)
        return jax.lax.scan(lambda s, a: step(s, a, weight_hh, bias_hh), initial, x @ weight_ih.T + bias_ih)[1]

    train = jax.jit(jax.value_and_grad(lambda w, x, dy: (forward(w, x) * dy).sum(), argnums=(0, 1)))
    infer = jax.jit(forward)
    values, inputs, cotangent = (jax.device_put(a) for a in (list(weights), x, dy))
    return {
        "training": Side(
            lambda: jax.block_until_ready(train(values, inputs, cotangent)),
            lambda result: [np.array(a) for a in (result[1][1], *result[1][0])],
        ),
        "inference": Side(lambda: jax.block_until_ready(infer(values, inputs)), lambda y: [np.array(y)]),
    }


def onnxruntime_sides(cell: str, weights: Sequence[Any], x: Any, dy: Any, threads: int) -> dict[str, Side]:
    """One node of the layer's own kind, with torch's weights; inference only."""
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, checker, helper, numpy_helper

    weight_ih, weight_hh, *biases = (blocks(w, ONNX_GATES[cell]) for w in weights)
    constants = {"W": weight_ih[None], "R": weight_hh[None], "B": np.concatenate(biases)[None]}
    own = {"linear_before_reset": 1} if cell == "GRU" else {}
    node = helper.make_node(cell, ["X", *constants], ["Y"], hidden_size=weight_hh.shape[1], **own)
    graph = helper.make_graph(
        [node],
        cell,
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, (len(x), 1, *dy.shape[1:]))],
        [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    checker.check_model(model)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    settings.add_session_config_entry(
        "session.force_spinning_stop", "1"
    )  # after each run: they would slow the next side
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return {"inference": Side(lambda: session.run(["Y"], {"X": x}), lambda result: [result[0][:, 0]])}
