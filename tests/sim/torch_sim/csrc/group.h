// The process group: gloo's collectives, run on streams by NCCL's rules.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "kernels.h"

namespace sim {

using c10d::OpType;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
struct Part {
  std::function<Works()> start;
  std::function<void()> finish;
};

struct CclWork final : c10d::Work {
  MarkPtr end;
  std::shared_ptr<std::vector<Tensor>> stash;
  int device;
  int64_t stream;
  bool host;
  std::vector<Tensor> outs;
  CclWork(int rank, OpType type, MarkPtr end, std::shared_ptr<std::vector<Tensor>> stash, int device, int64_t stream,
          bool host)
      : Work(rank, type), end(std::move(end)), stash(std::move(stash)), device(device), stream(stream), host(host) {}
  bool isCompleted() override { return end->ask(); }
  bool isSuccess() const override { return !broken; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    wait_for(current(device), end);
    if (host || timeout != kNoTimeout) {
      host_waits(host ? "barrier" : "work.wait(timeout)", stream);
      Unlocked u;
      if (timeout == kNoTimeout)
        end->wait();
      else if (!end->wait_for(timeout))
        TORCH_CHECK(false, "Operation timed out: the communicator is aborted");
    }
    {
      static std::mutex m;
      std::vector<Tensor> gone;
      {
        std::lock_guard<std::mutex> g(m);
        if (stash) gone.swap(*stash);
      }
    }
    if (host) check_device();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{c10::Device(KIND, device)});
    const auto old = current_streams[device];
    current_streams[device] = stream;
    future->markCompleted(IValue(outs));
    current_streams[device] = old;
    return future;
  }
  std::vector<Tensor> result() override { return outs; }
};

