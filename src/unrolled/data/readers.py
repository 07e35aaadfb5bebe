"""Reads labelled examples and bare inputs from CSV, TSV, JSONL and label<TAB>text files.

A mistake in a file is a DataError that names the file and the line. Blank lines are passed over. CSV may quote fields;
TSV and label<TAB>text never do: a quote is a character of the text.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from unrolled.config import DataConfig
from unrolled.data.values import DataError, Input, Row, check_channels, check_input, check_label, kind, short

Records = Iterator[tuple[int, dict[str, Any]]]


def read_examples(source: str | Path, data: DataConfig) -> list[Row]:
    """All labelled examples of a file. DataError where there is none, or a line cannot be used."""
    column = data.values_column or data.text_column
    text = _decode(source, _content(source), data)
    rows = []
    for line, record in _records(source, text, _format_of(source, data, data.format), (data.label_column, column)):
        where = f"{source}, line {line}"
        rows.append(Row(line, check_input(record[column], data, where), check_label(record[data.label_column], where)))
    if not rows:
        raise DataError(f"{source}: no examples, the file holds no line of data")
    check_channels([row.input for row in rows], [f"{source}, line {row.line}" for row in rows])
    return rows


def read_inputs(source: str | Path, data: DataConfig, content: bytes | None = None) -> list[Input]:
    """Inputs without labels, of a file or of `content` (then `source` only names it).

    Texts: the text column of a .csv, .tsv or .jsonl file, else each line is one text, a blank line too.
    Numbers: JSONL; a line is the list of time steps or an object with the values field.
    """
    text = _decode(source, _content(source) if content is None else content, data)
    column, kind_of_file = data.values_column or data.text_column, _format_of(source, data, "auto")
    if kind_of_file == "pairs":
        records = [(number, {column: line}) for number, line in enumerate(_lines(text), 1)]
    else:
        records = list(_records(source, text, kind_of_file, (column,)))
    where = [f"{source}, line {line}" for line, _ in records]
    inputs = [check_input(record[column], data, place) for (_, record), place in zip(records, where, strict=True)]
    check_channels(inputs, where)
    return inputs


def _content(source: str | Path) -> bytes:
    try:
        content = Path(source).read_bytes()
        return gzip.decompress(content) if str(source).endswith(".gz") else content
    except OSError as error:
        raise DataError(f"{source}: {(error.strerror or str(error)).lower()}") from None
    except (EOFError, zlib.error) as error:
        raise DataError(f"{source}: damaged gzip file ({error})") from None


def _decode(source: str | Path, content: bytes, data: DataConfig) -> str:
    try:
        return content.decode(data.encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{source}, line {line}: not {data.encoding} (byte 0x{content[error.start]:02x}: {error.reason}); "
            "name the file's encoding with data.encoding"
        ) from None
    except (LookupError, UnicodeError):
        raise DataError(f"{source}: data.encoding = {data.encoding!r} is not an encoding Python knows") from None


def _lines(text: str) -> list[str]:
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def _format_of(source: str | Path, data: DataConfig, given: str) -> str:
    if data.values_column is not None or given != "auto":
        return "jsonl" if data.values_column is not None else given
    ending = Path(str(source).removesuffix(".gz")).suffix.lower()
    return {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}.get(ending, "pairs")


def _records(source: str | Path, text: str, kind_of_file: str, columns: tuple[str, ...]) -> Records:
    return {"csv": _csv, "tsv": _tsv, "jsonl": _jsonl, "pairs": _pairs}[kind_of_file](source, text, columns)


def _jsonl(source: str | Path, text: str, columns: tuple[str, ...]) -> Records:
    for number, line in enumerate(_lines(text), 1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON, {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON that can be read, {error}") from None
        if isinstance(record, list) and len(columns) == 1:
            record = {columns[0]: record}
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected an object {{...}}, found {kind(record)}")
        for column in columns:
            if column not in record:
                raise DataError(f"{where}: {_missing('field', column, list(record))}")
        yield number, record


def _csv(source: str | Path, text: str, columns: tuple[str, ...]) -> Records:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    limit = csv.field_size_limit(sys.maxsize)
    header, line = None, 1
    try:
        for fields in reader:
            if fields and header is None:
                header = _header(source, line, fields, columns)
            elif fields and header is not None:
                yield line, _fields(source, line, fields, header)
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{source}, line {line}: not CSV ({error}); a quote inside a quoted field is doubled") from None
    finally:
        csv.field_size_limit(limit)


def _tsv(source: str | Path, text: str, columns: tuple[str, ...]) -> Records:
    header = None
    for number, line in enumerate(_lines(text), 1):
        if line and header is None:
            header = _header(source, number, line.split("\t"), columns)
        elif line and header is not None:
            yield number, _fields(source, number, line.split("\t"), header)


def _pairs(source: str | Path, text: str, columns: tuple[str, ...]) -> Records:
    for number, line in enumerate(_lines(text), 1):
        if line:
            label, tab, rest = line.partition("\t")
            if not tab:
                raise DataError(f"{source}, line {number}: expected label<TAB>text, found no tab in {short(line)}")
            yield number, dict(zip(columns, (label, rest), strict=True))


def _header(source: str | Path, line: int, fields: list[str], columns: tuple[str, ...]) -> list[str]:
    header = [field.strip() for field in fields]
    for column in columns:
        if column not in header:
            raise DataError(f"{source}, line {line}: {_missing('column', column, header)}")
        if header.count(column) > 1:
            raise DataError(f"{source}, line {line}: the header names column {column!r} {header.count(column)} times")
    return header


def _fields(source: str | Path, line: int, fields: list[str], header: list[str]) -> dict[str, Any]:
    if len(fields) != len(header):
        raise DataError(f"{source}, line {line}: {len(fields)} fields, but the header has {len(header)}")
    return dict(zip(header, fields, strict=True))


def _missing(what: str, column: str, found: list[str]) -> str:
    close = get_close_matches(column, found, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"found {', '.join(map(repr, found)) or 'none'}"
    return f"no {what} {column!r}, {hint} (options data.text_column, data.label_column, data.values_column)"
