"""Hooks of mkdocs.yml: the site's version and repository from pyproject.toml, and the plots of benchmarks/results.

Pages name a plot relative to docs/, `../benchmarks/results/NAME.png`, as the repository shows it. The site has a copy
of the plots that its pages show, `results/NAME.png`.
"""

from __future__ import annotations

import os
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PLOT = re.compile(r"\]\(\.\./benchmarks/results/([\w.-]+\.png)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add version, license and addresses from pyproject.toml; REPOSITORY_URL and SITE_URL override its `urls`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_name = f"{config.site_name} {project['version']}"
    config.copyright = f"{project['name']} {project['version']}, license {project['license']}"
    url = os.environ.get("REPOSITORY_URL") or project.get("urls", {}).get("Repository")
    if url:
        config.repo_url, config.repo_name, config.edit_uri = url, project["name"], "edit/main/docs/"
    if site := os.environ.get("SITE_URL") or project.get("urls", {}).get("Documentation"):
        config.site_url = site.rstrip("/") + "/"
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the plots that pages show to the site; a missing one fails a strict build."""
    names = {name for page in files.documentation_pages() for name in PLOT.findall(page.content_string)}
    for name in sorted(names):
        path = ROOT / "benchmarks" / "results" / name
        if path.exists():
            files.append(File.generated(config, f"results/{name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace the paths of plots by those of the site."""
    folder = posixpath.dirname(page.file.src_uri)
    return PLOT.sub(lambda match: f"]({posixpath.relpath('results', folder or '.')}/{match[1]})", markdown)
