"""The groups of options: data, model, memory, training.

Relative paths are relative to the working directory. 0 means "off" or "no limit" where a field says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def as_text(value: Any) -> Any:
    """What a YAML file can hold and a file can be called: no NUL and, in Unicode, no half of a surrogate pair."""
    if isinstance(value, str | Path) and re.search("[\0\ud800-\udfff]", str(value)):
        raise ValueError(f"expected Unicode text without NUL, found {str(value)!r}")
    return value


def not_empty(value: Any) -> Any:
    if value == "":
        raise ValueError("expected the name of a file or folder, found ''")
    return value


MOST = 1_000_000  # of sizes and lengths

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**63 - 1)]
Size = Annotated[int, Field(ge=1, le=MOST)]
Share = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, BeforeValidator(as_text)]
Name = Annotated[str, BeforeValidator(as_text), BeforeValidator(not_empty)]


class Section(BaseModel):
    """A group of options: frozen, unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            for key in given:
                if key not in cls.model_fields:
                    raise PydanticCustomError("unknown_key", "unknown key", {"key": str(key)})
        return given

    def _unused(self, why: str, *names: str, prefix: str = "") -> None:
        """Refuse options that would change nothing: each of `names` must still have its default."""
        for name in names:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                raise ValueError(f"{prefix}{name} = {value!r} has no effect {why}: remove it")


class DataConfig(Section):
    """Where the examples come from and how they become sequences of tokens or numbers."""

    train: Name | None = None
    """File of labelled examples to train on (.gz is read too), or builder:NAME for data made by the package."""
    valid: Name | None = None
    """File of examples to choose the best model with; without one, valid_fraction of the training file."""
    test: Name | None = None
    """File of examples for the final score; without one, test_fraction of the training file."""
    valid_fraction: Share = 0.1
    """Share of the training file kept for validation, where no valid file is given; 0 = none."""
    test_fraction: Share = 0.1
    """Share of the training file kept for the test, where no test file is given; 0 = none."""
    split_seed: Count = 42
    """Which examples go where when the training file is split; equal inputs always stay together."""
    format: Literal["auto", "csv", "tsv", "jsonl", "pairs"] = "auto"
    """pairs = lines label<TAB>text without header or quoting; auto = by the name's ending, else pairs."""
    text_column: Text = "text"
    """Column (CSV, TSV) or field (JSONL) that holds the text."""
    label_column: Text = "label"
    """Column or field that holds the label; line breaks, tabs and blanks in it count as one blank."""
    values_column: Text | None = None
    """JSONL field with a list of time steps, each a list of numbers, one a channel; takes the place of the text."""
    encoding: Text = "utf-8"
    """Character encoding of all files."""
    tokens: Literal["characters", "words", "bpe"] = "characters"
    """What one step of a text is; bpe = byte-level byte-pair encoding learned from the training texts."""
    vocabulary_size: Annotated[int, Field(ge=2, le=2**63 - 1)] = 10_000
    """At most this many tokens, the most frequent ones; <unk>, which characters and words have, is one of them."""
    min_frequency: Positive = 2
    """Characters and words seen less often in training, and bpe merges likewise, are not learned (become <unk>)."""
    lowercase: bool = False
    """Lower-case the text first."""
    max_length: Count = 0
    """Keep only the first tokens or time steps of a longer sequence; 0 = no limit."""

    @model_validator(mode="after")
    def _applicable(self) -> DataConfig:
        if self.valid is not None:
            self._unused("with a valid file", "valid_fraction")
        if self.test is not None:
            self._unused("with a test file", "test_fraction")
        if self.valid is not None and self.test is not None:
            self._unused("with a valid and a test file", "split_seed")
        if self.values_column is not None:
            self._unused("with values_column", "text_column", "tokens", "vocabulary_size", "min_frequency", "lowercase")
            if self.format not in ("auto", "jsonl"):
                raise ValueError(f"values_column needs JSONL files, found format = {self.format!r}")
        if self.format == "pairs":
            self._unused("in files without a header", "text_column", "label_column")
        column = self.values_column or self.text_column
        if column == self.label_column:
            raise ValueError(f"the label and the input cannot both be in column {column!r}")
        if self.tokens == "bpe" and self.vocabulary_size < 256:
            raise ValueError(
                f"vocabulary_size must be >= 256, one for each byte, with bpe, found {self.vocabulary_size}"
            )
        if self.valid_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"valid_fraction + test_fraction must leave something to train on (< 1), "
                f"found {self.valid_fraction} + {self.test_fraction}"
            )
        return self


