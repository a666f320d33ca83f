// The custom call "jax_ep_check_status": fails the program when a status record of its context tells of a failure.
//
// On CUDA it is NOT compatible with command buffers: it has to read host memory each time the program runs, and a
// captured graph would replay the zero that it writes, not the reading. A handler runs when its work is enqueued, so
// without `wait` it sees what kernels recorded that have already ended, and a failure may surface one check later;
// with `wait` it first waits for the stream, and sees everything that its operand depends on.
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <tuple>

#include "abi.h"
#include "cuda_driver.h"
#include "handler.h"
#include "status.h"

namespace jax_ep {
namespace {

namespace ffi = xla::ffi;

using Key = std::tuple<int64_t, Platform, int32_t>;  // context id, platform, device ordinal

struct Registry {
  std::shared_mutex mutex;
  std::map<Key, const StatusRecord*> records;
};

Registry& GetRegistry() {
  static Registry* registry = new Registry;  // never destroyed: handlers may run until the process ends
  return *registry;
}

StatusRecord Read(const StatusRecord* record) {
  StatusRecord copy;
  copy.state = __atomic_load_n(&record->state, __ATOMIC_ACQUIRE);
  const volatile StatusRecord* rest = record;  // the device may write while the host reads: no cached values
  copy.operation = rest->operation;
  copy.rank = rest->rank;
  copy.peer = rest->peer;
  copy.expected = rest->expected;
  copy.seen = rest->seen;
  copy.task = rest->task;
  copy.detail = rest->detail;
  return copy;
}

bool Failed(const StatusRecord& record) { return record.state != kStateOk && record.state != kStateWriting; }

// The first failure among the records of this context on this process's devices, this device's own first; but a wrong
// mesh before all others, since it is their cause. A failure of another device counts too, because a device that goes on
// alone waits in the program's next collective for the one that has stopped, and XLA then ends the process.
Status FirstFailure(const Key& key, StatusRecord* failure) {
  Registry& registry = GetRegistry();
  std::shared_lock lock(registry.mutex);
  const auto own = registry.records.find(key);
  if (own == registry.records.end()) {
    return {kFailedPrecondition, "jax_ep: context " + std::to_string(std::get<0>(key)) + " has no status record on " +
                                     DeviceName(std::get<1>(key), std::get<2>(key)) +
                                     ". Call jax_ep.init() before the program runs; it brings back what "
                                     "programs used before jax_ep.finalize(), unless its heap_bytes is too small for "
                                     "that: then call jax.clear_caches(), and the program is compiled again. One that "
                                     "was compiled in another process needs the same jax_ep.init(heap_bytes=...) there "
                                     "and here."};
  }
  *failure = Read(own->second);
  const Key first{std::get<0>(key), std::get<1>(key), 0};
  for (auto it = registry.records.lower_bound(first); it != registry.records.end(); ++it) {
    if (std::get<0>(it->first) != std::get<0>(key) || std::get<1>(it->first) != std::get<1>(key)) break;
    const StatusRecord record = Read(it->second);
    if (!Failed(*failure) || record.state == kStateWrongMesh) *failure = record;
  }
  return {};
}

// DeadlineExceeded for a timeout, so that callers can tell it from other failures.
ffi::ErrorCode CodeOf(const StatusRecord& record) {
  switch (record.state) {
    case kStateTimeout:
      return ffi::ErrorCode::kDeadlineExceeded;
    case kStateWrongMesh:
      return ffi::ErrorCode::kFailedPrecondition;
    default:
      return ffi::ErrorCode::kAborted;
  }
}

// The verdict as an error.
ffi::Error Check(const Key& key) {
  StatusRecord record;
  if (Status status = FirstFailure(key, &record); !status.ok()) return ToError(status);
  if (!Failed(record)) return ffi::Error::Success();
  return ffi::Error(CodeOf(record), FormatStatus(record));
}

using CheckResult = ffi::Result<ffi::Buffer<ffi::S32>>;

ffi::Error OnCpu(int32_t device_ordinal, int64_t context_id, bool /*wait*/, ffi::AnyBuffer /*token*/,
                 CheckResult result) {
  std::memset(result->untyped_data(), 0, result->size_bytes());
  return Check({context_id, Platform::kCpu, device_ordinal});
}

ffi::Error OnCuda(cuda::Stream stream, int32_t device_ordinal, int64_t context_id, bool wait, ffi::AnyBuffer /*token*/,
                  CheckResult result) {
  const auto destination = reinterpret_cast<cuda::DevicePointer>(result->untyped_data());
  if (Status status = cuda::ZeroAsync(destination, result->size_bytes(), stream); !status.ok()) return ToError(status);
  if (wait) {
    if (Status status = cuda::Synchronize(stream); !status.ok()) return ToError(status);
  }
  return Check({context_id, Platform::kCuda, device_ordinal});
}

Status Allocate(Platform platform, int32_t device_ordinal, void** host, uint64_t* device) {
  if (platform == Platform::kCuda) {
    if (Status status = cuda::AllocateHost(device_ordinal, sizeof(StatusRecord), host, device); !status.ok()) {
      return status;
    }
  } else {
    *host = ::operator new(sizeof(StatusRecord));
    *device = reinterpret_cast<uint64_t>(*host);
  }
  std::memset(*host, 0, sizeof(StatusRecord));
  return {};
}

Status Free(Platform platform, int32_t device_ordinal, void* host) {
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  for (const auto& [key, record] : registry.records) {
    if (record == host) {
      return {kFailedPrecondition, "jax_ep: the status record of context " + std::to_string(std::get<0>(key)) +
                                       " on " + DeviceName(std::get<1>(key), std::get<2>(key)) +
                                       " is still registered. Unregister the context's records before freeing them."};
    }
  }
  if (platform == Platform::kCuda) return cuda::FreeHost(device_ordinal, host);
  ::operator delete(host);
  return {};
}

Status Register(const Key& key, const void* host) {
  if (host == nullptr || reinterpret_cast<uintptr_t>(host) % alignof(StatusRecord) != 0) {
    return {kInvalidArgument, "jax_ep: a status record needs an address that is a non-zero multiple of " +
                                  std::to_string(alignof(StatusRecord)) + ", got " +
                                  std::to_string(reinterpret_cast<uintptr_t>(host))};
  }
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  registry.records.insert_or_assign(key, static_cast<const StatusRecord*>(host));
  return {};
}

Status Unregister(int64_t context_id) {
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  for (auto it = registry.records.begin(); it != registry.records.end();) {
    it = std::get<0>(it->first) == context_id ? registry.records.erase(it) : std::next(it);
  }
  return {};
}

}  // namespace
}  // namespace jax_ep

