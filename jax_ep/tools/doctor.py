"""`jax-ep doctor`: check versions, devices, the compiled library, the transport, links and computations.

Every warning and every error has a remedy. The command changes nothing, and leaves nothing behind. With `--plan MODEL`
it prints the memory of a training step of `jax-ep bench train` instead, without running the step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import context
from jax_ep.settings.file import ENVIRONMENT
from jax_ep.tools.command import count, in_one_line, layer_count, versions

if TYPE_CHECKING:
    from jax_ep.ops.memory import MemoryPlan

OK, WARNING, ERROR = "ok", "warning", "error"
_PACKAGES = (
    *("jax-ep", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "triton", "jax-triton", "nvshmem4py-cu13"),
    *("numpy", "flax"),
)
_COPY_BYTES, _COPIES = 64 << 20, 4
_LARGEST_ERROR = 0.02  # of bfloat16, in the norm
_SLOW_LINK = 100e9  # NVLink of any generation is faster, PCI Express is not
_TUNED_FOR = "H200"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of one check."""

    topic: str  # subject of the check
    state: str  # "ok", "warning" (it works, but not as well as possible) or "error" (it does not work)
    text: str  # the result
    remedy: str = ""  # what to do after a warning or an error
    data: Any = None  # the result for programs, as JSON values; or None


def examine() -> Iterator[Finding]:
    """Run all checks, and yield their results."""
    parts: dict[str, Callable[[], Iterable[Finding]]] = {"versions": _versions, "devices": _devices}
    parts |= {"tuned settings": _tuned_settings}
    parts |= {"compiled library": _library, "jax-triton": _jax_triton, "transport": _transport, "links": _links}
    parts["computations"] = _computations
    for topic, part in parts.items():
        try:
            yield from part()
        except Exception as error:
            remedy = "report it, with the output of jax-ep doctor --json"
            if part is _devices:
                remedy = "check JAX_PLATFORMS, the NVIDIA driver, and that jax and its plugin have the same version"
            yield Finding(topic, ERROR, in_one_line(error), remedy)
            if part is _devices:  # All other checks need them.
                return


def _versions() -> Iterator[Finding]:
    found = versions(_PACKAGES)
    yield Finding("versions", OK, ", ".join(f"{name} {version}" for name, version in found.items()), data=found)


def _on_gpus() -> bool:
    return jax.default_backend() == "gpu"


def _devices() -> Iterator[Finding]:
    devices = jax.devices()
    kinds = {
        kind: sum(d.device_kind == kind for d in devices) for kind in dict.fromkeys(d.device_kind for d in devices)
    }
    text = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    data = {"platform": jax.default_backend(), "kinds": kinds, "processes": jax.process_count()}
    if not _on_gpus():
        yield Finding("devices", OK, f"{text}: `xla` runs every function; kernels are for NVIDIA GPUs", data=data)
        return
    from jax_ep.megakernels import requirements

    data["compute_capability"] = devices[0].compute_capability
    if (reason := requirements.missing_capability()) is not None:
        yield Finding("devices", WARNING, f"{text}: {reason}", "`xla` runs on these GPUs", data)
    elif not requirements.has_tma():
        reason = f"fused GEMMs need GPUs of compute capability {requirements.TMA_MODELS}"
        yield Finding("devices", WARNING, f"{text}: {reason}", "all-to-alls run on kernels, GEMMs on `xla`", data)
    else:
        yield Finding("devices", OK, text, data=data)


def _tuned_settings() -> Iterator[Finding]:
    from jax_ep.megakernels import requirements

    topic = "tuned settings"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = context.tuning().path
    is_other = _on_gpus() and requirements.has_tma() and any(_TUNED_FOR not in d.device_kind for d in jax.devices())
    if caught:
        yield Finding(topic, WARNING, str(caught[0].message), f"or set {ENVIRONMENT}=off, so that no file is read")
    elif path is None and is_other:
        reason = f"none: tiles and the cost model are those of the {_TUNED_FOR}"
        yield Finding(topic, WARNING, reason, "measure them here: jax-ep tune")
    else:
        yield Finding(topic, OK, f"none: those of the {_TUNED_FOR}" if path is None else str(path))


