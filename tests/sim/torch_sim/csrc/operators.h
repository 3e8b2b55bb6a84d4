// The operators that torch asks of a device, and those whose way on an accelerator is another than on the CPU.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>

#include "kernels.h"

namespace sim {

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(KIND)));
  return at::detail::empty_generic(size, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(KIND)));
  return at::detail::empty_strided_generic(size, stride, &memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
Tensor as_strided(const Tensor& t, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}
void grow(const Tensor& t) {
  const size_t n = (t.storage_offset() + extent(t.sizes(), t.strides())) * t.itemsize();
  if (t.numel() && n > t.storage().nbytes()) resize_storage(t.storage(), n);
}
const Tensor& resize_(const Tensor& t, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (t.sizes() == size) return t;
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  grow(t);
  return t;
}
Tensor& set_storage_offset(Tensor& t, at::Storage s, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(s));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  grow(t);
  return t;
}
Tensor& set_storage(Tensor& t, at::Storage s) {
  const int64_t n = s.nbytes() / t.itemsize();
  return set_storage_offset(t, s, 0, {n}, {1});
}
Tensor& set_tensor(Tensor& t, const Tensor& from) {
  return set_storage_offset(t, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}
Tensor& set_nothing(Tensor& t) {
  c10::Storage s(c10::Storage::use_byte_size_t(), 0, &memory(), true);
  return set_storage_offset(t, s, 0, {0}, {1});
}

bool one_piece(const Tensor& a, const Tensor& b) {  // what a single copy of bytes does
  return a.is_non_overlapping_and_dense() && a.sizes() == b.sizes() && a.strides() == b.strides();
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  if (from.sizes() != to.sizes()) return copy_from(from.expand(to.sizes()), to, non_blocking);
  if (is_sim(from) && is_sim(to)) {  // between two devices on the stream of the source, as CUDA does
    auto &source = current(from.device().index()), &target = current(to.device().index());
    if (&source != &target) wait_for(source, record(target));
    run_later("copy_", {from}, {to}, [](auto& in, auto& out) { out[0].copy_(in[0]); }, &source);
    if (&source != &target) wait_for(target, record(source));
    return to;
  }
  const bool up = is_sim(to);
  const Tensor &host = up ? from : to, &here = up ? to : from;
  TORCH_CHECK(host.device().is_cpu(), "sim: no copy between ", from.device(), " and ", to.device());
  auto& l = current(here.device().index());
  const bool free = non_blocking && is_pinned(host.data_ptr(), host.nbytes()) && host.is_non_overlapping_and_dense() &&
                    (up ? host.is_contiguous() || one_piece(host, here)
                        : host.is_contiguous() || (one_piece(host, here) && host.dtype() == here.dtype()));
  const Desc h = describe(host, "copy_"), d = describe(here, "copy_");
  if (free) {  // the host's memory is read or written later: whoever changes it meanwhile is seen
    launch(
        l, up ? "copy_h2d" : "copy_d2h",
        [h, d, up] {
          at::AutoDispatchBelowAutograd b;
          if (up)
            alias_of(d).copy_(alias_of(h));
          else
            alias_of(h).copy_(alias_of(d));
        },
        host.nbytes());
    host_memory().use(host.data_ptr(), record(l));
    return to;
  }
  if (up) {
    auto staged = host.detach().clone();
    launch(
        l, "copy_h2d_pageable",
        [staged, d] {
          at::AutoDispatchBelowAutograd b;
          alias_of(d).copy_(staged);
        },
        host.nbytes());
    if (!non_blocking) synchronize(l, "copy host to device");
  } else {
    synchronize(l, non_blocking ? "copy device to pageable host" : "copy device to host");
    at::AutoDispatchBelowAutograd b;
    alias_of(h).copy_(alias_of(d));
  }
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar(const Tensor& t) {
  synchronize(current(t.device().index()), "item");
  return alias_of(describe(t, "item")).item();
}
void assert_msg(const Tensor& t, c10::string_view text) {
  TORCH_CHECK(text.size() < 255, "Message length must be smaller than 255");  // CUDA's kernel takes the text by value
  run_later("_assert_async", {t}, {}, [text = std::string(text)](auto& in, auto&) {
    TORCH_CHECK(in[0].item().toBool(), "device-side assert triggered: ", text);
  });
}
void assert_plain(const Tensor& t) { assert_msg(t, ""); }
std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (x.numel() == 0 || (train && !*train)) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto mask = at::empty_like(x, x.options().dtype(at::kBool));
  if (p == 1)
    mask.zero_();
  else
    mask.bernoulli_(1 - p);
  return {at::mul(x, mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}
Tensor histc(const Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high) {  // CUDA counts integers too
  auto out = at::empty({bins}, x.options());
  run_later("histc", {x}, {out}, [=](auto& in, auto& to) {
    to[0].copy_(at::histc(at::isIntegralType(in[0].scalar_type(), true) ? in[0].to(at::kDouble) : in[0], bins, low, high));
  });
  return out;
}
int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;
}  // plain products
bool same_kind(const Tensor& a, const Tensor& b) {
  auto plain = [](const Tensor& t) {
    return (t.device().is_cpu() || is_sim(t)) && t.layout() == at::kStrided &&
           !t.key_set().has(c10::DispatchKey::Python);
  };
  return a.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(b.key_set()) || (plain(a) && plain(b));
}
void record_stream(Tensor& t, c10::Stream s) { memory().recordStream(t.storage().data_ptr(), s); }

// The cells of recurrent networks: the CPU has no kernels for them, and torch wants them of every device. Their backward
// is that of the operators below, which autograd records.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cx,
                                             const std::optional<Tensor>& b1, const std::optional<Tensor>& b2) {
  const bool has = b1 && b1->defined();
  auto parts = (has ? input + *b1 + (hidden + *b2) : input + hidden).chunk(4, 1);
  auto i = parts[0].sigmoid(), f = parts[1].sigmoid(), c = parts[2].tanh(), o = parts[3].sigmoid();
  auto cy = f * cx + i * c;
  return {o * cy.tanh(), cy, Tensor()};
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx,
                                    const std::optional<Tensor>& b1, const std::optional<Tensor>& b2) {
  const bool has = b1 && b1->defined();
  auto i = (has ? input + *b1 : input).chunk(3, 1), h = (has ? hidden + *b2 : hidden).chunk(3, 1);
  auto r = (h[0] + i[0]).sigmoid(), z = (h[1] + i[1]).sigmoid(), n = (i[2] + h[2] * r).tanh();
  return {(hx - n) * z + n, Tensor()};
}
void implement_cells(torch::Library& m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { implement_cells(m); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", [](const Tensor& t, at::IntArrayRef s) { return at::native::view(t, s); });
  m.impl("_reshape_alias",
         [](const Tensor& t, at::IntArrayRef s, at::IntArrayRef st) { return at::native::_reshape_alias(t, s, st); });
  m.impl("unfold", [](const Tensor& t, int64_t d, int64_t s, int64_t st) { return at::native::unfold(t, d, s, st); });
  m.impl("view_as_real", [](const Tensor& t) { return at::native::view_as_real(t); });
  m.impl("view_as_complex", [](const Tensor& t) { return at::native::view_as_complex(t); });
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_assert_async", assert_plain);
  m.impl("_assert_async.msg", assert_msg);
  m.impl("native_dropout", dropout);
  m.impl("histc", histc);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("_has_compatible_shallow_copy_type", same_kind);
  m.impl("record_stream", record_stream);
  implement_cells(m);  // for calls below autograd
  // CPU has kernels of its own for these: take them, and not what torch puts together from others.
  for (auto* name : {"native_layer_norm", "native_group_norm", "native_batch_norm", "mse_loss", "smooth_l1_loss",
                     "silu_backward", "embedding_dense_backward", "convolution", "convolution_backward"})
    if (c10::Dispatcher::singleton().findSchema({std::string("aten::") + name, ""}))
      m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
// A copy sees by itself that its source is conjugated or negated; else it would be asked to resolve that by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
// Autocast, with CUDA's lists of operators.
#define SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_DTYPE)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
}  // namespace sim
