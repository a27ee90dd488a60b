"""Sphinx's settings. Nothing that a page needs comes from the network: formulas are MathML, fonts the reader's own."""

from inspect import isbuiltin

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

from course.book.reference import to_rst
from minillm import __version__

project, release, copyright = "minillm", __version__, "the minillm authors; MIT license"
html_title = "minillm"
smartquotes = False  # "--serve" is no dash
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a lab's text may skip a level of headings

autodoc_inherit_docstrings = False  # torch writes its own otherwise
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False
python_maximum_signature_line_length = 120
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_math_renderer = "mathml"
html_copy_source = False
pygments_style, pygments_dark_style = "friendly", "monokai"
copybutton_selector = "div.highlight-python pre"


def setup(app):
    """What Sphinx asks of an extension."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("autodoc-skip-member", _is_anothers)


def _inline(writer, node):
    writer.body.append(_mathml(node, "inline"))
    raise SkipNode


def _block(writer, node):
    writer.body.append(f'<div class="formula">{_mathml(node, "block")}</div>')
    raise SkipNode


def _mathml(node, display):
    """MathML of a formula; a fraction's stroke without the space that browsers put around operators."""
    return convert(node.astext(), display=display).replace("<mo>&#x0002F;</mo>", '<mo lspace="0" rspace="0">/</mo>')


def _docstring(app, what, name, value, options, lines):
    lines[:] = to_rst(lines)


def _is_anothers(app, kind, name, member, skip, options):
    """A field whose default is a function of Python's own: its page of code would be one that is not there."""
    return True if isbuiltin(member) else None
