// Kernels: those of the CPU, run later on the raw pointers of what they were launched with; shapes come from Meta.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <unordered_map>
#include <unordered_set>

#include "device.h"

namespace sim {

struct Desc {
  char* ptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool wrapped, conj = false, neg = false;  // bits of the tensor that a copy must see
};
bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == KIND; }
int64_t extent(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t n = 1;
  for (size_t i = 0; i < sizes.size(); i++) {
    if (!sizes[i]) return 0;
    n += (sizes[i] - 1) * strides[i];
  }
  return n;
}
Desc describe(const Tensor& t, const std::string& who) {
  auto* impl = t.unsafeGetTensorImpl();
  TORCH_CHECK(t.layout() == at::kStrided, "sim: ", who, ": only strided tensors");
  const int64_t end = (t.storage_offset() + extent(t.sizes(), t.strides())) * int64_t(t.itemsize());
  if (t.numel())
    TORCH_CHECK(int64_t(t.storage().nbytes()) >= end, "sim: ", who, " uses a tensor of shape ", t.sizes(),
                " whose storage has ", t.storage().nbytes(), " bytes: an illegal memory access");
  char* base = static_cast<char*>(t.storage().unsafeGetStorageImpl()->mutable_data());
  return {t.numel() ? base + t.storage_offset() * t.itemsize() : nullptr,
          t.sizes().vec(),
          t.strides().vec(),
          t.scalar_type(),
          impl->is_wrapped_number(),
          t.is_conj(),
          t.is_neg()};
}
Tensor alias_of(const Desc& d) {
  auto options = at::TensorOptions().dtype(d.dtype).device(at::kCPU);
  Tensor t = d.ptr ? at::from_blob(d.ptr, d.sizes, d.strides, options) : at::empty_strided(d.sizes, d.strides, options);
  if (d.wrapped) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  t._set_conj(d.conj);
  t._set_neg(d.neg);
  return t;
}
Tensor meta_of(const Tensor& t) {
  Tensor m = at::empty_strided(t.sizes(), t.strides(),
                               t.options().device(at::kMeta).requires_grad(false).pinned_memory(false));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) m.unsafeGetTensorImpl()->set_wrapped_number(true);
  return m;
}
Tensor zeros_of(const Tensor& t) {
  Tensor z = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false)).zero_();
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) z.unsafeGetTensorImpl()->set_wrapped_number(true);
  return z;
}
Tensor fresh_like(const Tensor& meta, int device) {
  return at::empty_strided(meta.sizes(), meta.strides(),
                           meta.options().device(c10::Device(KIND, device)).requires_grad(false));
}
int64_t bytes_of(const Tensor& t) { return t.numel() * int64_t(t.itemsize()); }

// A kernel by hand: `fn` gets CPU tensors over the memory of `ins` and `outs`. `on`: where, if not on the current
// stream of their device.
void run_later(const std::string& name, const std::vector<Tensor>& ins, const std::vector<Tensor>& outs,
               std::function<void(std::vector<Tensor>&, std::vector<Tensor>&)> fn, Lane* on = nullptr) {
  int device = current_device;
  auto descs = [&](const std::vector<Tensor>& some) {
    std::vector<Desc> found;
    for (auto& t : some) {
      found.push_back(t.defined() ? describe(t, name) : Desc{nullptr, {0}, {1}, at::kFloat, false});
      if (t.defined()) device = t.device().index();
    }
    return found;
  };
  const auto in = descs(ins), out = descs(outs);
  launch(
      on ? *on : current(device), name,
      [in, out, fn] {
        at::AutoDispatchBelowAutograd below;
        std::vector<Tensor> a, b;
        for (auto& d : in) a.push_back(alias_of(d));
        for (auto& d : out) b.push_back(alias_of(d));
        fn(a, b);
      },
      outs.empty() || !outs[0].defined() ? 0 : bytes_of(outs[0]));
}

struct Arg {  // of an operator: `plain` where it has no tensors of ours
  IValue plain;
  int kind = 0;  // 1 a tensor, 2 a list, 3 a list with gaps
  std::vector<Tensor> tensors;
  std::vector<std::optional<Desc>> descs;
  std::vector<Tensor> others;
  std::optional<uint64_t> seed;  // of a generator
};
IValue value_of(const Arg& a, const std::vector<Tensor>& tensors) {
  if (a.kind == 1) return tensors[0];
  if (a.kind == 2) {
    c10::List<Tensor> list;
    for (auto& t : tensors) list.push_back(t);
    return list;
  }
  c10::List<std::optional<Tensor>> list;
  for (auto& t : tensors) list.push_back(t.defined() ? std::optional<Tensor>(t) : std::nullopt);
  return list;
}
bool writes(const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); }
bool is_generator(const c10::Argument& a) {
  auto type = a.type();
  if (auto o = type->cast<c10::OptionalType>()) type = o->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}
