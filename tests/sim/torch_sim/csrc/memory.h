// Memory of the device, by the rules of CUDA's caching allocator but without splitting; pinned memory of the host.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>
#include <set>

#include "streams.h"

namespace sim {

struct Block {
  char* ptr;
  size_t size;
  int device;
  int64_t stream;
  std::set<int64_t> others;
};
using Stats = c10::CachingDeviceAllocator::DeviceStats;
struct Memory final : c10::DeviceAllocator {
  std::recursive_mutex m;
  std::map<std::pair<int, int64_t>, std::multimap<size_t, Block*>> pools;
  std::vector<std::pair<Block*, std::vector<MarkPtr>>> pending;  // recorded on other streams
  std::map<int, Stats> stats;
  static void count(c10::CachingAllocator::StatArray& s, int64_t by) {
    if (by > 0)
      s[0].increase(by);
    else
      s[0].decrease(-by);
  }
  void spoil(Block* b) {  // in the order of the block's stream, as the next user's kernels are
    if (!broken)
      lane(b->device, b->stream)
          .add({"poison", [p = b->ptr, n = b->size] { std::memset(p, 0xFF, n); }, true, int64_t(b->size)});
  }
  void give_back(Block* b) {
    if (settings().poison == 2) spoil(b);  // stricter than CUDA: as if another user came at once
    pools[{b->device, b->stream}].emplace(b->size, b);
  }
  void settle() {
    for (size_t i = 0; i < pending.size();) {
      auto& marks = pending[i].second;
      if (std::all_of(marks.begin(), marks.end(), [](const MarkPtr& k) { return k->ask(); })) {
        auto* b = pending[i].first;
        pending.erase(pending.begin() + i);
        give_back(b);
      } else
        i++;
    }
  }
  Block* take(size_t n, int device, int64_t stream) {
    auto& pool = pools[{device, stream}];
    auto it = pool.lower_bound(n);
    if (it == pool.end() || it->first > n + n / 4) return nullptr;
    it = std::prev(pool.upper_bound(it->first));  // what was let go last: whoever still reads it is seen
    auto* b = it->second;
    pool.erase(it);
    return b;
  }
  c10::DataPtr allocate(size_t n) override {
    const int device = current_device;
    const c10::Device d(KIND, device);
    if (n == 0) return {nullptr, nullptr, &free_block, d};
    const int64_t stream = current(device).id;
    std::lock_guard<std::recursive_mutex> g(m);
    const size_t size = (n + 511) / 512 * 512;
    settle();
    auto* b = take(size, device, stream);
    if (b && settings().poison == 1) spoil(b);
    auto& s = stats[device];
    if (!b) {
      if (s.reserved_bytes[0].current + int64_t(size) > settings().memory) emptyCache();
      TORCH_CHECK_WITH(OutOfMemoryError, s.reserved_bytes[0].current + int64_t(size) <= settings().memory,
                       "sim out of memory. Tried to allocate ", size, " bytes; ", s.allocated_bytes[0].current,
                       " allocated, ", s.reserved_bytes[0].current, " reserved");
      b = new Block{static_cast<char*>(std::aligned_alloc(512, size)), size, device, stream, {}};
      TORCH_CHECK(b->ptr, "the host has no memory left");
      pieces[reinterpret_cast<uintptr_t>(b->ptr)] = size;
      if (settings().poison) std::memset(b->ptr, 0xFF, size);
      count(s.reserved_bytes, size);
      count(s.segment, 1);
    }
    count(s.allocated_bytes, b->size);
    count(s.active_bytes, b->size);
    count(s.requested_bytes, b->size);
    count(s.allocation, 1);
    note("alloc", "", stream, size, now_us(), now_us());
    return {b->ptr, b, &free_block, d};
  }
  std::map<uintptr_t, size_t> pieces;
  bool owns(uintptr_t at) {
    std::lock_guard<std::recursive_mutex> g(m);
    auto it = pieces.upper_bound(at);
    return it != pieces.begin() && (--it, at < it->first + it->second);
  }
  static void free_block(void* context);
  void let_go(Block* b) {
    std::lock_guard<std::recursive_mutex> g(m);
    auto& s = stats[b->device];
    count(s.allocated_bytes, -int64_t(b->size));
    count(s.active_bytes, -int64_t(b->size));
    count(s.requested_bytes, -int64_t(b->size));
    count(s.allocation, -1);
    note("free", "", b->stream, b->size, now_us(), now_us());
    if (b->others.empty()) return give_back(b);
    std::vector<MarkPtr> marks;
    for (auto id : b->others) marks.push_back(record(lane(b->device, id)));
    b->others.clear();
    pending.emplace_back(b, std::move(marks));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::recursive_mutex> g(m);
    for (int i = 0; i < 2; i++) {  // the first wait lets pending blocks settle, the second one lets these be filled
      settle();
      for (int d = 0; d < settings().devices; d++)
        for (auto* l : all_lanes(d)) {
          auto k = record(*l);
          Unlocked u;
          k->wait();
        }
    }
    for (auto& [key, pool] : pools) {
      for (auto& [size, b] : pool) {
        count(stats[key.first].reserved_bytes, -int64_t(size));
        count(stats[key.first].segment, -1);
        pieces.erase(reinterpret_cast<uintptr_t>(b->ptr));
        std::free(b->ptr);
        delete b;
      }
      pool.clear();
    }
  }
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    auto* b = static_cast<Block*>(p.get_context());
    std::lock_guard<std::recursive_mutex> g(m);
    if (b && s.id() != b->stream) b->others.insert(s.id());
  }
  Stats getDeviceStats(c10::DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> g(m);
    return stats[d];
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> g(m);
    auto& s = stats[d];
    for (auto* a :
         {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes, &s.allocation, &s.segment})
      (*a)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    std::lock_guard<std::recursive_mutex> g(m);
    return {size_t(settings().memory - stats[d].reserved_bytes[0].current), size_t(settings().memory)};
  }
};
Memory& memory() {
  static auto* one = new Memory();
  return *one;
}
void Memory::free_block(void* context) {
  if (context && !ended) memory().let_go(static_cast<Block*>(context));
}

