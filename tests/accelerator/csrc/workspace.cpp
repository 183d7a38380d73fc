// Memory that a library keeps for itself, and that counts like everything else.
#include "memory.h"

#include <map>
#include <thread>
#include <utility>

namespace sim {
namespace {

using Owner = std::pair<std::thread::id, c10::StreamId>; // as cuBLAS: one for each handle, which belongs to a thread

std::mutex mutex;
size_t workspace_bytes = 0;

std::map<Owner, c10::DataPtr>& workspaces() {
  static auto* const kept = new std::map<Owner, c10::DataPtr>(); // outlives the process' last kernel
  return *kept;
}

} // namespace

void set_workspace_bytes(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  workspaces().clear();
  workspace_bytes = bytes;
}

void keep_workspace() {
  std::lock_guard<std::mutex> lock(mutex);
  const Owner owner(std::this_thread::get_id(), current_stream_id());
  if (workspace_bytes > 0 && workspaces().count(owner) == 0) {
    workspaces().emplace(owner, device_memory()->allocate(workspace_bytes));
  }
}

} // namespace sim
