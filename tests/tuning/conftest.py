"""Files of tuned settings, as `jax-ep tune` writes them."""

import json

import jax
import pytest

from jax_ep import context
from jax_ep.settings import file

KIND = jax.devices()[0].device_kind


@pytest.fixture(autouse=True)
def untuned():
    """Reset the chosen settings after tests and documentation pages."""
    context.set_tuning(None)
    yield
    context.set_tuning(None)


@pytest.fixture
def make_file(tmp_path):
    """`make_file(*entries, **changed)`: write a valid file with changes; values of ... are omitted."""

    def make(*entries, rates=None, **changed):
        content = {"format": 1, "device_kind": KIND, "kernels": file.kernel_sources(), "rates": rates}
        content = content | {"entries": list(entries)} | changed
        path = tmp_path / "tuned.json"
        path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
        return path

    return make
