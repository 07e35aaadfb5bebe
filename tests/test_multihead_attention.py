"""unrolled.nn.MultiheadAttention against torch.nn: every argument, every mask, every form of input."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import unrolled
from covering import Option, covering
from peers import agree, results
from tolerances import ATTENTION, DEVIATIONS, ROUNDING, close, same_bits
from unrolled import Ragged
from unrolled.verify.judges import relative_error

WIDTH, BATCH, QUERIES, KEYS = 8, 3, 4, 5
INFINITY = float("inf")
CHOICES: dict[str, list[Option]] = {
    "heads": [{"num_heads": heads} for heads in (1, 2, 4)],
    "batch_first": [{}, {"batch_first": True}],
    "bias": [{}, {"bias": False}],
    "sources": [{"sources": s} for s in ("self", "cross", "three", "sizes", "alone")],
    "extra": [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}],
    "mask": [{}, *({"mask": m} for m in ("bool2", "bool3", "float2", "float3", "causal"))],
    "padding": [{}, *({"padding": p} for p in ("suffix", "holes", "infinite", "numbers"))],
    "average": [{}, {"average_attn_weights": False}],
    "dtype": [{}, {"dtype": torch.float32}],
}
ROWS = covering(CHOICES)
_OWN = ("sources", "mask", "padding", "average_attn_weights")


def mask_of(kind: str | None, heads: int, queries: int, keys: int, batch: int, dtype: torch.dtype) -> Tensor | None:
    """torch's: True = may not attend. Key 0 stays for every query, so that torch has no NaN."""
    if kind is None:
        return None
    if kind == "causal":
        return torch.ones(queries, keys, dtype=torch.bool).triu(1)
    shape = (queries, keys) if kind.endswith("2") else (batch * heads, queries, keys)
    if kind.startswith("float"):
        return torch.randn(shape, dtype=dtype)
    mask = torch.rand(shape) < 0.5
    mask[..., 0] = False
    return mask


def padding_of(kind: str | None, batch: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    if kind is None:
        return None
    if kind == "numbers":
        numbers = torch.randn(batch, keys, dtype=dtype)
        numbers[0, 1] = -INFINITY
        return numbers
    mask = torch.zeros(batch, keys, dtype=torch.bool)
    mask[0, -1] = mask[1 % batch, -2:] = True
    if kind != "suffix":
        mask[-1, 1] = True
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -INFINITY) if kind == "infinite" else mask


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The same in numbers: torch warns where masks of two dtypes meet."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -INFINITY)


