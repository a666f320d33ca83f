#include "cuda_driver.h"

#include <dlfcn.h>

namespace jax_ep::cuda {
namespace {

constexpr unsigned kHostPortable = 0x1;   // CU_MEMHOSTALLOC_PORTABLE
constexpr unsigned kHostDeviceMap = 0x2;  // CU_MEMHOSTALLOC_DEVICEMAP
constexpr int kRelaxedCapture = 2;        // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int kMaxDynamicShared = 8;      // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kPromoteTo128Bytes = 2;     // CU_TENSOR_MAP_L2_PROMOTION_L2_128B

// Signatures from the CUDA driver API; CUresult, CUdevice and CUfunction_attribute are int, handles are void*.
struct Driver {
  int (*init)(unsigned);
  int (*get_error_name)(int, const char**);
  int (*device_get)(int*, int);
  int (*device_get_count)(int*);
  int (*context_get_state)(int, unsigned*, int*);
  int (*context_retain)(void**, int);
  int (*context_release)(int);
  int (*context_push)(void*);
  int (*context_pop)(void**);
  int (*mem_alloc)(DevicePointer*, size_t);
  int (*mem_host_alloc)(void**, size_t, unsigned);
  int (*mem_host_device_pointer)(DevicePointer*, void*, unsigned);
  int (*mem_free_host)(void*);
  int (*copy_to_device)(DevicePointer, const void*, size_t);
  int (*copy_async)(DevicePointer, DevicePointer, size_t, Stream);
  int (*set_async)(DevicePointer, unsigned char, size_t, Stream);
  int (*stream_synchronize)(Stream);
  int (*context_get_current)(Context*);
  int (*exchange_capture_mode)(int*);
  int (*module_load_data)(void**, const void*);
  int (*module_get_function)(Function*, void*, const char*);
  int (*function_set_attribute)(Function, int, int);
  int (*encode_tiled)(TensorMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                      const uint32_t*, int, int, int, int);
  int (*launch_kernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                       void**);
  Status status;  // why the driver cannot be used, or ok
};

Status Failure(const Driver& driver, const char* call, int result) {
  const char* name = nullptr;
  if (driver.get_error_name != nullptr) driver.get_error_name(result, &name);
  return {kInternal, std::string("jax_ep: ") + call + " failed with CUDA error " + std::to_string(result) + " (" +
                         (name != nullptr ? name : "unknown") + ")"};
}

template <typename Function>
void Find(void* library, Driver* driver, const char* symbol, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (*function == nullptr && driver->status.ok()) {
    driver->status = {kFailedPrecondition, std::string("jax_ep: libcuda.so.1 has no ") + symbol +
                                               "; the NVIDIA driver is too old"};
  }
}

Driver Load() {
  Driver driver{};
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // never closed: handlers keep its functions
  if (library == nullptr) {
    const char* why = dlerror();
    driver.status = {kFailedPrecondition,
                     std::string("jax_ep: the CUDA driver library libcuda.so.1 could not be loaded (") +
                         (why != nullptr ? why : "no reason given") +
                         "). A CUDA device needs the NVIDIA driver on this machine; CPU devices do not."};
    return driver;
  }
  Find(library, &driver, "cuInit", &driver.init);
  Find(library, &driver, "cuGetErrorName", &driver.get_error_name);
  Find(library, &driver, "cuDeviceGet", &driver.device_get);
  Find(library, &driver, "cuDeviceGetCount", &driver.device_get_count);
  Find(library, &driver, "cuDevicePrimaryCtxGetState", &driver.context_get_state);
  Find(library, &driver, "cuDevicePrimaryCtxRetain", &driver.context_retain);
  Find(library, &driver, "cuDevicePrimaryCtxRelease_v2", &driver.context_release);
  Find(library, &driver, "cuCtxPushCurrent_v2", &driver.context_push);
  Find(library, &driver, "cuCtxPopCurrent_v2", &driver.context_pop);
  Find(library, &driver, "cuMemAlloc_v2", &driver.mem_alloc);
  Find(library, &driver, "cuMemHostAlloc", &driver.mem_host_alloc);
  Find(library, &driver, "cuMemHostGetDevicePointer_v2", &driver.mem_host_device_pointer);
  Find(library, &driver, "cuMemFreeHost", &driver.mem_free_host);
  Find(library, &driver, "cuMemcpyHtoD_v2", &driver.copy_to_device);
  Find(library, &driver, "cuMemcpyDtoDAsync_v2", &driver.copy_async);
  Find(library, &driver, "cuMemsetD8Async", &driver.set_async);
  Find(library, &driver, "cuStreamSynchronize", &driver.stream_synchronize);
  Find(library, &driver, "cuCtxGetCurrent", &driver.context_get_current);
  Find(library, &driver, "cuThreadExchangeStreamCaptureMode", &driver.exchange_capture_mode);
  Find(library, &driver, "cuModuleLoadData", &driver.module_load_data);
  Find(library, &driver, "cuModuleGetFunction", &driver.module_get_function);
  Find(library, &driver, "cuFuncSetAttribute", &driver.function_set_attribute);
  Find(library, &driver, "cuTensorMapEncodeTiled", &driver.encode_tiled);
  Find(library, &driver, "cuLaunchKernel", &driver.launch_kernel);
  if (driver.status.ok()) {
    if (int result = driver.init(0)) driver.status = Failure(driver, "cuInit", result);
  }
  return driver;
}

const Driver& Get() {
  static const Driver* driver = new Driver(Load());  // never destroyed: handlers may run until the process ends
  return *driver;
}

// Makes the primary context of a device current for its lifetime.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, int32_t ordinal) : driver_(driver), status_(driver.status) {
    if (!status_.ok()) return;
    if (int result = driver_.device_get(&device_, ordinal)) {
      status_ = Failure(driver_, ("cuDeviceGet(" + std::to_string(ordinal) + ")").c_str(), result);
      return;
    }
    void* context = nullptr;
    if (int result = driver_.context_retain(&context, device_)) {
      status_ = Failure(driver_, "cuDevicePrimaryCtxRetain", result);
      return;
    }
    retained_ = true;
    if (int result = driver_.context_push(context)) {
      status_ = Failure(driver_, "cuCtxPushCurrent", result);
      return;
    }
    pushed_ = true;
  }
  ScopedContext(const ScopedContext&) = delete;
  ~ScopedContext() {
    void* popped = nullptr;
    if (pushed_) driver_.context_pop(&popped);
    if (retained_ && !kept_) driver_.context_release(device_);
  }
  // Memory that was allocated in the context outlives this object only while the context is retained.
  void Keep() { kept_ = true; }
  void Drop() { driver_.context_release(device_); }
  const Status& status() const { return status_; }

