// The status record: one per context and device, in memory that both the host and the device see.
//
// Only kernels of that one device write it, and the first failure stays: a kernel whose wait expires claims the
// record by compare-and-swap of `state` from kStateOk to kStateWriting, writes the other fields, and stores the final
// `state` LAST, with release at system scope. Kernels that find a non-zero `state` run out without waiting. The host
// reads `state` with acquire before the rest, and takes kStateWriting for "not yet": the next check sees it.
//
// jax_ep/ffi/status.py holds the same names in the same order (tests/ffi/test_ffi.py compares them).
#ifndef JAX_EP_FFI_STATUS_H_
#define JAX_EP_FFI_STATUS_H_

#include <cstdint>
#include <string>

namespace jax_ep {

struct StatusRecord {
  int32_t state;      // 0 = ok, else a State: what went wrong
  int32_t operation;  // an Operation: in which call
  int32_t rank;       // the rank that reports, on the context's axis
  int32_t peer;       // the rank it waited for, -1 = none in particular
  // The epoch it waited for, and the one it saw when it gave up. kWrongMesh: the device that the mesh given to init has
  // at this rank, and the one that runs the kernel. kOtherLaunch: what it launches, and what the peer does, each an
  // Operation in the lowest 8 bits and a hash above them.
  int32_t expected;
  int32_t seen;
  int32_t task;       // the task number in the kernel's queue, -1 = none
  int32_t detail;     // kTimeout: milliseconds waited; kAborted: the state that the peer reported; kOtherLaunch: epoch
};
static_assert(sizeof(StatusRecord) == 32, "the record is 8 packed int32");

inline constexpr const char* kStatusFields = "state operation rank peer expected seen task detail";

enum State : int32_t {
  kStateOk = 0,
  kStateTimeout = 1,
  kStateAborted = 2,
  kStateWriting = 3,
  kStateWrongMesh = 4,
  kStateOtherLaunch = 5
};
inline constexpr const char* kStateNames = "ok timeout aborted writing wrong_mesh other_launch";

// In the order of these names, from 0.
inline constexpr const char* kOperationNames =
    "unknown dispatch combine dispatch_grouped_gemm grouped_gemm_combine low_latency_dispatch low_latency_combine "
    "low_latency_gemm_combine";

// The whole story of a record, for an exception's text; "jax_ep: no failure recorded" where there is none.
std::string FormatStatus(const StatusRecord& record);

}  // namespace jax_ep

#endif  // JAX_EP_FFI_STATUS_H_
