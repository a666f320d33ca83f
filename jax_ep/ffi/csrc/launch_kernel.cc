// The custom call "jax_ep_launch_kernel": runs a compiled kernel whose parameters are its operands' and its results'
// addresses, in this order.
//
// What a launch needs is found when the executable is made, in the first stage, and kept as its state: a launch then
// reads no attribute, looks nothing up by content and takes no lock that others hold. jaxlib 0.11.2 launches Triton
// kernels from a message with their source text in it, which it copies and hashes on every launch: tens of
// microseconds, as long as four of the kernels that this call is for take.
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "abi.h"
#include "cuda_driver.h"
#include "handler.h"

namespace jax_ep {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kMostParameters = 64;
constexpr size_t kHidden = 2;  // Triton adds two addresses: of scratch memory, and of a profile; both unused

// Machine code, and its function on each device that has run it. Equal ones are one object, so that programs share
// what the driver loads.
class Image {
 public:
  // Keeps the references.
  Image(const std::string& name, const std::string& code, int32_t shared_bytes)
      : name_(name), code_(code), shared_bytes_(shared_bytes) {}

  int32_t shared_bytes() const { return shared_bytes_; }

  // The function in a context, which is loaded on first use.
  Status In(cuda::Context context, cuda::Function* out) {
    {
      std::shared_lock lock(mutex_);
      if (Find(context, out)) return {};
    }
    std::unique_lock lock(mutex_);
    if (Find(context, out)) return {};
    if (Status status = cuda::LoadFunction(code_.data(), name_.c_str(), shared_bytes_, out); !status.ok()) {
      return status;
    }
    functions_.emplace_back(context, *out);
    return {};
  }

 private:
  bool Find(cuda::Context context, cuda::Function* out) const {
    for (const auto& [place, function] : functions_) {
      if (place == context) return *out = function, true;
    }
    return false;
  }

  const std::string &name_, &code_;
  const int32_t shared_bytes_;
  std::shared_mutex mutex_;
  std::vector<std::pair<cuda::Context, cuda::Function>> functions_;
};

// Lives until the process ends: what the driver has loaded does too, since captured graphs may hold it.
Image* GetImage(std::string_view name, std::string_view code, int32_t shared_bytes) {
  using Key = std::tuple<std::string, std::string, int32_t>;
  static auto* mutex = new std::mutex;
  static auto* images = new std::map<Key, Image*>;
  Key key{std::string(name), std::string(code), shared_bytes};
  std::lock_guard lock(*mutex);
  auto [place, added] = images->try_emplace(std::move(key), nullptr);
  if (added) place->second = new Image(std::get<0>(place->first), std::get<1>(place->first), shared_bytes);
  return place->second;
}

}  // namespace

// What one call of an executable launches.
struct Launch {
  static ffi::TypeId id;  // XLA sets it when the type is registered
  Image* image;
  int32_t num_programs, num_threads, alignment;
};

ffi::TypeId Launch::id = {};

namespace {

constexpr ffi::TypeInfo kLaunchInfo = ffi::MakeTypeInfo<Launch>();

ffi::ErrorOr<std::unique_ptr<Launch>> Instantiate(std::string_view name, std::string_view code, int32_t num_programs,
                                                  int32_t num_threads, int32_t shared_bytes, int32_t alignment) {
  if (num_programs < 1 || num_threads < 1 || shared_bytes < 0 || alignment < 1 || code.empty()) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jax_ep: kernel " + std::string(name) + " cannot be launched with " + std::to_string(num_programs) +
        " programs of " + std::to_string(num_threads) + " threads, " + std::to_string(shared_bytes) +
        " bytes of shared memory, " + std::to_string(code.size()) + " bytes of code and addresses aligned to " +
        std::to_string(alignment)));
  }
  return std::make_unique<Launch>(
      Launch{GetImage(name, code, shared_bytes), num_programs, num_threads, alignment});
}

// Collects addresses, and finds those that the kernel's vector accesses cannot take.
struct Addresses {
  std::array<void*, kMostParameters> values;
  size_t count = 0;
  Status status;

  void Add(void* address, int32_t alignment) {
    if (count == kMostParameters - kHidden) {
      status = {kInvalidArgument, "jax_ep: a kernel has more than " + std::to_string(count) + " operands and results"};
    } else if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(alignment) != 0) {
      status = {kInvalidArgument, "jax_ep: parameter " + std::to_string(count) + " of a kernel lies at " +
                                      std::to_string(reinterpret_cast<uintptr_t>(address)) +
                                      ", which is no multiple of " + std::to_string(alignment)};
    } else {
      values[count++] = address;
    }
  }
};

ffi::Error OnCuda(cuda::Stream stream, Launch* launch, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  Addresses addresses;
  for (size_t i = 0; i < operands.size(); ++i) {
    auto operand = operands.get<ffi::AnyBuffer>(i);
    if (!operand.has_value()) return operand.error();
    addresses.Add(operand->untyped_data(), launch->alignment);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return result.error();
    addresses.Add((*result)->untyped_data(), launch->alignment);
  }
  if (!addresses.status.ok()) return ToError(addresses.status);
  for (size_t i = 0; i < kHidden; ++i) addresses.values[addresses.count++] = nullptr;
  std::array<void*, kMostParameters> parameters;
  for (size_t i = 0; i < addresses.count; ++i) parameters[i] = &addresses.values[i];
  cuda::Context context = nullptr;
  if (Status status = cuda::CurrentContext(&context); !status.ok()) return ToError(status);
  cuda::Function function = nullptr;
  if (Status status = launch->image->In(context, &function); !status.ok()) return ToError(status);
  return ToError(cuda::LaunchKernel(function, launch->num_programs, launch->num_threads,
                                    launch->image->shared_bytes(), stream, parameters.data()));
}

}  // namespace
}  // namespace jax_ep

void* jax_ep_launch_type_id() { return &jax_ep::Launch::id; }
const void* jax_ep_launch_type_info() { return &jax_ep::kLaunchInfo; }

JAX_EP_EXPORT_HANDLER(jax_ep_launch_kernel_instantiate_cuda);
JAX_EP_EXPORT_HANDLER(jax_ep_launch_kernel_cuda);

XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_launch_kernel_instantiate_cuda, jax_ep::Instantiate,
                              xla::ffi::Ffi::BindInstantiate()
                                  .Attr<std::string_view>("name")
                                  .Attr<std::string_view>("code")
                                  .Attr<int32_t>("num_programs")
                                  .Attr<int32_t>("num_threads")
                                  .Attr<int32_t>("shared_bytes")
                                  .Attr<int32_t>("alignment"));

// Compatible with command buffers: it enqueues the same launch each time, on the addresses that XLA gives it.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_launch_kernel_cuda, jax_ep::OnCuda,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<jax_ep::cuda::Stream>>()
                                  .Ctx<xla::ffi::State<jax_ep::Launch>>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
