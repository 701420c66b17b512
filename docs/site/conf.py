"""Sphinx's configuration of the site, whose pages are the repository's pages, unchanged.

``make docs`` runs Sphinx with it, on the whole repository as its source.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sphinx import addnodes

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

project = "mlserver-torch-stream"
html_title = project
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/site/index"
include_patterns = ["*.md", "docs/**.md", "docs/site/*.rst", "benchmarks/*.md", "benchmarks/results/*.md"]
exclude_patterns = [".*", "build", "dist", "tests", "mlserver_torch_stream", "deploy"]
html_theme = "furo"
html_static_path = ["tables.css", "tables.js"]
html_css_files = ["tables.css"]
html_js_files = ["tables.js"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
smartquotes = False  # options begin with two hyphens
nitpicky = True
myst_heading_anchors = 4  # as on GitHub

autodoc_mock_imports = ["grpc", "google", "aiohttp", "yarl", "httpx", "mlserver", "orjson", "numpy", "torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Names of the standard library, whose pages are not linked, and pieces of types that Sphinx splits at a comma.
nitpick_ignore_regex = [("py:.*", r"(collections|os)\..*|.*\[.*")]

_ENTRY = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/site/index.html"><title>{}</title>\n'


def setup(app: Any) -> None:
    app.connect("doctree-read", _unlink_folders)
    app.connect("build-finished", _write_entry)


def _unlink_folders(app: Any, doctree: Any) -> None:
    """Replaces links to folders of the repository by their text, as the site does not have these folders."""
    folder = (ROOT / app.env.docname).parent
    for link in list(doctree.findall(addnodes.pending_xref)):
        if (folder / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def _write_entry(app: Any, error: Exception | None) -> None:
    if error is None:
        Path(app.outdir, "index.html").write_text(_ENTRY.format(project), encoding="utf-8")
