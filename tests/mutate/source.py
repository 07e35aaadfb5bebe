"""Mutants of a text: which lines belong to a backward, and the single-token changes of a line."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple


class Region(NamedTuple):
    """A function: its place in the text, its body without the docstring, and the names that may be confused."""

    file: str
    name: str
    start: int
    end: int
    groups: list[list[str]]

    def __hash__(self) -> int:
        return hash(self[:4])


class Mutant(NamedTuple):
    label: str  # the file, and its line with [old → new] in it
    line: str  # the file, and its line
    file: str
    function: str
    row: int
    start: int
    end: int
    new: str

    def applied(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]


# In both languages as we format them a binary operator has blanks around it, a pointer or a template has not.
OTHER = {
    **{"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "/", "@": "*", "+=": "-=", "-=": "+=", "*=": "/="},
    **{"<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "|", "and": "or", "or": "and"},
    **{"<": "<= >", "<=": "< >", ">": ">= <", ">=": "> <", "==": "!=", "!=": "=="},
}
_OPERATOR = "|".join(re.escape(o) for o in sorted(OTHER, key=len, reverse=True))
_TOKEN = re.compile(
    rf"(?<=\s)(?P<operator>{_OPERATOR})(?=\s)"
    r"|(?<=[\s(\[{,])(?P<unary>-|not )(?=[\w(])"
    r"|(?<![\w.])(?P<number>\d+(\.\d*)?)(?![\w.])"
    r"|(?<![\w.>])(?P<name>[A-Za-z_]\w*)(?!\w|\s*=[^=]|\s*\()"
)


# In C++ an arithmetic line carries the number of an equation, reads and writes vectors or makes a number out of others;
# the others move whole numbers: where rows lie, who works on them. A change there reads foreign memory, which is the
# sanitizers' to find. Of a loop on one line only the body counts.
_ARITHMETIC = re.compile(
    r"//.*\(\d+\)|\bload\(|\bstore\(|\btotal<|[-+*]= [a-zD(-]|\bto\[f\] =|\bderivative = |\brest = "
    r"|\b(?:T|double|V|D|Vec<T>) \w+ = |\b(?:cos|sin|ds|s|y|density|log_sum)\[[^]]*\] = "
    r"|\b(?:low|v) [+>] (?:high|best)\b|\bhighest = |\breturn (?:\w+ \* )?(?:x|word|phi)\b"
    r"|\b(?:map_rows|outer_product|sum_tokens)\b"
    r"|\bc\d\[v\] = |\bk\d \+= |\bfactor = static_cast|__builtin_nearbyint"
    r"|\b(?:low|high) = UNROLLED_SHUFFLE\(a, b, \d, \d\)"  # of doubles, two to a vector
)
_WHOLE_NUMBERS = re.compile(
    r"\bint64_t\b|\bfor \(|\bmem(?:set|cpy)\(|\b(?:multiply|tile_rows|scores|pack_rows)\w*\(|\bt\d? [-+]="
    r"|\b(?:n|numbers|from|first|before|total|pairs) \+=|\bdouble (?:operations|wanted|pairs) ="
)
_HEAD = re.compile(r"\s*(?:UNROLL )?for \([^;]*;[^;]*;(?:[^()]|\([^()]*\))*\) |\[[&=]\]\((?:[^()]|\([^()]*\))*\)")


def arithmetic(line: str, column: int) -> bool:
    """Whether the token there is of an arithmetic line, not of the head of its loop or function."""
    heads = list(_HEAD.finditer(line))
    body = _HEAD.sub(" ", line)
    inside = any(h.start() <= column < h.end() for h in heads)
    return not inside and bool(_ARITHMETIC.search(body)) and not _WHOLE_NUMBERS.search(body)


def mutants(regions: Iterable[Region], texts: dict[str, str]) -> list[Mutant]:
    """All changes of one token in the regions; equal labels in a file are numbered."""
    seen: Counter[str] = Counter()
    found = []
    for r in sorted(regions):
        code = _masked(texts[r.file], r.file)
        neighbour = {a: b for group in r.groups for a, b in zip(group, group[1:] + group[:1], strict=True)}
        for token in _TOKEN.finditer(code, r.start, r.end):
            first, after = code.rfind("\n", 0, token.start()) + 1, code.index("\n", token.end())
            for new in _changes(token, neighbour):
                changed = f"{code[first : token.start()]}[{token[0]} → {new}]{code[token.end() : after]}"
                line, label = (f"{r.file}: {' '.join(t.split())}" for t in (code[first:after], changed))
                seen[label] += 1
                label += f" ({seen[label]})" if seen[label] > 1 else ""
                row = code.count("\n", 0, first) + 1
                found.append(Mutant(label, line, r.file, r.name, row, token.start(), token.end(), new))
    return found


def _changes(token: re.Match[str], neighbour: dict[str, str]) -> list[str]:
    kind, old = token.lastgroup, token[0]
    if kind == "operator":
        return OTHER[old].split()
    if kind == "unary":
        return [""]
    if kind == "name":
        return [neighbour[old]] if neighbour.get(old, old) != old else []
    number = float(old)
    new = number + 1 if number < 2 else number - 1
    return [f"{new:.1f}" if "." in old else f"{new:.0f}"]


def _masked(text: str, file: str) -> str:
    """The text with comments, strings and preprocessor lines blank."""
    comment = r"#[^\n]*" if file.endswith(".py") else r"//[^\n]*|(?m:^#[^\n]*)"
    pattern = rf"'''.*?'''|\"\"\".*?\"\"\"|\"(\\.|[^\"\\\n])*\"|'(\\.|[^'\\\n])*'|{comment}"
    return re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)


_PARTS = {"target_share"}  # of a gradient, which the forward computes for the backward
_FORWARDS = {"csrc/few_queries.h"}  # headers with a forward that no backward calls and no other stands for: decoding


def _reached(regions: list[Region], texts: dict[str, str]) -> list[Region]:
    """Every backward and the helpers that it calls; where a file has none, its forward is its own backward."""
    gradient = re.compile("backward", re.IGNORECASE)
    own = {r.file for r in regions if gradient.search(r.name)}
    entry = {r: "forward" in r.name or r.name == Path(r.file).stem for r in regions}
    alone = {r.file for r in regions if r.file not in own and not r.file.endswith(".h") and entry[r]} | _FORWARDS
    wanted = [r for r in regions if gradient.search(r.name) or r.name in _PARTS or (r.file in alone and entry[r])]
    codes = {file: _masked(text, file) for file, text in texts.items()}
    tables = {m[1]: m[2] for code in codes.values() for m in re.finditer(r"(k[A-Z]\w*)\b[^;(){]*= (\w+\(\w+\));", code)}
    for region in wanted:  # grows
        words = r"\w+" if region.file.endswith(".py") else r"\w+(?=(?:<[^<>;(){}]*>)?(?: \w+)?\()"
        called = set(re.findall(words, codes[region.file][region.start : region.end]))
        inside = set(re.findall(r"\w+", codes[region.file][region.start : region.end]))
        called |= {name for table in inside & tables.keys() for name in re.findall(r"\w+", tables[table])}
        for r in regions:
            near = r.file in (region.file, *(f for f in texts if f.endswith(".h")))
            passes_forward = re.search("forward", r.name, re.IGNORECASE) and r.file not in alone
            if near and r.name.split("::")[-1] in called and not passes_forward and r not in wanted:
                wanted.append(r)
    return wanted


def python_regions(texts: dict[str, str]) -> list[Region]:
    found = []
    for file, text in texts.items():
        starts = [0, *(m.end() for m in re.finditer("\n", text))]
        for f in ast.parse(text).body:
            if not isinstance(f, ast.FunctionDef):
                continue
            body = f.body[1:] if ast.get_docstring(f) and len(f.body) > 1 else f.body
            first, last = starts[body[0].lineno - 1], starts[(body[-1].end_lineno or 0)]
            found.append(Region(file, f.name, first, last, _confusable(f)))
    return _reached(found, texts)


def _confusable(function: ast.FunctionDef) -> list[list[str]]:
    """Names bound together, arguments of one type, and names alike up to an underscore."""
    tuples = [t for n in ast.walk(function) if isinstance(n, ast.Assign) for x in n.targets for t in ast.walk(x)]
    groups = [[e.id for e in t.elts if isinstance(e, ast.Name)] for t in tuples if isinstance(t, ast.Tuple)]
    by_type = groupby(function.args.args, lambda a: ast.unparse(a.annotation) if a.annotation else "")
    groups += [[a.arg for a in same] for _, same in by_type]
    stored = dict.fromkeys(t.id for t in tuples if isinstance(t, ast.Name) and "_" in t.id[1:])
    groups += [list(g) for _, g in groupby(sorted(stored), lambda name: name.split("_")[0])]
    return [[name for name in group if name != "_"] for group in groups if len(group) > 1]


def cpp_regions(texts: dict[str, str]) -> list[Region]:
    return _reached([r for file, text in texts.items() for r in _functions(file, _masked(text, file))], texts)


def _functions(file: str, code: str) -> Iterator[Region]:
    """Functions and member functions (`Struct::name`), with constructors' initialisers, by their braces."""
    opened: list[tuple[str, str, int, str]] = []  # kind, name, start, parameters
    last = 0
    for brace in re.finditer(r"[{};]", code):
        place = brace.start()
        inside = any(kind == "function" for kind, *_ in opened)
        if brace[0] == "{":
            head = re.sub(r"template\s*<[^{};]*?>\s*(?=[A-Za-z])", "", code[last:place])
            structure = re.search(r"\b(?:struct|class)\s+(\w+)", head)
            call = re.search(r"(~?\w+)\s*\(((?:[^()]|\([^()]*\))*)\)(?!\s*\()", head)
            if inside or not (structure or call) or "=" in head.split("(")[0]:
                opened.append(("block", "", place, ""))
            elif structure:
                opened.append(("struct", structure[1], place, ""))
            else:
                outer = [name for kind, name, *_ in opened if kind == "struct"]
                start = code.index(call[0], last) + len(call[0]) if call[0] in code[last:place] else place
                opened.append(("function", "::".join([*outer, call[1]]), start, call[2]))
        elif brace[0] == "}" and opened:
            kind, name, start, parameters = opened.pop()
            # the core is compiled in doubles: floats have functions of their own, which tests/test_core.py judges
            if kind == "function" and not re.search(r"\b(?:F|float) \w", parameters):
                yield Region(file, name, start, place, _confusable_cpp(parameters, code[start:place]))
        if not (brace[0] == ";" and inside):
            last = place + 1


def _confusable_cpp(parameters: str, body: str) -> list[list[str]]:
    """Neighbours among the parameters of one type, and names declared together."""
    typed = [m for p in parameters.split(",") if (m := re.fullmatch(r"\s*(.+?)\b(\w+)(\[\w*\])?\s*", p, re.DOTALL))]
    groups = [[m[2] for m in same] for _, same in groupby(typed, lambda m: (" ".join(m[1].split()), bool(m[3])))]
    for declaration in re.findall(
        r"(?:^|[;{(])\s*(?:const |constexpr )*[\w:]+(?:<\w+>)? (\*?(?:const )?\w+ = [^;{]*);", body
    ):
        flat = declaration
        while flat != (flat := re.sub(r"\([^()]*\)|\[[^\[\]]*\]|<\w+>", "", flat)):
            pass
        groups.append(re.findall(r"(?:^|,)\s*\*?(?:const )?(\w+)(?= =)", flat))
    return [group for group in groups if len(group) > 1]


def read(root: Path, patterns: Iterable[str], without: Iterable[str] = ()) -> dict[str, str]:
    files = (f for pattern in patterns for f in sorted(root.glob(pattern)) if f.name not in without)
    return {f.relative_to(root).as_posix(): f.read_text() for f in files}