std::mutex pinned_mutex;
std::map<uintptr_t, size_t> pinned;
int64_t pinned_bytes = 0;
int pin(uintptr_t at, size_t n) {
  if (memory().owns(at)) return 1;  // invalid value: the device's memory
  std::lock_guard<std::mutex> g(pinned_mutex);
  if (pinned_bytes + int64_t(n) > settings().pin_limit) return 2;
  if (pinned.count(at)) return 712;  // already registered
  pinned[at] = n;
  pinned_bytes += n;
  return 0;
}
int unpin(uintptr_t at) {
  std::lock_guard<std::mutex> g(pinned_mutex);
  auto it = pinned.find(at);
  if (it == pinned.end()) return 713;
  pinned_bytes -= it->second;
  pinned.erase(it);
  return 0;
}
bool is_pinned(const void* p, size_t n = 1) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  std::lock_guard<std::mutex> g(pinned_mutex);
  auto it = pinned.upper_bound(at);
  if (it == pinned.begin()) return false;
  --it;
  return at + n <= it->first + it->second;
}
struct HostBlock {
  char* ptr;
  size_t size;
  std::vector<MarkPtr> uses;
};
struct HostMemory final : at::HostAllocator {
  std::mutex m;
  std::map<char*, HostBlock*> taken;
  std::vector<HostBlock*> back;
  c10::DataPtr allocate(size_t n) override {
    if (!n) return {nullptr, nullptr, &free_block, c10::Device(c10::kCPU)};
    size_t size = 512;
    while (size < n) size *= 2;
    std::lock_guard<std::mutex> g(m);
    HostBlock* b = nullptr;
    for (auto it = back.begin(); it != back.end() && !b; ++it)
      if ((*it)->size == size &&
          std::all_of((*it)->uses.begin(), (*it)->uses.end(), [](auto& k) { return k->ask(); })) {
        b = *it;
        back.erase(it);
        break;
      }
    if (!b) {
      b = new HostBlock{static_cast<char*>(std::aligned_alloc(512, size)), size, {}};
      TORCH_CHECK(pin(reinterpret_cast<uintptr_t>(b->ptr), size) == 0, "sim error: out of memory (pinning ", size,
                  " bytes)");
    }
    b->uses.clear();
    std::memset(b->ptr, 0xFF, size);
    taken[b->ptr] = b;
    return {b->ptr, b, &free_block, c10::Device(c10::kCPU)};
  }
  static void free_block(void* context);
  void let_go(HostBlock* b) {
    std::lock_guard<std::mutex> g(m);
    taken.erase(b->ptr);
    back.push_back(b);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  void use(const void* p, const MarkPtr& mark) {
    std::lock_guard<std::mutex> g(m);
    auto it = taken.upper_bound(static_cast<char*>(const_cast<void*>(p)));
    if (it == taken.begin()) return;
    --it;
    if (p < it->second->ptr + it->second->size) it->second->uses.push_back(mark);
  }
  bool record_event(void* p, void*, c10::Stream s) override {
    use(p, record(lane(s)));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostMemory& host_memory() {
  static auto* one = new HostMemory();
  return *one;
}
void HostMemory::free_block(void* context) {
  if (context && !ended) host_memory().let_go(static_cast<HostBlock*>(context));
}
}  // namespace sim