def twins(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    ours = unrolled.nn.MultiheadAttention(WIDTH, dtype=dtype, **options)
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(torch.randn_like(p) / 2)
    peer = nn.MultiheadAttention(WIDTH, dtype=dtype, **options)
    peer.load_state_dict(ours.state_dict())
    return ours, peer


@pytest.mark.parametrize("options", ROWS, ids=str)
def test_everything_that_torch_has(options: dict[str, Any], backend: str) -> None:
    options = dict(options)
    sources, mask_kind, padding_kind, average = (options.pop(name, None) for name in _OWN)
    dtype = options.get("dtype", torch.float64)
    sizes = {"kdim": 5, "vdim": 7} if sources == "sizes" else {}
    ours, peer = twins(**options, **sizes)
    batch = 1 if sources == "alone" else BATCH
    queries, keys = QUERIES, QUERIES if sources == "self" or mask_kind == "causal" else KEYS
    shapes = {"self": [(queries, WIDTH)], "cross": [(queries, WIDTH), (keys, WIDTH)]}.get(
        sources, [(queries, WIDTH), (keys, sizes.get("kdim", WIDTH)), (keys, sizes.get("vdim", WIDTH))]
    )

    def lead(steps: int) -> tuple[int, ...]:
        if sources == "alone":
            return (steps,)
        return (batch, steps) if options.get("batch_first") else (steps, batch)

    inputs = [torch.randn(*lead(steps), width, dtype=dtype) for steps, width in shapes]
    mask = mask_of(mask_kind, options["num_heads"], queries, keys, batch, dtype)
    padding = padding_of(padding_kind, batch, keys, dtype)
    if padding is not None and sources == "alone":
        padding = padding[0]

    def call(module: nn.Module, *x: Tensor, change: Callable[..., Any] = lambda m, _: m) -> Any:
        x = x * 3 if len(x) == 1 else (*x, x[1]) if len(x) == 2 else x
        given = {"attn_mask": change(mask, x[0].dtype), "key_padding_mask": change(padding, x[0].dtype)}
        return module(*x, **given, average_attn_weights=average is None)

    def other(module: nn.Module, *x: Tensor) -> Any:
        in_double = [m if m is None or m.dtype == torch.bool else m.double() for m in (mask, padding)]
        both = len({m.dtype for m in in_double if m is not None}) > 1
        x = x * 3 if len(x) == 1 else (*x, x[1]) if len(x) == 2 else x
        given = [additive(m, torch.float64) if both else m for m in in_double]
        return module(*x, attn_mask=given[0], key_padding_mask=given[1], average_attn_weights=average is None)

    agree(ours, peer, call, *inputs, other=other, terms=ATTENTION)
    o, weights = ours(*(inputs * 3 if len(inputs) == 1 else (inputs + inputs[1:])[:3]), need_weights=False)
    assert weights is None
    assert o.dtype == dtype


@pytest.mark.parametrize("batch_first", [False, True])
def test_without_weights_it_is_the_same(batch_first: bool, backend: str) -> None:
    ours, _ = twins(num_heads=2, batch_first=batch_first)
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64)
    expected = results(ours, lambda m, x: m(x, x, x)[:1], x)
    for found, reference in zip(
        results(ours, lambda m, x: m(x, x, x, need_weights=False)[:1], x), expected, strict=True
    ):
        close(found, reference, x.numel() + ATTENTION)


def test_arguments_and_first_values_are_torchs() -> None:
    for method in ("__init__", "forward"):
        own, theirs = (
            list(inspect.signature(getattr(m.MultiheadAttention, method)).parameters.values())
            for m in (unrolled.nn, nn)
        )
        own = [p for p in own if p.kind != inspect.Parameter.KEYWORD_ONLY]
        assert [(p.name, p.default) for p in own] == [(p.name, p.default) for p in theirs]
    for options in ({}, {"kdim": 5}, {"add_bias_kv": True, "bias": False}, {"positions": "alibi"}):
        torch.manual_seed(3)
        ours = unrolled.nn.MultiheadAttention(WIDTH, 2, **options)
        torch.manual_seed(3)
        peer = nn.MultiheadAttention(WIDTH, 2, **{k: v for k, v in options.items() if k != "positions"})
        assert list(ours.state_dict()) == list(peer.state_dict())
        for found, expected in zip(ours.parameters(), peer.parameters(), strict=True):
            same_bits(found, expected)
        assert repr(ours) == repr(peer)


# What torch gets wrong


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("form", ["mask", "padding", "numbers"])
def test_a_query_that_may_attend_to_nothing_gets_the_bias_and_gives_no_gradient(
    form: str, need_weights: bool, backend: str
) -> None:
    ours, _ = twins(num_heads=2, batch_first=True)
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(BATCH * 2, QUERIES, QUERIES, dtype=torch.bool)
    mask[:2] = True
    padding = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    padding[0] = True
    given = {"attn_mask": mask} if form == "mask" else {"key_padding_mask": padding}
    if form == "numbers":
        given = {"key_padding_mask": additive(padding, torch.float64)}
    o, weights = ours(x, x, x, need_weights=need_weights, **given)
    same_bits(o[0], ours.out_proj.bias.expand(QUERIES, WIDTH))
    if weights is not None:
        assert not bool(weights[0].any())
        close(weights[1:].sum(-1), torch.ones(BATCH - 1, QUERIES, dtype=torch.float64), QUERIES)
    grads = torch.autograd.grad(o.pow(2).sum(), [x, *ours.parameters()])
    assert all(bool(g.isfinite().all()) for g in grads)
    assert not bool(grads[0][0].any())
    rest = x[1:].detach().requires_grad_()
    o, _ = ours(rest, rest, rest, need_weights=need_weights)
    alone = torch.autograd.grad(o.pow(2).sum(), [rest, ours.in_proj_weight])
    close(grads[0][1:], alone[0], ATTENTION)
    close(grads[1], alone[1], ATTENTION)


