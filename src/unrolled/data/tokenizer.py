"""Texts to token numbers, through the `tokenizers` library: learned from the training texts, one JSON file.

Texts are first brought to Unicode's composed form (NFC), so that an accent is written in one way only. Characters and
words have an unknown token, number 0; bytes do not need one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from unrolled.config import DataConfig
from unrolled.data.values import DataError

UNKNOWN = "<unk>"


def train_tokenizer(texts: Sequence[str], data: DataConfig) -> Tokenizer:
    """A tokenizer of the kind `data.tokens` for these texts; the same texts in any order give the same tokenizer."""
    tokenizer = _bpe(texts, data) if data.tokens == "bpe" else _whole(texts, data)
    if data.max_length:
        tokenizer.enable_truncation(data.max_length)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[np.int64]]:
    """Token numbers of each text. <unk> written out in a text is ordinary text; an empty text has no tokens."""
    return [np.array(encoding.ids, dtype=np.int64) for encoding in tokenizer.encode_batch_fast(list(texts))]


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer from its JSON file. DataError where the file is missing or damaged."""
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except Exception as error:  # noqa: BLE001 (the library raises Exception itself)
        raise DataError(f"{path}: damaged, {error}") from None


def normalize(text: str, data: DataConfig) -> str:
    """The text as a tokenizer sees it: two texts equal here are the same input."""
    composed = unicodedata.normalize("NFC", text)
    return composed.lower() if data.lowercase else composed


def _whole(texts: Sequence[str], data: DataConfig) -> Tokenizer:
    """Characters or words: each is one entry of the vocabulary, the most frequent first."""
    tokenizer = Tokenizer(models.WordLevel())
    tokenizer.normalizer = _normalizer(data)
    if data.tokens == "words":
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    trainer = trainers.WordLevelTrainer(
        vocab_size=data.vocabulary_size - 1, min_frequency=data.min_frequency, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    number = tokenizer.get_vocab()
    tokens = [UNKNOWN, *sorted(number, key=number.__getitem__)]
    tokenizer.model = models.WordLevel({token: i for i, token in enumerate(tokens)}, UNKNOWN)
    return tokenizer


def _bpe(texts: Sequence[str], data: DataConfig) -> Tokenizer:
    """Byte-pair encoding over UTF-8 bytes: the 256 bytes, then the most frequent merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = _normalizer(data)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    most = 256 + 16 * sum(
        map(len, texts)
    )  # no more merges than bytes; the library reserves memory for all it may learn
    trainer = trainers.BpeTrainer(
        vocab_size=min(data.vocabulary_size, most),
        min_frequency=data.min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _normalizer(data: DataConfig) -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.NFC(), *([normalizers.Lowercase()] if data.lowercase else [])])