const std::unordered_set<std::string> HOST_INDICES = {"aten::index", "aten::_index_put_impl_", "aten::index_put_",
                                                      "aten::_unsafe_index", "aten::_unsafe_index_put"};
// How many rows these make depends on the numbers: the host waits, as CUDA's does.
const std::unordered_set<std::string> READS = {
    "aten::equal",    "aten::nonzero",           "aten::masked_select", "aten::is_nonzero",
    "aten::unique",   "aten::_unique2",          "aten::unique_dim",    "aten::unique_consecutive",
    "aten::bincount", "aten::repeat_interleave", "aten::allclose"};
// What the CPU's kernels of these return is of another shape or dtype than Meta says: the CPU is asked, with zeros.
const std::unordered_set<std::string> SHAPES_OF_CPU = {"aten::native_layer_norm", "aten::native_group_norm",
                                                       "aten::native_batch_norm", "aten::_native_batch_norm_legit",
                                                       "aten::_embedding_bag",    "aten::_embedding_bag_forward_only",
                                                       "aten::mse_loss",          "aten::_native_multi_head_attention",
                                                       "aten::smooth_l1_loss"};

struct Shapes {  // of an operator with such arguments
  bool known;
  Stack returned;                              // of Meta tensors
  std::vector<std::vector<Tensor>> arguments;  // afterwards: what is written into may take another shape
};
std::mutex shapes_mutex;
std::unordered_map<std::string, Shapes> shapes;

// One call of an operator that has no kernel of ours.
struct Call {
  const c10::OperatorHandle& op;
  Stack* stack;
  const std::string& name = op.schema().name();
  const std::vector<c10::Argument>&params = op.schema().arguments(), &returns = op.schema().returns();
  const size_t begin = stack->size() - params.size();
  int device = -1;
  std::vector<Arg> args = std::vector<Arg>(params.size());
  std::vector<IValue> results;

