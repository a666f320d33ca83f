// What the custom calls share: turning a Status into an XLA FFI error.
#ifndef JAX_EP_FFI_HANDLER_H_
#define JAX_EP_FFI_HANDLER_H_

#include <string>

#include "abi.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

inline xla::ffi::Error ToError(const Status& status) {
  switch (status.code) {
    case kOk:
      return xla::ffi::Error::Success();
    case kInvalidArgument:
      return xla::ffi::Error::InvalidArgument(status.message);
    case kFailedPrecondition:
      return xla::ffi::Error(xla::ffi::ErrorCode::kFailedPrecondition, status.message);
    case kInternal:
      break;
  }
  return xla::ffi::Error::Internal(status.message);
}

// "CUDA device 3", for messages.
inline std::string DeviceName(Platform platform, int32_t device_ordinal) {
  return std::string(PlatformName(platform)) + " device " + std::to_string(device_ordinal);
}

}  // namespace jax_ep

// Declares an exported handler: XLA_FFI_DEFINE_HANDLER_SYMBOL alone would leave it hidden.
#define JAX_EP_EXPORT_HANDLER(name) JAX_EP_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame)

#endif  // JAX_EP_FFI_HANDLER_H_
