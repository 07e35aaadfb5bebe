"""unrolled config show, schema, validate"""

from __future__ import annotations

import os
import sys
from typing import Any

from unrolled.cli import tables
from unrolled.cli.options import resolve
from unrolled.config import Config, ConfigError, parse_config, read_yaml, to_yaml


def show(what: str, /, **flags: Any) -> int:
    """Print the whole configuration that `train` with the same arguments would use, as YAML.

    Parameters
    ----------
    what
        A .yaml file, else the name of a task, else of a recipe.
    """
    tables.utf8(to_yaml(resolve(what, flags, os.environ)))
    return 0


def schema() -> int:
    """Print the JSON Schema of a configuration file."""
    tables.print_json(Config.model_json_schema())
    return 0


def validate(file: str, /) -> int:
    """Check a configuration file: exit code 0 if it is valid, 1 with one line a mistake if it is not.

    Parameters
    ----------
    file
        A .yaml file.
    """
    try:
        parse_config(read_yaml(file), file)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{file}: valid")
    return 0
