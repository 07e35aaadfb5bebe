"""Everything a run can be told, read from YAML and from options, never from code."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from yaml.composer import ComposerError

from unrolled.sections import DataConfig as DataConfig
from unrolled.sections import MemoryConfig as MemoryConfig
from unrolled.sections import ModelConfig as ModelConfig
from unrolled.sections import Section as Section
from unrolled.sections import TrainingConfig as TrainingConfig
from unrolled.sections import as_text, not_empty


class ConfigError(ValueError):
    """A configuration that cannot be used: one line per mistake, with the value found and what is allowed."""


class Config(Section):
    """One run: what it learns, from what, with which network, how."""

    task: Literal["classify", "memory"] = "classify"
    """classify = one label for each sequence; memory = a problem that only a long memory solves, no data needed."""
    data: DataConfig = DataConfig()
    memory: MemoryConfig = MemoryConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    output_dir: Annotated[Path, BeforeValidator(as_text), BeforeValidator(not_empty)] | None = None
    """Folder of the run; without one, runs/TASK-DATE-TIME."""

    @model_validator(mode="after")
    def _applicable(self) -> Config:
        why, other = f"with task = {self.task!r}", self._other()
        section: Section = getattr(self, other)
        section._unused(why, *type(section).model_fields, prefix=f"{other}.")
        if self.task == "memory":
            if self.model.model in ("attention", "transformer"):
                raise ValueError(f"model.model must be rnn, lstm or gru {why}, found {self.model.model!r}")
            self.model._unused(why, "reading", prefix="model.")
            self.training._unused(why, "class_weights", "label_smoothing", prefix="training.")
            if self.training.metric not in ("accuracy", "loss"):
                raise ValueError(f"training.metric must be accuracy or loss {why}, found {self.training.metric!r}")
        return self

    @model_serializer(mode="wrap")
    def _relevant(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        return {name: value for name, value in values.items() if name != self._other()}

    def _other(self) -> str:
        """The section that is not for this task."""
        return "data" if self.task == "memory" else "memory"


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
    """All options that the task has, defaults included; `parse_config` reads them back to an equal Config."""
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
    if details["type"] == "unknown_key":
        key = details["ctx"]["key"]
        section = type(getattr(Config(), where)) if where else Config
        found = f" {key!r}: {_nearest(key, section)}"
    message = message[0].lower() + message[1:]
    return f"{where}: {message}{found}" if where else f"{message}{found}"