_RECURRENT = ("rnn", "lstm", "gru")
_ONLY = {  # options that not every kind of network has
    **dict.fromkeys(("embedding_size", "bidirectional", "learn_initial_state", "recurrent_dropout"), _RECURRENT),
    **dict.fromkeys(("zoneout", "layer_norm", "recurrent_init", "bptt"), _RECURRENT),
    "nonlinearity": ("rnn",),
    "proj_size": ("rnn", "lstm"),
    "peephole": ("lstm",),
    "zoneout_c": ("lstm",),
    "forget_bias": ("lstm",),
    "reset": ("gru",),
    "reading": (*_RECURRENT, "transformer"),
    **dict.fromkeys(("encoder", "attention_size"), ("attention",)),
    **dict.fromkeys(("heads", "feed_forward_size", "activation", "gated", "norm_first"), ("transformer",)),
    **dict.fromkeys(("norm", "positions", "max_positions"), ("transformer",)),
}


class ModelConfig(Section):
    """The network: embedding (text) or projection (numbers), recurrent or attention layers, dropout, linear layer."""

    model: Literal["rnn", "lstm", "gru", "attention", "transformer"] = "rnn"
    """Kind of recurrent layer; attention = one whose states are read by additive attention; transformer = none."""
    embedding_size: Size = 64
    """Numbers per token that enter the first recurrent layer."""
    hidden_size: Size = 128
    """Numbers in a hidden state, per direction; model = transformer: the width of everything between the layers."""
    num_layers: Size = 1
    """Recurrent or transformer layers, one on top of the other."""
    bidirectional: bool = False
    """Read each sequence in both directions."""
    encoder: Literal["lstm", "gru", "rnn"] = "lstm"
    """model = attention: the kind of recurrent layer, with the options of that kind."""
    attention_size: Size = 128
    """model = attention: numbers to which the final state, which asks, and each state that answers are mapped."""
    heads: Size = 4
    """model = transformer: parts of the width that attend on their own; hidden_size is a multiple."""
    feed_forward_size: Size = 512
    """model = transformer: numbers within the feed-forward part."""
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu"
    """model = transformer: the function within the feed-forward part."""
    gated: bool = False
    """model = transformer: multiply what the activation gives by a second linear map."""
    norm_first: bool = True
    """model = transformer: normalise before each part of a layer; else after it (as in 2017), which wants a warm-up."""
    norm: Literal["layer", "rms"] = "layer"
    """model = transformer: the normalisation; rms = without the mean."""
    positions: Literal["sinusoidal", "learned", "rotary", "alibi"] = "sinusoidal"
    """model = transformer: how a token knows its place: a vector added, or turned or biased attention."""
    max_positions: Size = 1024
    """positions = learned: the longest sequence there can be."""
    nonlinearity: Literal["tanh", "relu"] = "tanh"
    """model = rnn: the function phi of the recurrence."""
    reading: Literal["last", "mean", "max"] = "last"
    """What goes to the classifier: the last state, mean or maximum of all; for transformer mean, unless it is given."""
    dropout: Share = 0.1
    """Share of numbers set to 0 in training: of the embedding, between layers, before the linear layer."""
    learn_initial_state: bool = False
    """Train the state before the first step instead of starting at 0."""
    recurrent_dropout: Share = 0.0
    """Share of the numbers in h hidden from the recurrent product in training, the same at all steps of a sequence."""
    zoneout: Share = 0.0
    """Probability that a number in the state keeps its old value for a step; in evaluation, that share of it."""
    zoneout_c: Share | None = None
    """model = lstm: the same for the memory cell alone; without it as zoneout."""
    proj_size: Count = 0
    """model = rnn or lstm: project h to this many numbers, less than hidden_size; 0 = no projection."""
    layer_norm: bool = False
    """Layer norm inside the cell."""
    peephole: bool = False
    """model = lstm: the gates see the memory cell too."""
    reset: Literal["after", "before"] = "after"
    """model = gru: whether the reset gate acts after the recurrent product (as in torch.nn) or before (as in 2014)."""
    forget_bias: float | None = None
    """model = lstm: the bias of the forget gate to begin with, such as 1; without it, uniform like the other biases."""
    recurrent_init: Literal["uniform", "orthogonal"] = "uniform"
    """How the recurrent weights begin."""
    bptt: Count = 0
    """Truncated back-propagation: cut the gradient after each bptt-th step of a sequence; 0 = never."""

    @model_validator(mode="before")
    @classmethod
    def _reading(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("model") == "transformer":
            return {"reading": "mean", **given}
        return given

    @model_validator(mode="after")
    def _applicable(self) -> ModelConfig:
        kind = f"model = {self.model!r}" + (f" and encoder = {self.encoder!r}" if self.model == "attention" else "")
        self._unused(f"with {kind}", *self._foreign())
        if self.proj_size and self.proj_size >= self.hidden_size:
            raise ValueError(f"proj_size must be less than hidden_size = {self.hidden_size}, found {self.proj_size}")
        if self.model == "transformer":
            self._attends()
        return self

    def _attends(self) -> None:
        if self.positions != "learned":
            self._unused(f"with positions = {self.positions!r}", "max_positions")
        if self.hidden_size % self.heads:
            raise ValueError(f"heads must divide hidden_size = {self.hidden_size}, found {self.heads}")
        if self.positions == "rotary" and self.hidden_size // self.heads % 2:
            raise ValueError(
                f"positions = 'rotary' wants an even hidden_size / heads, found {self.hidden_size // self.heads}"
            )

    @property
    def longest(self) -> int | None:
        """The most steps that a sequence can have; None without a limit."""
        return self.max_positions if self.model == "transformer" and self.positions == "learned" else None

    def _foreign(self) -> list[str]:
        layer = self.encoder if self.model == "attention" else self.model
        return [
            name
            for name, models in _ONLY.items()
            if self.model not in models and (layer not in models or name == "reading")
        ]

    def arguments(self) -> dict[str, Any]:
        """The options that this kind of network has, as `models.classifier` takes them."""
        values = self.model_dump(exclude={*self._foreign(), "zoneout_c"})
        if self.zoneout_c is not None:
            values["zoneout"] = (self.zoneout, self.zoneout_c)
        if self.longest is None:
            values.pop("max_positions", None)
        return values


class MemoryConfig(Section):
    """task = memory: which problem, how long, how many sequences; they are made as they are needed, never stored."""

    problem: Literal["adding", "copying"] = "adding"
    """adding = the sum of two marked numbers; copying = ten digits, again at the end."""
    length: Size = 600
    """T: steps of a sequence (adding), steps from the digits to where they are asked for (copying, T + 20 in all)."""
    train_examples: Size = 50_000
    """Sequences in an epoch."""
    valid_examples: Size = 1000
    """Sequences to choose the best model with."""
    test_examples: Size = 1000
    """Sequences for the final score."""
    data_seed: Count = 42
    """Of the sequences."""

    @model_validator(mode="after")
    def _long_enough(self) -> MemoryConfig:
        if self.length < self.shortest:
            raise ValueError(f"length must be >= {self.shortest} with problem = 'adding', found {self.length}")
        return self

    @property
    def shortest(self) -> int:
        """The least length that the problem can have: two numbers are marked."""
        return 2 if self.problem == "adding" else 1


class TrainingConfig(Section):
    """The optimisation: how long, how fast, in which batches, on what."""

    epochs: Positive = 10
    """Times through the training examples."""
    max_steps: Count = 0
    """Stop after this many optimizer steps even if epochs are left; 0 = no limit."""
    batch_size: Positive = 32
    """Sequences per optimizer step, over all processes together."""
    batch_tokens: Count = 0
    """Instead of batch_size: as many sequences per step as fit into this many tokens; 0 = use batch_size."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Highest learning rate."""
    momentum: Share = 0.9
    """Momentum of sgd."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decay of weight matrices towards 0 (biases are left alone)."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip the gradient to this global norm; 0 = no clipping."""
    scheduler: Literal["none", "cosine", "plateau"] = "none"
    """How the learning rate falls: never, along a half cosine to 0, or when the metric stands still."""
    warmup_steps: Count = 0
    """Steps over which the learning rate first rises linearly from 0."""
    plateau_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """scheduler = plateau: multiply the learning rate by this."""
    plateau_patience: Positive = 2
    """scheduler = plateau: after this many evaluations without a better metric."""
    label_smoothing: Share = 0.0
    """Share of the target probability spread evenly over all classes."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced = each class counts in the loss by the inverse of its frequency."""
    metric: Literal["accuracy", "macro_f1", "mcc", "loss"] = "accuracy"
    """What "best" means on the validation examples: the highest, for loss the lowest."""
    patience: Count = 0
    """Stop after this many evaluations without a better metric; 0 = never."""
    eval_every: Count = 0
    """Steps between evaluations; 0 = at the end of each epoch."""
    checkpoint_every: Count = 0
    """Steps between checkpoints; 0 = at each evaluation."""
    seed: Count = 42
    """Of initial weights, order of examples and dropout."""
    device: Text = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    precision: Literal["float32", "float64"] = "float32"
    """Arithmetic of the model and of its training."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads; 0 = PyTorch's choice."""

    @model_validator(mode="after")
    def _applicable(self) -> TrainingConfig:
        if self.batch_tokens:
            self._unused("with batch_tokens", "batch_size")
        if self.optimizer != "sgd":
            self._unused(f"with optimizer = {self.optimizer!r}", "momentum")
        if self.scheduler != "plateau":
            self._unused(f"with scheduler = {self.scheduler!r}", "plateau_factor", "plateau_patience")
        return self
