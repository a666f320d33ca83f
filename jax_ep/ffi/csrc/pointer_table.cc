// The custom call "jax_ep_pointer_table": every device copies its own registered pointer table into the result.
//
// One compiled program runs on all devices of a process, so a table of raw addresses, which differs from device to
// device, cannot be a constant of the program, and as an argument it would have to be threaded through every layer.
//
// What the program does say is how much of the memory behind the addresses it uses: it may have been compiled by another
// process, for a larger heap, and would write past the end of this one.
#include <atomic>
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

constexpr int64_t kMaxEntries = int64_t{1} << 20;

struct Table {
  std::vector<int64_t> values;
  int64_t num_bytes = 0;           // what programs may use of the memory that the addresses lead to
  std::atomic<int64_t> used{0};    // the most that a program uses which has run
  cuda::DevicePointer device = 0;  // the copy in device memory, which stays where it is; 0 on the CPU platform
  size_t device_entries = 0;       // what the copy has room for: that of `values`, where the table is visible
  bool visible = false;            // to programs that ask for it
  size_t bytes() const { return values.size() * sizeof(int64_t); }
};

using Key = std::tuple<int64_t, Platform, int32_t>;  // table id first: unregistering removes a range

// Tables are never removed: a CUDA graph that was captured with the copy of one may be replayed at any time.
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

// Copies `values` to the device, into memory of exactly their size. Memory of another size is left as it is: a CUDA graph
// that was captured with it may be replayed.
Status ToDevice(int32_t ordinal, const std::vector<int64_t>& values, Table* table) {
  const size_t bytes = values.size() * sizeof(int64_t);
  if (table->device_entries != values.size()) {
    cuda::DevicePointer device = 0;
    if (Status status = cuda::Allocate(ordinal, bytes, &device); !status.ok()) return status;
    table->device = device;
    table->device_entries = values.size();
  }
  table->visible = false;  // what the device holds after a failed copy is unknown
  return cuda::Upload(ordinal, table->device, values.data(), bytes);
}

// Changes the table after all that can fail. Only the device copy changes earlier, and the table is hidden then.
Status Register(const Key& key, const int64_t* host_values, int64_t n, int64_t num_bytes) {
  if (n <= 0 || n > kMaxEntries || host_values == nullptr || num_bytes < 0) {
    return {kInvalidArgument, TableName(key) + " got " + std::to_string(n) + " entries for " + std::to_string(num_bytes) +
                                  " bytes, expected 1 to " + std::to_string(kMaxEntries) + " entries and no negative size"};
  }
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  Table& table = registry.tables[key];
  const bool same_size = table.values.size() == static_cast<size_t>(n);
  if (table.visible && !same_size) {
    // The compiled programs that name this id were made for its first size.
    return {kInvalidArgument, TableName(key) + " has " + std::to_string(table.values.size()) +
                                  " entries and cannot be replaced by one of " + std::to_string(n) +
                                  ". Use a new table id, or unregister this one first."};
  }
  const int64_t used = same_size ? table.used.load() : 0;  // the size stops programs that were made for another
  if (num_bytes < used) {
    // A graph that holds such a program is replayed without a check.
    return {kFailedPrecondition, TableName(key) + " has served a program that uses " + std::to_string(used) +
                                     " bytes of its memory, and cannot be replaced by one for " +
                                     std::to_string(num_bytes) + ". Use a new table id."};
  }
  std::vector<int64_t> values(host_values, host_values + n);
  if (std::get<1>(key) == Platform::kCuda) {
    if (Status status = ToDevice(std::get<2>(key), values, &table); !status.ok()) return status;
  }
  table.values = std::move(values);
  table.num_bytes = num_bytes;
  table.used = used;
  table.visible = true;
  return {};
}

// Calls `visit(key, table)` for a table on all devices, and returns the first failure.
template <typename Visit>
Status OnAllDevices(int64_t table_id, Visit&& visit) {
  Registry& registry = GetRegistry();
  std::unique_lock lock(registry.mutex);
  Status first_failure;
  for (auto& [key, table] : registry.tables) {
    if (std::get<0>(key) != table_id) continue;
    Status status = visit(key, table);
    if (first_failure.ok()) first_failure = std::move(status);
  }
  return first_failure;
}

Status Hide(int64_t table_id) {
  return OnAllDevices(table_id, [](const Key&, Table& table) {
    table.visible = false;
    return Status{};
  });
}

// The device copy is filled with null pointers and kept: a CUDA graph captured earlier may be replayed with its
// address in it. It then faults on a null pointer and writes to no memory. This costs 8 bytes an entry.
Status Unregister(int64_t table_id) {
  if (Status status = Hide(table_id); !status.ok()) return status;  // on all devices, whatever fails next
  return OnAllDevices(table_id, [](const Key& key, Table& table) {
    if (table.device == 0) return Status{};
    const std::vector<int64_t> nulls(table.device_entries, 0);
    return cuda::Upload(std::get<2>(key), table.device, nulls.data(), nulls.size() * sizeof(int64_t));
  });
}