  void read_arguments() {
    for (size_t i = 0; i < params.size(); i++) {
      auto& a = args[i];
      const auto& v = (*stack)[begin + i];
      if (v.isTensor() && v.toTensor().defined()) {
        a.kind = 1;
        a.tensors = {v.toTensor()};
      } else if (v.isTensorList()) {
        a.kind = 2;
        a.tensors = v.toTensorVector();
      } else if (v.isOptionalTensorList()) {
        a.kind = 3;
        for (const std::optional<Tensor>& t : v.toOptionalTensorList()) a.tensors.push_back(t.value_or(Tensor()));
      } else {
        a.plain = v;
        if (v.isDevice() && v.toDevice().type() == KIND) device = Guard::index(v.toDevice());
      }
      for (auto& t : a.tensors)
        if (is_sim(t) && device < 0) device = t.device().index();
    }
    if (device < 0) device = current_device;
  }
  // Tensors of the CPU may be numbers, and indices; the latter are copied, and waited for, as CUDA's are.
  void check_devices() const {
    bool copied = false;
    for (size_t i = 0; i < args.size(); i++)
      for (auto& t : args[i].tensors) {
        if (!t.defined() || (is_sim(t) && t.device().index() == device)) continue;
        if (t.device().is_cpu() && args[i].kind == 3 && HOST_INDICES.count(name)) {
          copied = true;
          continue;
        }
        TORCH_CHECK(t.device().is_cpu() && t.dim() == 0 && !writes(params[i]),
                    "Expected all tensors to be on the same device, but found at least two devices, sim:", device,
                    " and ", t.device(), "! (when checking argument ", params[i].name(), " of ", name, ")");
      }
    if (copied) synchronize(current(device), name + " copies its indices from pageable memory");
  }
  std::string key() const {
    std::ostringstream text;
    text << name << '.' << op.schema().overload_name();
    for (size_t i = 0; i < args.size(); i++) {
      text << '|';
      if (!args[i].kind && !is_generator(params[i])) text << args[i].plain;
      for (auto& t : args[i].tensors)
        if (t.defined())
          text << int(t.scalar_type()) << is_sim(t) << t.unsafeGetTensorImpl()->is_wrapped_number() << t.sizes()
               << t.strides();
        else
          text << '-';
    }
    return text.str();
  }
  // Meta's kernels are Python's, half a millisecond each: what they said is kept.
  Shapes infer() const {
    if (READS.count(name)) return {false, {}, std::vector<std::vector<Tensor>>(args.size())};
    const auto text = key();
    {
      std::lock_guard<std::mutex> g(shapes_mutex);
      auto it = shapes.find(text);
      if (it != shapes.end()) return it->second;
    }
    auto found = ask(SHAPES_OF_CPU.count(name));
    std::lock_guard<std::mutex> g(shapes_mutex);
    if (shapes.size() > 50000) shapes.clear();
    return shapes[text] = found;
  }
  Shapes ask(bool cpu) const {
    Shapes found{true, {}, std::vector<std::vector<Tensor>>(args.size())};
    Stack s;
    for (size_t i = 0; i < args.size(); i++) {
      auto& a = args[i];
      if (!a.kind) {
        s.push_back(a.plain.isDevice()        ? IValue(c10::Device(cpu ? at::kCPU : at::kMeta))
                    : is_generator(params[i]) ? IValue()
                                              : a.plain);
        continue;
      }
      for (auto& t : a.tensors) {
        auto stands = !t.defined() || !(is_sim(t) || a.kind == 3) ? t : cpu ? zeros_of(t) : meta_of(t);
        found.arguments[i].push_back(stands);
      }
      s.push_back(value_of(a, found.arguments[i]));
    }
    try {
      at::AutoDispatchBelowAutograd below;
      op.redispatchBoxed(c10::DispatchKeySet(cpu ? c10::DispatchKey::CPU : c10::DispatchKey::Meta), &s);
    } catch (const std::exception&) {
      py::gil_scoped_acquire g;  // Meta's kernels may have left an error of Python
      PyErr_Clear();
      found.known = false;
    }
    if (!found.known) return found;
    for (size_t i = 0; i < returns.size(); i++) {
      auto v = s[s.size() - returns.size() + i];
      if (cpu && v.isTensor() && v.toTensor().defined()) v = meta_of(v.toTensor());
      if (v.isTensor() && v.toTensor().defined() && !v.toTensor().is_meta()) found.known = false;
      found.returned.push_back(v);
    }
    return found;
  }

  IValue written(size_t i) const {  // the argument that a return is
    for (size_t j = 0; j < params.size(); j++)
      if (writes(params[j]) && *params[j].alias_info() == *returns[i].alias_info()) return (*stack)[begin + j];
    TORCH_CHECK(false, "sim: ", name, " returns what it was not given");
  }
  // Each return, with `make(tensor, i, k)` for the k-th tensor of the i-th return that is new.
  template <class Make>
  void collect(const Stack& from, Make make) {
    for (size_t i = 0; i < returns.size(); i++) {
      const auto& v = from[from.size() - returns.size() + i];
      auto here = [&](const Tensor& t, int64_t k) { return t.defined() ? make(t, i, k) : t; };
      if (returns[i].alias_info()) {
        results.push_back(written(i));
      } else if (v.isTensor()) {
        results.push_back(here(v.toTensor(), -1));
      } else if (v.isTensorList()) {
        c10::List<Tensor> list;
        int64_t k = 0;
        for (auto& t : v.toTensorVector()) list.push_back(here(t, k++));
        results.push_back(list);
      } else {
        results.push_back(v);
      }
    }
  }
  void finish() {
    torch::jit::drop(*stack, params.size());
    for (auto& r : results) stack->push_back(std::move(r));
  }

