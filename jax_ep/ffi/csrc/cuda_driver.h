// The few CUDA driver functions that are needed, found at run time: the library builds and loads without CUDA.
#ifndef JAX_EP_FFI_CUDA_DRIVER_H_
#define JAX_EP_FFI_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "abi.h"

namespace jax_ep::cuda {

using DevicePointer = uint64_t;  // CUdeviceptr
using Stream = void*;            // CUstream
using Context = void*;           // CUcontext
using Module = void*;            // CUmodule
using Function = void*;          // CUfunction

// Each says which driver call failed and how. The first use loads libcuda.so.1; where that is missing, every
// function returns kFailedPrecondition.

// Device memory on the primary context of `device_ordinal`, which XLA uses as well.
Status Allocate(int32_t device_ordinal, size_t bytes, DevicePointer* out);
// Copies, and returns when the device holds the bytes: an unsynchronized stream may read them next.
Status Upload(int32_t device_ordinal, DevicePointer destination, const void* source, size_t bytes);
// Calls `body` once for each device of this process, with the primary context of the device current in this thread. A
// device without a context is left out: making one would cost hundreds of megabytes.
Status OnActiveDevices(const std::function<void(Context)>& body);
// Pinned host memory that the device addresses too.
Status AllocateHost(int32_t device_ordinal, size_t bytes, void** host, DevicePointer* device);
Status FreeHost(int32_t device_ordinal, void* host);

// On a stream of the context that is current in the calling thread, as in an XLA FFI handler.
Status CopyAsync(DevicePointer destination, DevicePointer source, size_t bytes, Stream stream);
Status ZeroAsync(DevicePointer destination, size_t bytes, Stream stream);
Status Synchronize(Stream stream);
Status CurrentContext(Context* out);
// Loads machine code into the current context, unless `module` has it there, and finds a function that may use
// `shared_bytes` of shared memory. The module is never unloaded, since captured graphs may hold its functions. So it is
// handed out even when a later step fails: pass it to the next attempt.
Status LoadFunction(const void* code, const char* name, int32_t shared_bytes, Module* module, Function* out);

// A TMA descriptor, CUtensorMap. Dimensions come fastest first; strides are in bytes, without that of the first.
struct alignas(64) TensorMap {
  char bytes[128];
};
struct TensorShape {
  int32_t rank, element_type, swizzle;  // CUtensorMapDataType, CUtensorMapSwizzle
  uint64_t sizes[5], strides[5];
  uint32_t box[5];
};
Status EncodeTensorMap(const TensorShape& shape, void* address, TensorMap* out);

Status LaunchKernel(Function function, int32_t num_programs, int32_t num_threads, int32_t shared_bytes, Stream stream,
                    void** parameters);

}  // namespace jax_ep::cuda

#endif  // JAX_EP_FFI_CUDA_DRIVER_H_