int64_t Used(const Key& key) {
  Registry& registry = GetRegistry();
  std::shared_lock lock(registry.mutex);
  const auto found = registry.tables.find(key);
  return found == registry.tables.end() ? 0 : found->second.used.load();
}

// Why a program that expects `entries` entries and uses `num_bytes` may not run with this table, or ok.
Status Refusal(const Key& key, const Table& table, size_t entries, int64_t num_bytes) {
  if (table.values.size() != entries) {
    return {kInvalidArgument, TableName(key) + " has " + std::to_string(table.values.size()) +
                                  " entries, but the program asks for " + std::to_string(entries) +
                                  ". Ask for as many entries as were registered."};
  }
  if (num_bytes > table.num_bytes) {
    return {kFailedPrecondition,
            TableName(key) + " stands for " + std::to_string(table.num_bytes) +
                " bytes of symmetric memory, but the program was compiled for " + std::to_string(num_bytes) +
                ". Call jax_ep.finalize() and jax_ep.init(heap_bytes=...) with as much as where it was compiled, or "
                "compile it here: after jax.clear_caches(), if it is a jitted function."};
  }
  return {};
}

// Calls `copy(table)` under the reader lock, after checking that the table is what the program was compiled for.
template <typename Copy>
ffi::Error WithTable(const Key& key, size_t entries, int64_t num_bytes, Copy&& copy) {
  Registry& registry = GetRegistry();
  std::shared_lock lock(registry.mutex);
  auto found = registry.tables.find(key);
  if (found == registry.tables.end() || !found->second.visible) {
    return ToError({kFailedPrecondition,
                    TableName(key) +
                        " is not registered. Call jax_ep.init() before the program runs; it brings back what programs "
                        "used before jax_ep.finalize(), unless its heap_bytes is too small for that: then call "
                        "jax.clear_caches(), and the program is compiled again. One that was compiled in another "
                        "process needs the same jax_ep.init(heap_bytes=...) there and here."});
  }
  Table& table = found->second;
  if (Status status = Refusal(key, table, entries, num_bytes); !status.ok()) return ToError(status);
  int64_t used = table.used.load();
  while (used < num_bytes && !table.used.compare_exchange_weak(used, num_bytes)) {
  }
  return ToError(copy(table));
}

using TableResult = ffi::Result<ffi::BufferR1<ffi::S64>>;

ffi::Error OnCpu(int32_t device_ordinal, int64_t table_id, int64_t num_bytes, ffi::RemainingArgs /*token*/,
                 TableResult result) {
  return WithTable({table_id, Platform::kCpu, device_ordinal}, result->element_count(), num_bytes, [&](const Table& table) {
    std::memcpy(result->untyped_data(), table.values.data(), table.bytes());
    return Status{};
  });
}

ffi::Error OnCuda(cuda::Stream stream, int32_t device_ordinal, int64_t table_id, int64_t num_bytes,
                  ffi::RemainingArgs /*token*/, TableResult result) {
  return WithTable({table_id, Platform::kCuda, device_ordinal}, result->element_count(), num_bytes, [&](const Table& table) {
    const auto destination = reinterpret_cast<cuda::DevicePointer>(result->untyped_data());
    return cuda::CopyAsync(destination, table.device, table.bytes(), stream);
  });
}

}  // namespace
}  // namespace jax_ep

int32_t jax_ep_register_table(int32_t platform, int64_t table_id, int32_t device_ordinal, const int64_t* host_values,
                              int64_t n, int64_t num_bytes) {
  return jax_ep::Guarded([&]() -> jax_ep::Status {
    if (jax_ep::Status status = jax_ep::CheckDevice(platform, device_ordinal); !status.ok()) return status;
    return jax_ep::Register({table_id, static_cast<jax_ep::Platform>(platform), device_ordinal}, host_values, n,
                            num_bytes);
  });
}

int64_t jax_ep_table_used(int32_t platform, int64_t table_id, int32_t device_ordinal) {
  return jax_ep::Used({table_id, static_cast<jax_ep::Platform>(platform), device_ordinal});
}

int32_t jax_ep_hide_table(int64_t table_id) {
  return jax_ep::Guarded([&] { return jax_ep::Hide(table_id); });
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
                                  .Attr<int64_t>("num_bytes")
                                  .RemainingArgs()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::S64>>());

// Compatible with command buffers: it always enqueues the same single copy, between addresses that stay valid.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_pointer_table_cuda, jax_ep::OnCuda,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<jax_ep::cuda::Stream>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Attr<int64_t>("table_id")
                                  .Attr<int64_t>("num_bytes")
                                  .RemainingArgs()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::S64>>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
