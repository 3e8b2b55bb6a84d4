// Streams: a thread with a queue each. Kernels run there later, some of them late on purpose.
#pragma once

#include <ATen/Parallel.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>

#include "settings.h"

namespace sim {

struct Task {
  std::string name;
  std::function<void()> run;
  bool kernel;
  int64_t bytes;
};
struct Lane {
  int device;
  int64_t id;
  uint64_t random = 0;
  bool started = false;
  std::mutex m;
  std::condition_variable cv;
  std::deque<Task> queue;
  Lane(int device, int64_t id) : device(device), id(id) {}
  uint64_t draw() {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return random;
  }
  void add(Task task) {
    {
      std::lock_guard<std::mutex> g(m);
      if (!started) {
        started = true;
        std::thread([this] { work(); }).detach();
      }
      queue.push_back(std::move(task));
    }
    cv.notify_one();
  }
  void work() {
    at::init_num_threads();
    random = 0x9E3779B97F4A7C15ull * (settings().seed * 1000003 + settings().rank * 10007 + device * 101 + id + 1) + 1;
    for (;;) {
      Task task;
      {
        std::unique_lock<std::mutex> g(m);
        cv.wait(g, [&] { return !queue.empty(); });
        task = std::move(queue.front());
        queue.pop_front();
      }
      if (task.kernel && (broken || ended)) continue;
      if (task.kernel && settings().delay_us > 0) {
        auto draw_ = draw();
        auto us = draw_ % 64 == 0  ? settings().delay_us * 20
                  : draw_ % 4 == 0 ? int64_t((draw_ >> 8) % settings().delay_us)
                                   : 0;
        if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
      }
      const double begin = now_us();
      try {
        task.run();
      } catch (const std::exception& e) {
        fail(task.name + " on stream " + std::to_string(id) + ": " + e.what());
      }
      if (task.kernel) note("kernel", task.name, id, task.bytes, begin, now_us());
      task.run = nullptr;
    }
  }
};
constexpr int64_t POOLED = 32,
                  COMM = 1000;  // stream ids: 0, 1 to 32 and 33 to 64 (high priority), then those of groups
std::mutex lanes_mutex;
std::map<std::pair<int, int64_t>, Lane*> lanes;
Lane& lane(int device, int64_t id) {
  std::lock_guard<std::mutex> g(lanes_mutex);
  auto& found = lanes[{device, id}];
  if (!found) found = new Lane(device, id);
  return *found;
}
Lane& lane(const c10::Stream& s) { return lane(s.device_index(), s.id()); }
std::vector<Lane*> all_lanes(int device) {
  std::lock_guard<std::mutex> g(lanes_mutex);
  std::vector<Lane*> some;
  for (auto& [key, l] : lanes)
    if (key.first == device) some.push_back(l);
  return some;
}
thread_local int current_device = 0;
thread_local std::map<int, int64_t> current_streams;
Lane& current(int device) { return lane(device, current_streams[device]); }
Lane& current() { return current(current_device); }

MarkPtr record(Lane& l) {
  auto mark = std::make_shared<Mark>();
  l.add({"record", [mark] { mark->set(); }, false, 0});
  return mark;
}
void wait_for(Lane& l, const MarkPtr& mark) {
  l.add({"wait", [mark] { mark->wait(); }, false, 0});
}
void synchronize(Lane& l, const std::string& why, bool tell = true) {
  if (ended) return;
  if (tell) host_waits(why, l.id);
  auto mark = record(l);
  {
    Unlocked u;
    mark->wait();
  }
  check_device();
}
void synchronize_device(int device, const std::string& why) {
  host_waits(why, -1);
  for (auto* l : all_lanes(device)) synchronize(*l, why, false);
}
void launch(Lane& l, const std::string& name, std::function<void()> run, int64_t bytes = 0) {
  check_device();
  l.add({name, std::move(run), true, bytes});
  if (settings().blocking) synchronize(l, "SIM_BLOCKING", false);
}
}  // namespace sim
