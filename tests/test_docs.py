"""Documentation tests: its code runs and prints what it says, its links work, and the reference is complete."""

import contextlib
import importlib
import io
import json
import re
from pathlib import Path

import jax
import pytest

import jax_ep

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TEXTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
# In `make test-rest`, because tests of these subjects cover their parts.
SLOW = {
    *("checkpoints.md", "flax.md", "guide.md", "integrations.md", "multi_node.md"),
    *("numerics.md", "placement.md", "sharding.md", "tracing.md", "tutorial.md"),
}
NUM_DEVICES = 8
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def python_blocks(page):
    """Return each block of a page, padded so that tracebacks show the page's lines, and what it prints, or None."""
    text = page.read_text()
    fences = list(FENCE.finditer(text))
    blocks = []
    for fence, following in zip(fences, [*fences[1:], None], strict=False):
        if fence[1].strip() == "python":
            adjacent = (
                following and following[1].strip() == "text" and not text[fence.end() : following.start()].strip()
            )
            printed = following[2] if following and adjacent else None
            blocks.append(("\n" * text[: fence.start(2)].count("\n") + fence[2], printed))
    return blocks


def run_blocks(blocks, name):
    """Run blocks in one namespace and compare what they print on CPU devices; a line that ends in "..." may go on."""
    namespace = {"__name__": "__docs__"}
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            for block, printed in blocks:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(block, name, "exec"), namespace)
                if printed is not None and jax.default_backend() == "cpu":
                    pattern = re.escape(printed.strip()).replace(r"\.\.\.", ".*")
                    assert re.fullmatch(pattern, out.getvalue().strip()), out.getvalue()
    finally:
        jax.set_mesh(None)


def prose(page):
    return FENCE.sub("", page.read_text())


def anchors(page):
    """Return the anchors of a page's headings, and of mkdocstrings."""
    text = prose(page)
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def resolve(dotted):
    """Return the module or object of that name, or raise an error."""
    value = jax_ep
    for i, part in enumerate(dotted.split(".")[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(dotted.split(".")[:i]))
        value = getattr(value, part)
    return value


WITH_CODE = [page for page in PAGES if python_blocks(page)]
WITH_CODE = [pytest.param(p, marks=[pytest.mark.slow] * (p.name in SLOW), id=p.name) for p in WITH_CODE]


@pytest.fixture
def quick_compilation():
    """Compilation dominates the examples' time, and halves without XLA's optimizations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")  # It calls what Flax deprecates.
@pytest.mark.parametrize("page", WITH_CODE)
def test_docs_code_runs(page):
    """Check that the blocks of a page run one after another and print what the page says."""
    if jax.device_count() < NUM_DEVICES:
        pytest.skip(f"needs {NUM_DEVICES} devices")
    for package in ("flax", "equinox", "qwix", "optax", "orbax.checkpoint"):
        if package in page.read_text():
            pytest.importorskip(package)
    run_blocks(python_blocks(page), str(page))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_notebook_prints_its_outputs():
    if jax.device_count() != NUM_DEVICES or jax.default_backend() != "cpu":
        pytest.skip(f"needs {NUM_DEVICES} CPU devices")
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells]
    assert any(outputs)
    run_blocks([("".join(cell["source"]), printed) for cell, printed in zip(cells, outputs, strict=True)], "notebook")


def test_docs_links():
    """Links of pages outside docs/; `make docs` checks those inside."""
    for page in (page for page in TEXTS if not page.is_relative_to(DOCS)):
        for target in LINK.findall(CODE.sub("`code`", prose(page))):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(file), f"{page.name} links to {target}: no such heading"


def test_docs_reference_is_complete():
    text = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    named = set(re.findall(r"`(jax_ep\.[\w.]+)`", text))
    rendered = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    public = {f"jax_ep.{name}" for name in jax_ep.__all__}
    assert public - named == set()
    # mkdocstrings reads sources, in which `jax_ep.moe` is the module that has the function.
    assert {name.replace("jax_ep.moe.moe", "jax_ep.moe") for name in rendered} >= public
    assert [name for name in rendered if not getattr(_rendered(name), "__doc__", None)] == []


def _rendered(name):
    return jax_ep.moe if name == "jax_ep.moe.moe" else resolve(name)
