"""The interpreter pool: failures of kernels, of workers, and of programs."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_calls import FOLDER, HEAP_BYTES, H, W, exchange, heap_tables, kernel, ranks, run_one

import harness
import jax_ep
from jax_ep import context, interpreter
from jax_ep.core.kernel import Config
from jax_ep.interpreter import activity
from jax_ep.megakernels.launch import launch

LONG_S = 1000.0  # Beyond the time limit of a test.
# The error of its peers, which XLA may report instead of the first one.
STOPPED = "the launch failed on another worker"


def fail():
    return run_one(("elementwise", "fail"), jnp.zeros(1, jnp.int32), LIMIT=3)


def test_interpreter_kernel_raises(pool, mesh4, after_failures):
    def fn(x):
        return run_one(("elementwise", "fail"), x, LIMIT=3)

    run = jax.jit(harness.per_rank(fn, mesh4))
    with pytest.raises(Exception, match=r"(?s)kernel fail, worker 3:.*elementwise\.py.*the limit is reached"):
        jax.block_until_ready(run(ranks()[:, None]))
    with pytest.raises(Exception, match=r"(?s)the limit is reached.*Kernels cannot run after a failure"):
        jax.block_until_ready(run(ranks()[:, None] * 0))
    pool.reset()
    np.testing.assert_array_equal(np.asarray(run(ranks()[:, None] - 1)), ranks()[:, None] - 1)


def test_interpreter_failure_stops_peers(pool, mesh4, after_failures, monkeypatch):
    def fn(rank, heaps, x):
        limited = run_one(("elementwise", "fail"), x, LIMIT=3)
        return exchange(rank, limited[0], heaps, jnp.zeros((W, H), jnp.float32))

    monkeypatch.setattr(pool, "timeout_s", LONG_S)
    start = time.perf_counter()
    with pytest.raises(Exception, match=f"the limit is reached|{STOPPED}"):
        jax.block_until_ready(jax.jit(harness.per_rank(fn, mesh4))(ranks(), heap_tables(pool), ranks()[:, None]))
    pool.reset()  # Waits until the others have stopped too.
    assert time.perf_counter() - start < LONG_S, "the others waited for the rank that failed"


def wait_for_ever(mesh4):
    """Compile a call of a kernel that waits for flags that are never set."""

    def fn(rank, heaps):
        result = jax.ShapeDtypeStruct((1 + W,), jnp.int32)
        constants = {"W": W, "TIMEOUT_NS": int(LONG_S * 1e9)}
        return launch(kernel("exchange", "wait"), (rank, heaps), (result,), Config(1), constants)[0]

    return jax.jit(harness.per_rank(fn, mesh4))


def until(condition):
    """Return once `condition` holds; the test's time limit ends it otherwise."""
    while not condition():
        time.sleep(0.01)


def all_wait(pool):
    return all(words[activity.STATE] == activity.WAITING for words in pool._activity)


@contextlib.contextmanager
def own_pool(num_workers=W, heap_bytes=HEAP_BYTES):
    """A separate pool, whose workers may die; closed after the test."""
    pool = interpreter.Pool(num_workers, heap_bytes)
    interpreter.set_pool(pool)
    try:
        yield pool
    finally:
        interpreter.set_pool(None)
        pool.close()


@pytest.mark.parametrize(
    ("number", "timeout_s", "words", "story"),
    [
        (signal.SIGKILL, LONG_S, "died with exit code -9", r"worker 2 \(process \d+\) died with exit code -9"),
        (signal.SIGSTOP, 0.3, "was killed", r"worker 2 .* was killed: it had been stopped.* for 0\.3 s"),
    ],
    ids=["killed", "stopped"],
)
def test_interpreter_signal_ends_waits(number, timeout_s, words, story, mesh4, after_failures):
    with own_pool() as pool:

        def send():
            until(lambda: all_wait(pool))
            os.kill(pool._workers[2].process.pid, number)

        run, start = wait_for_ever(mesh4), time.perf_counter()
        pool.timeout_s = timeout_s
        threading.Thread(target=send).start()
        with pytest.raises(Exception, match=f"{words}|{STOPPED}"):
            jax.block_until_ready(run(ranks(), heap_tables(pool)))
        assert time.perf_counter() - start < LONG_S
        assert re.match(f"kernel wait, {story}", str(pool.close()))


