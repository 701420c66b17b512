"""The site of the pages is built without a warning, and its search finds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import markdown

_PAGES = [page for page in [*markdown.pages(), *markdown.pages_of_reference()] if page != "README.md"]
_SITE = markdown.ROOT / "docs/site"


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Sphinx needs Python 3.11")
def test_make_docs_builds_every_page_without_a_warning(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = ["make", "docs", f"VENV={tmp_path}", f"DOCS_DIR={site}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=markdown.ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [page for page in _PAGES if not (site / page).with_suffix(".html").is_file()] == []
    assert (site / "docs/site/index.html").is_file() and "docs/site/index.html" in (site / "index.html").read_text()
    assert "AsyncClient" in (site / "docs/site/api.html").read_text()
    assert "tables.js" in (site / "docs/openai.html").read_text()
    index = (site / "searchindex.js").read_text()
    assert '"docs/scaling"' in index and "preempt" in index
    fetched = [page for page in site.rglob("*.html") if 'src="http' in page.read_text(encoding="utf-8")]
    assert fetched == [], "a page loads something from elsewhere"


def test_the_index_of_the_site_has_every_page() -> None:
    index = (_SITE / "index.md").read_text(encoding="utf-8").split()
    assert [page for page in _PAGES if f"../{page.removeprefix('docs/').removesuffix('.md')}" not in index] == []


@pytest.mark.parametrize("page", ["docs/site/index.md", "docs/site/tasks.md"])
def test_every_link_of_the_site_leads_somewhere(page: str) -> None:
    assert [link for link in markdown.local_links(page) if not link.leads_somewhere()] == []
