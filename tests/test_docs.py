"""The pages: both languages alike, numbers as in the code, links that resolve, programs and commands that run."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cyclopts import CycloptsError

from unrolled.cli import app
from unrolled.cli.options import dashes
from unrolled.equations.recurrence import Cell, Reset
from unrolled.run import train

ROOT = Path(__file__).parents[1]
EQUATIONS = ROOT / "src/unrolled/equations"
LANGUAGES = ("en", "zh")
THEMES = ("", "_dark")
FILES = ["README.md", *(f"docs/en/{path.name}" for path in sorted((ROOT / "docs/en").glob("*.md")))]


def prose(text: str) -> str:
    return re.sub(r"^(`{3,})[^`].*?^\1$", "", text, flags=re.S | re.M)


def headings(text: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(text), re.M)]


def labels(text: str) -> list[str]:
    return re.findall(r"^\(([\w-]+)\)=$", prose(text), re.M)


def displays(text: str) -> list[tuple[str, str]]:
    """Each displayed formula without its words and its last stop, and its label."""
    found = re.findall(r"^\$\$\n(.*?)^\$\$(?: \(([\w-]+)\))?$", prose(text), re.S | re.M)
    return [(re.sub(r"\\text\{[^{}]*\}|[.,]$", "", "".join(formula.split())), label) for formula, label in found]


def inline(text: str) -> set[str]:
    without_displays = re.sub(r"^\$\$\n.*?^\$\$", "", prose(text), flags=re.S | re.M)
    return {"".join(formula.split()) for formula in re.findall(r"(?<!\$)\$([^$]+)\$(?!\$)", without_displays)}


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.S | re.M)


def programs(text: str) -> list[str]:
    return blocks(text, "python")


def fences(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.S | re.M)


def included(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^(?:`{3}|:{3})\{(code-of|picture)\} (.+)$", text, re.M)


def references(text: str) -> list[str]:
    return sorted(re.findall(r"\{eq\}`([^`]+)`", text) + re.findall(r"\]\(#([^)]+)\)", text))


def numbers_of_source(path: Path) -> set[str]:
    """The numbers of the docstrings' definitions; ValueError where the comments of the code have others."""
    text = path.read_text("utf-8")
    documented: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            documented.update(re.findall(r" \((\d+)\)$", ast.get_docstring(node) or "", re.M))
    commented = {
        number for comment in re.findall(r"# (\(.*)$", text, re.M) for number in re.findall(r"\((\d+)\)", comment)
    }
    if documented != commented:
        raise ValueError(f"{path.name}: numbered in docstrings {documented}, in comments {commented}")
    return documented


def problems(root: Path) -> Iterator[str]:
    """Everything about the pages under `root` that is not as it must be."""
    english, chinese = (
        {path.stem: path.read_text("utf-8") for path in (root / "docs" / language).glob("*.md")}
        for language in LANGUAGES
    )
    if english.keys() != chinese.keys():
        yield f"pages in one language only: {english.keys() ^ chinese.keys()}"
    for page in sorted(english.keys() & chinese.keys()):
        for part in (headings, labels, displays, inline, references, included, fences):
            if part(english[page]) != part(chinese[page]):
                yield f"{page}: not the same {part.__name__} in both languages"
    for texts in (english, chinese):
        yield from broken_links(root, texts)
        yield from wrong_numbers(texts)


def foundations(path: Path) -> list[Path]:
    """The files of equations whose numbers this one continues: those it imports, if its own do not begin with 1."""
    names = re.findall(r"^from unrolled\.equations\.(\w+) import", path.read_text("utf-8"), re.M)
    return [] if "1" in numbers_of_source(path) else [EQUATIONS / f"{name}.py" for name in names]


