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
  bool wrapped;
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
  return {t.numel() ? base + t.storage_offset() * t.itemsize() : nullptr, t.sizes().vec(), t.strides().vec(),
          t.scalar_type(), impl->is_wrapped_number()};
}
Tensor alias_of(const Desc& d) {
  auto options = at::TensorOptions().dtype(d.dtype).device(at::kCPU);
  Tensor t = d.ptr ? at::from_blob(d.ptr, d.sizes, d.strides, options) : at::empty_strided(d.sizes, d.strides, options);
  if (d.wrapped) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}
Tensor meta_of(const Tensor& t) {
  Tensor m = at::empty_strided(t.sizes(), t.strides(),
                               t.options().device(at::kMeta).requires_grad(false).pinned_memory(false));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) m.unsafeGetTensorImpl()->set_wrapped_number(true);
  return m;
}
Tensor fresh_like(const Tensor& meta, int device) {
  return at::empty_strided(meta.sizes(), meta.strides(),
                           meta.options().device(c10::Device(KIND, device)).requires_grad(false));
}
int64_t bytes_of(const Tensor& t) { return t.numel() * int64_t(t.itemsize()); }

// A kernel by hand: `fn` gets CPU tensors over the memory of `ins` and `outs`.
void run_later(const std::string& name, const std::vector<Tensor>& ins, const std::vector<Tensor>& outs,
               std::function<void(std::vector<Tensor>&, std::vector<Tensor>&)> fn) {
  std::vector<Desc> in, out;
  int device = current_device;
  for (auto& t : ins) {
    in.push_back(t.defined() ? describe(t, name) : Desc{nullptr, {0}, {1}, at::kFloat, false});
    if (t.defined()) device = t.device().index();
  }
  for (auto& t : outs) {
    out.push_back(t.defined() ? describe(t, name) : Desc{nullptr, {0}, {1}, at::kFloat, false});
    if (t.defined()) device = t.device().index();
  }
  launch(
      current(device), name,
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
const std::unordered_set<std::string> READS = {
    "aten::equal",    "aten::nonzero",           "aten::masked_select", "aten::is_nonzero",
    "aten::unique",   "aten::_unique2",          "aten::unique_dim",    "aten::unique_consecutive",
    "aten::bincount", "aten::repeat_interleave", "aten::allclose"};

struct Shapes {
  bool known;
  Stack meta;
  std::vector<std::vector<Tensor>> metas;
};
std::mutex shapes_mutex;
std::unordered_map<std::string, Shapes> shapes;
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto& params = schema.arguments();
  const auto& returns = schema.returns();
  const size_t begin = stack->size() - params.size();
  std::vector<Arg> args(params.size());
  int device = -1;
  bool host_indices = HOST_INDICES.count(name), copied_indices = false;
  for (size_t i = 0; i < params.size(); i++) {
    auto& a = args[i];
    const auto& v = (*stack)[begin + i];
    if (v.isTensor()) {
      if (v.toTensor().defined()) {
        a.kind = 1;
        a.tensors = {v.toTensor()};
      } else
        a.plain = v;
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
  const c10::DeviceGuard guard(c10::Device(KIND, device));
  for (size_t i = 0; i < args.size(); i++)
    for (auto& t : args[i].tensors) {
      if (!t.defined() || is_sim(t)) continue;
      if (host_indices && args[i].kind == 3) {
        copied_indices = true;
        continue;
      }
      TORCH_CHECK(t.device().is_cpu() && t.dim() == 0 && !writes(params[i]),
                  "Expected all tensors to be on the same device, but found at least two devices, sim:", device,
                  " and ", t.device(), "! (when checking argument ", params[i].name(), " of ", name, ")");
    }
  if (copied_indices)
    synchronize(current(device), name + " copies its indices from pageable memory");  // as CUDA's does

  // Shapes through Meta.
  bool known = !READS.count(name);
  Stack meta;
  std::vector<std::vector<Tensor>> metas(args.size());
  std::string key;  // Meta's kernels are Python's, half a millisecond each: what they said is kept
  if (known) {
    std::ostringstream text;
    text << name << '.' << schema.overload_name();
    for (size_t i = 0; i < args.size(); i++) {
      text << '|';
      if (!args[i].kind) {
        if (!is_generator(params[i])) text << args[i].plain;
      }
      for (auto& t : args[i].tensors)
        if (!t.defined())
          text << '-';
        else
          text << int(t.scalar_type()) << is_sim(t) << t.unsafeGetTensorImpl()->is_wrapped_number() << t.sizes()
               << t.strides();
    }
    key = text.str();
    std::lock_guard<std::mutex> g(shapes_mutex);
    auto it = shapes.find(key);
    if (it != shapes.end()) {
      known = it->second.known;
      meta = it->second.meta;
      metas = it->second.metas;
      key.clear();
    }
  }
  if (!key.empty()) {
    for (size_t i = 0; i < args.size(); i++) {
      auto& a = args[i];
      if (!a.kind) {
        meta.push_back(a.plain.isDevice()        ? IValue(c10::Device(at::kMeta))
                       : is_generator(params[i]) ? IValue()
                                                 : a.plain);
        continue;
      }
      for (auto& t : a.tensors) metas[i].push_back(!t.defined() ? t : is_sim(t) || a.kind == 3 ? meta_of(t) : t);
      meta.push_back(value_of(a, metas[i]));
    }
    try {
      at::AutoDispatchBelowAutograd below;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &meta);
    } catch (const std::exception&) {
      known = false;
    }
    if (!known && PyErr_Occurred()) {
      py::gil_scoped_acquire g;
      PyErr_Clear();
    }
    for (size_t i = 0; known && i < returns.size(); i++) {
      const auto& v = meta[meta.size() - returns.size() + i];
      if (v.isTensor() && v.toTensor().defined() && !v.toTensor().is_meta()) known = false;
    }
    std::lock_guard<std::mutex> g(shapes_mutex);
    if (shapes.size() > 50000) shapes.clear();
    shapes[key] = {known, known ? Stack(meta.end() - returns.size(), meta.end()) : Stack(),
                   known ? metas : std::vector<std::vector<Tensor>>(args.size())};
  }
  for (auto& r : returns)
    if (r.alias_info() && !r.alias_info()->isWrite())
      TORCH_CHECK(false, "sim has no kernel for ", op.operator_name(), ", which returns a view");

  auto written = [&](size_t i) -> IValue {  // the argument that a return is
    for (size_t j = 0; j < params.size(); j++)
      if (writes(params[j]) && *params[j].alias_info() == *returns[i].alias_info()) return (*stack)[begin + j];
    TORCH_CHECK(false, "sim: ", name, " returns what it was not given");
  };
  std::vector<IValue> results;
  auto finish = [&] {
    torch::jit::drop(*stack, params.size());
    for (auto& r : results) stack->push_back(std::move(r));
  };

  if (!known) {  // wait, run at once, take what comes
    synchronize(current(device), name);
    Stack s;
    std::vector<std::vector<Tensor>> cpu(args.size());
    for (size_t i = 0; i < args.size(); i++) {
      auto& a = args[i];
      if (!a.kind) {
        if (is_generator(params[i])) {
          auto g = a.plain.isNone() ? default_generator(device) : a.plain.toGenerator();
          s.push_back(at::make_generator<at::CPUGeneratorImpl>(ours(g)->next()));
        } else
          s.push_back(a.plain.isDevice() ? IValue(c10::Device(at::kCPU)) : a.plain);
        continue;
      }
      for (auto& t : a.tensors)
        cpu[i].push_back(!is_sim(t)          ? t
                         : writes(params[i]) ? alias_of(describe(t, name)).clone()
                                             : alias_of(describe(t, name)));
      s.push_back(value_of(a, cpu[i]));
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
      if (args[i].kind && writes(params[i]))
        for (size_t k = 0; k < cpu[i].size(); k++)
          if (is_sim(args[i].tensors[k])) move(cpu[i][k], args[i].tensors[k]);
    for (size_t i = 0; i < returns.size(); i++) {
      auto v = s[s.size() - returns.size() + i];
      auto here = [&](const Tensor& t) {
        if (!t.defined()) return t;
        auto r = fresh_like(t, device);
        move(t, r);
        return r;
      };
      if (returns[i].alias_info())
        results.push_back(written(i));
      else if (v.isTensor())
        results.push_back(here(v.toTensor()));
      else if (v.isTensorList()) {
        c10::List<Tensor> list;
        for (auto& t : v.toTensorVector()) list.push_back(here(t));
        results.push_back(list);
      } else
        results.push_back(v);
    }
    return finish();
  }

  // What is written into may take another shape.
  for (size_t i = 0; i < args.size(); i++)
    if (args[i].kind && writes(params[i]))
      for (size_t k = 0; k < args[i].tensors.size(); k++) {
        auto &t = args[i].tensors[k], &m = metas[i][k];
        if (!is_sim(t) || t.sizes() == m.sizes()) continue;
        t.resize_(m.sizes());
        t.unsafeGetTensorImpl()->set_sizes_and_strides(m.sizes(), m.strides());
      }
  std::vector<std::pair<std::pair<size_t, int64_t>, Desc>> outs;
  int64_t bytes = 0;
  for (size_t i = 0; i < returns.size(); i++) {
    auto v = meta[meta.size() - returns.size() + i];
    auto here = [&](const Tensor& t, int64_t k) {
      if (!t.defined()) return t;
      auto r = fresh_like(t, device);
      bytes += bytes_of(r);
      outs.push_back({{i, k}, describe(r, name)});
      return r;
    };
    if (returns[i].alias_info())
      results.push_back(written(i));
    else if (v.isTensor())
      results.push_back(here(v.toTensor(), -1));
    else if (v.isTensorList()) {
      c10::List<Tensor> list;
      int64_t k = 0;
      for (auto& t : v.toTensorVector()) list.push_back(here(t, k++));
      results.push_back(list);
    } else
      results.push_back(v);
  }
  auto kept = std::make_shared<std::vector<Arg>>();
  std::vector<std::pair<size_t, uint64_t>> seeds;
  for (size_t i = 0; i < args.size(); i++) {
    Arg a;
    a.plain = args[i].plain.isDevice() ? IValue(c10::Device(at::kCPU)) : args[i].plain;
    a.kind = args[i].kind;
    if (!a.kind && is_generator(params[i])) {
      auto g = a.plain.isNone() ? default_generator(device) : a.plain.toGenerator();
      seeds.push_back({i, ours(g)->next()});
      a.plain = IValue();
    }
    for (auto& t : args[i].tensors) {
      if (is_sim(t)) {
        a.descs.push_back(describe(t, name));
        a.others.emplace_back();
        if (writes(params[i])) bytes += bytes_of(t);
      } else {  // numbers travel with the launch
        a.descs.push_back(std::nullopt);
        a.others.push_back(t.defined() ? t.detach().clone() : t);
        if (t.defined() && t.unsafeGetTensorImpl()->is_wrapped_number())
          a.others.back().unsafeGetTensorImpl()->set_wrapped_number(true);
      }
    }
    kept->push_back(std::move(a));
  }
  const size_t num = returns.size();
  launch(
      current(device), name + (schema.overload_name().empty() ? "" : "." + schema.overload_name()),
      [op, kept, outs, seeds, num,
       norm = name == "aten::native_layer_norm_backward"   ? 3
              : name == "aten::native_group_norm_backward" ? 2
                                                           : 0] {
        at::AutoDispatchBelowAutograd below;
        Stack s;
        for (auto& a : *kept) {
          if (!a.kind) {
            s.push_back(a.plain);
            continue;
          }
          std::vector<Tensor> some;
          for (size_t k = 0; k < a.descs.size(); k++) some.push_back(a.descs[k] ? alias_of(*a.descs[k]) : a.others[k]);
          s.push_back(value_of(a, some));
        }
        for (auto& [i, seed] : seeds) s[i] = at::make_generator<at::CPUGeneratorImpl>(seed);
        if (norm) {  // Meta keeps their statistics in float32, as CUDA does; CPU's kernel wants its own dtype back
          const auto x = s[1].toTensor().scalar_type();
          const auto w =
              s[norm + 2].isTensor() && s[norm + 2].toTensor().defined() ? s[norm + 2].toTensor().scalar_type() : x;
          for (int i : {norm, norm + 1}) s[i] = s[i].toTensor().to(w == x ? x : at::kFloat);
        }
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &s);
        for (auto& [where, desc] : outs) {
          auto v = s[s.size() - num + where.first];
          auto to = alias_of(desc);
          to.copy_(where.second < 0 ? v.toTensor() : v.toTensorVector()[where.second]);
        }
      },
      bytes);
  finish();
}
}  // namespace sim
