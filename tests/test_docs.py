"""The documentation cannot rot: its code runs, its links lead somewhere, and the names it uses exist."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import jax
import pytest

import jax_ep

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PLOTS = ROOT / "benchmarks" / "results"  # of which tools/mkdocs_hooks.py brings the PNGs to the site
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TEXTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
TESTED_ELSEWHERE = {"flax.md"}  # test_flax.py
# In `make test-rest`: their parts repeat what tests of these subjects have.
SLOW = {
    "checkpoints.md",
    "integrations.md",
    "models.md",
    "multi_node.md",
    "numerics.md",
    "placement.md",
    "sharding.md",
    "tracing.md",
}
FOLDERS = ("", "jax_ep", "jax_ep/ffi")  # that the prose names files relative to
NUM_DEVICES = 8
MAX_COLUMNS = 115  # of code, which docs/site.css has room for
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def every(pages: list[Path], *, slow: Set[str] = frozenset()) -> Any:
    cases = [pytest.param(page, marks=[pytest.mark.slow] * (page.name in slow)) for page in pages]
    return pytest.mark.parametrize("page", cases, ids=[page.name for page in pages])


def python_blocks(page: Path) -> list[str]:
    """The blocks of a page, each after as many empty lines as stand before it, so that tracebacks name its lines."""
    text = page.read_text()
    return ["\n" * text[: m.start(2)].count("\n") + m[2] for m in FENCE.finditer(text) if m[1].strip() == "python"]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, and of what mkdocstrings puts there."""
    text = prose(page)
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def resolve(dotted: str) -> Any:
    """The module or object of that name, or an error."""
    value: Any = jax_ep
    for i, part in enumerate(dotted.split(".")[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(dotted.split(".")[:i]))
        value = getattr(value, part)
    return value


WITH_CODE = [page for page in PAGES if page.name not in TESTED_ELSEWHERE and python_blocks(page)]


def test_pages_with_code_are_found() -> None:
    names = {"README.md", "index.md", "guide.md", "concepts.md", "sharding.md", "numerics.md", "errors.md"}
    assert names <= {page.name for page in WITH_CODE}
    assert len(python_blocks(DOCS / "guide.md")) >= 7
    (first,) = python_blocks(ROOT / "README.md")
    assert len([line for line in first.splitlines() if line.strip()]) <= 12


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    """Compilation is nearly all of the time that the examples take, and halves without XLA's optimisations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("quick_compilation")
@every(WITH_CODE, slow=SLOW)
def test_code_runs(page: Path) -> None:
    """The blocks of a page run one after another, as a reader would run them; they check themselves."""
    if jax.device_count() < NUM_DEVICES:
        pytest.skip(f"needs {NUM_DEVICES} devices")
    for package in ("flax", "equinox"):
        if package in page.read_text():
            pytest.importorskip(package)
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


@every(PAGES)
def test_code_blocks_are_marked(page: Path) -> None:
    """A block with a misspelled language would be neither highlighted nor run."""
    languages = {m[1].strip() for m in FENCE.finditer(page.read_text())}
    assert languages <= {"python", "text", "bash", "console", ""}
    assert page.read_text().count("```") == 2 * len(FENCE.findall(page.read_text()))


@every(TEXTS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(CODE.sub("`code`", prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}: no such heading"
        if page.is_relative_to(DOCS) and not (file.parent == PLOTS and file.suffix == ".png"):
            assert file.is_relative_to(DOCS), f"{page.name} links to {target}: the site has docs/ and plots only"


@every(TEXTS)
def test_code_fits_its_page(page: Path) -> None:
    """What a page of the site, and of a forge, shows without a scroll bar."""
    lines = [line for m in FENCE.finditer(page.read_text()) for line in m[2].splitlines()]
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []


@every(PAGES)
def test_headings_are_unique(page: Path) -> None:
    """Sites and forges number the second one differently, so that a link to it works in one place only."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    assert sorted(set(headings)) == sorted(headings)


@pytest.mark.parametrize("address", [None, "https://example.org/jax_ep"])
@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """`mkdocs build --strict`, with the version, the plots that pages show, and the repository where one is known."""
    pytest.importorskip("mkdocs")
    monkeypatch.delenv("REPOSITORY_URL", raising=False)
    if address:
        monkeypatch.setenv("REPOSITORY_URL", address)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "performance" / "index.html").read_text()
    assert f"jax_ep {jax_ep.__version__}" in page
    shown = set(re.findall(r'src="\.\./(results/[^"]+\.png)"', page))
    assert shown and not [name for name in shown if not (tmp_path / name).is_file()]
    assert ("example.org" in page) == (address is not None)


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    nav = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", text, re.MULTILINE)
    assert sorted(nav) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    readme_links = set(LINK.findall((ROOT / "README.md").read_text()))
    design = set(LINK.findall((DOCS / "design" / "architecture.md").read_text()))
    for name in nav:
        folder, _, page = name.rpartition("/")
        assert f"docs/{name}" in readme_links or (folder == "design" and page in design), f"no link to {name}"


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "api.md").read_text()
    named = set(re.findall(r"`(jax_ep\.[\w.]+)`", text))
    rendered = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    public = {f"jax_ep.{name}" for name in jax_ep.__all__}
    assert public - named == set()
    # mkdocstrings reads sources, in which `jax_ep.moe` is the module that has the function.
    assert {name.replace("jax_ep.moe.moe", "jax_ep.moe") for name in rendered} >= public
    assert [name for name in rendered if not getattr(_rendered(name), "__doc__", None)] == []


