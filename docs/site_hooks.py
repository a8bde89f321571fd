"""The site's version and its link to the repository, for `mkdocs build`.

`make docs REPOSITORY=URL` links to the repository; without it the site refers to no host.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

VERSION = Path(__file__).parents[1] / "src" / "meshwright" / "version.py"


def on_config(config: Any) -> Any:
    """Add the package's version to the site's name, and the repository to its menu."""
    stated = re.search(r'__version__ = "(.+)"', VERSION.read_text(encoding="utf-8"))
    assert stated is not None, f"{VERSION} states no version"
    config["site_name"] = f"{config['site_name']} {stated[1]}"
    if repository := os.environ.get("REPOSITORY"):
        config["nav"] = [*config["nav"], {"Repository": repository}]
    return config
