"""Tokenizers and scaled numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unrolled.config import DataConfig
from unrolled.data.scaler import Scaler
from unrolled.data.tokenizer import encode, train_tokenizer

# Tokenizers


@pytest.mark.parametrize(
    ("options", "text", "tokens"),
    [
        ({}, "ab\nÅ ", ["a", "b", "\n", "Å", " "]),
        ({"lowercase": True}, "ABÅ", ["a", "b", "å"]),
        ({"tokens": "words"}, "Don't stop", ["Don", "'", "t", "stop"]),
        ({"tokens": "words"}, "<unk> ?", ["<", "unk", ">", "<unk>"]),
        ({"max_length": 2}, "abÅ", ["a", "b"]),
        ({}, "", []),
        ({}, "a\U0001f600", ["a", "<unk>"]),
    ],
)
def test_tokens(options, text, tokens):
    data = DataConfig(min_frequency=1, **options)
    training = ["ab\nA\u030a BÅ" * 2, "Don't stop <unk>", ""]
    tokenizer = train_tokenizer([t.lower() for t in training] if data.lowercase else training, data)
    assert tokenizer.encode(text).tokens == tokens
    assert encode(tokenizer, [text])[0].tolist() == [tokenizer.token_to_id(token) for token in tokens]
    if data.tokens != "bpe":
        assert tokenizer.token_to_id("<unk>") == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=6), st.text(max_size=20))
def test_bpe_is_lossless_up_to_composition(texts, text):
    import unicodedata

    tokenizer = train_tokenizer(texts, DataConfig(tokens="bpe", vocabulary_size=300, min_frequency=1))
    ids = encode(tokenizer, [text])[0].tolist()
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert tokenizer.get_vocab_size() <= 300


def test_the_vocabulary_holds_the_most_frequent_and_no_more():
    texts = ["a a a b b c", "b a"]
    tokenizer = train_tokenizer(texts, DataConfig(tokens="words", vocabulary_size=3, min_frequency=1))
    assert tokenizer.get_vocab() == {"<unk>": 0, "a": 1, "b": 2}
    rare = train_tokenizer(texts, DataConfig(tokens="words", min_frequency=3))
    assert rare.get_vocab() == {"<unk>": 0, "a": 1, "b": 2}


@pytest.mark.parametrize("tokens", ["characters", "words", "bpe"])
def test_the_order_of_texts_does_not_matter(tokens):
    texts = ["some words", "other words", "some more text", "中文 text"]
    data = DataConfig(tokens=tokens, vocabulary_size=280, min_frequency=1)
    assert train_tokenizer(texts, data).to_str() == train_tokenizer(texts[::-1], data).to_str()


def test_a_vocabulary_may_be_allowed_any_size():
    for tokens in ("characters", "words", "bpe"):
        data = DataConfig(tokens=tokens, vocabulary_size=2**63 - 1, min_frequency=1)
        assert train_tokenizer(["aa bb aa"], data).get_vocab_size() < 300


# Numbers


def test_scaler_by_hand():
    scaler = Scaler.fit([[[1, 5], [3, 5]], [], [[5, 5]]])
    expected = np.array([[(5 - 3) / np.sqrt(8 / 3), 2.0]])
    empty, one = scaler.encode([[], [[5, 7]]])
    assert empty.shape == (0, 2)
    np.testing.assert_allclose(one, expected, rtol=1e-6)
    again = Scaler.from_json(json.loads(json.dumps(scaler.to_json())), "scaler.json")
    np.testing.assert_array_equal(again.encode([[[5, 7]]])[0], one)


@pytest.mark.parametrize("value", [0.1, 1e-310, -9e37])
def test_a_channel_that_never_changes_is_only_centred(value):
    """The mean of equal numbers is rounded, so their deviation is not 0: 0.1 three times gives 1.4e-17."""
    scaler = Scaler.fit([[[value]] * 3])
    assert scaler.to_json() == {"mean": [value], "deviation": [1.0], "max_length": 0}
    assert not scaler.encode([[[value]]])[0].any()


def test_scaled_numbers_stay_in_float32():
    for training in ([[0.0], [1e-310]], [[0.0], [1e-30]], [[0.0], [9e37]]):
        (scaled,) = Scaler.fit([training]).encode([[[9e37], [-9e37]]])
        assert np.isfinite(scaled).all()
        assert scaled[0] > 1 > -1 > scaled[1] or training == [[0.0], [9e37]]


def test_scaler_keeps_the_first_steps():
    scaler = Scaler.fit([[[0.0], [2.0], [100.0]]], max_length=2)
    np.testing.assert_array_equal(scaler.encode([[[0.0], [2.0], [100.0]]])[0], [[-1.0], [1.0]])
