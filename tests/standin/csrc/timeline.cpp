// Work in streams, each at its time.
#include "standin.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <tuple>

namespace standin {
namespace {

// As float32 and as the upper half of bfloat16 and float64 it is no number, so it is seen wherever it is used.
constexpr uint32_t kPoison = 0xfff5cafe;
constexpr size_t kLookedAt = 16;  // bytes at either end of a span that are looked at

struct Work {
  Stream* stream;
  std::vector<Span> reads, writes;
  std::function<void()> does;
};

struct Moment {
  std::shared_ptr<Work> work;
  bool begins;
};

using Key = std::tuple<double, uint64_t>;

// Not destroyed at exit: streams of torch may still be used then.
std::map<Key, Moment>& moments() {
  static auto* all = new std::map<Key, Moment>;
  return *all;
}

uint64_t order = 0;

bool all_poison(const char* at, size_t bytes) {
  uint32_t word;
  for (size_t i = 0; i + sizeof word <= bytes; i += sizeof word) {
    memcpy(&word, at + i, sizeof word);
    if (word != kPoison) return false;
  }
  return bytes >= sizeof word;
}

bool poisoned(const Span& span) {
  size_t bytes = std::min(span.bytes, kLookedAt) / sizeof kPoison * sizeof kPoison;
  size_t last = span.bytes / sizeof kPoison * sizeof kPoison - bytes;
  return all_poison(span.at, bytes) || all_poison(span.at + last, bytes);
}

void poison(const Span& span) {
  std::fill_n((uint32_t*)span.at, span.bytes / sizeof kPoison, kPoison);
}

void pass(const Moment& moment) {
  Work& work = *moment.work;
  // At the end once more: what is read may have been overwritten meanwhile.
  if (std::any_of(work.reads.begin(), work.reads.end(), poisoned)) counts[work.stream->device].poisoned_reads++;
  if (moment.begins) {
    std::for_each(work.writes.begin(), work.writes.end(), poison);
  } else {
    work.does();
  }
}

}  // namespace

void settle(double until) {
  auto& all = moments();
  while (!all.empty() && std::get<0>(all.begin()->first) <= until) {
    Moment moment = all.begin()->second;
    all.erase(all.begin());
    pass(moment);
  }
}

void put(Stream* stream, double seconds, std::vector<Span> reads, std::vector<Span> writes, std::function<void()> does) {
  double time = now();
  settle(time);
  double start = std::max(stream->end, time);
  stream->end = start + seconds;
  if (!settings.deferred) return does();
  auto work = std::make_shared<Work>(Work{stream, std::move(reads), std::move(writes), std::move(does)});
  moments()[{start, order++}] = {work, true};
  moments()[{stream->end, order++}] = {work, false};
}

}  // namespace standin
