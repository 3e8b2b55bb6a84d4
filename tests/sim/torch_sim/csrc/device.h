// What torch asks of a kind of device: guard, generator, hooks.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace sim {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const int old = current_device;
    setDevice(d);
    return c10::Device(KIND, old);
  }
  c10::Device getDevice() const override { return c10::Device(KIND, current_device); }
  void setDevice(c10::Device d) const override {
    if (d.index() < 0) return;
    TORCH_CHECK(d.index() < settings().devices, "sim error: invalid device ordinal ", int(d.index()));
    current_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  static int index(c10::Device d) { return d.index() < 0 ? current_device : d.index(); }
  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), id);
  }
  c10::Stream getStream(c10::Device d) const override { return stream(index(d), current_streams[index(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(index(d), 0); }
  c10::Stream getNewStream(c10::Device d, int priority = 0) const override {
    static std::atomic<int64_t> next[2] = {0, 0};
    const int high = priority < 0;
    return stream(index(d), 1 + high * POOLED + next[high]++ % POOLED);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool high = false) const override {
    return getNewStream(d, high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return &lane(s); }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<MarkPtr*>(e); }
  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*e) *e = new MarkPtr();
    *static_cast<MarkPtr*>(*e) = sim::record(lane(s));
  }
  void block(void* e, const c10::Stream& s) const override {
    if (e) wait_for(lane(s), *static_cast<MarkPtr*>(e));
  }
  bool queryEvent(void* e) const override { return !e || (*static_cast<MarkPtr*>(e))->ask(); }
  c10::DeviceIndex deviceCount() const noexcept override { return settings().devices; }
  bool queryStream(const c10::Stream& s) const override {
    std::lock_guard<std::mutex> g(lane(s).m);
    return lane(s).queue.empty();
  }
  void synchronizeStream(const c10::Stream& s) const override { synchronize(lane(s), "stream.synchronize"); }
  void synchronizeEvent(void* e) const override {
    if (!e) return;
    host_waits("event.synchronize", -1);
    {
      Unlocked u;
      (*static_cast<MarkPtr*>(e))->wait();
    }
    check_device();
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    synchronize_device(d < 0 ? current_device : d, "device.synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    memory().recordStream(p, s);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    TORCH_CHECK(a && b, "both events must have been recorded");
    auto &x = *static_cast<MarkPtr*>(a), &y = *static_cast<MarkPtr*>(b);
    {
      Unlocked u;
      x->wait();
      y->wait();
    }
    return std::chrono::duration<double, std::milli>(y->at - x->at).count();
  }
};

struct Generator final : c10::GeneratorImpl {  // a seed and an offset, as Philox's: each kernel takes the next number
  uint64_t seed_ = c10::detail::getNonDeterministicRandom() & 0x1FFFFFFFFFFFFFull, offset_ = 0;
  explicit Generator(c10::DeviceIndex d)
      : GeneratorImpl(c10::Device(KIND, d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {
    seed_ = c10::default_rng_seed_val;
  }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom() & 0x1FFFFFFFFFFFFFull);
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    const auto* p = static_cast<const uint64_t*>(state.data());
    seed_ = p[0];
    offset_ = p[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* p = reinterpret_cast<uint64_t*>(t.data_ptr<uint8_t>());
    p[0] = seed_;
    p[1] = offset_;
    return t.getIntrusivePtr();
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* g = new Generator(device_.index());
    g->seed_ = seed_;
    g->offset_ = offset_;
    return g;
  }
  uint64_t next() {
    std::lock_guard<std::mutex> g(mutex_);
    uint64_t z = seed_ * 0x9E3779B97F4A7C15ull + offset_ + 0x632BE59BD9B4E019ull;
    offset_ += 4;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (z ^ (z >> 31)) & 0x7FFFFFFFFFFFFFFFull;
  }
};
Generator* ours(const at::Generator& g) {
  TORCH_CHECK(g.device().type() == KIND, "Expected a 'sim' device type for generator but found '", g.device().type(),
              "'");
  return static_cast<Generator*>(g.unsafeGetGeneratorImpl());
}
const at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>([] {
    std::vector<at::Generator> some;
    for (int d = 0; d < settings().devices; d++) some.push_back(at::make_generator<Generator>(d));
    return some;
  }());
  return all->at(device < 0 ? current_device : device);
}

void resize_storage(const c10::Storage& storage, size_t n) {
  auto* s = storage.unsafeGetStorageImpl();
  TORCH_CHECK(s->resizable(), "Trying to resize storage that is not resizable");
  if (n == 0) {
    s->set_data_ptr_noswap(c10::DataPtr(nullptr, s->device()));
    s->set_nbytes(0);
    return;
  }
  const c10::DeviceGuard guard(s->device());
  auto fresh = memory().allocate(n);
  if (s->data() && s->nbytes()) {
    const size_t count = std::min<size_t>(n, s->nbytes());
    launch(
        current(), "resize_copy", [to = fresh.get(), from = s->mutable_data(), count] { std::memcpy(to, from, count); },
        count);
  }
  s->set_data_ptr_noswap(std::move(fresh));
  s->set_nbytes(n);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return settings().devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return settings().devices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { Guard().setDevice(c10::Device(KIND, d)); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    const int old = current_device;
    setCurrentDevice(d);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return d < 0 ? current_device : exchangeDevice(d);
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_memory(); }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(KIND, current_device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return at::make_generator<Generator>(d < 0 ? current_device : d);
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override { resize_storage(s, n); }
};
}  // namespace sim
