"""Every Python block of the docs and the README runs, page by page, in a temporary working directory."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_of_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in BLOCK.finditer(text):
        # Blank lines keep the traceback's line numbers those of the page.
        source = "\n" * text[: block.start(1)].count("\n") + block.group(1)
        exec(compile(source, str(page), "exec"), namespace)
