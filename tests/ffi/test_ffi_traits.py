"""Traits of the custom calls: which of them XLA may record into CUDA graphs."""

import shutil
import subprocess

import jax
import pytest

from jax_ep.ffi import library

PROGRAM = r"""
#include <dlfcn.h>
#include <cstdio>

#include "xla/ffi/api/c_api.h"

// Asks a handler for its metadata, as XLA does when it is registered.
int main(int argc, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) return std::puts(dlerror()), 1;
  for (int i = 2; i < argc; ++i) {
    auto* handler = reinterpret_cast<XLA_FFI_Error* (*)(XLA_FFI_CallFrame*)>(dlsym(library, argv[i]));
    XLA_FFI_Metadata metadata{XLA_FFI_Metadata_STRUCT_SIZE};
    metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
    XLA_FFI_Metadata_Extension extension{};
    extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
    extension.extension_base.type = XLA_FFI_Extension_Metadata;
    extension.metadata = &metadata;
    XLA_FFI_CallFrame frame{XLA_FFI_CallFrame_STRUCT_SIZE};
    frame.extension_start = &extension.extension_base;
    if (handler == nullptr || handler(&frame) != nullptr) return std::puts("no metadata"), 1;
    const bool recordable = metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
    std::printf("%s %d\n", argv[i], recordable);
  }
  return 0;
}
"""
HANDLERS = {f"jax_ep_{call}_{place}": False for call in ("pointer_table", "check_status") for place in ("cpu", "cuda")}
HANDLERS["jax_ep_launch_kernel_cuda"] = False


def test_custom_calls_command_buffer_traits(tmp_path):
    """A replayed check would return the result of the time of recording."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source, program = tmp_path / "traits.cc", tmp_path / "traits"
    source.write_text(PROGRAM)
    command = [compiler, "-std=c++17", f"-I{jax.ffi.include_dir()}", source, "-o", program, "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    command = [program, library.load()._name, *HANDLERS]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {name: bool(int(value)) for name, value in (line.split() for line in done.stdout.splitlines())}
    assert found == HANDLERS | {"jax_ep_pointer_table_cuda": True, "jax_ep_launch_kernel_cuda": True}