def _library() -> Iterator[Finding]:
    from jax_ep import ffi
    from jax_ep.ffi import library

    path = next((path for path in library.candidates() if path.exists()), None)
    try:
        ffi.load()
    except ffi.LibraryError as error:
        lines = str(error).splitlines()
        state = ERROR if _on_gpus() else WARNING  # on CPU devices only tests need it
        yield Finding("compiled library", state, " ".join(line.strip() for line in lines[:-1]), lines[-1])
        return
    stamp = None if path is None else library.read_stamp(path)
    data = None if stamp is None else dataclasses.asdict(stamp)
    built = "" if stamp is None else f", of sources {stamp.source_hash[:12]}"
    yield Finding("compiled library", OK, f"{path}{built}", data=data)


def _jax_triton() -> Iterator[Finding]:
    """Check the optional launcher."""
    from jax_ep.core import jax_triton

    if importlib.util.find_spec("jax_triton") is None:
        text = "not installed; it is optional, for init(launcher='jax-triton')"
        yield Finding("jax-triton", OK, text, data={"works": None})
        return
    try:
        jax_triton.check()
    except (ImportError, RuntimeError) as error:
        remedy = "omit init's launcher, or pip install '.[jax-triton]' for compatible versions"
        yield Finding("jax-triton", WARNING, in_one_line(error), remedy, {"works": False})
    except OSError as error:
        remedy = "omit init's launcher, or set TMPDIR and TRITON_CACHE_DIR to folders with space"
        yield Finding("jax-triton", WARNING, in_one_line(error), remedy, {"works": False})
    else:
        text = f"{importlib.metadata.version('jax-triton')} works, for init(launcher='jax-triton')"
        yield Finding("jax-triton", OK, text, data={"works": True})


def _transport() -> Iterator[Finding]:
    from jax_ep.heap import nvshmem, peer_access, transports

    chosen = transports.best()
    text = transports.describe(chosen)
    if _on_gpus() and importlib.util.find_spec("triton") is None:
        remedy = "pip install '.[cuda13]'"
        yield Finding("triton", WARNING, "not installed: kernels are not used", remedy)
    is_by_peers = jax.process_count() == 1 or peer_access.unsupported_processes_reason() is None
    if _on_gpus() and is_by_peers and (reason := peer_access.unsupported_reason()) is not None:
        remedy = "`xla` runs on such machines; for kernels use GPUs of one NVLink domain"
        yield Finding("transport", WARNING, reason, remedy, {"transport": chosen})
        return
    if chosen == "xla" and _on_gpus():
        reason = transports.unordered_launches_reason() or nvshmem.unsupported_reason() or "kernels are not used"
        yield Finding("transport", WARNING, f"{text}; {reason}", "see docs/multi_process.md", {"transport": chosen})
        return
    yield Finding("transport", OK, text, data={"transport": chosen})
    if _on_gpus() and jax.process_count() == 1:
        reason = nvshmem.unsupported_reason()
        text = "found" if reason is None else f"{reason} (needed with one process per GPU only)"
        yield Finding("nvshmem", OK, text, data={"missing": reason})


def _links() -> Iterator[Finding]:
    devices = jax.local_devices()
    if not _on_gpus() or len(devices) < 2:
        return
    rates = {pair: _rate(*(devices[i] for i in pair)) for pair in itertools.permutations(range(len(devices)), 2)}
    (source, target), slowest = min(rates.items(), key=lambda item: item[1])
    matrix = [[rates.get((i, j)) for j in range(len(devices))] for i in range(len(devices))]
    fastest = max(rates.values())
    text = f"copies between GPUs at {slowest / 1e9:.0f} to {fastest / 1e9:.0f} GB/s"
    if slowest < min(_SLOW_LINK, fastest / 2):
        where = f"{text}; the slowest is from GPU {source} to GPU {target}"
        remedy = "spread experts over GPUs of one NVLink domain: nvidia-smi topo -m shows them"
        yield Finding("links", WARNING, where, remedy, {"bytes_per_s": matrix})
    else:
        yield Finding("links", OK, text, data={"bytes_per_s": matrix})


