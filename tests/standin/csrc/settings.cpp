// What tests set and read, and what a process says when it asks for something that the stand-in does not have.
#include "standin.h"

#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

namespace standin {

std::recursive_mutex lock;
Settings settings;
Counts counts[kMaxCards];

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void sleep_until(double time) {
  double left = time - now();
  if (left <= 0) return;
  struct timespec span{(time_t)left, (long)((left - (time_t)left) * 1e9)};
  nanosleep(&span, nullptr);
}

namespace {

std::map<std::pair<int, int64_t>, int64_t>& syncs() {  // by card and thread
  static auto* all = new std::map<std::pair<int, int64_t>, int64_t>;
  return *all;
}

}  // namespace

void count_sync(int card) {
  counts[card].syncs++;
  syncs()[{card, gettid()}]++;
}

void missing(const char* what) {
  fprintf(stderr, "The stand-in for CUDA has no %s. Add it to tests/standin/csrc/.\n", what);
  fflush(stderr);
  abort();
}

}  // namespace standin

using namespace standin;

STANDIN_API void standin_missing(const char* what) { missing(what); }

STANDIN_API int standin_set(const char* name, double value) {
  std::lock_guard<std::recursive_mutex> held(lock);
  const std::pair<const char*, double*> known[] = {
      {"link_bytes_per_s", &settings.link_bytes_per_s},
      {"kernel_s", &settings.kernel_s},
      {"pin_limit_bytes", &settings.pin_limit_bytes},
      {"deferred", &settings.deferred},
  };
  for (auto& [key, place] : known) {
    if (strcmp(name, key) == 0) {
      wait_for_all();  // what is under way was begun under the old setting
      *place = value;
      return 0;
    }
  }
  return 1;
}

STANDIN_API const char* standin_count_names() {
  return "launches products copies_in copies_out copies_on_device fills waits records syncs allocations frees "
         "host_allocations bytes_in bytes_out pageable_copies poisoned_reads";
}

STANDIN_API void standin_counts(int card, int64_t* into) {
  std::lock_guard<std::recursive_mutex> held(lock);
  memcpy(into, &counts[card], sizeof(Counts));
}

STANDIN_API int64_t standin_syncs_of(int card, int64_t thread) {
  std::lock_guard<std::recursive_mutex> held(lock);
  auto found = syncs().find({card, thread});
  return found == syncs().end() ? 0 : found->second;
}
