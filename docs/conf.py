"""One configuration for both languages.

sphinx-build -W -c docs -D language=en docs/en docs/_build/en
sphinx-build -W -c docs -D language=zh_CN docs/zh docs/_build/zh
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "unrolled"
project_copyright = "the authors of unrolled, Apache-2.0"

extensions = ["myst_parser", "pages"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_dmath_double_inline = False
html_math_renderer = "mathml"

html_theme = "furo"
html_title = "unrolled"
html_static_path = ["_static"]
html_css_files = ["unrolled.css"]
html_copy_source = False
html_show_sphinx = False
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
