"""The cases of the operators of scaled dot-product attention: see cases.py."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

from hypothesis import strategies as st

from covering import covering

Options = dict[str, list[dict[str, Any]]]

_STEPS = cycle(
    [((3, 4), (2, 0), (1, 2)), ((1, 1),), ((0, 3), (2, 2)), ((5, 2),), ((2, 3), (3, 3), (0, 0)), ((4, 1), (1, 4))]
)
_SIZES = cycle([{"heads": 2, "size": 3}, {"heads": 1, "size": 1}, {"heads": 3, "size": 2}, {"heads": 1, "size": 5}])
_CHOICES: dict[str, list[dict[str, Any]]] = {
    "causal": [{}, {"causal": True}],
    "mask": [
        {},
        {"mask": "boolean"},
        {"mask": "added", "repeated": (1,)},
        {"mask": "learned", "repeated": (0, 2)},
        {"mask": "boolean", "repeated": (0, 1, 2)},
        {"mask": "learned", "repeated": (1, 3)},
    ],
    "slopes": [{}, {"slopes": True}],
    "p": [{}, {"p": 0.4}],
    "packed": [{}, {"packed": 2}, {"packed": 3}, {"value_size": 2}],
    "layout": [{}, {"layout": "time_major"}, {"layout": "batch_first"}, {"layout": "reverse"}],
    "weights": [{}, {"need_weights": True}],
    "scale": [{}, {"scale": -0.7}],
}
_EVERYTHING: dict[str, Any] = {"causal": True, "slopes": True, "p": 0.4, "need_weights": True}
_TINY: dict[str, Any] = {"steps": ((2, 3), (1, 1)), "heads": 1, "size": 1, "slopes": True, "need_weights": True}

OPTIONS: Options = {
    "attention": [
        *({**row, "steps": next(_STEPS), **next(_SIZES)} for row in covering(_CHOICES)),
        *(
            {**more, "steps": steps, "size": 2}
            for more, steps in product(({}, {**_EVERYTHING, "mask": "learned"}), ((), ((0, 0), (0, 2)), ((3, 0),)))
        ),
        {"p": 1.0, "steps": ((2, 3),)},
        {"need_weights": True, "steps": ((2, 3),), "size": 3},
        {"scale": 0.0, "mask": "boolean"},
    ],
    "multiplicative_attention": [
        {"steps": steps, "width": width, "weight": weight}
        for (steps, width), weight in product(
            [(((2, 3), (1, 4)), 3), (((1, 1),), 1), (((2, 0), (0, 3)), 2), ((), 2)], (True, False)
        )
    ],
}
# More keys than a block, more queries than a piece, one head for all threads, and rows that end within a vector.
LARGE: Options = {
    "attention": [
        {"steps": ((300, 700), (50, 3)), "heads": 1, "size": 19, "causal": True},
        {"steps": ((801, 40), (7, 300)), "size": 7, "p": 0.3, "layout": "time_major"},
        {"steps": ((517, 517),), "heads": 1, "size": 64, "packed": 3, "causal": True, "p": 0.1},
        {"steps": ((61, 61), (0, 0), (33, 33)) * 4, "heads": 3, "size": 35, "packed": 3, "slopes": True},
        {"steps": ((270, 530),), "size": 3, "value_size": 67, "mask": "added", "repeated": (1,), "causal": True},
        {"steps": ((120, 290),) * 2, "size": 5, "packed": 2, "mask": "boolean", "p": 0.3, "layout": "reverse"},
        # a few queries each
        {"steps": ((1, 700), (4, 530), (0, 9)), "heads": 3, "size": 67, "packed": 2, "causal": True},
        {
            "steps": ((3, 300),) * 3,
            "heads": 4,
            "size": 19,
            "value_size": 67,
            "mask": "boolean",
            "p": 0.3,
            "slopes": True,
        },
        {"steps": ((2, 270),), "heads": 5, "size": 64, "mask": "added", "repeated": (1,), "layout": "time_major"},
    ],
}
TEETH: Options = {
    "attention": [
        {"steps": ((2, 3), (1, 2)), "heads": 1, "size": 2, "causal": True, "p": 0.4},
        {**_EVERYTHING, "steps": ((2, 3), (1, 1)), "size": 1, "mask": "learned", "repeated": (2,)},
        {**_TINY, "mask": "boolean", "scale": 0.6},
        {**_TINY, "steps": ((3, 4),), "mask": "added"},
        {**_TINY, "causal": True},
    ],
    "multiplicative_attention": [
        {"steps": ((2, 3), (1, 2)), "width": 2},
        {"steps": ((2, 2),), "width": 2, "weight": False},
    ],
}

# Changes of the backward that no judge can tell from the original: see test_teeth.py.
_FORM = "only its shape or its type is read here"
EQUIVALENT: dict[str, dict[str, str]] = {
    "attention": {
        **{
            f"{where}, {change} {what}": _FORM
            for change in ("drop", "shift", "scale", "negate")
            for where, what in (
                ("_scores", "mask in if mask is not None and mask.is_floating_point():"),
                ("_scores", "s in return torch.where(_seen(saved, s), s, -torch.inf) (2)"),
                (
                    "attention_backward",
                    "mask in return AttentionGrads(dq=_joined(dq, queries, len(q)), dk=_joined(dk, keys, len(k)), "
                    "dv=_j ...",
                ),
            )
        },
        **{
            f"_seen, {change} saved.mask in queries, keys, mask = (saved.queries, saved.keys, saved.mask)": _FORM
            for change in ("drop", "scale", "negate")
        },
        **{
            f"_seen, {what}": "what is -inf here is added too; that it is ruled out as well concerns torch's "
            "differentiation of the forward"
            for what in (
                "another comparison in read > -torch.inf in "
                "seen = seen & (read if mask.dtype == torch.bool else read > -torch.inf)",
                *(
                    f"{change} {part}"
                    for change in ("drop", "scale", "negate")
                    for part in (
                        "mask in read = mask[:, :, :s.shape[2], :s.shape[3]]",
                        "mask[:, :, :s.shape[2], :s.shape[3]] in read = mask[:, :, :s.shape[2], :s.shape[3]]",
                        "read in seen = seen & (read if mask.dtype == torch.bool else read > -torch.inf)",
                    )
                ),
            )
        },
        "attention_backward, shift ds * distance(queries, keys).abs() in return AttentionGrads(dq=_joined(dq, queries, "
        "len(q)), dk=_joined(dk, keys, len(k)), dv=_j ...": "a sum does not depend on the order of its terms",
    },
    "multiplicative_attention": {},
}

_WIDTHS = st.one_of(st.integers(1, 40), st.sampled_from([1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 97]))
_COUNTS = st.one_of(st.integers(0, 9), st.sampled_from([0, 1, 2, 15, 16, 17, 47, 48, 49, 64, 65]))

DRAWS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "attention": st.fixed_dictionaries(
        {
            "steps": st.lists(st.tuples(_COUNTS, _COUNTS), max_size=4),
            "heads": st.integers(1, 3),
            "size": _WIDTHS,
            "layout": st.sampled_from(["ragged", "reverse", "batch_first", "time_major"]),
            "causal": st.booleans(),
            "mask": st.sampled_from([None, None, "boolean", "added", "learned"]),
            "repeated": st.lists(st.integers(0, 3), max_size=3, unique=True),
            "slopes": st.booleans(),
            "scale": st.sampled_from([None, None, 1.0, -0.3]),
            "p": st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
            "packed": st.sampled_from([1, 2, 3]),
            "need_weights": st.booleans(),
        }
    ),
}