def test_causal_is_a_command_with_a_mask_and_without(backend: str) -> None:
    ours, _ = twins(num_heads=2, batch_first=True)
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64)
    later = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
    other = torch.rand(QUERIES, QUERIES) < 0.3
    expected, weights = ours(x, x, x, attn_mask=later)
    assert not bool(weights[:, later].any())
    for name in ("causal", "is_causal"):
        for more in ({}, {"attn_mask": later}, {"attn_mask": additive(later, torch.float64)}):
            same_bits(ours(x, x, x, **{name: True}, **more)[0], expected)
        found = ours(x, x, x, attn_mask=other, **{name: True})
        for own, reference in zip(found, ours(x, x, x, attn_mask=other | later), strict=True):
            close(own, reference, ATTENTION)


def test_the_last_query_of_a_causal_attention_sees_every_key(backend: str) -> None:
    ours, _ = twins(num_heads=2, batch_first=True)
    q, k = (torch.randn(BATCH, n, WIDTH, dtype=torch.float64) for n in (QUERIES, KEYS))
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES)
    for own, reference in zip(ours(q, k, k, causal=True), ours(q, k, k, attn_mask=~seen), strict=True):
        close(own, reference, ATTENTION)


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@given(data=st.data())
def test_a_batch_equals_its_sequences_alone(extra: dict[str, Any], backend: str, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4))
    causal, positions = data.draw(st.booleans()), data.draw(st.sampled_from([None, "rotary", "alibi"]))
    ours, _ = twins(num_heads=2, **extra) if extra else (None, None)
    if not extra:
        ours = unrolled.nn.MultiheadAttention(WIDTH, 2, positions=positions, dtype=torch.float64)
    queries, keys = ([torch.randn(p[n], WIDTH, dtype=torch.float64) for p in pairs] for n in (0, 1))
    o, weights = ours(Ragged.from_list(queries), ragged := Ragged.from_list(keys), ragged, causal=causal)
    more = len(extra)
    for b, (q, k) in enumerate(zip(queries, keys, strict=True)):
        alone, own = ours(q, k, k, causal=causal)
        close(o[b], alone, ATTENTION)
        close(weights[b, : len(q), : len(k)], own[:, : len(k)], ATTENTION)
        longest = weights.shape[2] - more
        close(weights[b, : len(q), longest:], own[:, len(k) :], ATTENTION)
        assert not bool(weights[b, len(q) :, :longest].any())
        assert not bool(weights[b, :, len(k) : longest].any())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # with strides
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("itself", [False, True])
def test_every_form_of_input_is_the_same_batch(itself: bool, batch_first: bool, backend: str) -> None:
    ours, _ = twins(num_heads=2, batch_first=batch_first)
    lengths, key_lengths = [3, 1, 4], [3, 1, 4] if itself else [5, 2, 1]
    q, k = ([torch.randn(n, WIDTH, dtype=torch.float64) for n in own] for own in (lengths, key_lengths))
    k = q if itself else k
    ragged, ragged_keys = Ragged.from_list(q), Ragged.from_list(k)
    expected, weights = ours(ragged, *[ragged if itself else ragged_keys] * 2)
    padded, padded_keys = (r.to_padded(batch_first, 6, float("nan")) for r in (ragged, ragged_keys))
    given = [padded] * 3 if itself else [padded, padded_keys, padded_keys]
    o, w = ours(*given, lengths=lengths, **({} if itself else {"key_lengths": key_lengths}))
    same_bits(o, expected.to_padded(batch_first, 6))
    same_bits(w[:, : weights.shape[1], : weights.shape[2]], weights)
    assert w.shape == (3, 6, 6)
    assert w[:, weights.shape[1] :].any() == w[:, :, weights.shape[2] :].any() == False  # noqa: E712
    nested, nested_keys = (torch.nested.as_nested_tensor(x, layout=torch.jagged) for x in (q, k))
    o, _ = ours(nested, *[nested if itself else nested_keys] * 2)
    assert o.is_nested
    same_bits(o.values(), expected.values)
    packed, packed_keys = (pack_sequence(x, enforce_sorted=False) for x in (q, k))
    o, _ = ours(packed, *[packed if itself else packed_keys] * 2)
    same_bits(Ragged.from_packed(o).values, expected.values)
    strided, strided_keys = (torch.nested.as_nested_tensor(x, layout=torch.strided) for x in (q, k))
    o, _ = ours(strided, *[strided if itself else strided_keys] * 2)
    for own, reference in zip(o.unbind(), expected, strict=True):
        same_bits(own, reference)


