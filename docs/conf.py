"""How Sphinx builds the site: `sphinx-build -W --keep-going -c docs . build/site`.

The source folder is the repository, so that links from page to page, and to tests and
examples, are the same ones there and on the site.
"""

from typing import Any

from jhost import __version__, errors

project = "jhost"
version = release = __version__

include_patterns = ["*.md", "benchmarks/README.md", "docs/*.md"]
exclude_patterns = [".*", "build"]  # not looked into
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"jhost {version}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_copyright = False  # the license stands beside the code

myst_heading_anchors = 3  # links to headings, as GitHub makes them

# Docstrings are written for `help` and for editors: between two backticks is code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_attr_annotations = False  # their types have no pages here

# A reference that leads nowhere is a warning, and warnings are errors.  Names of other
# libraries could be looked up only with a network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!jhost).*")]


def _without_section(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Of an error its own words: its section, which `help` has too, is on a page."""
    if isinstance(obj, type) and obj.__module__ == errors.__name__:
        if section := errors.section_of(obj).splitlines():
            del lines[lines.index(section[0]) :]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _without_section)
