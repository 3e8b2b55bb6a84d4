// The extension: device "sim" of PyTorch (PrivateUse1), and what Python asks of it.
#include <torch/extension.h>

#include "group.h"
#include "operators.h"

namespace sim {
void begin() {
  static bool done = false;
  if (done) return;
  done = true;
  c10::SetAllocator(KIND, &memory());
  at::setHostAllocator(KIND, &host_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  py::module_::import("torch.distributed");
  py::class_<Ccl, c10d::Backend, c10::intrusive_ptr<Ccl>>(m, "Ccl")
      .def(py::init([](const c10::intrusive_ptr<c10d::Backend>& gloo, const std::string& name, int rank, int size,
                       int64_t ms) { return c10::make_intrusive<Ccl>(gloo, name, rank, size, ms); }))
      .def_property_readonly("options", [](Ccl& c) { return c.getBackendOptions(); });
  m.def("begin", begin);
  m.def("end", [] {
    if (!ended) {
      py::gil_scoped_release r;
      for (int d = 0; d < settings().devices; d++)
        for (auto* l : all_lanes(d)) {
          auto k = record(*l);
          k->wait_for(std::chrono::milliseconds(1000));
        }
      ended = true;
    }
  });
  m.def("default_generator", [](int d) { return default_generator(d); });
  m.def("pin", pin);
  m.def("unpin", unpin);
  m.def("is_pinned", [](uintptr_t p) { return is_pinned(reinterpret_cast<void*>(p)); });
  m.def("sleep", [](int64_t us) {
    launch(current(), "sleep", [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
  });
  m.def("empty_cache", [] { memory().emptyCache(); });
  m.def("clear_error", [] {
    std::lock_guard<std::mutex> g(error_mutex);
    broken = false;
    error_text.clear();
  });
  m.def("num_waits", [] { return num_waits.load(); });
  m.def("tell_waits", [](py::object f) {
    if (on_wait) {
      delete on_wait;
      on_wait = nullptr;
    }
    tell_waits = !f.is_none();
    if (!f.is_none()) on_wait = new py::object(f);
  });
  m.def("trace", [](bool on) {
    std::lock_guard<std::mutex> g(trace_mutex);
    py::list found;
    for (auto& e : trace) found.append(py::make_tuple(e.kind, e.name, e.stream, e.bytes, e.begin, e.end));
    trace.clear();
    tracing = on;
    return found;
  });
  m.def("rank", [] { return settings().rank; });
  m.def("device_count", [] { return settings().devices; });
}
