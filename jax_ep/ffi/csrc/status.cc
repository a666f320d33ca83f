#include "status.h"

#include <cstdio>
#include <cstring>
#include <sstream>

#include "abi.h"

namespace jax_ep {
namespace {

std::string OperationName(int32_t operation) {
  std::istringstream names(kOperationNames);
  std::string name;
  for (int32_t code = 0; names >> name; ++code) {
    if (code == operation) return code == 0 ? "an unknown operation" : name;
  }
  return "operation " + std::to_string(operation);
}

std::string Seconds(int32_t milliseconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", milliseconds / 1000.0);
  return text;
}

std::string Place(const StatusRecord& record) {
  std::string place = " in " + OperationName(record.operation);
  if (record.task >= 0) place += " (task " + std::to_string(record.task) + ")";
  return place;
}

std::string Wait(const StatusRecord& record) {
  const std::string whom = record.peer >= 0 ? "rank " + std::to_string(record.peer) : "its own tasks";
  return " waiting for " + whom + ": expected epoch " + std::to_string(record.expected) + ", saw " +
         std::to_string(record.seen);
}

constexpr const char* kRemedy =
    " The results of this operation and of all later ones are invalid. Find out why that rank is late (it ended, it "
    "runs another program, or it needs a longer timeout), then call jax_ep.finalize() and jax_ep.init() on every rank.";

constexpr const char* kLaunchRemedy =
    " The results of this operation and of all later ones are invalid. All ranks of a group must launch the same "
    "operations with the same sizes in the same order: look for a lax.cond that differs between ranks, for programs that "
    "two threads run at the same time, and for processes that run different programs. Then call jax_ep.finalize() and "
    "jax_ep.init() on every rank.";

constexpr const char* kMeshRemedy =
    " The results of this operation and of all later ones are invalid. Call jax_ep.finalize() and jax_ep.init(mesh) with "
    "the mesh that the program runs on, or jax_ep.init() without one where there are several, and compile the program "
    "again.";

}  // namespace

std::string FormatStatus(const StatusRecord& record) {
  const std::string rank = "jax_ep: rank " + std::to_string(record.rank);
  switch (record.state) {
    case kStateOk:
    case kStateWriting:  // the fields are not complete
      return "jax_ep: no failure recorded";
    case kStateTimeout: {
      const std::string after = record.detail > 0 ? " after " + Seconds(record.detail) : "";
      return rank + " timed out" + after + Place(record) + Wait(record) + "." + kRemedy;
    }
    case kStateAborted:
      return rank + " stopped" + Place(record) + Wait(record) + ", because rank " + std::to_string(record.peer) +
             " had reported a failure (state " + std::to_string(record.detail) + ")." + kRemedy;
    case kStateWrongMesh:
      return rank + " is another device" + Place(record) + " than in the mesh given to jax_ep.init(): expected device " +
             std::to_string(record.expected) + ", got device " + std::to_string(record.seen) + "." + kMeshRemedy;
    case kStateOtherLaunch: {
      const int32_t other = record.seen & 0xFF;
      const std::string peers = other == (record.expected & 0xFF) ? "other sizes" : OperationName(other);
      return rank + " met another launch" + Place(record) + ": rank " + std::to_string(record.peer) + " launched " +
             peers + " as its launch " + std::to_string(record.detail) + " of the two." + kLaunchRemedy;
    }
    default:
      return rank + " reported the unknown state " + std::to_string(record.state) + Place(record) + Wait(record) +
             ", detail " + std::to_string(record.detail) + "." + kRemedy;
  }
}

}  // namespace jax_ep

int64_t jax_ep_format_status(const int32_t* record, char* out, int64_t size) {
  try {
    jax_ep::StatusRecord copy;
    std::memcpy(&copy, record, sizeof(copy));
    const std::string text = jax_ep::FormatStatus(copy);
    if (size > 0) std::snprintf(out, static_cast<size_t>(size), "%s", text.c_str());
    return static_cast<int64_t>(text.size());
  } catch (...) {
    return -1;
  }
}

const char* jax_ep_status_fields() { return jax_ep::kStatusFields; }
const char* jax_ep_status_states() { return jax_ep::kStateNames; }
const char* jax_ep_status_operations() { return jax_ep::kOperationNames; }
