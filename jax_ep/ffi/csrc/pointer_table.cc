// The custom call "jax_ep_pointer_table": every device copies its own registered pointer table into the result.
//
// One compiled program runs on all devices of a process, so a table of raw addresses, which differs from device to
// device, cannot be a constant of the program, and as an argument it would have to be threaded through every layer.
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <vector>

#include "abi.h"
#include "cuda_driver.h"
#include "handler.h"

namespace jax_ep {
namespace {

namespace ffi = xla::ffi;

struct Table {
  std::vector<int64_t> values;
  cuda::DevicePointer device = 0;  // the copy in device memory; 0 on the CPU platform
  size_t bytes() const { return values.size() * sizeof(int64_t); }
};

using Key = std::tuple<int64_t, Platform, int32_t>;  // table id first: unregistering removes a range

struct Registry {
  std::shared_mutex mutex;
  std::map<Key, Table> tables;
};

Registry& GetRegistry() {
  static Registry* registry = new Registry;  // never destroyed: handlers may run until the process ends
  return *registry;
}

std::string TableName(const Key& key) {
  return "jax_ep: pointer table " + std::to_string(std::get<0>(key)) + " of " +
         DeviceName(std::get<1>(key), std::get<2>(key));
}

Status Register(const Key& key, const int64_t* host_values, int64_t n) {
  if (n <= 0 || host_values == nullptr) {
    return {kInvalidArgument, TableName(key) + " needs at least one entry, got " + std::to_string(n)};
  }
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  auto found = registry.tables.find(key);
  if (found != registry.tables.end() && found->second.values.size() != static_cast<size_t>(n)) {
    // The compiled programs that name this id were made for its first size.
    return {kInvalidArgument, TableName(key) + " has " + std::to_string(found->second.values.size()) +
                                  " entries and cannot be replaced by one of " + std::to_string(n) +
                                  ". Use a new table id, or unregister this one first."};
  }
  Table table;
  table.values.assign(host_values, host_values + n);
  if (std::get<1>(key) == Platform::kCuda) {
    const int32_t ordinal = std::get<2>(key);
    if (found != registry.tables.end()) {
      table.device = found->second.device;  // in place: captured graphs hold this address
    } else if (Status status = cuda::Allocate(ordinal, table.bytes(), &table.device); !status.ok()) {
      return status;
    }
    if (Status status = cuda::Upload(ordinal, table.device, table.values.data(), table.bytes()); !status.ok()) {
      return status;
    }
  }
  registry.tables.insert_or_assign(key, std::move(table));
  return {};
}

// The device copy is filled with null pointers and kept: a CUDA graph captured earlier may be replayed with its
// address in it. It then faults on a null pointer, and writes to nobody's memory. This costs 8 bytes an entry.
Status Retire(const Key& key, Table* table) {
  if (std::get<1>(key) != Platform::kCuda) return {};
  const std::vector<int64_t> nulls(table->values.size(), 0);
  return cuda::Upload(std::get<2>(key), table->device, nulls.data(), table->bytes());
}

Status Unregister(int64_t table_id) {
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  Status first_failure;
  for (auto it = registry.tables.begin(); it != registry.tables.end();) {
    if (std::get<0>(it->first) != table_id) {
      ++it;
      continue;
    }
    Status status = Retire(it->first, &it->second);
    if (first_failure.ok()) first_failure = std::move(status);
    it = registry.tables.erase(it);
  }
  return first_failure;
}

// Calls `copy(table)` under the reader lock, after checking that the table exists and has `entries` entries.
template <typename Copy>
ffi::Error WithTable(const Key& key, size_t entries, Copy&& copy) {
  Registry& registry = GetRegistry();
  std::shared_lock lock(registry.mutex);
  auto found = registry.tables.find(key);
  if (found == registry.tables.end()) {
    return ToError({kFailedPrecondition,
                    TableName(key) +
                        " is not registered. Call jax_ep.init() before the program runs, on a mesh that holds this "
                        "device; after jax_ep.finalize(), trace and compile the program again."});
  }
  const Table& table = found->second;
  if (table.values.size() != entries) {
    return ToError({kInvalidArgument, TableName(key) + " has " + std::to_string(table.values.size()) +
                                          " entries, but the program asks for " + std::to_string(entries) +
                                          ". Ask for as many entries as were registered."});
  }
  return ToError(copy(table));
}

using TableResult = ffi::Result<ffi::BufferR1<ffi::S64>>;

ffi::Error OnCpu(int32_t device_ordinal, int64_t table_id, ffi::RemainingArgs /*token*/, TableResult result) {
  return WithTable({table_id, Platform::kCpu, device_ordinal}, result->element_count(), [&](const Table& table) {
    std::memcpy(result->untyped_data(), table.values.data(), table.bytes());
    return Status{};
  });
}

ffi::Error OnCuda(cuda::Stream stream, int32_t device_ordinal, int64_t table_id, ffi::RemainingArgs /*token*/,
                  TableResult result) {
  return WithTable({table_id, Platform::kCuda, device_ordinal}, result->element_count(), [&](const Table& table) {
    const auto destination = reinterpret_cast<cuda::DevicePointer>(result->untyped_data());
    return cuda::CopyAsync(destination, table.device, table.bytes(), stream);
  });
}

}  // namespace
}  // namespace jax_ep

int32_t jax_ep_register_table(int32_t platform, int64_t table_id, int32_t device_ordinal, const int64_t* host_values,
                              int64_t n) {
  return jax_ep::Guarded([&]() -> jax_ep::Status {
    if (jax_ep::Status status = jax_ep::CheckDevice(platform, device_ordinal); !status.ok()) return status;
    return jax_ep::Register({table_id, static_cast<jax_ep::Platform>(platform), device_ordinal}, host_values, n);
  });
}

int32_t jax_ep_unregister_table(int64_t table_id) {
  return jax_ep::Guarded([&] { return jax_ep::Unregister(table_id); });
}

JAX_EP_EXPORT_HANDLER(jax_ep_pointer_table_cpu);
JAX_EP_EXPORT_HANDLER(jax_ep_pointer_table_cuda);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_pointer_table_cpu, jax_ep::OnCpu,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Attr<int64_t>("table_id")
                                  .RemainingArgs()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::S64>>());

// Compatible with command buffers: it always enqueues the same single copy, between addresses that stay valid.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_pointer_table_cuda, jax_ep::OnCuda,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<jax_ep::cuda::Stream>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Attr<int64_t>("table_id")
                                  .RemainingArgs()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::S64>>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
