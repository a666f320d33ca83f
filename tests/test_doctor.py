"""`jax-ep doctor`: its findings here, and its messages if something is missing or wrong."""

import importlib.metadata
import importlib.util
import json
import math
import re
import sys
from unittest.mock import Mock

import pytest

import harness
from jax_ep import __main__, context, ffi
from jax_ep.core import jax_triton, json_files
from jax_ep.ops import registry
from jax_ep.tools import doctor


def of(findings, topic):
    return next(finding for finding in findings if finding.topic == topic)


@pytest.mark.slow
def test_doctor_this_machine():
    """As a user runs it; four devices form a mesh."""
    flags = "--xla_force_host_platform_device_count=4"
    done = harness.run_command(*harness.STRICT_PYTHON, "-m", "jax_ep", "doctor", "--json", XLA_FLAGS=flags)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(done.stdout)
    assert content["status"] == 0
    states = {finding["topic"]: finding["state"] for finding in content["findings"]}
    assert set(states.values()) == {"ok"}
    assert {"versions", "devices", "compiled library", "transport", "computation, xla"} <= set(states)
    error = next(f["data"] for f in content["findings"] if f["topic"] == "computation, xla")["relative_error"]
    assert 1e-4 < error < 0.02
    assert next(f["data"] for f in content["findings"] if f["topic"] == "devices")["kinds"] == {"cpu": 4}


def test_doctor_plan_devices_checked_before_they_are_made(monkeypatch, capsys):
    monkeypatch.setattr(doctor.jax.config, "update", None)
    assert __main__.main(["doctor", "--plan", "tiny", "--devices", "99999"]) == 2
    assert "--devices 99999: tiny has 8 experts, expected a number that divides them; pass" in capsys.readouterr().err