int32_t jax_ep_alloc_status(int32_t platform, int32_t device_ordinal, void** host_address, uint64_t* device_address) {
  return jax_ep::Guarded([&]() -> jax_ep::Status {
    if (jax_ep::Status status = jax_ep::CheckDevice(platform, device_ordinal); !status.ok()) return status;
    return jax_ep::Allocate(static_cast<jax_ep::Platform>(platform), device_ordinal, host_address, device_address);
  });
}

int32_t jax_ep_free_status(int32_t platform, int32_t device_ordinal, void* host_address) {
  return jax_ep::Guarded([&]() -> jax_ep::Status {
    if (jax_ep::Status status = jax_ep::CheckDevice(platform, device_ordinal); !status.ok()) return status;
    return jax_ep::Free(static_cast<jax_ep::Platform>(platform), device_ordinal, host_address);
  });
}

int32_t jax_ep_register_status(int32_t platform, int64_t context_id, int32_t device_ordinal,
                               const void* host_address) {
  return jax_ep::Guarded([&]() -> jax_ep::Status {
    if (jax_ep::Status status = jax_ep::CheckDevice(platform, device_ordinal); !status.ok()) return status;
    return jax_ep::Register({context_id, static_cast<jax_ep::Platform>(platform), device_ordinal}, host_address);
  });
}

int32_t jax_ep_unregister_status(int64_t context_id) {
  return jax_ep::Guarded([&] { return jax_ep::Unregister(context_id); });
}

JAX_EP_EXPORT_HANDLER(jax_ep_check_status_cpu);
JAX_EP_EXPORT_HANDLER(jax_ep_check_status_cuda);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_check_status_cpu, jax_ep::OnCpu,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Attr<int64_t>("context_id")
                                  .Attr<bool>("wait")
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_check_status_cuda, jax_ep::OnCuda,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<jax_ep::cuda::Stream>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Attr<int64_t>("context_id")
                                  .Attr<bool>("wait")
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());
