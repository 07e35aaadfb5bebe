"""The configuration as command-line options, and the four layers it comes from: flag, file, environment, default."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from cyclopts import Group, Parameter

from unrolled.config import Config, ConfigError, Section, nearest_option, option_names, parse_config, read_yaml
from unrolled.tasks import TASKS

ENVIRONMENT = "UNROLLED_"
_SECTIONS = ["", *(name for name, field in Config.model_fields.items() if isinstance(field.default, Section))]
_SHORT = {"output_dir": ["-o"], "training.learning_rate": ["--lr"]}


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command(..., **flags)` a keyword for every option: `--training.batch-size`, or `--batch-size` for short."""
    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    last_parts = Counter(name.rpartition(".")[2] for name in option_names())
    options = [_option(name, short=last_parts[name.rpartition(".")[2]] == 1) for name in option_names()]
    command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return command


def _option(name: str, short: bool) -> inspect.Parameter:
    section, _, last = name.rpartition(".")
    field = (Config.model_fields[section].default if section else Config()).__class__.model_fields[last]
    dotted = [name] if not section or not short else [name, last]
    names = [f"--{form.replace('_', '-')}" for form in dotted]
    default = "" if field.default is None else f" (default {field.default})"
    parameter = Parameter(
        name=[*names, *_SHORT.get(name, [])],
        negative=[re.sub(r"([^.-][^.]*)$", r"no-\1", form) for form in names] if field.annotation is bool else (),
        group=Group(section.capitalize() or "Run", sort_key=_SECTIONS.index(section) + 1),
        help=f"{field.description}{default}",
        converter=_whole if _bare(field.annotation) is int else None,
    )
    kind: Any = _bare(field.annotation)
    annotation = Annotated[kind | None, parameter]
    keyword = name.replace(".", "__")
    return inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _bare(annotation: Any) -> Any:
    """The type without None and without what Pydantic is told about it."""
    while get_origin(annotation) in (Annotated, Union, UnionType):
        annotation = get_args(annotation)[0]
    return annotation


def _whole(kind: Any, tokens: Sequence[Any]) -> int:
    """A whole number as a file would have it: cyclopts alone would round 1.5."""
    text = tokens[0].value
    if not re.fullmatch(r"[+-]?[0-9]{1,99}", text):
        raise ValueError(f'unable to convert "{text[:40]}" into int.')
    return int(text)


def dashes(arguments: Sequence[str]) -> list[str]:
    """--batch_size is --batch-size."""
    parts = [argument.partition("=") for argument in arguments]
    return [(name.replace("_", "-") if name[:2] == "--" else name) + rest + value for name, rest, value in parts]


def resolve(what: str, flags: Mapping[str, Any], environment: Mapping[str, str]) -> Config:
    """The configuration of WHAT under the flags that were given. ConfigError (ValueError) for whatever does not fit."""
    given: dict[str, Any] = {}
    _merge(given, from_environment(environment))
    _merge(given, read_what(what))
    for keyword, value in flags.items():
        if value is not None:
            _put(given, keyword.replace("__", "."), str(value) if isinstance(value, Path) else value)
    return parse_config(given, what)


def read_what(what: str) -> dict[str, Any]:
    """The values WHAT stands for: a YAML file, a task or a recipe."""
    if what.endswith((".yaml", ".yml")):
        return read_yaml(what)
    recipes = recipe_files()
    if what in TASKS:
        return {"task": what}
    if what in recipes:
        return read_yaml(recipes[what])
    if Path(what).is_file():
        return read_yaml(what)
    close = get_close_matches(what, [*TASKS, *recipes], n=1)
    if (Path(what) / "config.yaml").is_file():
        close = [str(Path(what) / "config.yaml")]
    raise ConfigError(
        f"{what!r} is no .yaml file, task or recipe{f'; did you mean {close[0]}?' if close else '.'} "
        f"Tasks: {', '.join(TASKS)}. Recipes: {', '.join(recipes) or 'none'}."
    )


def recipe_files() -> dict[str, Path]:
    folder = Path(__file__).parents[1] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """UNROLLED_TRAINING_BATCH_SIZE=64 is training.batch_size. Unknown keys of a section are an error."""
    names = {ENVIRONMENT + name.replace(".", "_").upper(): name for name in option_names()}
    fields = Config.model_fields.items()
    sections = tuple(f"{ENVIRONMENT}{name.upper()}_" for name, field in fields if isinstance(field.default, Section))
    values: dict[str, Any] = {}
    for key, value in environment.items():
        if key in names:
            _put(values, names[key], value)
        elif key.startswith(sections):
            near = nearest_option(key.removeprefix(ENVIRONMENT).lower().replace("_", ".", 1))
            hint = f": did you mean {ENVIRONMENT}{near.replace('.', '_').upper()}?" if near else ""
            raise ConfigError(f"the environment variable {key} is no option{hint}")
    return values


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        values = inner if isinstance(inner, dict) else values
    values[last] = value


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value
