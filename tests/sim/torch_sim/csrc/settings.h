// What the simulator is told by its environment, what went wrong on it, and what happened there, for those who ask.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace sim {
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Clock = std::chrono::steady_clock;
constexpr auto KIND = c10::DeviceType::PrivateUse1;

int64_t env(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoll(text) : otherwise;
}
struct Settings {
  int64_t devices = env("SIM_DEVICES", 1);
  int64_t seed = env("SIM_SEED", 0);
  int64_t rank = env("RANK", -1);  // or that of the first process group: each rank has delays of its own
  int64_t delay_us = env("SIM_DELAY_US", 100);
  int64_t blocking = env("SIM_BLOCKING", 0);
  int64_t poison = env("SIM_POISON", 1);
  int64_t memory = env("SIM_MEMORY", int64_t(64) << 30);
  int64_t pin_limit = env("SIM_PIN_LIMIT", int64_t(1) << 50);
};
Settings& settings() {
  static auto* s = new Settings();
  return *s;
}

struct Unlocked {  // the GIL is let go while the host waits
  std::optional<py::gil_scoped_release> released;
  Unlocked() {
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  }
};

struct Mark {  // one recording of an event
  std::mutex m;
  std::condition_variable cv;
  bool done = false;
  Clock::time_point at;
  void set() {
    {
      std::lock_guard<std::mutex> g(m);
      done = true;
      at = Clock::now();
    }
    cv.notify_all();
  }
  bool ask() {
    std::lock_guard<std::mutex> g(m);
    return done;
  }
  void wait() {
    std::unique_lock<std::mutex> g(m);
    cv.wait(g, [&] { return done; });
  }
  bool wait_for(std::chrono::milliseconds t) {
    std::unique_lock<std::mutex> g(m);
    return cv.wait_for(g, t, [&] { return done; });
  }
};
using MarkPtr = std::shared_ptr<Mark>;

std::mutex error_mutex;
std::string error_text;
std::atomic<bool> broken{false}, ended{false};
void fail(const std::string& text) {  // as a device-side assert: nothing runs after it
  std::lock_guard<std::mutex> g(error_mutex);
  if (!broken) {
    error_text = text;
    broken = true;
  }
}
void check_device() {
  if (!broken) return;
  std::lock_guard<std::mutex> g(error_mutex);
  TORCH_CHECK(false, "sim error: ", error_text);
}

struct Entry {
  std::string kind, name;
  int64_t stream, bytes;
  double begin, end;
};
std::mutex trace_mutex;
std::vector<Entry> trace;
std::atomic<bool> tracing{false};
const auto t0 = Clock::now();
double now_us() { return std::chrono::duration<double, std::micro>(Clock::now() - t0).count(); }
void note(const char* kind, const std::string& name, int64_t stream, int64_t bytes, double begin, double end) {
  if (!tracing) return;
  std::lock_guard<std::mutex> g(trace_mutex);
  trace.push_back({kind, name, stream, bytes, begin, end});
}
std::atomic<int64_t> num_waits{0};
std::atomic<bool> tell_waits{false};
py::object* on_wait = nullptr;
void host_waits(const std::string& why, int64_t stream) {  // as torch.cuda.set_sync_debug_mode would tell
  num_waits++;
  note("wait", why, stream, 0, now_us(), now_us());
  if (tell_waits && Py_IsInitialized()) {
    py::gil_scoped_acquire g;
    if (on_wait) (*on_wait)(why, stream);
  }
}
}  // namespace sim
