"""Everything a run can be told: one frozen model per section, read from YAML and from options, never from code.

Relative paths are relative to the working directory. 0 means "off" or "no limit" where a field says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from yaml.composer import ComposerError


def _text(value: Any) -> Any:
    """What a YAML file can hold and a file can be called: no NUL and, in Unicode, no half of a surrogate pair."""
    if isinstance(value, str | Path) and re.search("[\0\ud800-\udfff]", str(value)):
        raise ValueError(f"expected Unicode text without NUL, found {str(value)!r}")
    return value


def _not_empty(value: Any) -> Any:
    if value == "":
        raise ValueError("expected the name of a file or folder, found ''")
    return value


Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**63 - 1)]
Size = Annotated[int, Field(ge=1, le=1_000_000)]
Share = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, BeforeValidator(_text)]
Name = Annotated[str, BeforeValidator(_text), BeforeValidator(_not_empty)]


class ConfigError(ValueError):
    """A configuration that cannot be used: one line per mistake, with the value found and what is allowed."""


class Section(BaseModel):
    """A group of options: frozen, unknown keys are an error that names the nearest valid one."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            for key in given:
                if key not in cls.model_fields:
                    raise ValueError(f"unknown key {key!r}: {_nearest(str(key), cls)}")
        return given

    def _unused(self, why: str, *names: str) -> None:
        """Refuse options that would change nothing: each of `names` must still have its default."""
        for name in names:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                raise ValueError(f"{name} = {value!r} has no effect {why}: remove it")


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


class ModelConfig(Section):
    """The network: embedding (text) or projection (numbers), recurrent layers, dropout, linear layer."""

    model: Literal["rnn", "lstm", "gru"] = "rnn"
    """Kind of recurrent layer."""
    embedding_size: Size = 64
    """Numbers per token that enter the first recurrent layer."""
    hidden_size: Size = 128
    """Numbers in a hidden state, per direction."""
    num_layers: Size = 1
    """Recurrent layers, one on top of the other."""
    bidirectional: bool = False
    """Read each sequence in both directions."""
    nonlinearity: Literal["tanh", "relu"] = "tanh"
    """model = rnn: the function phi of the recurrence."""
    reading: Literal["last", "mean", "max"] = "last"
    """What goes to the classifier: the final state, or the mean or maximum over all states of the sequence."""
    dropout: Share = 0.1
    """Share of numbers set to 0 in training: of the embedding, between layers, before the linear layer."""
    learn_initial_state: bool = False
    """Train the state before the first step instead of starting at 0."""

    @model_validator(mode="after")
    def _applicable(self) -> ModelConfig:
        if self.model != "rnn":
            self._unused(f"with model = {self.model!r}", "nonlinearity")
        return self


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


class Config(Section):
    """One run: what it learns, from what, with which network, how."""

    task: Literal["classify"] = "classify"
    """What is learned: classify = one label for each sequence."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    output_dir: Annotated[Path, BeforeValidator(_text), BeforeValidator(_not_empty)] | None = None
    """Folder of the run; without one, runs/TASK-DATE-TIME."""


def parse_config(values: Mapping[str, Any], source: str = "configuration") -> Config:
    """A Config from nested mappings. ConfigError lists every mistake by its dotted name; `source` begins each line."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_mistake(details)}" for details in error.errors())) from None


class _Loader(yaml.SafeLoader):
    """A key given twice is an error: YAML would silently take the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise ComposerError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
        return node


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. ConfigError names the file, and the line of a syntax error."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or a number that is none
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections such as data: and training:, found {type(values).__name__}")
    return values


def to_yaml(config: Config) -> str:
    """The whole configuration, defaults included; `parse_config` reads it back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def option_names(section: type[Section] = Config, prefix: str = "") -> list[str]:
    """Every option by its dotted name, as in a YAML file and on the command line."""
    names = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            names += option_names(kind, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def nearest_option(key: str, names: list[str] | None = None) -> str | None:
    """The option most like `key`, compared by its dotted name and by its last part alone."""
    names = option_names() if names is None else names
    by_part: dict[str, str] = {}
    for name in names:
        by_part.setdefault(name, name)
        by_part.setdefault(name.rsplit(".", 1)[-1], name)
    close = get_close_matches(key.replace("-", "_"), by_part, n=1, cutoff=0.6)
    return by_part[close[0]] if close else None


def _nearest(key: str, section: type[Section]) -> str:
    elsewhere = [name for name in option_names() if name.rpartition(".")[2] == key]
    found = elsewhere[0] if elsewhere else nearest_option(key, list(section.model_fields)) or nearest_option(key)
    allowed = ", ".join(section.model_fields)
    return f"did you mean {found}?" if found else f"allowed are {allowed}"


def _mistake(details: Any) -> str:
    where = ".".join(str(part) for part in details["loc"])
    message = str(details["msg"]).removeprefix("Value error, ")
    found = "" if details["type"] in ("value_error", "missing") else f", found {details['input']!r}"
    message = message[0].lower() + message[1:]
    return f"{where}: {message}{found}" if where else f"{message}{found}"
