"""The command line: it parses and prints. Exit codes: 0 done, 1 a check failed, 2 wrong use."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import TracebackType

from cyclopts import App, CycloptsError, Parameter

from unrolled import __version__
from unrolled.cli import configs, inform, models, training
from unrolled.cli.options import dashes, with_options

app = App(
    name="unrolled",
    version=__version__,
    help="Sequence models with every gradient written out: train, evaluate, predict.",
    help_format="plaintext",
    default_parameter=Parameter(negative=()),
    suppress_keyboard_interrupt=False,
    help_epilogue="unrolled COMMAND --help says more. Begin with: unrolled train names",
)
app.command(with_options(training.train))
app.command(models.evaluate)
app.command(models.predict)
app.command(inform.verify)
app.command(inform.info)
config = App(name="config", help="Show a configuration, its schema, or check one.")
config.command(with_options(configs.show))
config.command(configs.schema)
config.command(configs.validate)
app.command(config)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave by SystemExit with its exit code. A user's mistake is a message, never a traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, as by >&-
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if "OMP_WAIT_POLICY" not in os.environ:  # before torch loads: threads that spin long ruin a machine with other work
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    try:
        code = app(dashes(arguments), exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError as error:
        return _complain(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # what a shell reports for SIGPIPE
    except KeyboardInterrupt as error:
        return training.interrupted(error)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _complain(place + (error.strerror or str(error)))
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        if not _ours(error.__traceback__):
            raise
        return _complain(str(error), code=2 if isinstance(error, ValueError | TypeError | ImportError) else 1)
    return int(code or 0)


def _complain(message: str, code: int = 2) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"unrolled: error: {message}", file=sys.stderr)
    return code


def _ours(traceback: TracebackType | None) -> bool:
    """Whether this project raised the error, knowing what it says; others are bugs and keep their traceback."""
    name = ""
    while traceback:
        name, traceback = traceback.tb_frame.f_globals.get("__name__", ""), traceback.tb_next
    return str(name).startswith("unrolled.")