  // Nobody knows the shapes: wait, run, and take what comes.
  void run_now() {
    synchronize(current(device), name);
    Stack s;
    std::vector<std::vector<Tensor>> cpu(args.size());
    for (size_t i = 0; i < args.size(); i++) {
      auto& a = args[i];
      if (!a.kind && is_generator(params[i])) {
        s.push_back(at::make_generator<at::CPUGeneratorImpl>(seed(a.plain)));
      } else if (!a.kind) {
        s.push_back(a.plain.isDevice() ? IValue(c10::Device(at::kCPU)) : a.plain);
      } else {
        for (auto& t : a.tensors) {
          auto here = is_sim(t) ? alias_of(describe(t, name)) : t;
          cpu[i].push_back(is_sim(t) && writes(params[i]) ? here.clone() : here);
        }
        s.push_back(value_of(a, cpu[i]));
      }
    }
    {
      at::AutoDispatchBelowAutograd below;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &s);
    }
    auto move = [&](const Tensor& from, Tensor to) {
      if (to.sizes() != from.sizes()) to.resize_(from.sizes());
      run_later(name, {}, {to}, [from = from.clone()](auto&, auto& out) { out[0].copy_(from); });
    };
    for (size_t i = 0; i < args.size(); i++)
      for (size_t k = 0; k < cpu[i].size(); k++)
        if (writes(params[i]) && is_sim(args[i].tensors[k])) move(cpu[i][k], args[i].tensors[k]);
    collect(s, [&](const Tensor& t, size_t, int64_t) {
      auto fresh = fresh_like(t, device);
      move(t, fresh);
      return fresh;
    });
  }

  void run_behind(const Shapes& known) {
    for (size_t i = 0; i < args.size(); i++)
      for (size_t k = 0; k < args[i].tensors.size() && writes(params[i]); k++) {
        auto& t = args[i].tensors[k];
        const auto& m = known.arguments[i][k];
        if (!is_sim(t) || t.sizes() == m.sizes()) continue;
        t.resize_(m.sizes());
        t.unsafeGetTensorImpl()->set_sizes_and_strides(m.sizes(), m.strides());
      }
    std::vector<std::pair<std::pair<size_t, int64_t>, Desc>> outs;
    int64_t bytes = 0;
    collect(known.returned, [&](const Tensor& t, size_t i, int64_t k) {
      auto fresh = fresh_like(t, device);
      bytes += bytes_of(fresh);
      outs.push_back({{i, k}, describe(fresh, name)});
      return fresh;
    });
    auto kept = std::make_shared<std::vector<Arg>>();
    for (size_t i = 0; i < args.size(); i++) kept->push_back(launched(i, bytes));
    const auto& overload = op.schema().overload_name();
    launch(
        current(device), name + (overload.empty() ? "" : "." + overload),
        [op = op, kept, outs, num = returns.size()] {
          at::AutoDispatchBelowAutograd below;
          Stack s;
          for (auto& a : *kept) {
            std::vector<Tensor> some;
            for (size_t k = 0; k < a.descs.size(); k++)
              some.push_back(a.descs[k] ? alias_of(*a.descs[k]) : a.others[k]);
            s.push_back(a.kind   ? value_of(a, some)
                        : a.seed ? IValue(at::make_generator<at::CPUGeneratorImpl>(*a.seed))
                                 : a.plain);
          }
          op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &s);
          for (auto& [where, desc] : outs) {
            auto v = s[s.size() - num + where.first];
            alias_of(desc).copy_(where.second < 0 ? v.toTensor() : v.toTensorVector()[where.second]);
          }
        },
        bytes);
  }
  Arg launched(size_t i, int64_t& bytes) const {  // an argument as a kernel takes it: pointers, and numbers by value
    Arg a;
    a.plain = args[i].plain.isDevice() ? IValue(c10::Device(at::kCPU)) : args[i].plain;
    a.kind = args[i].kind;
    if (!a.kind && is_generator(params[i])) a.seed = seed(a.plain);
    for (auto& t : args[i].tensors) {
      if (is_sim(t)) {
        a.descs.push_back(describe(t, name));
        a.others.emplace_back();
        if (writes(params[i])) bytes += bytes_of(t);
      } else {
        a.descs.push_back(std::nullopt);
        a.others.push_back(t.defined() ? t.detach().clone() : t);
        if (t.defined() && t.unsafeGetTensorImpl()->is_wrapped_number())
          a.others.back().unsafeGetTensorImpl()->set_wrapped_number(true);
      }
    }
    return a;
  }
  uint64_t seed(const IValue& generator) const {
    return ours(generator.isNone() ? default_generator(device) : generator.toGenerator())->next();
  }
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "sim has no kernel for ",
                              op.operator_name(), ": the CPU has none");
  for (auto& r : op.schema().returns())
    TORCH_CHECK_NOT_IMPLEMENTED(!r.alias_info() || r.alias_info()->isWrite(), "sim has no kernel for ",
                                op.operator_name(), ", which returns a view");
  Call call{op, stack};
  call.read_arguments();
  const c10::DeviceGuard guard(c10::Device(KIND, call.device));
  call.check_devices();
  const auto shapes = call.infer();
  if (shapes.known)
    call.run_behind(shapes);
  else
    call.run_now();
  call.finish();
}
}  // namespace sim