struct Ccl final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  std::string name;
  std::chrono::milliseconds timeout;
  c10::intrusive_ptr<Options> options;
  int64_t id;
  MarkPtr last;
  int64_t last_stream = -1;
  std::mutex m;
  bool coalescing = false, coalesced_async = false;
  const bool coalesces;  // torch's nccl2 launches each collective by itself, and batches messages alone
  std::vector<Part> parts;
  std::vector<Tensor> held;
  int64_t coalesced_bytes = 0;
  static int64_t next_id() {
    static std::atomic<int64_t> n{COMM};
    return n++;
  }
  Ccl(c10::intrusive_ptr<c10d::Backend> gloo, std::string name, int rank, int size, int64_t timeout_ms)
      : Backend(rank, size),
        gloo(std::move(gloo)),
        name(name),
        timeout(timeout_ms),
        options(c10::make_intrusive<Options>(name, timeout)),
        id(next_id()),
        coalesces(name != "nccl2") {
    if (settings().rank < 0) settings().rank = rank;
  }
  const std::string getBackendName() const override { return name; }
  bool supportsCoalescing() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options; }
  void setTimeout(std::chrono::milliseconds t) override {
    timeout = t;
    options->timeout = t;
    gloo->setTimeout(t);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  static void known(const Tensor& t) {
    const auto k = t.scalar_type();
    TORCH_CHECK(!at::isComplexType(k) && k != at::kShort && k != at::kUInt16 && k != at::kUInt32 && k != at::kUInt64,
                "Unconvertible NCCL type ", k);
  }
  c10::intrusive_ptr<c10d::Work> go(OpType type, const std::vector<Tensor>& tensors, bool async,
                                    std::function<Works()> start, std::function<void()> finish = nullptr,
                                    bool host = false) {
    int64_t bytes = 0;
    for (auto& t : tensors) {
      TORCH_CHECK(is_sim(t), "No backend type associated with device type ", t.device().type(),
                  " (simccl takes tensors on sim)");
      TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous");
      known(t);
      bytes += bytes_of(t);
    }
    if (coalescing && (coalesces || type == OpType::SEND || type == OpType::RECV)) {
      parts.push_back({std::move(start), std::move(finish)});
      held.insert(held.end(), tensors.begin(), tensors.end());
      coalesced_async |= async;
      coalesced_bytes += bytes;
      return nullptr;
    }
    return run(type, tensors, async, {{std::move(start), std::move(finish)}}, bytes, host);
  }
  c10::intrusive_ptr<c10d::Work> run(OpType type, const std::vector<Tensor>& tensors, bool async,
                                     std::vector<Part> some, int64_t bytes, bool host) {
    const int device = tensors.empty() ? current_device : tensors[0].device().index();
    std::lock_guard<std::mutex> g(m);
    auto &now = current(device), &l = async ? lane(device, id) : now;
    if (&l != &now) wait_for(l, record(now));
    if (last && last_stream != l.id)
      wait_for(l, last);  // one communicator works in the order of the calls, whatever the stream
    auto stash = std::make_shared<std::vector<Tensor>>();
    if (async) *stash = tensors;
    launch(
        l, "ccl_" + c10d::opTypeToString(type),
        [some = std::move(some), stash] {
          std::vector<Works> all;
          for (auto& p : some) all.push_back(p.start());
          for (auto& works : all)
            for (auto& w : works) w->wait();
          for (auto& p : some)
            if (p.finish) p.finish();
        },
        bytes);
    last = record(l);
    last_stream = l.id;
    if (!async) return nullptr;
    auto work = c10::make_intrusive<CclWork>(rank_, type, last, stash, device, l.id, host);
    work->outs = tensors;
    return work;
  }
  void startCoalescing() override {
    coalescing = true;
    coalesced_async = false;
    coalesced_bytes = 0;
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    coalescing = false;
    auto some = std::move(parts);
    auto tensors = std::move(held);
    parts.clear();
    held.clear();
    if (some.empty()) return nullptr;
    return run(OpType::COALESCED, tensors, coalesced_async, std::move(some), coalesced_bytes, false);
  }
  static Tensor raw(const Desc& d) {
    auto t = alias_of(d);
    return t.is_contiguous() && t.numel() ? t.view(-1).view(at::kByte) : at::empty({0}, at::kByte);
  }
  static std::vector<Desc> descs(const std::vector<Tensor>& some) {
    std::vector<Desc> d;
    for (auto& t : some) d.push_back(describe(t, "collective"));
    return d;
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& ts, const c10d::BroadcastOptions& o) override {
    return go(OpType::BROADCAST, ts, o.asyncOp, [g = gloo, d = descs(ts), root = o.rootRank] {
      Works w;
      for (auto& x : d)
        if (x.ptr) {
          c10d::BroadcastOptions b;
          b.rootRank = root;
          std::vector<Tensor> v{raw(x)};
          w.push_back(g->broadcast(v, b));
        }
      return w;
    });
  }
  // What gloo sums: AVG and PREMUL_SUM are NCCL's.
  Part reducing(std::vector<Desc> d, c10d::ReduceOp op, std::function<void(std::vector<Tensor>&)> after = nullptr) {
    auto tmp = std::make_shared<std::vector<Tensor>>();
    double factor = 1;
    auto kind = op.op_;
    if (kind == c10d::ReduceOp::PREMUL_SUM)
      factor = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get())->double_factor;
    const int n = size_;
    return {[=, g = gloo] {
              Works w;
              tmp->clear();
              for (auto& x : d) {
                auto t = alias_of(x);
                auto copy = t.is_floating_point() || t.scalar_type() == at::kLong || t.scalar_type() == at::kInt
                                ? t.clone()
                                : t.to(at::kInt);
                if (factor != 1) copy.mul_(factor);
                c10d::AllreduceOptions o;
                o.reduceOp = kind == c10d::ReduceOp::AVG || kind == c10d::ReduceOp::PREMUL_SUM
                                 ? c10d::ReduceOp(c10d::ReduceOp::SUM)
                                 : c10d::ReduceOp(kind);
                if (copy.numel()) {
                  std::vector<Tensor> v{copy};
                  w.push_back(g->allreduce(v, o));
                }
                tmp->push_back(copy);
              }
              return w;
            },
            [=] {
              at::AutoDispatchBelowAutograd below;
              if (kind == c10d::ReduceOp::AVG)
                for (auto& t : *tmp) t.div_(n);
              if (after)
                after(*tmp);
              else
                for (size_t i = 0; i < d.size(); i++) alias_of(d[i]).copy_((*tmp)[i]);
              tmp->clear();
            }};
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& ts, const c10d::AllreduceOptions& o) override {
    auto p = reducing(descs(ts), o.reduceOp);
    return go(OpType::ALLREDUCE, ts, o.asyncOp, p.start, p.finish);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<Tensor>& ts,
                                                     const c10d::AllreduceCoalescedOptions& o) override {
    return allreduce(ts, o);
  }
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<Tensor>& ts, const c10d::ReduceOptions& o) override {
    auto d = descs(ts);
    auto p = reducing(d, o.reduceOp, [=, root = o.rootRank, me = rank_](auto& sums) {
      if (me == root) alias_of(d[0]).copy_(sums[0]);
    });
    return go(OpType::REDUCE, ts, o.asyncOp, p.start, p.finish);
  }
  Part gathering(Desc out, Desc in) {
    return {[=, g = gloo] {
              Works w;
              if (in.ptr) {
                auto a = raw(out), b = raw(in).clone();
                w.push_back(g->_allgather_base(a, b));
              }
              return w;
            },
            nullptr};
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(out.dtype() == in.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(out.numel() == in.numel() * size_,
                "output tensor size must be equal to world_size times input tensor size");
    auto p = gathering(describe(out, "gather"), describe(in, "gather"));
    return go(OpType::_ALLGATHER_BASE, {out, in}, o.asyncOp, p.start, p.finish);
  }
  c10::intrusive_ptr<c10d::Work> together(OpType type, std::vector<Tensor> tensors, bool async,
                                          std::vector<Part> some) {
    if (coalescing && coalesces) {
      for (auto& p : some) go(type, {}, async, p.start, p.finish);
      held.insert(held.end(), tensors.begin(), tensors.end());
      return nullptr;
    }
    int64_t bytes = 0;
    for (auto& t : tensors) {
      known(t);
      bytes += bytes_of(t);
    }
    for (size_t i = 0; !coalesces && some.size() > 1; i += 2) {  // the last work holds all tensors
      const int64_t own = bytes_of(tensors[i]) + bytes_of(tensors[i + 1]);
      run(type, {tensors[i], tensors[i + 1]}, async, {some.front()}, own, false);
      some.erase(some.begin());
      bytes -= own;
    }
    return run(type, tensors, async, std::move(some), bytes, false);
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<Tensor>& outs, std::vector<Tensor>& ins,
                                                                 const c10d::AllgatherOptions& o) override {
    std::vector<Part> some;
    std::vector<Tensor> all;
    for (size_t i = 0; i < outs.size(); i++) {
      TORCH_CHECK(outs[i].dtype() == ins[i].dtype() && outs[i].numel() == ins[i].numel() * size_ &&
                      outs[i].is_contiguous() && ins[i].is_contiguous(),
                  "sim: gather of what does not fit");
      some.push_back(gathering(describe(outs[i], "gather"), describe(ins[i], "gather")));
      all.push_back(outs[i]);
      all.push_back(ins[i]);
    }
    return together(OpType::COALESCED, all, o.asyncOp, std::move(some));
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<Tensor>>& outs, std::vector<Tensor>& ins,
                                           const c10d::AllgatherOptions& o) override {
    auto d = descs(outs[0]);
    auto in = describe(ins[0], "gather");
    auto all = outs[0];
    all.push_back(ins[0]);
    return go(OpType::ALLGATHER, all, o.asyncOp, [g = gloo, d, in] {
      std::vector<std::vector<Tensor>> to(1);
      std::vector<Tensor> from{raw(in).clone()};
      for (auto& x : d) to[0].push_back(raw(x));
      return Works{g->allgather(to, from)};
    });
  }
  Part scattering(Desc out, Desc in, c10d::ReduceOp op) {
    return reducing(
        {in}, op, [=, me = rank_, n = size_](auto& sums) { alias_of(out).view(-1).copy_(sums[0].view({n, -1})[me]); });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& out, Tensor& in,
                                                      const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(out.dtype() == in.dtype() && in.numel() == out.numel() * size_,
                "input tensor must be the same type and size as output times world_size");
    auto p = scattering(describe(out, "reduce_scatter"), describe(in, "reduce_scatter"), o.reduceOp);
    return go(OpType::_REDUCE_SCATTER_BASE, {out, in}, o.asyncOp, p.start, p.finish);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<Tensor>& outs, std::vector<Tensor>& ins,
                                                                 const c10d::ReduceScatterOptions& o) override {
    std::vector<Part> some;
    std::vector<Tensor> all;
    for (size_t i = 0; i < outs.size(); i++) {
      some.push_back(scattering(describe(outs[i], "reduce_scatter"), describe(ins[i], "reduce_scatter"), o.reduceOp));
      all.push_back(outs[i]);
      all.push_back(ins[i]);
    }
    return together(OpType::REDUCE_SCATTER_TENSOR_COALESCED, all, o.asyncOp, std::move(some));
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<Tensor>& outs, std::vector<std::vector<Tensor>>& ins,
                                                const c10d::ReduceScatterOptions& o) override {
    auto out = describe(outs[0], "reduce_scatter");
    auto p = reducing(descs(ins[0]), o.reduceOp,
                      [=, me = rank_](auto& sums) { alias_of(out).copy_(sums[me].view_as(alias_of(out))); });
    auto all = ins[0];
    all.push_back(outs[0]);
    return go(OpType::REDUCE_SCATTER, all, o.asyncOp, p.start, p.finish);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& os,
                                               std::vector<int64_t>& is, const c10d::AllToAllOptions& o) override {
    TORCH_CHECK(out.dtype() == in.dtype(), "alltoall of two dtypes");
    auto scaled = [&](std::vector<int64_t> splits, const Tensor& t) {
      const int64_t n = bytes_of(t);
      if (splits.empty()) return std::vector<int64_t>(size_, n / size_);
      const int64_t rows = t.dim() ? t.size(0) : 1;
      for (auto& s : splits) s = rows ? s * (n / rows) : 0;
      return splits;
    };
    return go(OpType::ALLTOALL_BASE, {out, in}, o.asyncOp,
              [g = gloo, a = describe(out, "alltoall"), b = describe(in, "alltoall"), x = scaled(os, out),
               y = scaled(is, in)] {
                auto to = raw(a), from = raw(b).clone();
                auto p = x, q = y;
                return Works{g->alltoall_base(to, from, p, q, c10d::AllToAllOptions())};
              });
  }
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<Tensor>& outs, std::vector<Tensor>& ins,
                                          const c10d::AllToAllOptions& o) override {
    auto all = outs;
    all.insert(all.end(), ins.begin(), ins.end());
    return go(OpType::ALLTOALL, all, o.asyncOp, [g = gloo, a = descs(outs), b = descs(ins), me = rank_] {
      Works w;
      for (size_t r = 0; r < a.size(); r++) {
        if (int(r) == me) {
          raw(a[r]).copy_(raw(b[r]));
          continue;
        }
        std::vector<Tensor> to{raw(a[r])}, from{raw(b[r])};
        if (to[0].numel()) w.push_back(g->recv(to, r, 7));
        if (from[0].numel()) w.push_back(g->send(from, r, 7));
      }
      return w;
    });
  }
  // A collective in which each rank has the tensor `one`, and the root `many`, one for each rank.
  template <class Options, class Collective>
  c10::intrusive_ptr<c10d::Work> of_root(OpType type, const Tensor& one, const std::vector<std::vector<Tensor>>& many,
                                         const Options& o, Collective collective) {
    std::vector<Tensor> all{one};
    if (!many.empty()) all.insert(all.end(), many[0].begin(), many[0].end());
    return go(type, all, o.asyncOp, [d = descs(all), root = o.rootRank, collective] {
      std::vector<Tensor> own{raw(d[0])};
      std::vector<std::vector<Tensor>> lists;
      for (size_t i = 1; i < d.size(); i++) lists.resize(1), lists[0].push_back(raw(d[i]));
      Options p;
      p.rootRank = root;
      return Works{collective(own, lists, p)};
    });
  }
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<Tensor>>& outs, std::vector<Tensor>& ins,
                                        const c10d::GatherOptions& o) override {
    return of_root(OpType::GATHER, ins[0], outs, o,
                   [g = gloo](auto& own, auto& lists, auto& p) { return g->gather(lists, own, p); });
  }
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<Tensor>& outs, std::vector<std::vector<Tensor>>& ins,
                                         const c10d::ScatterOptions& o) override {
    return of_root(OpType::SCATTER, outs[0], ins, o,
                   [g = gloo](auto& own, auto& lists, auto& p) { return g->scatter(own, lists, p); });
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<Tensor>& ts, int to, int) override {
    return go(OpType::SEND, ts, true, [g = gloo, d = describe(ts[0], "send"), to] {
      std::vector<Tensor> v{raw(d)};
      return Works{g->send(v, to, 3)};
    });
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<Tensor>& ts, int from, int) override {
    return go(OpType::RECV, ts, true, [g = gloo, d = describe(ts[0], "recv"), from] {
      std::vector<Tensor> v{raw(d)};
      return Works{g->recv(v, from, 3)};
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return go(OpType::BARRIER, {}, true, [g = gloo] { return Works{g->barrier()}; }, nullptr, true);
  }
  void abort() override { gloo->abort(); }
  void shutdown() override {
    for (auto* l : all_lanes(current_device))
      if (l->id == id) {
        auto k = record(*l);
        Unlocked u;
        k->wait_for(std::chrono::milliseconds(2000));
      }
    gloo->shutdown();
  }
};
}  // namespace sim