def test_rotary_positions_depend_on_the_distance_alone(backend: str) -> None:
    ours = unrolled.nn.MultiheadAttention(WIDTH, 2, positions="rotary", dtype=torch.float64)
    plain = unrolled.nn.MultiheadAttention(WIDTH, 2, dtype=torch.float64)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    whole, _ = ours(x, x, x, causal=True)
    assert relative_error(plain(x, x, x, causal=True)[0], whole) > ROUNDING
    close(ours(x[3:], x, x, causal=True)[0], whole[3:], ATTENTION)
    shuffled = x[torch.tensor([1, 0, 2, 3, 4, 5])]
    assert relative_error(ours(shuffled, shuffled, shuffled)[0][5], ours(x, x, x)[0][5]) > ROUNDING
    close(plain(shuffled, shuffled, shuffled)[0][5], plain(x, x, x)[0][5], ATTENTION)


def test_linear_biases_lower_the_score_by_the_distance(backend: str) -> None:
    ours = unrolled.nn.MultiheadAttention(WIDTH, 2, positions="alibi", dtype=torch.float64)
    plain = unrolled.nn.MultiheadAttention(WIDTH, 2, dtype=torch.float64)
    assert plain.load_state_dict(ours.state_dict()).missing_keys == []
    x = torch.randn(BATCH, 6, WIDTH, dtype=torch.float64)
    t = torch.arange(BATCH)
    bias = -torch.tensor([2.0**-4, 2.0**-8])[:, None, None] * (t[:, None] - t).abs()
    mask = bias.repeat(6, 1, 1).double()
    for own, reference in zip(ours(x, x, x), plain(x, x, x, attn_mask=mask), strict=True):
        close(own, reference, ATTENTION)


def test_dropout_drops_the_weights_at_its_rate_and_by_the_keys(backend: str) -> None:
    ours = unrolled.nn.MultiheadAttention(WIDTH, 2, 0.4, batch_first=True, dtype=torch.float64)
    x = torch.randn(BATCH, 40, WIDTH, dtype=torch.float64)

    def run(x: Any, **options: Any) -> tuple[Any, Tensor]:
        torch.manual_seed(7)
        return ours(x, x, x, average_attn_weights=False, **options)

    (_, dropped), (_, whole) = run(x), ours.eval()(x, x, x, average_attn_weights=False)
    ours.train()
    kept = dropped != 0
    close(dropped, torch.where(kept, whole / 0.6, 0), ATTENTION)
    assert abs(float(kept.double().mean()) - 0.6) < DEVIATIONS * (0.6 * 0.4 / kept.numel()) ** 0.5
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[:, 0], kept[:, 1])
    o, weights = run(x[[1, 0, 2]], keys=[1, 0, 2])
    close(weights[[1, 0, 2]], dropped, ATTENTION)
    close(o[[1, 0, 2]], run(x)[0], ATTENTION)
    lengths = [40, 3, 0]
    o, weights = run(x, lengths=lengths)
    close(weights[0], dropped[0], ATTENTION)
    alone, _ = run(Ragged.from_padded(x, lengths, batch_first=True))
    close(o, alone.to_padded(batch_first=True), ATTENTION)