def wrong_numbers(texts: dict[str, str]) -> Iterator[str]:
    """A page derives a file together with those it continues, which have no numbers of their own on any page."""
    paths = sorted(EQUATIONS.glob("[a-z]*.py"))
    continued = {below for path in paths for below in foundations(path)}
    numbered = {path.stem for path in paths if path not in continued}
    for page, text in texts.items():
        for _, label in displays(text):
            file, _, number = label.rpartition("-")
            if number.isdigit() and file not in numbered:
                yield f"{page}: {label} is a line of no file"
    for path in paths:
        if path in continued:
            continue
        files = [path, *foundations(path)]
        in_code = sorted(set().union(*map(numbers_of_source, files)))
        pages = {page for file in files for page in re.findall(r"docs/en/(\w+)\.md", file.read_text("utf-8"))}
        shown = [label for page in pages for _, label in displays(texts.get(page, ""))]
        on_page = sorted(number for label in shown for number in re.findall(rf"^{path.stem}-(\d+)$", label))
        if on_page != in_code:
            yield f"{[file.name for file in files]} have {in_code}, the pages {pages} have {on_page}"


def broken_links(root: Path, texts: dict[str, str]) -> Iterator[str]:
    known = {name for text in texts.values() for name in [*labels(text), *(label for _, label in displays(text))]}
    for page, text in texts.items():
        listed = re.findall(r"^(\w+)$", "".join(blocks(text, r"\{toctree\}")), re.M)
        for target in [*re.findall(r"\]\(([\w./-]+)\.md\)", text), *listed]:
            if target not in texts:
                yield f"{page}: there is no page {target}"
        for target in references(text):
            if target not in known:
                yield f"{page}: nothing is called {target}"
        for kind, name in included(text):
            if kind == "picture" and not all((root / f"docs/_static/{name}{theme}.svg").is_file() for theme in THEMES):
                yield f"{page}: there is no picture {name}"
            if kind == "code-of" and not functions_exist(*name.split()):
                yield f"{page}: there is no {name}"


def functions_exist(file: str, *names: str) -> bool:
    path = ROOT / file
    return path.is_file() and all(f"\ndef {name}(" in path.read_text("utf-8") for name in names)


def test_pages_agree() -> None:
    assert list(problems(ROOT)) == []


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("en/rnn.md", "\n## The bias\n", "\n"),
        ("zh/rnn.md", "\n## 偏置\n", "\n### 偏置\n"),
        ("zh/losses.md", "$$ (cross_entropy-2)", "$$ (cross_entropy-4)"),
        ("zh/backpropagation_through_time.md", r"h_{t-1}^{\top}", r"h_{t}^{\top}"),
        ("zh/backpropagation_through_time.md", r"$\sigma < 1$", r"$\sigma > 1$"),
        ("en/rnn.md", "{eq}`rnn-1`", "{eq}`rnn-7`"),
        ("zh/rnn.md", "$$ (rnn-1)", "$$ (rnn-e)"),
        ("zh/lstm.md", "$$ (lstm-7)", "$$ (lstm-9)"),
        ("en/gru.md", "$$ (gru-2)", "$$ (gru-6)"),
        ("en/gru.md", "$$ (gru_before-4)", "$$ (gru_before-5)"),
        ("en/recurrent_options.md", "$$ (recurrent_options-4)", "$$ (recurrent_options-6)"),
        ("en/recurrent_options.md", "$$ (recurrent_options-5)", "$$ (recurrent_options-v)"),
        ("zh/recurrent_options.md", "$$ (lstm_options-8)", "$$ (lstm_options-9)"),
        ("en/self_attention.md", "$$ (attention-3)", "$$ (attention-6)"),
        ("en/self_attention.md", "$$ (attention-4)", "$$ (self_attention-p)"),
        ("zh/attention.md", "$$ (additive_attention-2)", "$$ (additive_attention-6)"),
        ("zh/positions.md", "$$ (positions-3)", "$$ (rotary-1)"),
        ("en/transformer.md", "$$ (activations-4)", "$$ (activations-5)"),
        ("en/losses.md", "$$ (linear_cross_entropy-3)", "$$ (linear_cross_entropy-5)"),
        ("en/normalisation.md", "$$ (layer_norm-2)", "$$ (layer_norms-2)"),
        ("en/recurrent_options.md", "$$ (zoneout-1)", "$$ (recurrence-1)"),
        ("en/index.md", "\nlosses\n", "\nlosess\n"),
        ("en/losses.md", "(#linear-map)", "(#linear-mapp)"),
        ("zh/rnn.md", "assert_close", "assert_equal"),
        ("zh/rnn.md", "linear_forward linear_backward", "linear_backward"),
        ("en/rnn.md", "linear_forward linear_backward", "linear_forwards linear_backward"),
        ("en/rnn.md", "{picture} unrolled", "{picture} unroled"),
        ("zh/command_line.md", "--resume\n", "--overwrite\n"),
    ],
)
def test_a_difference_is_found(tmp_path: Path, file: str, before: str, after: str) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build"))
    path = tmp_path / "docs" / file
    text = path.read_text("utf-8")
    assert before in text
    path.write_text(text.replace(before, after), "utf-8")
    assert list(problems(tmp_path)) != []


