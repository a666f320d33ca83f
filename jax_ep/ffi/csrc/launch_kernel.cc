// The custom call "jax_ep_launch_kernel": runs a compiled Triton kernel whose parameters are its operands and its
// results, in this order, as addresses or as TMA descriptors.
//
// What a launch needs is found when the executable is made, in the first stage, and kept as its state: a launch then
// reads no attribute, looks nothing up by content and takes no lock that others hold. jaxlib 0.11.2 launches Triton
// kernels from a message with their source text in it, which it copies and hashes every time: tens of microseconds,
// as long as four of the low-latency kernels take. And it describes operands only.
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

constexpr size_t kMostArrays = 48, kMostDescriptors = 8, kMostRank = 5;
constexpr size_t kHidden = 2;  // Triton adds two addresses: of scratch memory, and of a profile; both unused
constexpr size_t kMostParameters = kMostArrays + 2 * kMostRank * kMostDescriptors + kHidden;
constexpr int64_t kMostElementBytes = 16, kMostBox = 256;
constexpr int64_t kMostStride = int64_t{1} << 40;  // TMA takes fewer bytes

// Machine code, and its function on each device that has run it. Equal ones are one object, so that programs share
// what the driver loads.
class Image {
 public:
  Image(std::string name, std::string code, int32_t shared_bytes)
      : name_(std::move(name)), code_(std::move(code)), shared_bytes_(shared_bytes) {}

  int32_t shared_bytes() const { return shared_bytes_; }

  // Loads it into every device of this process, before any program that has it runs. The driver may stop a device to
  // load code; were that left to the first launch, a peer might already wait for this one, and so for itself. A device
  // that cannot take the code says so when it is to run it.
  Status Load() {
    return cuda::OnActiveDevices([this](cuda::Context context) {
      cuda::Function function = nullptr;
      In(context, &function);
    });
  }

  // The function in a context, where it is loaded now if the context was made after `Load`.
  Status In(cuda::Context context, cuda::Function* out) {
    {
      std::shared_lock lock(mutex_);
      if (Find(context, out)) return {};
    }
    std::unique_lock lock(mutex_);
    if (Find(context, out)) return {};
    Loaded& loaded = Of(context);
    const Status status =
        cuda::LoadFunction(code_.data(), name_.c_str(), shared_bytes_, &loaded.module, &loaded.function);
    if (status.ok()) *out = loaded.function;
    return status;
  }

 private:
  struct Loaded {
    cuda::Context context;
    cuda::Module module = nullptr;      // stays for the next attempt, where the function could not be had
    cuda::Function function = nullptr;  // set when it can run
  };

  bool Find(cuda::Context context, cuda::Function* out) const {
    for (const Loaded& loaded : loaded_) {
      if (loaded.context == context && loaded.function != nullptr) return *out = loaded.function, true;
    }
    return false;
  }

  Loaded& Of(cuda::Context context) {
    for (Loaded& loaded : loaded_) {
      if (loaded.context == context) return loaded;
    }
    return loaded_.emplace_back(Loaded{context});
  }

  const std::string name_, code_;
  const int32_t shared_bytes_;
  std::shared_mutex mutex_;
  std::vector<Loaded> loaded_;
};

// Lives until the process ends: what the driver has loaded does too, since captured graphs may hold it.
Image* GetImage(std::string_view name, std::string_view code, int32_t shared_bytes) {
  using Key = std::tuple<std::string, std::string, int32_t>;
  static auto* mutex = new std::mutex;
  static auto* images = new std::map<Key, Image*>;
  Key key{std::string(name), std::string(code), shared_bytes};
  std::lock_guard lock(*mutex);
  Image*& image = images->try_emplace(std::move(key), nullptr).first->second;
  if (image == nullptr) image = new Image(std::string(name), std::string(code), shared_bytes);
  return image;
}