def _rate(source: jax.Device, target: jax.Device) -> float:
    """Measure the bytes per second of copies from one device to another."""
    data = jax.device_put(jnp.zeros((_COPY_BYTES,), jnp.uint8), source)
    jax.block_until_ready(jax.device_put(data, target))
    start = time.perf_counter()
    jax.block_until_ready([jax.device_put(data, target) for _ in range(_COPIES)])
    return _COPIES * _COPY_BYTES / (time.perf_counter() - start)


def _computations() -> Iterator[Finding]:
    """Compare a small layer of each implementation, on all devices, with NumPy in float64."""
    from jax_ep.ops import registry

    if jax.process_count() > 1:
        yield Finding(
            "computation", OK, "not tried: there are several processes, and all of them would have to take part"
        )
        return
    for name in registry.available():
        topic = f"computation, {name}"
        if name != "xla" and not _on_gpus():
            yield Finding(topic, OK, "not tried: it is for NVIDIA GPUs; `xla` runs on these devices")
            continue
        try:
            start = time.perf_counter()
            error = _error_of(name)
        except NotImplementedError as reason:
            yield Finding(topic, WARNING, in_one_line(reason), "use `xla` instead")
        except Exception as failure:
            yield Finding(
                topic, ERROR, in_one_line(failure), "see docs/errors.md; pass implementation='xla' until it works"
            )
        else:
            text = f"relative error {error:.1e}, in {time.perf_counter() - start:.1f} s with compilation"
            state, remedy = (OK, "") if error < _LARGEST_ERROR else (ERROR, "do not use it here, and report it")
            # JSON has no NaN.
            yield Finding(topic, state, text, remedy, {"relative_error": error if np.isfinite(error) else None})


