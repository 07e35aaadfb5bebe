"""unrolled evaluate, unrolled predict"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unrolled.cli import tables
from unrolled.files import to_json, write_json, write_text

Output = Annotated[Path | None, Parameter(name=["--output", "-o"])]


def evaluate(run: Path, data: str, /, *, output: Output = None, json: bool = False) -> int:
    """Score a trained model on a file of labelled examples, or on new sequences of a length.

    Parameters
    ----------
    run
        Run folder; its best model is taken. Or a model folder, such as RUN/model-last.
    data
        File in the format of the training data; for a run of the task memory the length of new sequences.
    output
        Also write the metrics to this JSON file.
    json
        Print the metrics as JSON.
    """
    from unrolled.run import load

    metrics = load(run).evaluate(data)
    if output:
        write_json(output, metrics)
    if json:
        tables.print_json(metrics)
    else:
        tables.scores({Path(data).name: metrics})
        tables.classes(metrics)
    return 0


def predict(
    run: Path,
    file: Annotated[str, Parameter(allow_leading_hyphen=True)] = "-",
    /,
    *,
    output: Output = None,
    probabilities: bool = False,
    json: bool = False,
) -> int:
    """Print a label for each line, or each row of a .csv, .tsv or .jsonl file, in their order.

    Parameters
    ----------
    run
        Run folder; its best model is taken. Or a model folder, such as RUN/model-last.
    file
        What to label; - reads lines from the standard input.
    output
        Write to this file instead of the standard output.
    probabilities
        Also the probability of every label.
    json
        One JSON object a line, instead of the label alone (with probabilities: tab-separated LABEL=PROBABILITY).
    """
    if file != "-" and file.startswith("-") and not Path(file).exists():
        raise ValueError(f"there is no option {file}; unrolled predict --help lists them")
    from unrolled.data.readers import read_inputs
    from unrolled.run import load

    model = load(run)
    if not model.task.predicts:
        how = model.task.use.format(run="RUN")
        raise ValueError(f"a run of the task {model.config.task} predicts nothing: score it with unrolled {how}")
    if file == "-" and sys.stdin.isatty():
        print("reading lines from the terminal until Ctrl-D", file=sys.stderr)
    source, content = ("<stdin>", sys.stdin.buffer.read()) if file == "-" else (file, None)
    inputs = read_inputs(source, model.config.data, content)
    lines = []
    for row in model.predict(inputs, probabilities):
        if json:
            lines.append(to_json(row))
        else:
            shares = (f"{label}={share:.6f}" for label, share in row.get("probabilities", {}).items())
            lines.append("\t".join([row["label"], *shares]))
    text = "".join(line + "\n" for line in lines)
    if output:
        write_text(output, text)
    else:
        tables.utf8(text)
    return 0
