// A libcuda.so.1 without a GPU, for tests. Device memory is host memory. Of three devices, the second has no context, and
// the third cannot take code.
//
// `fail(call, after, times)` lets the next `after` calls succeed and the `times` calls behind them fail. `overflows` counts
// copies past the end of an allocation.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {
struct Failure {
  int after, times;
};
std::map<std::string, Failure>& failures() {
  static auto* all = new std::map<std::string, Failure>;
  return *all;
}
std::map<uint64_t, size_t>& memory() {
  static auto* all = new std::map<uint64_t, size_t>;
  return *all;
}
thread_local intptr_t stack[8];
thread_local int depth = 0;
thread_local int mode = 0;
intptr_t seen[256];
int count = 0, retained[3] = {}, too_long = 0;

int result(const char* call) {
  const auto found = failures().find(call);
  if (found == failures().end() || found->second.after-- > 0) return 0;
  return found->second.times-- > 0 ? 2 : 0;
}
}  // namespace

extern "C" {
void fail(const char* call, int after, int times) { failures()[call] = {after, times}; }
int num_loads() { return count; }
int64_t load(int i) { return seen[i]; }  // the context of a load of code
int num_retained(int device) { return retained[device]; }
int num_allocations() { return static_cast<int>(memory().size()); }
int overflows() { return too_long; }
int num_pushed() { return depth; }
int capture_mode() { return mode; }
int64_t first_word(int allocation) {
  auto found = memory().begin();
  while (allocation-- > 0) ++found;
  return *reinterpret_cast<int64_t*>(found->first);
}

int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char** name) { return *name = "FAKE", 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, result("cuDeviceGet"); }
int cuDeviceGetCount(int* out) { return *out = 3, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned*, int* active) { return *active = device != 1, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
  if (int failed = result("cuDevicePrimaryCtxRetain")) return failed;
  ++retained[device];
  return *context = reinterpret_cast<void*>(static_cast<intptr_t>(100 + device)), 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return --retained[device], 0; }
int cuCtxPushCurrent_v2(void* context) {
  if (int failed = result("cuCtxPushCurrent")) return failed;
  return stack[depth++] = reinterpret_cast<intptr_t>(context), 0;
}
int cuCtxPopCurrent_v2(void** context) { return *context = reinterpret_cast<void*>(stack[--depth]), 0; }
int cuCtxGetCurrent(void** context) { return *context = reinterpret_cast<void*>(depth ? stack[depth - 1] : 0), 0; }
int cuThreadExchangeStreamCaptureMode(int* other) {
  if (int failed = result("cuThreadExchangeStreamCaptureMode")) return failed;
  const int old = mode;
  mode = *other;
  return *other = old, 0;
}
int cuMemAlloc_v2(uint64_t* out, size_t bytes) {
  *out = 0xBAD;
  if (int failed = result("cuMemAlloc")) return failed;
  *out = reinterpret_cast<uint64_t>(std::calloc(1, bytes));
  return memory()[*out] = bytes, 0;
}
int cuMemHostAlloc(void** out, size_t bytes, unsigned) {
  *out = nullptr;
  if (int failed = result("cuMemHostAlloc")) return failed;
  *out = std::calloc(1, bytes);
  return memory()[reinterpret_cast<uint64_t>(*out)] = bytes, 0;
}
int cuMemHostGetDevicePointer_v2(uint64_t* out, void* host, unsigned) {
  return *out = reinterpret_cast<uint64_t>(host), result("cuMemHostGetDevicePointer");
}
int cuMemFreeHost(void* host) {
  if (int failed = result("cuMemFreeHost")) return failed;
  memory().erase(reinterpret_cast<uint64_t>(host));
  return std::free(host), 0;
}
int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
  const auto found = memory().find(to);
  if (found == memory().end() || found->second < bytes) return ++too_long, 0;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return result("cuMemcpyHtoD");  // a failed copy may have copied
}
int cuStreamSynchronize(void*) { return result("cuStreamSynchronize"); }
int cuModuleLoadData(void** module, const void*) {
  const intptr_t context = depth ? stack[depth - 1] : 0;
  if (count < 256) seen[count++] = context;
  *module = module;
  return context == 102 ? 209 : result("cuModuleLoadData");
}
int cuModuleGetFunction(void** function, void* module, const char*) {
  return *function = module, result("cuModuleGetFunction");
}
int cuFuncSetAttribute(void*, int, int) { return result("cuFuncSetAttribute"); }
#define UNUSED(name) \
  int name() { return 1; }
UNUSED(cuMemcpyDtoDAsync_v2)
UNUSED(cuMemsetD8Async)
UNUSED(cuTensorMapEncodeTiled)
UNUSED(cuLaunchKernel)
}