 private:
  const Driver& driver_;
  Status status_;
  int device_ = 0;
  bool retained_ = false, pushed_ = false, kept_ = false;
};

}  // namespace

Status Allocate(int32_t device_ordinal, size_t bytes, DevicePointer* out) {
  const Driver& driver = Get();
  ScopedContext context(driver, device_ordinal);
  if (!context.status().ok()) return context.status();
  if (int result = driver.mem_alloc(out, bytes)) return Failure(driver, "cuMemAlloc", result);
  context.Keep();
  return {};
}

Status Upload(int32_t device_ordinal, DevicePointer destination, const void* source, size_t bytes) {
  const Driver& driver = Get();
  ScopedContext context(driver, device_ordinal);
  if (!context.status().ok()) return context.status();
  if (int result = driver.copy_to_device(destination, source, bytes)) return Failure(driver, "cuMemcpyHtoD", result);
  // From pageable memory the call above may return before the last bytes have landed. XLA's streams do not wait
  // for the default stream, so this waits for it.
  if (int result = driver.stream_synchronize(nullptr)) return Failure(driver, "cuStreamSynchronize", result);
  return {};
}

Status OnActiveDevices(const std::function<void(Context)>& body) {
  const Driver& driver = Get();
  if (!driver.status.ok()) return {};  // no devices: a program may be compiled where none is
  int count = 0;
  if (int result = driver.device_get_count(&count)) return Failure(driver, "cuDeviceGetCount", result);
  for (int32_t ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0, active = 0;
    unsigned flags = 0;
    if (int result = driver.device_get(&device, ordinal)) return Failure(driver, "cuDeviceGet", result);
    if (int result = driver.context_get_state(device, &flags, &active)) {
      return Failure(driver, "cuDevicePrimaryCtxGetState", result);
    }
    if (active == 0) continue;
    const ScopedContext scoped(driver, ordinal);
    if (!scoped.status().ok()) return scoped.status();
    Context context = nullptr;
    if (Status status = CurrentContext(&context); !status.ok()) return status;
    body(context);
  }
  return {};
}

Status AllocateHost(int32_t device_ordinal, size_t bytes, void** host, DevicePointer* device) {
  const Driver& driver = Get();
  ScopedContext context(driver, device_ordinal);
  if (!context.status().ok()) return context.status();
  void* allocated = nullptr;
  if (int result = driver.mem_host_alloc(&allocated, bytes, kHostPortable | kHostDeviceMap)) {
    return Failure(driver, "cuMemHostAlloc", result);
  }
  if (int result = driver.mem_host_device_pointer(device, allocated, 0)) {
    driver.mem_free_host(allocated);
    return Failure(driver, "cuMemHostGetDevicePointer", result);
  }
  *host = allocated;
  context.Keep();
  return {};
}

