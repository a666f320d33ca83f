// The C ABI of libjax_ep_ffi.so: everything Python calls through ctypes, and nothing else is exported.
//
// Rules: plain C types only; no exception leaves a function; a function that can fail returns one of the codes
// below and leaves the reason in jax_ep_last_error() of the calling thread. All functions may be called from any
// thread. JAX_EP_ABI_VERSION changes with every change of a signature, of a struct or of a custom call's attributes, and
// must equal ABI_VERSION in jax_ep/ffi/library.py.
#ifndef JAX_EP_FFI_ABI_H_
#define JAX_EP_FFI_ABI_H_

#include <cstdint>
#include <string>

#define JAX_EP_ABI_VERSION 4

#define JAX_EP_EXPORT extern "C" __attribute__((visibility("default")))

namespace jax_ep {

enum Code : int32_t { kOk = 0, kInvalidArgument = 1, kFailedPrecondition = 2, kInternal = 3 };

// The two platforms have separate device ordinals and separate registries: device 0 of either can hold a table.
enum class Platform : int32_t { kCpu = 0, kCuda = 1 };

struct Status {
  Code code = kOk;
  std::string message;
  bool ok() const { return code == kOk; }
};

const char* PlatformName(Platform platform);

// Keeps the message for jax_ep_last_error() and returns the code.
int32_t Report(const Status& status) noexcept;

// Runs `body`, which returns a Status, so that no exception (std::bad_alloc, at worst) reaches the caller.
template <typename Body>
int32_t Guarded(Body&& body) noexcept {
  try {
    return Report(body());
  } catch (...) {
    return Report({kInternal, "jax_ep: out of memory in the FFI library"});
  }
}

// The callers of the C ABI may pass any number: kInvalidArgument for what is no platform or no ordinal.
Status CheckDevice(int32_t platform, int32_t device_ordinal);

}  // namespace jax_ep

// "jax_ep_ffi stamp abi=4 xla=0.5 source=<hash>": the version above, that of the XLA FFI headers it was built with, and
// the hash of its sources. library.py reads it from the file, before anything of the library runs.
JAX_EP_EXPORT const char* jax_ep_ffi_stamp();
JAX_EP_EXPORT const char* jax_ep_last_error();

// Pointer tables (pointer_table.cc). `num_bytes` is what programs may use of the memory that the table describes.
// Registering an id again replaces its values, of the same number; it must leave enough for every program that has run.
JAX_EP_EXPORT int32_t jax_ep_register_table(int32_t platform, int64_t table_id, int32_t device_ordinal,
                                            const int64_t* host_values, int64_t n, int64_t num_bytes);
// The most bytes that a program which has run on this device uses; 0 for an unknown table.
JAX_EP_EXPORT int64_t jax_ep_table_used(int32_t platform, int64_t table_id, int32_t device_ordinal);
// In this order, with a wait for the devices in between: from the first on no program finds the table, on any device;
// after the second what was captured finds nulls. An unknown id is not an error.
JAX_EP_EXPORT int32_t jax_ep_hide_table(int64_t table_id);
JAX_EP_EXPORT int32_t jax_ep_unregister_table(int64_t table_id);

// Status records (check_status.cc). The record's layout is in status.h.
JAX_EP_EXPORT int32_t jax_ep_alloc_status(int32_t platform, int32_t device_ordinal, void** host_address,
                                          uint64_t* device_address);
JAX_EP_EXPORT int32_t jax_ep_free_status(int32_t platform, int32_t device_ordinal, void* host_address);
JAX_EP_EXPORT int32_t jax_ep_register_status(int32_t platform, int64_t context_id, int32_t device_ordinal,
                                             const void* host_address);
JAX_EP_EXPORT int32_t jax_ep_unregister_status(int64_t context_id);

// Formats a record (8 int32) as snprintf does: at most size - 1 characters and a NUL, returns the length needed.
JAX_EP_EXPORT int64_t jax_ep_format_status(const int32_t* record, char* out, int64_t size);
JAX_EP_EXPORT const char* jax_ep_status_fields();      // space-separated names, in the order of the record
JAX_EP_EXPORT const char* jax_ep_status_states();      // space-separated names, the code is the position
JAX_EP_EXPORT const char* jax_ep_status_operations();  // likewise

// The state of the custom call that launches kernels (launch_kernel.cc): XLA_FFI_TypeId* and const XLA_FFI_TypeInfo*.
JAX_EP_EXPORT void* jax_ep_launch_type_id();
JAX_EP_EXPORT const void* jax_ep_launch_type_info();

#endif  // JAX_EP_FFI_ABI_H_
