"""The arithmetic of the benchmark: ratios, verdicts, counts, pages."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import checkpoint, gpu, offload, scale, streams
from benchmarks.scale import Network

from accordion.bench import contenders
from accordion.bench.contenders import chosen
from accordion.bench.host import HostTime, ratio_of, summary
from accordion.bench.model import GPTS, batch_of, loss_of, shape_of
from accordion.bench.trainer import Trainer
from accordion.errors import UsageError
from accordion.models.llama import TRAINED
from accordion.pages import show
from accordion.pages.page import Page, Table, as_text, write
from accordion.pages.stats import Spread, compare_losses, extremes, quartiles, ratio
from accordion.workers.ranks import BenchError, StillGroup
from tests.plan.builders import config_in
from tests.support.refused import refused


def trainer_on_cuda(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """Return a `Trainer` without a model, and the list to which calls of a replaced `torch.accelerator` are added."""
    done: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: done.append("synchronize"))
    monkeypatch.setattr(torch.accelerator.memory, "empty_cache", lambda: done.append("empty cache"))
    one = object.__new__(Trainer)
    one._device = torch.device("cuda")
    return one, done


def test_a_contender_frees_cached_device_memory_for_the_next(monkeypatch):
    one, done = trainer_on_cuda(monkeypatch)
    one._allocations = None
    one._step = lambda: (torch.tensor(1.0), SimpleNamespace(times=dict))
    for ask in (lambda: one.losses(2), one.wire):
        ask()
        assert done == ["synchronize", "empty cache"], "the next contender starts while this one lives"
        done.clear()


def test_steps_of_a_turn_are_queued_and_host_time_is_measured_in_another_step(monkeypatch):
    one, done = trainer_on_cuda(monkeypatch)

    def step(batch: str = "") -> tuple[torch.Tensor, Any]:
        done.append(f"step {batch}".strip())
        times = dict.fromkeys(("step", "host", "cpu"), float(len(done)))
        return torch.tensor(1.0), SimpleNamespace(times=lambda: times)

    one._step = step
    one._batch = lambda: done.append("copied") or "b"
    found = one.turn(1, 2)
    assert done == ["copied"] * 3 + ["step b"] * 3 + ["synchronize", "step", "synchronize", "empty cache"]
    assert found == [{"step": 5.0, "host": 8.0, "cpu": 8.0}, {"step": 6.0, "host": 8.0, "cpu": 8.0}]


def test_spreads_and_ratios():
    assert quartiles([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(median=3.0, low=2.0, high=4.0, count=5)
    assert extremes([3.0, 9.0, 1.0]) == Spread(median=3.0, low=1.0, high=9.0, count=3)
    slow_phase = [[1.0, 1.0, 50.0], [20.0, 20.0, 20.0], [3.0, 3.0, 3.0]]
    assert ratio(slow_phase, [[2.0] * 3, [40.0] * 3, [6.0] * 3]).median == 0.5
    assert ratio([[1.0], [3.0]], [[2.0], [2.0]]) == Spread(median=1.0, low=0.5, high=1.5, count=2)


def test_losses_that_differ_are_named():
    good = [4.0, 3.0, 2.0]
    assert compare_losses({"a": good, "b": [4.0, 3.00001, 2.0], "c": [4.0]}, 1e-4).wrong == []
    assert compare_losses({"a": good, "b": good, "late": [4.0, 3.0, 2.1]}, 1e-4).wrong == ["late"]
    for values in ([4.0, math.nan, 2.0], [4.0, 3.0, math.inf]):
        assert compare_losses({"a": good, "wrong": values, "b": good}, 1e-4).wrong == ["wrong"]
    assert compare_losses({"a": good, "b": good, "none": []}, 1e-4).wrong == ["none"]
    assert compare_losses({"a": good, "b": [4.2, 3.0, 2.0]}, 1e-4).wrong == ["a", "b"], "of two nobody knows which"


def test_host_time_is_the_difference_to_plain():
    times = summary({"plain": [[1.0], [2.0]], "a": [[3.0], [5.0]], "b": [[5.0], [8.0]]})
    assert times["a"] == HostTime(
        unit=Spread(median=4.0, low=3.0, high=5.0, count=2),
        extra=Spread(median=2.5, low=2.0, high=3.0, count=2),
        by_round=[2.0, 3.0],
    )
    assert ratio_of(times, "a", "b").median == 0.5


def test_the_simulated_network_counts_bandwidth_and_latency():
    assert Network(gbps=8.0, latency_us=10.0).seconds(10**9, 5) == pytest.approx(1.00005)


def test_batches_are_reproducible_and_differ_between_ranks_and_steps():
    first = batch_of(0, 0, (2, 8), 50)
    assert all(torch.equal(a, b) for a, b in zip(first, batch_of(0, 0, (2, 8), 50), strict=True))
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
    for step, rank in ((1, 0), (0, 1)):
        assert not torch.equal(first[0], batch_of(step, rank, (2, 8), 50)[0])


def test_all_presets_are_known_and_other_names_are_refused():
    for name in (*GPTS, *TRAINED):
        with torch.device("meta"):
            assert sum(p.numel() for p in shape_of(name).make().parameters()) > 1000
    with pytest.raises(UsageError, match="did you mean 'gpt-30m'"):
        shape_of("gpt-30")


def test_a_model_may_be_a_folder(tmp_path):
    shape = shape_of(str(config_in(tmp_path, vocab_size=37)))
    assert shape.vocab == 37
    tokens, targets = batch_of(0, 0, (2, 8), shape.vocab)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return float(loss_of(shape.make()(tokens), targets).detach())

    assert loss(0) == loss(0) != loss(1), "every contender starts from the weights of the setting's seed"
    assert loss(0) == pytest.approx(math.log(37), abs=0.5)


def test_a_contender_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(contenders.NOT_HERE, "deepspeed", "no_such_module")
    names, left_out = chosen("fsdp2, deepspeed,fsdp2,accordion:shard_grad_op")
    assert names == ["accordion", "fsdp2", "accordion:shard_grad_op"]
    assert left_out == {"deepspeed": "no_such_module is not installed"}


@pytest.mark.parametrize(
    ("run", "words", "said"),
    [
        (None, ["--against", "fsdp3"], "did you mean 'fsdp2'"),
        (None, ["hots"], "did you mean 'host'"),
        (None, ["--round", "3"], "did you mean '--rounds'"),
        (None, ["--rounds", "0"], "--rounds is 0; it must be between 1 and"),
        (None, ["--model", "nowhere/at/all"], "neither a folder nor a preset"),
        (None, ["--nproc", "-3"], "--nproc is -3"),
        (None, ["--precision", "fp8"], "precision"),
        (None, ["--batch", "-1"], "--batch is -1"),
        (None, ["host", "--against", "floor"], "engines that shard"),
        (None, ["memory", "--seq", "many"], "seq"),
        (streams.run, ["--device", "tpu"], "--device is 'tpu'"),
        (checkpoint.run, ["--mib", "0"], "mib is 0"),
        (checkpoint.run, ["--to", "/proc/none"], "nothing can be written to '/proc/none'"),
        (scale.run, ["--sizes", "8,many"], "takes numbers of ranks"),
        (scale.run, ["--sizes", "8,8"], "different numbers of ranks"),
        (scale.run, ["--sizes", "0"], "1 or more"),
        (scale.run, ["--gbps", "0"], "more than 0"),
        (offload.run, ["--model", "nowhere/at/all"], "neither a folder nor a preset"),
        (gpu.run, ["--parts", "az"], "parts 'z' do not exist"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bad_input_is_one_sentence(capsys, monkeypatch, tmp_path, run, words, said):
    monkeypatch.chdir(tmp_path)
    refused(capsys, words if run else ["bench", *words], said, run)


@pytest.mark.parametrize("run", [streams.run, gpu.run])
def test_without_an_accelerator_cpu_must_be_asked_for(capsys, monkeypatch, tmp_path, run):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    monkeypatch.chdir(tmp_path)
    refused(capsys, [], "no accelerator is found", run)


def test_nothing_is_measured_if_the_result_cannot_be_written(capsys, monkeypatch, tmp_path):
    (tmp_path / "runs").write_text("a file")
    monkeypatch.chdir(tmp_path)
    for words, run in ((["bench", "host"], None), (["--device", "cpu"], streams.run)):
        refused(capsys, words, "nothing can be written to 'runs/bench'", run)


def test_the_still_group_communicates_during_setup_only():
    group = StillGroup(3, 8)
    assert (group.rank(), group.size()) == (3, 8)
    out = torch.zeros(8, 2)
    group._allgather_base(out.view(-1), torch.tensor([1.0, 2.0])).wait()
    assert torch.equal(out, torch.tensor([1.0, 2.0]).expand(8, 2))
    group.moves = False
    work = group.all_gather_single(out.view(-1), torch.tensor([5.0, 5.0]), None)
    assert work.is_completed()
    assert out.max() == 2


def page(table: Table) -> Page:
    return Page(name="some", notes=["left out: x & y"], tables=[table], data={"ratios": {("a", "b"): extremes([0.5])}})


def test_a_page_is_written_as_json(tmp_path):
    path = write(page(Table(title="t", columns=[""], rows=[])), tmp_path)
    assert json.loads(path.read_text())["ratios"]["a / b"]["median"] == 0.5


def test_no_figure_is_cut_on_a_narrow_screen(monkeypatch, capsys):
    monkeypatch.setattr(show, "PLAIN_WIDTH", 30)
    show.show(page(Table(title="time", columns=["contender", "ms"], rows=[["accordion", "1,229.3 (1,204.0-1,253.2)"]])))
    assert "1,229.3(1,204.0-1,253.2)" in "".join(capsys.readouterr().out.split())


def test_text_tables_are_aligned():
    lines = as_text(Table(title="t", columns=["", "ms"], rows=[["a", "1.0"], ["a long name", "22.0"]])).splitlines()
    assert lines[0] == "t"
    assert {len(line) for line in lines[1:]} == {len("a long name  22.0")}


def test_the_hidden_share_of_the_optimizer():
    def steps(step: float, optimizer: float, shown: float) -> list[dict[str, float]]:
        return [{"step": step, "optimizer": optimizer, "shown": shown, "loss": 1.0}] * 3

    ranks = [
        {"deferred": steps(5.0, 0.1, 0.5), "waiting": steps(8.0, 4.0, 4.0), "floor": 2.0},
        {"deferred": steps(6.0, 0.1, 1.0), "waiting": steps(7.0, 3.0, 3.0), "floor": 3.0},
    ]
    found = offload.measured([ranks] * 2, {"arena": 1, "disk": 1})
    assert (found.step.median, found.shown.median) == (6.0, 1.0), "of the slowest rank"
    assert found.waiting.median == 8.0
    assert (found.hidden.median, found.gained.median, found.disk_rate.median) == (0.75, 0.5, 0.75)
    assert found.losses == [1.0] * 6
    offload.check({offload.OURS: found, offload.DISK: found})
    other = dataclasses.replace(found, losses=[1.0] * 5 + [1.0 + 1e-7])
    offload.check({offload.OURS: found, offload.PEER: other})
    with pytest.raises(BenchError, match="losses of accordion disk differ from those of accordion"):
        offload.check({offload.OURS: found, offload.DISK: other})
    bare = offload.measured([ranks] * 2, {"arena": 0, "disk": 0})
    assert bare.hidden is bare.gained is bare.disk_rate is None


def test_peers_whose_offload_cannot_run_are_left_out(monkeypatch):
    monkeypatch.setattr(offload, "find_spec", lambda name: None)
    kinds, left_out = offload.kinds_of("fsdp2,deepspeed")
    assert kinds == [offload.OURS, offload.HOST, offload.DISK, offload.PEER, offload.PEER_HOST]
    assert set(left_out.values()) == {"deepspeed is not installed"}
    monkeypatch.setattr(offload, "find_spec", lambda name: object())
    monkeypatch.setattr(offload, "find_library", lambda name: None)
    kinds, left_out = offload.kinds_of("deepspeed")
    assert kinds[3:] == [offload.DEEPSPEED_HOST]
    assert list(left_out) == [offload.DEEPSPEED_DISK]
    with pytest.raises(UsageError, match="the offload of 'fsdp3' cannot be compared; did you mean 'fsdp2'"):
        offload.kinds_of("fsdp3")


@pytest.mark.skipif(not torch.backends.mkl.is_available() or sys.platform != "linux", reason="of MKL, read off Linux")
def test_caches_of_the_matrix_library_are_not_counted():
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    library.mkl_serv_mem_stat.restype = ctypes.c_int64
    count = ctypes.c_int()
    torch.ones(512, 512) @ torch.ones(512, 2048)
    assert library.mkl_serv_mem_stat(ctypes.byref(count)) > 2**20
    offload.own_bytes()
    assert library.mkl_serv_mem_stat(ctypes.byref(count)) == 0
