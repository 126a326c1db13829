"""Sphinx configuration: MyST pages, API from docstrings, builds offline."""

import msrm

project = "msrm"
author = "The msrm developers"
copyright = "2026, The msrm developers"
version = release = msrm.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"msrm {release}"
