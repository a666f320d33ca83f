// The version stamp and error reporting of the C ABI.
#include "abi.h"

#include "xla/ffi/api/c_api.h"

#ifndef JAX_EP_SOURCE_HASH
#error "JAX_EP_SOURCE_HASH is defined by CMakeLists.txt"
#endif

namespace jax_ep {
namespace {
thread_local std::string last_error;
}  // namespace

const char* PlatformName(Platform platform) { return platform == Platform::kCuda ? "CUDA" : "CPU"; }

int32_t Report(const Status& status) noexcept {
  try {
    last_error = status.message;
  } catch (...) {
    last_error.clear();  // the code still tells that it failed
  }
  return status.code;
}

Status CheckDevice(int32_t platform, int32_t device_ordinal) {
  if (platform != static_cast<int32_t>(Platform::kCpu) && platform != static_cast<int32_t>(Platform::kCuda)) {
    return {kInvalidArgument, "jax_ep: platform " + std::to_string(platform) + " is neither 0 (CPU) nor 1 (CUDA)"};
  }
  if (device_ordinal < 0) {
    return {kInvalidArgument, "jax_ep: device ordinal " + std::to_string(device_ordinal) + " is negative"};
  }
  return {};
}

}  // namespace jax_ep

#define JAX_EP_TEXT_OF(x) #x
#define JAX_EP_TEXT(x) JAX_EP_TEXT_OF(x)

const char* jax_ep_ffi_stamp() {
  return "jax_ep_ffi stamp abi=" JAX_EP_TEXT(JAX_EP_ABI_VERSION) " xla=" JAX_EP_TEXT(XLA_FFI_API_MAJOR) "." JAX_EP_TEXT(
      XLA_FFI_API_MINOR) " source=" JAX_EP_SOURCE_HASH;
}
const char* jax_ep_last_error() { return jax_ep::last_error.c_str(); }