// How the kernel takes an array: rank 0, by its address; else by a descriptor, which the kernel's parameters repeat as
// numbers, in its own order of dimensions and with strides in elements.
struct Parameter {
  cuda::TensorShape shape{};
  std::array<int32_t, kMostRank> sizes{};
  std::array<int64_t, kMostRank> strides{};
};

bool IsIn(int64_t value, int64_t least, int64_t most) { return least <= value && value <= most; }

// Reads the attribute "parameters". Each array has a rank and, where that is not 0: element type, bytes of an element,
// swizzle, then sizes, strides and the box, one number per dimension each. The limits keep every product and every cast
// below exact.
Status ReadParameters(ffi::Span<const int64_t> numbers, std::vector<Parameter>* out) {
  const Status wrong{kInvalidArgument, "jax_ep: the parameters of a kernel are not what this library can read"};
  size_t descriptors = 0;
  for (size_t at = 0; at < numbers.size();) {
    Parameter parameter;
    const int64_t rank = numbers[at++];
    if (!IsIn(rank, 0, kMostRank) || (rank > 0 && at + 3 + 3 * rank > numbers.size())) return wrong;
    if (rank > 0) {
      cuda::TensorShape& shape = parameter.shape;
      if (!IsIn(numbers[at], 0, INT32_MAX) || !IsIn(numbers[at + 1], 1, kMostElementBytes) ||
          !IsIn(numbers[at + 2], 0, INT32_MAX)) {
        return wrong;
      }
      shape.rank = static_cast<int32_t>(rank);
      shape.element_type = static_cast<int32_t>(numbers[at]);
      const auto element_bytes = static_cast<uint64_t>(numbers[at + 1]);
      shape.swizzle = static_cast<int32_t>(numbers[at + 2]);
      at += 3;
      for (int64_t i = 0; i < rank; ++i) {
        const int64_t size = numbers[at + i], stride = numbers[at + rank + i], box = numbers[at + 2 * rank + i];
        if (!IsIn(size, 1, INT32_MAX) || !IsIn(stride, 0, kMostStride) || !IsIn(box, 1, kMostBox)) return wrong;
        parameter.sizes[i] = static_cast<int32_t>(size);
        parameter.strides[i] = stride;
        shape.sizes[rank - 1 - i] = static_cast<uint64_t>(size);
        shape.box[rank - 1 - i] = static_cast<uint32_t>(box);
        if (i < rank - 1) shape.strides[rank - 2 - i] = element_bytes * static_cast<uint64_t>(stride);
      }
      at += 3 * rank;
      if (++descriptors > kMostDescriptors) return wrong;
    }
    if (out->size() == kMostArrays) return wrong;
    out->push_back(parameter);
  }
  return {};
}

}  // namespace

// What one call of an executable launches.
struct Launch {
  static ffi::TypeId id;  // XLA sets it when the type is registered
  Image* image;
  int32_t num_programs, num_threads, alignment;
  std::vector<Parameter> parameters;
};

ffi::TypeId Launch::id = {};

namespace {

constexpr ffi::TypeInfo kLaunchInfo = ffi::MakeTypeInfo<Launch>();

ffi::ErrorOr<std::unique_ptr<Launch>> Instantiate(std::string_view name, std::string_view code, int32_t num_programs,
                                                  int32_t num_threads, int32_t shared_bytes, int32_t alignment,
                                                  ffi::Span<const int64_t> parameters) {
  if (num_programs < 1 || num_threads < 1 || shared_bytes < 0 || alignment < 1 || code.empty()) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jax_ep: kernel " + std::string(name) + " cannot be launched with " + std::to_string(num_programs) +
        " programs of " + std::to_string(num_threads) + " threads, " + std::to_string(shared_bytes) +
        " bytes of shared memory, " + std::to_string(code.size()) + " bytes of code and addresses aligned to " +
        std::to_string(alignment)));
  }
  auto launch = std::make_unique<Launch>();
  if (Status status = ReadParameters(parameters, &launch->parameters); !status.ok()) {
    return ffi::Unexpected(ToError(status));
  }
  launch->image = GetImage(name, code, shared_bytes);
  if (Status status = launch->image->Load(); !status.ok()) return ffi::Unexpected(ToError(status));
  launch->num_programs = num_programs;
  launch->num_threads = num_threads;
  launch->alignment = alignment;
  return launch;
}