@pytest.mark.slow
def test_interpreter_waits_count_idle_time():
    """Worker 0 waits for 0.2 s; worker 1 works longer, then polls, then has given up, then is gone."""
    words = [np.zeros(activity.NUM_WORDS, np.int64) for _ in range(2)]
    for own in words:
        own[[activity.PID, activity.LAUNCHES]] = os.getpid(), 1
    activity.begin(words[0])

    def expires(looks_of_the_other=0, seconds=0.6):
        wait, end = activity.Wait(words, 0, 200_000_000), time.monotonic() + seconds
        while time.monotonic() < end:
            words[1][activity.LOOKS] += looks_of_the_other
            if wait.expired():
                return True
        wait.succeeded()
        return False

    assert not expires()  # The other worker has an earlier launch.
    activity.begin(words[1])
    assert not expires()
    words[1][activity.STATE] = activity.WAITING
    assert not expires(), "the other may not have seen what came before this wait"
    assert expires(looks_of_the_other=1, seconds=LONG_S)
    words[1][activity.STATE] = activity.GAVE_UP
    assert expires(seconds=LONG_S)
    words[1][activity.LAUNCHES] += 1
    assert not expires(), "the other has another launch before it"
    words[1][activity.LAUNCHES] = 0
    assert expires(seconds=LONG_S)
    with subprocess.Popen(["sleep", "1000"]) as asleep:
        words[1][[activity.PID, activity.LAUNCHES, activity.STATE]] = asleep.pid, 1, activity.RUNNING
        assert not expires()
        asleep.send_signal(signal.SIGSTOP)
        assert expires(seconds=LONG_S)
        asleep.kill()


def test_interpreter_no_pool(after_failures):
    interpreter.set_pool(None)
    with pytest.raises(Exception, match="no interpreter pool"):
        jax.block_until_ready(fail())


def test_interpreter_mesh_larger_than_pool(pool, after_failures):
    mesh = harness.make_mesh((2 * W,), (harness.EXPERT,))

    def fn(x):
        return run_one(("elementwise", "fail"), x, LIMIT=30)

    with pytest.raises(Exception, match=r"device [4-7], in a launch of 1 devices, but the interpreter pool has 4"):
        jax.block_until_ready(jax.jit(harness.per_rank(fn, mesh))(np.zeros((2 * W, 1), np.int32)))


def test_interpreter_worker_killed(after_failures):
    with own_pool(1, 64) as pool:
        os.kill(pool._workers[0].process.pid, 9)
        for _ in range(2):
            with pytest.raises(Exception, match=r"worker 0 \(process \d+\) died with exit code -9"):
                jax.block_until_ready(fail())
        with pytest.raises(RuntimeError, match=r"workers \[0\] have died"):
            pool.reset()
    pool.close()


REQUEST = interpreter.Launch(
    str(FOLDER / "elementwise.py"), "fail", (("i32", bytes(4)),), (("i32", 4),), 1, {"LIMIT": 3}
)


def test_interpreter_missing_devices():
    pool = interpreter.Pool(3, 64)
    with ThreadPoolExecutor(3) as executor:

        def together(*workers, site=0):
            return [executor.submit(pool.launch, REQUEST, worker=w, group_size=2, site=site) for w in workers]

        for pair in ((0, 2), (1, 2)):
            assert [call.result() for call in together(*pair)] == [[bytes(4)]] * 2
        pool.timeout_s = 0.2
        first = [(0, 0, "device 2"), (0, 1, "device 2"), (0, 2, "1 of devices 0, 1")]
        for site, worker, who in [*first, (1, 0, "1 of devices 1, 2")]:
            text = f"device {worker} waited 0.2 s for {who}: of 2 devices that launch it together, only {worker}"
            with pytest.raises(RuntimeError, match=f"{re.escape(text)} arrived; .* set NPROC=16 before"):
                together(worker, site=site)[0].result()
            pool.reset()
    pool.close()


def test_interpreter_busy_device_is_not_missing():
    """The device runs a launch with another device, longer than the others' timeout."""
    pool = interpreter.Pool(3, 64)
    pool.timeout_s = 0.2
    held = threading.Event()
    run = pool._workers[1].run
    pool._workers[1].run = lambda *args: (held.wait(), run(*args))[1]
    with ThreadPoolExecutor(4) as executor:
        calls = [executor.submit(pool.launch, REQUEST, worker=w, group_size=2, site=0) for w in (1, 2)]
        until(lambda: pool._queues[1])
        calls.append(executor.submit(pool.launch, REQUEST, worker=0, group_size=2, site=1))
        time.sleep(1)
        pool.timeout_s = LONG_S  # Later launches are in time on any machine.
        held.set()
        calls.append(executor.submit(pool.launch, REQUEST, worker=1, group_size=2, site=1))
        assert [call.result() for call in calls] == [[bytes(4)]] * 4
    pool.close()


