"""benchmarks/launchers.py times what it says it times, and tells of a launcher that does not work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reports import check_report

import jax_ep
import launchers
from jax_ep import context
from jax_ep.core import jax_triton

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a quick run is for CPU devices")


@pytest.fixture(autouse=True)
def no_context() -> Iterator[None]:
    yield
    jax_ep.finalize()


def run(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict:
    arguments = ["launchers.py", "--quick", "--out", str(folder), "--kernels", "gather_rows"]
    monkeypatch.setattr("sys.argv", arguments)
    launchers.main()
    content = json.loads((folder / "launchers.json").read_text())
    check_report(content)
    return content


@pytest.mark.slow
def test_both_launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    used = []
    monkeypatch.setattr(jax_triton, "check", lambda: used.append(context.launcher()))
    rows = run(monkeypatch, tmp_path)["rows"]
    assert [row["variant"] for row in rows] == ["ffi", "jax-triton"] and used
    assert all(row["shape"]["kernel"] == "gather_rows" and row["seconds"] for row in rows)


@pytest.mark.slow
def test_a_launcher_that_does_not_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("a rule takes two arguments")

    monkeypatch.setattr(jax_triton, "check", fail)
    failed, measured = run(monkeypatch, tmp_path)["rows"]
    assert failed["variant"] == "jax-triton" and "two arguments" in failed["failed"]
    assert measured["variant"] == "ffi" and "seconds" in measured


@pytest.mark.parametrize("name", launchers.KERNELS)
def test_each_launch_takes_the_result_of_the_one_before(name: str) -> None:
    """A step that adds one, in place of the kernel: XLA would merge calls that do not depend on each other."""
    chain = launchers.make_chains()[name]._replace(step=lambda x, *rest: x + jnp.ones_like(x))
    fn, arguments = launchers.make("ffi", chain, 5)
    np.testing.assert_array_equal(np.asarray(fn(*arguments)), np.asarray(chain.x) + 5)
    assert set(launchers.make_chains()) == set(launchers.KERNELS)