// The parameters of one launch: pointers to values that live as long as this does.
class Values {
 public:
  explicit Values(const Launch& launch) : launch_(launch) {}

  Status Add(void* address) {
    if (arrays_ == launch_.parameters.size()) return WrongNumber();
    if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(launch_.alignment) != 0) {
      return {kInvalidArgument, "jax_ep: parameter " + std::to_string(arrays_) + " of a kernel lies at " +
                                    std::to_string(reinterpret_cast<uintptr_t>(address)) +
                                    ", which is no multiple of " + std::to_string(launch_.alignment)};
    }
    const Parameter& parameter = launch_.parameters[arrays_];
    const int32_t rank = parameter.shape.rank;
    addresses_[arrays_++] = address;
    if (rank == 0) {
      pointers_[count_++] = &addresses_[arrays_ - 1];
      return {};
    }
    cuda::TensorMap* map = &maps_[descriptors_++];
    if (Status status = cuda::EncodeTensorMap(parameter.shape, address, map); !status.ok()) return status;
    pointers_[count_++] = map;
    for (int32_t i = 0; i < rank; ++i) pointers_[count_++] = const_cast<int32_t*>(&parameter.sizes[i]);
    for (int32_t i = 0; i < rank; ++i) pointers_[count_++] = const_cast<int64_t*>(&parameter.strides[i]);
    return {};
  }

  Status Finish(void*** out) {
    if (arrays_ != launch_.parameters.size()) return WrongNumber();
    for (size_t i = 0; i < kHidden; ++i) pointers_[count_++] = &nothing_;
    *out = pointers_.data();
    return {};
  }

 private:
  Status WrongNumber() const {
    return {kInvalidArgument, "jax_ep: a kernel of " + std::to_string(launch_.parameters.size()) +
                                  " arrays was called with another number of operands and results"};
  }

  const Launch& launch_;
  std::array<cuda::TensorMap, kMostDescriptors> maps_;
  std::array<void*, kMostArrays> addresses_;
  std::array<void*, kMostParameters> pointers_;
  void* nothing_ = nullptr;
  size_t arrays_ = 0, descriptors_ = 0, count_ = 0;
};

ffi::Error OnCuda(cuda::Stream stream, Launch* launch, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  Values values(*launch);
  for (size_t i = 0; i < operands.size(); ++i) {
    auto operand = operands.get<ffi::AnyBuffer>(i);
    if (!operand.has_value()) return operand.error();
    if (Status status = values.Add(operand->untyped_data()); !status.ok()) return ToError(status);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result.has_value()) return result.error();
    if (Status status = values.Add((*result)->untyped_data()); !status.ok()) return ToError(status);
  }
  void** parameters = nullptr;
  if (Status status = values.Finish(&parameters); !status.ok()) return ToError(status);
  cuda::Context context = nullptr;
  if (Status status = cuda::CurrentContext(&context); !status.ok()) return ToError(status);
  cuda::Function function = nullptr;
  if (Status status = launch->image->In(context, &function); !status.ok()) return ToError(status);
  return ToError(cuda::LaunchKernel(function, launch->num_programs, launch->num_threads, launch->image->shared_bytes(),
                                    stream, parameters));
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
                                  .Attr<int32_t>("alignment")
                                  .Attr<xla::ffi::Span<const int64_t>>("parameters"));

// Compatible with command buffers: it enqueues the same launch each time, on the addresses that XLA gives it.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_ep_launch_kernel_cuda, jax_ep::OnCuda,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<jax_ep::cuda::Stream>>()
                                  .Ctx<xla::ffi::State<jax_ep::Launch>>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
