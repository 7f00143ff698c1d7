"""This folder, the package's docstrings and comments of C++ headers as a site (`make docs`). Nothing is fetched."""

import re
import subprocess
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

import nsa

project = "nsa"
author = "the libnsa authors"
version = release = nsa.__version__
extensions = ["myst_parser", "breathe", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"nsa {version}"
html_copy_source = False
smartquotes = False
myst_heading_anchors = 6  # links to headings, as GitHub has them

# Docstrings have Google's sections, and names in single backticks: a link where the name is documented here.
default_role = "py:obj"
nitpick_ignore_regex = [("cpp:.*", ".*"), ("py:obj", ".*"), ("py:.*", r"Tensor|(torch|transformers|collections)\..*")]
napoleon_use_param = napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style"), ("Fields", "params_style")]
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100

# Doxygen reads the headers, in which comments before #pragma are those of the file and trailing ones of a member.
comments = r"sed -E -e '0,/^#pragma/s|^// ?|/// |; 1s|^|/// @file\n|; s|^( +[^/ ].*[;,{]) +// |\1 ///< |'"
root = Path(__file__).resolve().parents[1]
doxygen = {
    "INPUT": root / "include" / "nsa",
    "OUTPUT_DIRECTORY": root / "build" / "doxygen",
    "FILTER_PATTERNS": f'*.h="{comments}"',
    **dict.fromkeys(("EXTRACT_ALL", "GENERATE_XML", "QUIET", "WARN_AS_ERROR"), "YES"),
    **dict.fromkeys(("GENERATE_HTML", "GENERATE_LATEX", "MARKDOWN_SUPPORT", "AUTOLINK_SUPPORT"), "NO"),
}
doxygen["OUTPUT_DIRECTORY"].mkdir(parents=True, exist_ok=True)
lines = "\n".join(f"{name} = {value}" for name, value in doxygen.items())
subprocess.run(["doxygen", "-"], input=lines, text=True, check=True)
breathe_projects = {"nsa": str(doxygen["OUTPUT_DIRECTORY"] / "xml")}
breathe_default_project = "nsa"
breathe_show_include = False

# A page for each public module but nsa, whose page says more. They are not tracked.
modules = ("nsa.compat.fla", "nsa.hf", "nsa.parallel", "nsa.reference", "nsa.replay", "nsa.serving", "nsa.vllm")
for module in modules:
    page = f"# {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n```\n"
    (root / "docs" / "api" / f"{module}.md").write_text(page, encoding="utf-8")

# One signature with every argument says more than the overloads, which are there for type checkers.
for module in ("nsa.decoding", "nsa.functional"):
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    analyzer.overloads.clear()


def skip_fields(app, what, name, obj, skip, options):
    """The fields of a NamedTuple, which its docstring has, are no members of their own."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field number") else None


def leave_the_site(app, page, source):
    """A link to a Markdown file outside of this folder is to the file itself, without an anchor in it."""
    up = "../" * (page.count("/") + 1)
    source[0] = re.sub(rf"\]\(({up}[^)#]*\.md)(#[^)]*)?\)", r"](path:\1)", source[0])


def setup(app):
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("source-read", leave_the_site)