def test_a_learned_mask_receives_its_gradient(backend: str) -> None:
    ours, peer = twins(num_heads=2, batch_first=True)
    x = torch.randn(BATCH, QUERIES, WIDTH, dtype=torch.float64)
    for shape in ((QUERIES, QUERIES), (BATCH * 2, QUERIES, QUERIES)):
        mask = torch.randn(shape, dtype=torch.float64)
        agree(ours, peer, lambda m, x, mask: m(x, x, x, attn_mask=mask), x, mask, terms=ATTENTION)
    padding = torch.randn(BATCH, QUERIES, dtype=torch.float64)
    agree(ours, peer, lambda m, x, padding: m(x, x, x, key_padding_mask=padding), x, padding, terms=ATTENTION)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 3), "multiple of num_heads, found 8 and 3"),
        ((0, 1), "embed_dim must be at least 1, found 0"),
        ((8, 2, 1.5), "found 1.5"),
        ((8, 2, -0.1), "found -0.1"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unrolled.nn.MultiheadAttention(*arguments)


def test_wrong_positions() -> None:
    with pytest.raises(ValueError, match='"rotary", "alibi" or None, found \'learned\''):
        unrolled.nn.MultiheadAttention(8, 2, positions="learned")
    with pytest.raises(ValueError, match="even size, found 3"):
        unrolled.nn.MultiheadAttention(9, 3, positions="rotary")


def test_wrong_inputs() -> None:
    ours = unrolled.nn.MultiheadAttention(WIDTH, 2)
    x, k = torch.randn(QUERIES, BATCH, WIDTH), torch.randn(KEYS, BATCH, WIDTH)
    ragged = Ragged(torch.randn(5, WIDTH), [0, 2, 5])
    mask: Callable[..., Tensor] = lambda *shape: torch.zeros(shape, dtype=torch.bool)  # noqa: E731
    for inputs, options, message in [
        ((x[..., :3],) * 3, {}, "reads 8 features, the input has 3"),
        ((x, k[..., :3], k), {}, "reads 8 features, the input has 3"),
        ((x[None],) * 3, {}, "found 4-D"),
        ((x, k[:, :2], k[:, :2]), {}, "3 sequences of queries cannot read 2"),
        ((x, k, k[:4]), {}, "15 keys cannot go with 12 values"),
        ((x, k, k), {"attn_mask": mask(5, 4)}, r"\(4, 5\) or \(6, 4, 5\), found \(5, 4\)"),
        ((x, k, k), {"attn_mask": mask(3, 4, 5)}, r"found \(3, 4, 5\)"),
        ((x, k, k), {"key_padding_mask": mask(3, 4)}, r"\(3, 5\), found \(3, 4\)"),
        ((x, x, x), {"key_padding_mask": mask(4, 3)}, r"\(3, 4\), found \(4, 3\)"),
        ((x, x, x), {"lengths": [4, 1, 5]}, r"lie in \[0, 4\]"),
        ((x[:, 0],) * 3, {"lengths": [4]}, "belongs to a padded batch"),
        ((ragged,) * 3, {"lengths": [4, 1]}, "belongs to a padded batch"),
        ((ragged,) * 3, {"key_padding_mask": mask(2, 3)}, "belongs to a padded batch"),
        ((ragged, ragged, ragged.with_values(ragged.values)), {"key_padding_mask": mask(2, 3)}, "padded batch"),
        ((x, k, k), {"key_lengths": [1, 2, 3], "key_padding_mask": mask(3, 5)}, "give one of them"),
        ((x, x, x), {"keys": [1, 2]}, "one number for each of 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            ours(*inputs, **options)
    for name, wrong in (("attn_mask", mask(4, 5).int()), ("key_padding_mask", mask(3, 5).to(torch.uint8))):
        with pytest.raises(TypeError, match="must be bool, True = may not attend, or floating"):
            ours(x, k, k, **{name: wrong})
