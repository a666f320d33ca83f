"""What `import jax_ep` may load, which modules may import each other, and what every public name must document."""

import ast
import graphlib
import json
import pathlib
import subprocess
import sys

import pytest

import jax_ep

PACKAGE = pathlib.Path(jax_ep.__file__).resolve().parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


ISOLATED = r"""
import ctypes, importlib.machinery, json, os, sys, threading, warnings
warnings.simplefilter("error")

BLOCKED = {"triton", "flax", "maxtext", "qwix", "optax", "nvshmem", "cupy", "torch", "safetensors", "huggingface_hub"}
PACKAGE = sys.argv[1]

class Finder:
    '''Stands before every other finder, also that of an editable installation, which would import the installed jax_ep.

    It takes jax_ep from PACKAGE alone; the optional packages and every compiled module of jax_ep are missing.
    '''
    def find_spec(self, name, path=None, target=None):
        root = name.split(".")[0]
        if root in BLOCKED:
            raise ImportError(f"{name} is blocked by the test")
        if root != "jax_ep":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path or [os.path.dirname(PACKAGE)])
        if spec is None:
            raise ModuleNotFoundError(f"{PACKAGE} has no {name}", name=name)
        if not str(spec.origin).endswith((".py", "None")):
            raise ImportError(f"{name} is a compiled module, blocked by the test")
        return spec

sys.meta_path.insert(0, Finder())

import jax, jax.numpy, numpy

def refuse(name, *args, **kwargs):
    raise OSError(f"{name} must not be loaded by an import")

ctypes.CDLL.__init__ = refuse
ctypes.cdll.LoadLibrary = refuse

def libraries():
    if not os.path.exists("/proc/self/maps"):
        return []
    with open("/proc/self/maps") as maps:
        return sorted({line.split()[-1] for line in maps if ".so" in line})

environment, modules, before = dict(os.environ), set(sys.modules), libraries()
config = {name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_platforms", "jax_numpy_rank_promotion")}
import jax_ep
for name in jax_ep.__all__:
    getattr(jax_ep, name)
from jax._src import xla_bridge

print(json.dumps({
    "files": sorted(module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "jax_ep"),
    "environment_changes": sorted(set(environment.items()) ^ set(os.environ.items())),
    "new_modules": sorted(set(sys.modules) - modules),
    "new_libraries": sorted(set(libraries()) - set(before)),
    "backends": sorted(xla_bridge._backends),
    "threads": [thread.name for thread in threading.enumerate()],
    "config_changes": [name for name, value in config.items() if getattr(jax.config, name) != value],
}))
"""