Status FreeHost(int32_t device_ordinal, void* host) {
  const Driver& driver = Get();
  ScopedContext context(driver, device_ordinal);
  if (!context.status().ok()) return context.status();
  if (int result = driver.mem_free_host(host)) return Failure(driver, "cuMemFreeHost", result);
  context.Drop();  // the reference that AllocateHost kept
  return {};
}

Status CopyAsync(DevicePointer destination, DevicePointer source, size_t bytes, Stream stream) {
  const Driver& driver = Get();
  if (!driver.status.ok()) return driver.status;
  if (int result = driver.copy_async(destination, source, bytes, stream)) {
    return Failure(driver, "cuMemcpyDtoDAsync", result);
  }
  return {};
}

Status ZeroAsync(DevicePointer destination, size_t bytes, Stream stream) {
  const Driver& driver = Get();
  if (!driver.status.ok()) return driver.status;
  if (int result = driver.set_async(destination, 0, bytes, stream)) return Failure(driver, "cuMemsetD8Async", result);
  return {};
}

Status Synchronize(Stream stream) {
  const Driver& driver = Get();
  if (!driver.status.ok()) return driver.status;
  if (int result = driver.stream_synchronize(stream)) return Failure(driver, "cuStreamSynchronize", result);
  return {};
}

Status CurrentContext(Context* out) {
  const Driver& driver = Get();
  if (!driver.status.ok()) return driver.status;
  if (int result = driver.context_get_current(out)) return Failure(driver, "cuCtxGetCurrent", result);
  return {};
}

namespace {

// Lets this thread make calls that a capture in progress would otherwise forbid, for its lifetime.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver), result_(driver.exchange_capture_mode(&mode_)) {}
  RelaxedCapture(const RelaxedCapture&) = delete;
  ~RelaxedCapture() {
    if (result_ == 0) driver_.exchange_capture_mode(&mode_);
  }
  int result() const { return result_; }

 private:
  const Driver& driver_;
  int mode_ = kRelaxedCapture;  // then the mode that the thread had
  const int result_;
};

}  // namespace

Status LoadFunction(const void* code, const char* name, int32_t shared_bytes, Module* module, Function* out) {
  const Driver& driver = Get();
  if (!driver.status.ok()) return driver.status;
  const RelaxedCapture relaxed(driver);  // the first launch may be one that XLA records into a graph
  if (relaxed.result() != 0) return Failure(driver, "cuThreadExchangeStreamCaptureMode", relaxed.result());
  if (*module == nullptr) {
    Module loaded = nullptr;
    if (int result = driver.module_load_data(&loaded, code)) return Failure(driver, "cuModuleLoadData", result);
    *module = loaded;
  }
  Function function = nullptr;
  if (int result = driver.module_get_function(&function, *module, name)) {
    return Failure(driver, "cuModuleGetFunction", result);
  }
  if (int result = driver.function_set_attribute(function, kMaxDynamicShared, shared_bytes)) {
    return Failure(driver, ("cuFuncSetAttribute(" + std::to_string(shared_bytes) + " bytes of shared memory)").c_str(),
                   result);
  }
  *out = function;
  return {};
}

Status EncodeTensorMap(const TensorShape& shape, void* address, TensorMap* out) {
  constexpr uint32_t kEveryElement[5] = {1, 1, 1, 1, 1};
  const Driver& driver = Get();
  if (!driver.status.ok()) return driver.status;
  // Not interleaved; zeros outside.
  if (int result = driver.encode_tiled(out, shape.element_type, static_cast<uint32_t>(shape.rank), address, shape.sizes,
                                       shape.strides, shape.box, kEveryElement, 0, shape.swizzle, kPromoteTo128Bytes,
                                       0)) {
    return Failure(driver, "cuTensorMapEncodeTiled", result);
  }
  return {};
}

Status LaunchKernel(Function function, int32_t num_programs, int32_t num_threads, int32_t shared_bytes, Stream stream,
                    void** parameters) {
  const Driver& driver = Get();
  if (int result = driver.launch_kernel(function, static_cast<unsigned>(num_programs), 1, 1,
                                        static_cast<unsigned>(num_threads), 1, 1, static_cast<unsigned>(shared_bytes),
                                        stream, parameters, nullptr)) {
    return Failure(driver, "cuLaunchKernel", result);
  }
  return {};
}

}  // namespace jax_ep::cuda