def _rendered(name: str) -> Any:
    return jax_ep.moe if name == "jax_ep.moe.moe" else resolve(name)


@every(TEXTS)
def test_names_exist(page: Path) -> None:
    """What the prose names in code style: names of the package, files, tasks of the Makefile, extras."""
    checkpoint_names = {"jax_ep.tokens", "jax_ep.hidden", "jax_ep.output"}
    for code in CODE.findall(prose(page)):
        match = re.match(r"jax_ep(\.[A-Za-z_]\w*)+", code)
        if match and match[0] not in checkpoint_names and not code.endswith(".py"):
            resolve(match[0])
        if re.fullmatch(r"(\w[\w-]*/)+[\w.-]+\.(py|md|cc|h)", code):
            assert any((ROOT / folder / code).exists() for folder in FOLDERS), f"{page.name} names {code}"


@every(TEXTS)
def test_commands_exist(page: Path) -> None:
    text = page.read_text()
    tasks = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [*CODE.findall(text), *re.findall(r"^ {4}(.+)$", text, re.MULTILINE)]
    for command in commands:
        named = re.match(r"make ([a-z][a-z-]*)", command)
        assert not named or named[1] in tasks, f"{page.name}: {command}"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"pip install '[^'\[]*\[([\w,]+)\]'", text):
        assert set(names.split(",")) <= set(extras), f"{page.name}: {names}"


def test_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"^ {4}make demo\b", readme, re.MULTILINE)
    assert re.search(r"^ {4}make test\b", readme, re.MULTILINE)


def test_pages_name_every_registered_implementation_and_function() -> None:
    """The feature table is what users trust: a new function must appear in it, and an implementation in README."""
    from jax_ep.ops import registry

    readme = (ROOT / "README.md").read_text()
    table = (DOCS / "features.md").read_text().split("## Features\n")[1].split("\n## ")[0]
    functions = [name for name in jax_ep.__all__ if name[0].islower() and name not in ("init", "finalize")]
    assert [name for name in functions if f"`{name}`" not in table] == []
    assert [name for name in registry.available() if f"`{name}`" not in readme] == []


def test_changelog_has_this_version() -> None:
    assert jax_ep.__version__ in (ROOT / "CHANGELOG.md").read_text()
