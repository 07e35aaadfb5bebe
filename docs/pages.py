"""What the pages need beyond Sphinx: formulas as MathML (no script, no network), and functions shown from their source.

An equation's label is its source file and its number there, `rnn-2`; the page shows (2), as the code does.
"""

from __future__ import annotations

import ast
import re
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import ziamath
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.directives.code import container_wrapper
from sphinx.directives.patches import Figure
from sphinx.util.docutils import SphinxDirective
from sphinx.util.fileutil import copy_asset

SOURCE = Path(__file__).parents[1]
MATHML = "{http://www.w3.org/1998/Math/MathML}"
ElementTree.register_namespace("", MATHML[1:-1])
FONT = Path(ziamath.__file__).parent / "fonts" / "STIXTwoMath-Regular.ttf"


def mathml(latex: str, display: str) -> str:
    """One formula; what latex2mathml does not know is put into words it does."""
    latex = latex.replace("{aligned}", "{split}")
    latex = re.sub(r"\\mathrm\{([A-Za-z]+)\}", r"\\text{\1}", latex)
    root = ElementTree.fromstring(convert(latex, display=display))
    space_out(root, in_script=False)
    return ElementTree.tostring(root, encoding="unicode")


def space_out(parent: ElementTree.Element, in_script: bool) -> None:
    """The spacing that TeX gives and browsers leave to the markup: signs, bars, named functions, indices."""
    parent_kind = parent.tag.removeprefix(MATHML)
    children = list(parent)
    before, before_name = "", False
    for place, child in enumerate(children):
        kind, text = child.tag.removeprefix(MATHML), child.text or ""
        if kind == "mtable" and child.get("displaystyle"):
            for row in child:
                for column, cell in enumerate(row):
                    cell.set("columnalign", ("right", "left")[column % 2])
        elif child.get("mathvariant") == "bold":
            child.text = text.translate({ord("0") + d: ord("𝟎") + d for d in range(10)})  # MathML Core has no bold
        elif text == "′":
            child.set("class", "prime")
        elif kind == "mo":
            if is_name(child) or text in "…⋯∞":
                child.tag, kind = MATHML + "mi", "mi"
            elif text in "‖∥|":
                child.attrib.update(stretchy="false", lspace="0", rspace="0")
            elif text in "-−" and before in ("", *"(=,[≤≥<>"):
                child.set("form", "prefix")
            elif in_script and text != ",":
                child.attrib.update(lspace="0", rspace="0")
        name = is_name(child) or (kind in ("msub", "msup", "munder") and is_name(child[0]))
        if parent_kind in ("mrow", "mtd", "math"):
            after_operand = name and before not in ("", "mo", "mspace") and before not in "(=,[+−-"
            if after_operand or (before_name and kind not in ("mo", "mtext", "mspace")):
                parent.insert(list(parent).index(child), ElementTree.Element(MATHML + "mspace", width="0.167em"))
        before, before_name = (text or kind) if kind == "mo" else kind, name
        has_scripts = re.fullmatch("m(sub|sup|subsup|under|over|underover)", parent_kind)
        space_out(child, in_script or (has_scripts is not None and place > 0))


def is_name(element: ElementTree.Element) -> bool:
    text = element.text or ""
    return element.tag in (MATHML + "mi", MATHML + "mo") and len(text) > 1 and text.isalpha()


def visit_inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    label = node.get("label")
    number = ""
    if label:
        anchor = node["ids"][0]
        number = f'<a class="eqno" href="#{escape(anchor)}">({escape(number_of(label))})</a>'
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    translator.body.append(f"{mathml(node.astext(), 'block')}{number}</div>\n")
    raise nodes.SkipNode


def number_of(label: str) -> str:
    return label.rpartition("-")[2]


def number_equations(app: Sphinx, env: Any) -> list[str]:
    """References show the number of the code, not a count of the page."""
    equations = env.domains["math"].data["objects"]
    for label, (page, _) in equations.items():
        equations[label] = (page, number_of(label))
    return []


class CodeOf(SphinxDirective):
    """`{code-of} src/unrolled/equations/rnn.py rnn_forward ...`: functions as the file has them, without docstrings."""

    required_arguments = 2
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        file, functions = self.arguments[0], self.arguments[1].split()
        path = SOURCE / file
        self.env.note_dependency(str(path))
        text = path.read_text("utf-8")
        found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if missing := [name for name in functions if name not in found]:
            raise self.error(f"{file} has no {', '.join(missing)}")
        code = "\n\n\n".join(source_of(found[name], text.splitlines()) for name in functions)
        block = nodes.literal_block(code, code, language="python")
        return [container_wrapper(self, block, file)]


def source_of(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> str:
    start, end = node.lineno - 1, node.end_lineno
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        return "\n".join([*lines[start : first.lineno - 1], *lines[first.end_lineno : end]])
    return "\n".join(lines[start:end])


class Picture(Figure):
    """`{picture} name`: a figure of _static/name.svg for light pages and _static/name_dark.svg for dark ones."""

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        self.arguments[0] = f"../_static/{name}.svg"
        (figure,) = super().run()
        light = next(figure.findall(nodes.image))
        dark = light.deepcopy()
        dark["uri"] = f"../_static/{name}_dark.svg"
        light["classes"].append("only-light")
        dark["classes"].append("only-dark")
        light.parent.insert(light.parent.index(light) + 1, dark)
        return [figure]


THEME_IN_CHINESE = {"Next": "下一页", "Previous": "上一页", "On this page": "本页内容", "Back to top": "返回顶部"}


def translate_theme(app: Sphinx) -> None:
    """The theme has no Chinese of its own."""
    if app.config.language == "zh_CN" and app.builder.format == "html":
        known = app.translator
        app.builder.templates.environment.install_gettext_callables(
            lambda text: THEME_IN_CHINESE.get(text) or known.gettext(text), known.ngettext, newstyle=True
        )


def copy_font(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        copy_asset(FONT, Path(app.outdir) / "_static")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    app.add_directive("code-of", CodeOf)
    app.add_directive("picture", Picture)
    app.connect("env-updated", number_equations)
    app.connect("builder-inited", translate_theme)
    app.connect("build-finished", copy_font)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