def test_interpreter_timeout_of_context(mesh4):
    jax_ep.finalize()
    jax_ep.init(mesh4, transport="shared_memory", timeout_s=3)
    assert context.heap("test")._memory.pool.timeout_s == 3
    jax_ep.finalize()


def start(program):
    """Start a program in a new process group, and wait until it prints "ready"."""
    path = os.pathsep.join([str(FOLDER.parents[2]), str(FOLDER.parent), str(FOLDER.parents[1] / "helpers")])
    process = subprocess.Popen(
        [*harness.STRICT_PYTHON, "-c", program],
        env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    line = process.stdout.readline()
    assert line == "ready\n", line + process.communicate()[0]
    return process


INTERRUPTED = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of shells ignore it
sys.modules["filelock"] = None  # which JAX can do without: Python reports interrupts that meet its audit hook twice
import harness, jax
from kernel_calls import heap_tables, ranks
from test_interpreter_failures import all_wait, until, wait_for_ever
import jax_ep
from jax_ep import context
from jax_ep import interpreter
mesh = harness.make_mesh((4,), ("expert",))
jax_ep.init(mesh, transport="shared_memory", heap_bytes=16 << 20)
pool = context.heap("test")._memory.pool
run = wait_for_ever(mesh).lower(ranks(), heap_tables(pool)).compile()
threading.Thread(target=lambda: (until(lambda: all_wait(pool)), print("ready", flush=True)), daemon=True).start()
jax.block_until_ready(run(ranks(), heap_tables(pool)))
"""


@pytest.mark.slow
def test_interpreter_interrupt_one_traceback():
    """A terminal sends it to all processes of the program, whose main thread waits for the kernels."""
    process = start(INTERRUPTED)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode in (1, -signal.SIGINT)
    assert len(output.splitlines()) < 20, output
    assert len(re.findall(r"^(KeyboardInterrupt|jax\.errors\.\w+)\b", output, re.MULTILINE)) == 1, output
    with pytest.raises(ProcessLookupError):  # No process of the group is left.
        os.killpg(process.pid, 0)


def test_interpreter_workers_without_jax(two_ranks):
    """An import of JAX is slow, and an interrupt of it aborts."""

    def fn(x, ids, gate_up, down):
        weights = jnp.ones(ids.shape, jnp.float32)
        return jax_ep.moe(x, ids, weights, gate_up, down, num_experts=2, implementation="triton")

    shapes = (2, 4, 16), (2, 4, 1), (2, 1, 16, 32), (2, 1, 16, 16)
    arguments = (np.ones(shape, np.int32 if len(shape) == 3 and shape[2] == 1 else np.float32) for shape in shapes)
    jax.block_until_ready(jax.jit(harness.per_rank(fn, two_ranks))(*arguments))
    workers = context.heap("test")._memory.pool._workers
    maps = [Path(f"/proc/{one.process.pid}/maps").read_text() for one in workers]
    assert sum("triton" in mapped for mapped in maps) == 2
    assert not any("jaxlib" in mapped for mapped in maps)


FORKED = """
import os, sys, time, warnings
import jax_ep
warnings.simplefilter("ignore")  # about forks with threads
from test_interpreter_failures import REQUEST
from jax_ep.interpreter import Pool
pool = Pool(1, 64)
def launch():
    return pool.launch(REQUEST, worker=0, group_size=1, site=0)
launch()
if os.fork() == 0:
    try:
        launch()
    except RuntimeError as error:
        assert "forked" in str(error)
        sys.exit(7)  # as the program's end would be, exit handlers included
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 7
assert launch() == [bytes(4)]
jax_ep.init(transport="shared_memory")
if os.fork() == 0:
    jax_ep.finalize()  # The child has no context, and must not wait for devices that run in its parent.
    os._exit(7)
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 7
jax_ep.finalize()
child = os.fork()
if child == 0:
    time.sleep(1000)
    os._exit(0)
print("ready", flush=True)
print(pool._workers[0].process.pid, child, flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.slow
def test_interpreter_forked_child():
    process = start(FORKED)
    worker, child = map(int, process.stdout.readline().split())
    with process:
        process.kill()
    until(lambda: not Path(f"/proc/{worker}").exists())
    os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_interpreter_exit_cleans_up():
    """A program that neither closes its pool nor finishes its kernel prints no warning, and its worker ends with it."""
    program = """
from jax_ep.interpreter import Pool
pool = Pool(1, 64)
print(pool._workers[0].process.pid)
"""
    done = subprocess.run([*harness.STRICT_PYTHON, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