def test_doctor_plan_devices(monkeypatch, capsys):
    """The message names what limits the number: the model, or the machine."""
    monkeypatch.setattr(doctor.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(doctor.jax, "device_count", lambda: 3)
    for model, devices, text in (
        ("tiny", "64", "--devices 64: tiny has 8 experts, expected .* pass --devices with one of 1, 2, 4, 8.$"),
        ("tiny", "8", "--devices 8: this machine has 3 CPU devices, expected at most .* JAX_PLATFORMS=cpu to plan on"),
    ):
        assert __main__.main(["doctor", "--plan", model, "--devices", devices]) == 2
        assert re.match(f"jax-ep: {text}", capsys.readouterr().err)
    assert __main__.main(["doctor", "--plan", "tiny"]) == 2
    assert "--devices 3 of this machine: tiny has 8 experts" in capsys.readouterr().err


@pytest.mark.slow
def test_doctor_plan_of_arrays_that_end_the_compiler():
    """4 million windows and their logits: XLA would divide by zero, see `plan_memory`."""
    size = ("--tokens", str(2**24), "--length", "1024", "--layers", "1")
    done = harness.run_command(sys.executable, "-m", "jax_ep", "doctor", "--plan", "tiny", *size)
    assert done.returncode == 0, done.stderr
    assert "temporaries" in done.stdout


def test_doctor_exit_status(monkeypatch, capsys):
    for error, status, shown in ((0.004, 0, "relative error 4.0e-03"), (0.5, 1, "  error  computation, xla: relative")):
        monkeypatch.setattr(doctor, "_error_of", lambda name, error=error: error)
        assert __main__.main(["doctor"]) == status
        assert shown in capsys.readouterr().out
    monkeypatch.setattr(doctor, "_error_of", lambda name: math.nan)
    assert __main__.main(["doctor", "--json"]) == 1
    found = json_files.parse(capsys.readouterr().out.encode(), 1 << 20)["findings"]
    assert ["error", {"relative_error": None}] in [[finding["state"], finding["data"]] for finding in found]


def test_doctor_failures_are_findings(monkeypatch):
    monkeypatch.setattr(doctor, "_error_of", Mock(side_effect=RuntimeError("the device\nhas gone")))
    monkeypatch.setattr(doctor, "_links", Mock(side_effect=OSError("no such bus")))
    findings = list(doctor.examine())
    assert of(findings, "computation, xla").state == doctor.ERROR
    assert of(findings, "computation, xla").text == "RuntimeError: the device has gone"
    assert of(findings, "links").text == "no such bus"
    assert all(finding.remedy for finding in findings if finding.state != doctor.OK)


def test_doctor_without_devices(monkeypatch):
    """As with JAX_PLATFORMS=cuda on a machine without GPUs."""
    monkeypatch.setattr(doctor.jax, "devices", Mock(side_effect=AssertionError))
    *_, last = findings = list(doctor.examine())
    assert [finding.topic for finding in findings] == ["versions", "devices"]
    assert last.state == doctor.ERROR and "no message" in last.text and "JAX_PLATFORMS" in last.remedy


def test_doctor_jax_triton_is_optional(monkeypatch):
    def examined():
        (finding,) = doctor._jax_triton()
        return finding

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert examined().state == doctor.OK and "not installed" in examined().text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9")
    monkeypatch.setattr(jax_triton, "check", Mock(side_effect=RuntimeError("a rule takes\ntwo arguments")))
    assert examined().state == doctor.WARNING and examined().text == "RuntimeError: a rule takes two arguments"
    assert "pip install '.[jax-triton]'" in examined().remedy
    monkeypatch.setattr(jax_triton, "check", lambda: None)
    assert examined().state == doctor.OK and examined().text.startswith("0.9 works")


@pytest.mark.slow
def test_doctor_without_a_folder_for_temporary_files():
    """As with a file size limit of 0; jax-triton is optional, so the status is 0."""
    command = "bash", "-c", 'ulimit -f 0; exec "$0" -m jax_ep doctor --json', sys.executable
    done = harness.run_command(*command, JAX_ENABLE_COMPILATION_CACHE="false")
    found = {finding["topic"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, done.stdout
    if importlib.util.find_spec("jax_triton") is not None:
        assert found["jax-triton"]["state"] == "warning" and "No usable temporary" in found["jax-triton"]["text"]
        assert "set TMPDIR" in found["jax-triton"]["remedy"]


def test_doctor_missing_library(monkeypatch):
    error = ffi.LibraryError("it is missing:\n  /there: does not exist\nBuild it with make ffi.")
    monkeypatch.setattr(ffi, "load", Mock(side_effect=error))
    monkeypatch.setattr(doctor, "_error_of", lambda name: 0.004)
    finding = of(list(doctor.examine()), "compiled library")
    assert (finding.state, finding.remedy) == (doctor.WARNING, "Build it with make ffi.")
    assert finding.text == "it is missing: /there: does not exist"


def test_doctor_machine_with_gpus(monkeypatch):
    """With fake GPUs: unsupported implementations are a warning, other failures an error."""

    def computes(name):
        if name == "triton":
            raise NotImplementedError("triton: no peer access")
        return 0.003

    monkeypatch.setattr(doctor, "_on_gpus", lambda: True)
    monkeypatch.setattr(doctor, "_error_of", computes)
    monkeypatch.setattr(doctor, "_rate", lambda source, target: 2e10 if target.id == 1 else 3e11)
    for part in ("_devices", "_transport"):
        monkeypatch.setattr(doctor, part, list)
    findings = list(doctor.examine())
    assert of(findings, "computation, triton").state == doctor.WARNING
    assert of(findings, "computation, pallas").state == doctor.OK
    links = of(findings, "links")
    assert links.state == doctor.WARNING
    assert "20 to 300 GB/s; the slowest is from GPU 0 to GPU 1" in links.text
    assert links.data["bytes_per_s"][0][:2] == [None, 2e10]


def test_doctor_tries_every_implementation(monkeypatch):
    tried = []
    monkeypatch.setattr(doctor, "_on_gpus", lambda: True)
    monkeypatch.setattr(doctor, "_error_of", lambda name: tried.append(name) or 0.001)
    list(doctor._computations())
    assert tried == list(registry.available())


def test_doctor_ignored_tuned_settings(monkeypatch, tmp_path):
    context.set_tuning(None)  # Another test may have chosen some.
    for content, state, text in (("{", doctor.WARNING, "ignored the tuned settings"), (None, doctor.OK, "none: those")):
        path = tmp_path / "tuned.json"
        path.write_text(content or "")
        monkeypatch.setenv("JAX_EP_TUNING", "off" if content is None else str(path))
        (finding,) = doctor._tuned_settings()
        assert finding.state == state and finding.text.startswith(text)
        assert content is None or "; `jax-ep tune` makes new ones" in finding.text


def test_doctor_tuned_settings_of_other_gpus(monkeypatch):
    context.set_tuning(None)
    monkeypatch.setenv("JAX_EP_TUNING", "off")
    monkeypatch.setattr(doctor, "_on_gpus", lambda: True)
    (finding,) = doctor._tuned_settings()
    assert finding.state == doctor.WARNING and "those of the H200" in finding.text and "jax-ep tune" in finding.remedy
