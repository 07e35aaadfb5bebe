"""Networks composed from `unrolled.nn`: embeddings, encoders, heads."""

from __future__ import annotations

from typing import Any

from unrolled.models.classifier import Classifier as Classifier
from unrolled.models.classifier import SequenceClassifier as SequenceClassifier
from unrolled.models.transformer import TransformerClassifier as TransformerClassifier


def classifier(num_classes: int, *, model: str = "rnn", **options: Any) -> Classifier:
    """The network that `model` names, with the options it has: `sections.ModelConfig`."""
    if model == "transformer":
        return TransformerClassifier(num_classes, **options)
    if model == "attention":
        return SequenceClassifier(num_classes, model=options.pop("encoder"), reading="attention", **options)
    return SequenceClassifier(num_classes, model=model, **options)