def _error_of(name: str) -> float:
    """Return the relative error of `moe`."""
    num_ranks, top_k, hidden, inner = len(jax.local_devices()), 2, 128, 128
    tokens, experts, rng = 32 * num_ranks, 4 * num_ranks, np.random.default_rng(0)
    x, w_down = rng.normal(size=(tokens, hidden)), rng.normal(size=(experts, inner, hidden)) / inner**0.5
    w_gate_up = rng.normal(size=(experts, hidden, 2 * inner)) / hidden**0.5
    x, w_gate_up, w_down = (np.asarray(jnp.asarray(a, jnp.bfloat16)) for a in (x, w_gate_up, w_down))
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    exact = [a.astype(np.float64) for a in (x, w_gate_up, w_down)]
    got = _layer(name, num_ranks, (x, ids, np.full(ids.shape, 0.5, np.float32), w_gate_up, w_down))
    want = np.zeros(x.shape)
    for k in range(top_k):
        gate, up = np.split(np.einsum("th,thf->tf", exact[0], exact[1][ids[:, k]]), 2, axis=1)
        want += 0.5 * np.einsum("ti,tih->th", gate / (1 + np.exp(-gate)) * up, exact[2][ids[:, k]])
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def _layer(name: str, num_ranks: int, arrays: tuple[Any, ...]) -> Any:
    from jax_ep.sharding import sharded_moe

    mesh = jax.make_mesh((num_ranks,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    layer = sharded_moe(mesh, num_experts=len(arrays[-1]), implementation=name)
    sharding = jax.NamedSharding(mesh, jax.P("expert"))
    return jax.jit(layer)(*(jax.device_put(array, sharding) for array in arrays))


def _plan(args: argparse.Namespace) -> MemoryPlan:
    """Compile the training step of a model, and return its memory."""
    from jax_ep.ops import memory
    from jax_ep.ops import plan as plans
    from jax_ep.tools.benchmark import inputs, train

    tokens, length, variant = args.tokens or 16384, args.length or 1024, args.variant
    variant = "jax_ep" if variant is None else variant
    for name, value, choices in (("plan", args.plan, train.ARCHITECTURES), ("variant", variant, train.VARIANTS)):
        if value not in choices:
            raise ValueError(f"--{name} {value!r}: expected one of {', '.join(choices)}.")
    if tokens % length:
        raise ValueError(f"--tokens {tokens}: expected a multiple of --length {length}.")
    model = train.ARCHITECTURES[args.plan]
    experts = model.experts.experts
    if args.devices and experts % args.devices == 0:
        jax.config.update("jax_num_cpu_devices", args.devices)
    devices = args.devices or jax.device_count()
    if experts % devices:
        divisors = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ValueError(
            f"--devices {devices}{'' if args.devices else ' of this machine'}: {args.plan} has {experts} experts,"
            f" expected a number that divides them; pass --devices with one of {divisors}."
        )
    if devices > jax.device_count():
        raise ValueError(
            f"--devices {devices}: this machine has {jax.device_count()} {jax.default_backend().upper()} devices,"
            " expected at most that many; pass fewer, or set JAX_PLATFORMS=cpu to plan on virtual CPU devices."
        )
    mesh = inputs.expert_mesh(devices)
    layers, batch = args.layers or model.layers, tokens * mesh.size // length
    with plans.recording() as found:
        layer = train.expert_layer(variant, model, mesh, tokens)
        training = train.make_training(model, layer, mesh, layers, batch, length)
    return memory.of_compiled(training.step, found)


@contextlib.contextmanager
def _sizes_of_any_model() -> Iterator[None]:
    """Let XLA compile programs whose arrays would end the process, if it has not yet used a device."""
    from jax_ep.ops.memory import NOT_TILED

    flags = os.environ.get("XLA_FLAGS")
    if "xla_backend_extra_options" not in (flags or ""):
        os.environ["XLA_FLAGS"] = f"{flags or ''} {NOT_TILED}".strip()
    try:
        yield
    finally:
        os.environ.pop("XLA_FLAGS", None)
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags


def add_command(commands: Any) -> None:
    """Add `doctor` to the command line."""
    summary = "check this machine: versions, devices, links, and whether each implementation computes"
    parser = commands.add_parser("doctor", help=summary, description=f"{summary}. Exit status 1 after an error.")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    plan = parser.add_argument_group("memory", "with --plan MODEL: the memory of a training step of jax-ep bench train")
    plan.add_argument("--plan", metavar="MODEL", help="print the bytes on each device, such as of qwen3-30b")
    plan.add_argument("--layers", type=layer_count, help="default: all of the model; XLA compiles each, 64 at most")
    plan.add_argument("--tokens", type=count, help="per device and step (default: 16384)")
    plan.add_argument("--length", type=count, help="tokens of a text (default: 1024)")
    plan.add_argument("--devices", type=count, help="default: all; on a machine without GPUs, virtual CPU devices")
    plan.add_argument("--variant", help="of the expert layer, see jax-ep bench train (default: jax_ep)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print all findings; return 1 after an error."""
    given = [name for name in ("layers", "tokens", "length", "devices", "variant") if getattr(args, name) is not None]
    if given and args.plan is None:
        raise ValueError(f"--{given[0]}: expected --plan MODEL with it; add --plan, or leave it out.")
    if args.plan is not None:
        with _sizes_of_any_model():
            plan = _plan(args)
        print(json.dumps({k.strip(): v for k, v in plan.rows()}, indent=1) if args.json else plan)
        return 0
    findings = []
    for finding in examine():
        findings.append(finding)
        if not args.json:
            _show(finding)
    status = int(any(finding.state == ERROR for finding in findings))
    if args.json:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"date": date, "status": status, "findings": found}, indent=1))
    else:
        counts = {state: sum(finding.state == state for finding in findings) for state in (OK, WARNING, ERROR)}
        print(", ".join(f"{count} {state}" for state, count in counts.items() if count or state == OK))
    return status


def _show(finding: Finding) -> None:
    """Print one finding, in color on a terminal."""
    color = {OK: 32, WARNING: 33, ERROR: 31}[finding.state]
    state = f"{finding.state:>7}"
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        state = f"\033[{color}m{state}\033[0m"
    print(f"{state}  {finding.topic}: {finding.text}", flush=True)
    if finding.remedy:
        print(f"         -> {finding.remedy}", flush=True)
