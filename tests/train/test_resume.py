"""A run that is stopped at any step and begun again goes on bit for bit, with everything in it that has a state."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

import accordion as acc
from accordion.checkpoint import RandomState
from accordion.config import strategy_named
from accordion.train.data import GlobalOrder, Sequences, Share, loader_of
from tests.devices import device

STEPS, ACCUMULATE, MICRO = 7, 2, 3


class Stream(IterableDataset):
    """An endless stream of numbers for one of `num_ranks`, shuffled in a buffer; keeps its state as torchdata asks."""

    def __init__(self, rank, num_ranks, full_buffer=5):
        self.rank, self.num_ranks, self.full_buffer = rank, num_ranks, full_buffer
        self.next, self.held, self.generator = rank, [], torch.Generator().manual_seed(rank)

    def __iter__(self):
        while True:
            while len(self.held) < self.full_buffer:
                self.held.append(self.next)
                self.next += self.num_ranks
            yield self.held.pop(int(torch.randint(self.full_buffer, (), generator=self.generator)))

    def state_dict(self):
        return {"next": self.next, "held": list(self.held), "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.next, self.held = state["next"], list(state["held"])
        self.generator.set_state(state["generator"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(19, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20), nn.GELU(), nn.Dropout(0.3), nn.Linear(20, 12))
            for _ in range(2)
        )
        self.head = nn.Linear(12, 19)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Run:
    """Everything that a run consists of."""

    def __init__(self, mesh, strategy):
        from torchdata.stateful_dataloader import StatefulDataLoader

        torch.manual_seed(0)
        precision = acc.Precision(params=torch.float16)
        self.model = acc.shard(Net(), mesh, strategy=strategy_named(strategy), precision=precision)
        self.optimizer = acc.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.01))
        self.scaler = torch.amp.GradScaler(device().type, init_scale=2.0**16, growth_interval=2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        own = torch.Generator()  # else a loader that begins anew draws a number of the dropout's
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.loader = StatefulDataLoader(Stream(mesh.get_rank(), mesh.size()), batch_size=MICRO, generator=own)
        self.batches = None
        torch.manual_seed(100 + mesh.get_rank())  # of the dropout

    @property
    def state(self):
        return {"scaler": self.scaler, "scheduler": self.scheduler, "loader": self.loader, "random": RandomState()}

    def step(self):
        """The loss, the data and the scale of one step."""
        self.batches = iter(self.loader) if self.batches is None else self.batches
        loss, seen = 0.0, []
        for _ in range(ACCUMULATE):
            numbers = next(self.batches)
            seen += numbers.tolist()
            tokens = ((numbers[:, None] * torch.arange(1, 6)) % 19).to(device())
            mean = F.cross_entropy(self.model(tokens).float().flatten(0, 1), (tokens * 7 % 19).flatten()) / ACCUMULATE
            self.scaler.scale(mean).backward()
            loss += mean.item()
        self.scaler.unscale_(self.optimizer)
        acc.clip_grad_norm_(self.model, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a step that the scaler leaves out is one that the scheduler asks about
            self.scheduler.step()
        return loss, seen, self.scaler.get_scale(), self.optimizer.param_groups[0]["lr"]

    def weights(self):
        return {name: tensor.clone() for name, tensor in acc.full_state_dict(self.model, rank0_only=False).items()}


def undisturbed(mesh, strategy, path):
    run = Run(mesh, strategy)
    found = []
    for step in range(STEPS):
        acc.save(path / f"step-{step}", run.model, run.optimizer, state=run.state, background=step % 2 == 0)
        found.append(run.step())
    acc.save(path / f"step-{STEPS}", run.model, run.optimizer, state=run.state)
    return found, run.weights()


def resumed(mesh, strategy, path, stops):
    """Begin anew at each of `stops`, with nothing of the run before left."""
    found = []
    for step in stops:
        run = Run(mesh, strategy)
        acc.load(path / f"step-{step}", run.model, run.optimizer, state=run.state)
        found.append(([run.step() for _ in range(step, STEPS)], run.weights()))
    return found


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optim"])
def test_a_run_goes_on_bit_for_bit_from_any_step(world, tmp_path, strategy):
    wanted = world.run(2, undisturbed, strategy, tmp_path)
    scales = [scale for *_, scale, _ in wanted[0][0]]
    assert len(set(scales)) > 1  # the scaler did something
    assert wanted[0][0] != wanted[1][0]  # ranks see other data
    for rank, found in enumerate(world.run(2, resumed, strategy, tmp_path, range(STEPS))):
        steps, weights = wanted[rank]
        for stop, (losses, ends) in enumerate(found):
            assert losses == steps[stop:], f"from step {stop}"
            assert all(torch.equal(weights[name], ends[name]) for name in weights), f"from step {stop}"


def global_batches(mesh, path, micro, save_at, steps):
    """What all ranks read in each step of the shuffled order, and the losses; begun again from `path` where nothing is saved."""
    torch.manual_seed(0)
    model = acc.shard(Net().eval(), mesh)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    share = Share(rank=mesh.get_rank(), world=mesh.size(), micro_batch=micro, accumulate=2)
    import numpy as np

    sequences = Sequences((np.arange(481) % 19).astype(np.uint16), 8)
    order = GlobalOrder(len(sequences), share, seed=3)
    if save_at is None:
        acc.load(path, model, optimizer, state={"order": order})
    batches, found = iter(loader_of(sequences, order, None, pins=False)), []
    for step in range(steps):
        if step == save_at:
            acc.save(path, model, optimizer, state={"order": order})
        total, seen = torch.zeros((), device=device()), []
        for _ in range(share.accumulate):
            batch = next(batches).to(device())
            seen.append(batch)
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) / share.accumulate
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total, group=mesh.get_group())
        rows = torch.cat(seen)
        parts = [torch.empty_like(rows) for _ in range(mesh.size())]
        torch.distributed.all_gather(parts, rows, group=mesh.get_group())
        found.append((sorted(torch.cat(parts).tolist()), total.item() / mesh.size()))
    return found


def test_another_number_of_ranks_reads_the_same_global_batches(world, tmp_path):
    wanted = world.run(4, global_batches, tmp_path / "c", 1, 2, 6)[0][2:]
    for ranks, micro in ((2, 2), (1, 4)):
        found = world.run(ranks, global_batches, tmp_path / "c", micro, None, 4)[0]
        assert [rows for rows, _ in found] == [rows for rows, _ in wanted]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=2e-6)