def test_a_page_in_one_language_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build"))
    (tmp_path / "docs/zh/losses.md").unlink()
    assert any("one language only" in problem for problem in problems(tmp_path))


def run_blocks(file: str) -> None:
    """All programs of a page, one after the other in one namespace, as a reader would type them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in programs((ROOT / file).read_text("utf-8")):
        exec(compile(block, file, "exec"), names)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run that the quick start trains, cut short."""
    folder = tmp_path_factory.mktemp("reader")
    training = {"max_steps": 5, "threads": 1}
    train({"data": {"train": "builder:names"}, "training": training, "output_dir": str(folder / "runs/names")})
    return folder


@pytest.mark.parametrize("file", [file for file in FILES if programs((ROOT / file).read_text("utf-8"))])
def test_programs_run(file: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    run_blocks(file)


@pytest.mark.parametrize(
    "page",
    [
        *("notation", "rnn", "backpropagation_through_time", "forgetting"),
        *("lstm", "gru", "recurrent_options", "losses"),
        *("attention", "self_attention", "positions", "normalisation", "transformer", "cost"),
    ],
)
def test_a_derivation_ends_with_a_program(page: str) -> None:
    assert (ROOT / f"docs/en/{page}.md").read_text("utf-8").endswith("\n```\n")


def damaged(result: Any) -> Any:
    """Each tensor of a result is a little too large."""
    if isinstance(result, torch.Tensor) and result.is_floating_point():
        return result * 1.001
    if not isinstance(result, tuple):
        return result
    parts = [damaged(part) for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)


@pytest.mark.parametrize(
    ("page", "target"),
    [
        ("notation", "dropout.dropout_backward"),
        ("rnn", "recurrence.recurrence_forward"),
        ("rnn", "rnn.rnn_tanh_forward"),
        ("rnn", "linear.linear_backward"),
        ("rnn", "embedding.embedding_backward"),
        ("backpropagation_through_time", "recurrence.recurrence_backward"),
        ("backpropagation_through_time", "rnn.rnn_relu_backward"),
        ("forgetting", "rnn.rnn_tanh_backward"),
        ("lstm", "lstm.lstm_forward"),
        ("lstm", "lstm.lstm_backward"),
        ("gru", "gru.gru_forward"),
        ("gru", "gru.gru_backward"),
        ("gru", "gru_before.gru_before_backward"),
        ("gru", "gru_before.reset_backward"),
        ("recurrent_options", "recurrent_options.options_forward"),
        ("recurrent_options", "recurrent_options.options_backward"),
        ("normalisation", "layer_norm.layer_norm_backward"),
        ("recurrent_options", "zoneout.zoneout_backward"),
        ("recurrent_options", "lstm_options.lstm_options_forward"),
        ("recurrent_options", "lstm_options.lstm_options_backward"),
        ("losses", "mean_squared_error.mean_squared_error_backward"),
        ("losses", "cross_entropy.cross_entropy_backward"),
        ("losses", "linear_cross_entropy.linear_cross_entropy_backward"),
        ("attention", "additive_attention.additive_attention_backward"),
        ("attention", "multiplicative_attention.multiplicative_attention_backward"),
        ("self_attention", "attention.attention_forward"),
        ("self_attention", "attention.attention_backward"),
        ("positions", "positions.sinusoidal"),
        ("positions", "positions.alibi_slopes"),
        ("positions", "positions.rotary_backward"),
        ("normalisation", "rms_norm.rms_norm_backward"),
        ("normalisation", "residual_norm.residual_norm_backward"),
        ("transformer", "activations.activation_backward"),
        ("transformer", "feed_forward.feed_forward_forward"),
        ("transformer", "feed_forward.feed_forward_backward"),
        ("transformer", "residual_norm.residual_norm_backward"),
    ],
)
def test_programs_fail_on_wrong_equations(page: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _, function = target.partition(".")
    module = importlib.import_module(f"unrolled.equations.{file}")
    right = getattr(module, function)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return damaged(right(*args, **kwargs))

    def with_wrong(cell: Any) -> Any:
        parts = (with_wrong(part) if isinstance(part, Reset) else wrong if part is right else part for part in cell)
        return type(cell)(*parts)

    monkeypatch.setattr(module, function, wrong)
    for name, value in list(vars(module).items()):
        if isinstance(value, Cell):
            monkeypatch.setattr(module, name, with_wrong(value))
    with pytest.raises(AssertionError):
        run_blocks(f"docs/en/{page}.md")


def commands(text: str) -> list[list[str]]:
    """The arguments of every `unrolled` in the console blocks."""
    found = []
    for block in blocks(text, "console"):
        for line in re.findall(r"^\$ (.*)$", block, re.M):
            for part in re.split(r"\||&&", line):
                words = shlex.split(part.split(" > ")[0])
                for name in (
                    ["unrolled"],
                    ["python", "-m", "unrolled"],
                    ["torchrun", "--nproc_per_node=2", "-m", "unrolled"],
                ):
                    if words[: len(name)] == name:
                        found.append(words[len(name) :])
    return found


@pytest.mark.parametrize("file", [file for file in FILES if commands((ROOT / file).read_text("utf-8"))])
def test_commands_parse(file: str) -> None:
    for arguments in commands((ROOT / file).read_text("utf-8")):
        app.parse_args(dashes(arguments), exit_on_error=False, print_error=False)


def test_an_unknown_flag_does_not_parse() -> None:
    with pytest.raises(CycloptsError):
        app.parse_args(["train", "names", "--epoch-number", "3"], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("file", ["README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_first_pages(file: str) -> None:
    text = (ROOT / file).read_text("utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text) + re.findall(
        r'(?:src|srcset|href)="(?!https?:|#)([^"]+)"', text
    )
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_readmes_agree() -> None:
    english, chinese = ((ROOT / name).read_text("utf-8") for name in ("README.md", "README.zh.md"))
    assert headings(english) == headings(chinese)
    assert fences(english) == fences(chinese)
    assert numbers_in_tables(english) == numbers_in_tables(chinese)


def numbers_in_tables(text: str) -> list[list[str]]:
    return [re.findall(r"\d+(?:[.,]\d+)*", row) for row in re.findall(r"^\|.*\|$", text, re.M)]


@pytest.mark.parametrize("file", ["README.md", "README.zh.md"])
def test_the_readme_has_two_commands(file: str) -> None:
    """`.ci/run` follows every line that begins with `$ pip install`, and expects these two."""
    assert re.findall(r"^\$ pip install .* && (\w+)", (ROOT / file).read_text("utf-8"), re.M) == ["unrolled", "pytest"]
    assert len(re.findall(r"^\$ pip install", (ROOT / file).read_text("utf-8"), re.M)) == 2
