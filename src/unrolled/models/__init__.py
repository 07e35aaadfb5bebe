"""Networks composed from `unrolled.nn`: embeddings, encoders, heads."""

from unrolled.models.classifier import SequenceClassifier as SequenceClassifier