def _isolated_import():
    command = [sys.executable, "-c", ISOLATED, str(PACKAGE)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def test_import_is_isolated():
    """It works without optional packages, and loads no compiler, library, backend or thread."""
    report = _isolated_import()
    files, modules = report["files"], report["new_modules"]
    assert {str(PACKAGE / "__init__.py"), str(PACKAGE / "ops" / "exchange.py")} <= set(files)
    assert [file for file in files if not pathlib.Path(file).is_relative_to(PACKAGE)] == []
    # JAX may load its own dependencies, for example in jax.experimental.
    allowed = {"jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy", "jax_ep"}
    assert {name.split(".")[0] for name in modules} - allowed - set(sys.stdlib_module_names) == set()
    roots = ("jax.experimental.pallas", "jax.experimental.mosaic", "jax_ep.pallas", "jax_ep.megakernels")
    assert [name for name in modules if name.startswith(roots)] == []
    assert (report["backends"], report["environment_changes"], report["config_changes"]) == ([], [], [])
    assert report["threads"] == ["MainThread"]
    assert [library for library in report["new_libraries"] if "jax_ep" in library or "nvshmem" in library] == []


def test_import_on_demand(monkeypatch):
    """Submodules that need other packages are attributes, too, without an import; `dir` lists what is public."""
    assert isinstance(jax_ep.checkpoints.Checkpoint, type) and jax_ep.tracing.record and jax_ep.integrations
    assert set(jax_ep.__all__) < set(dir(jax_ep)) and {"core", "ops", "sys"}.isdisjoint(dir(jax_ep))
    assert [name for name in dir(jax_ep) if name != "flax" and not hasattr(jax_ep, name)] == []
    with pytest.raises(AttributeError, match="'jax_ep' has no attribute 'moee'"):
        _ = jax_ep.moee
    monkeypatch.delattr(jax_ep, "flax", raising=False)
    monkeypatch.delitem(sys.modules, "jax_ep.flax", raising=False)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(AttributeError, match=r"needs Flax .*pip install '\.\[flax\]'"):
        _ = jax_ep.flax


# A unit is a module or folder directly under jax_ep. Imports, also those inside functions, go to a strictly lower
# level. Units of one level do not import each other.
LEVELS = [
    {"values"},
    {"types"},
    {"core", "ffi"},
    {"formats", "routing"},
    {"interpreter", "heap", "settings", "xla"},
    {"context", "pallas"},  # small arrays, and what no kernel takes, are for `xla`
    {"megakernels"},
    {"ops"},  # loads implementations by name
    {"quantization", "placement", "tuning"},
    {"sharding", "serving", "tracing", "lora"},
    {"flax", "checkpoints"},
    {"integrations"},
    {"__init__"},  # for users: only tools import it
    {"tools"},
    {"__main__"},
]
LEVEL_OF = {unit: level for level, units in enumerate(LEVELS) for unit in units}


def _module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts


def _internal_imports(path):
    """Return dotted names below jax_ep that this file imports, at any nesting depth; `()` stands for jax_ep itself."""
    here = ("jax_ep", *path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            targets = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else ()
            base = (*base, *(node.module.split(".") if node.module else ()))
            targets = [(*base, alias.name) for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] == "jax_ep":
                yield node.lineno, target[1:]


def _unit_of_target(target):
    """Return the unit of an imported name; `jax_ep.dispatch` and a bare `import jax_ep` mean the top."""
    if target and ((PACKAGE / f"{target[0]}.py").exists() or (PACKAGE / target[0]).is_dir()):
        return target[0]
    return "__init__"


def _unit_edges():
    for path in SOURCES:
        unit = _module_name(path)[0]
        for line, target in _internal_imports(path):
            imported = _unit_of_target(target)
            if imported != unit:
                yield f"{path.relative_to(PACKAGE.parent)}:{line}", unit, imported


def test_imports_go_down_only():
    units = {_module_name(path)[0] for path in SOURCES}
    assert units == set(LEVEL_OF), "give each module and folder a place in LEVELS, and nothing else"
    edges = list(_unit_edges())
    assert edges, "the parser found no imports at all"
    wrong = [
        f"{where}: {unit} imports {imported}" for where, unit, imported in edges if LEVEL_OF[imported] >= LEVEL_OF[unit]
    ]
    assert wrong == []


def test_files_do_not_import_each_other_in_a_circle():
    """Includes imports inside functions and for types; `graphlib` names the files of a cycle."""
    files = {_module_name(path): path for path in SOURCES}

    def imported(path):
        for _, target in _internal_imports(path):
            known = [files[target[:n]] for n in range(len(target), 0, -1) if target[:n] in files]
            yield from known[:1]

    graph = {path: set(imported(path)) - {path} for path in SOURCES}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(SOURCES)


WITHOUT_JAX = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import worker
sys.meta_path.insert(0, worker.Folders())
sys.modules.update(jax=None, jaxlib=None)  # an import of either fails
for file in sys.argv[2:]:
    worker.load(pathlib.Path(file))
"""


def test_import_kernels_without_jax():
    """As workers of the interpreter do."""
    pytest.importorskip("triton")
    kernels = [*PACKAGE.rglob("kernels/[!_]*.py"), *PACKAGE.rglob("*_kernels.py")]
    assert len(kernels) > 40
    command = [sys.executable, "-P", "-c", WITHOUT_JAX, str(PACKAGE / "interpreter"), *map(str, kernels)]
    subprocess.run(command, check=True)


DURING_IMPORT = """
import importlib, sys, threading
import jax_ep.megakernels.kernels

triton = threading.Thread(target=importlib.import_module, args=("triton",))
triton.start()
while "triton" not in sys.modules:
    pass
importlib.import_module(sys.argv[1])
triton.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["dispatch", "gluon_gemm", "gluon_gemm16", "gluon_gradient", "gluon_quantized"])
def test_import_kernel_while_triton_is_imported(module):
    """Programs that compile in threads import kernels at the same time."""
    pytest.importorskip("triton")
    command = [sys.executable, "-c", DURING_IMPORT, f"jax_ep.megakernels.kernels.{module}"]
    subprocess.run(command, check=True)
