"""Tests that need GPUs; `--implementation triton` runs most of them in Triton's interpreter, with few iterations."""

import jax
import numpy as np
import pytest

from jax_ep import context


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def kernels_run_here():
    if jax.default_backend() != "gpu" and context.transport() != "shared_memory":
        pytest.skip("needs NVIDIA GPUs; --implementation triton tries it out in Triton's interpreter")


@pytest.fixture
def on_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs NVIDIA GPUs")


@pytest.fixture
def one_process():
    if jax.process_count() > 1:
        pytest.skip("is about one process that drives every GPU")


@pytest.fixture
def same_bits():
    """Fail unless two results are equal bit for bit, leaf by leaf."""

    def compare(got, want):
        leaves = dict(jax.tree.leaves_with_path(got))
        for path, leaf in jax.tree.leaves_with_path(want):
            assert np.asarray(leaves[path]).tobytes() == np.asarray(leaf).tobytes(), jax.tree_util.keystr(path)

    return compare
