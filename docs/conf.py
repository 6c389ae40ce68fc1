"""How Sphinx builds these pages.

Run `pip install '.[docs]'`, then `sphinx-build -W docs docs/_build`.
"""

from smartcache import __version__

project = "smartcache"
author = "The smartcache authors"
copyright = author
release = version = __version__

extensions = ["myst_parser"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"smartcache {version}"
