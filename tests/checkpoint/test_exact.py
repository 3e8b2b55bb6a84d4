"""A run that is interrupted at any step and resumed by new objects equals the uninterrupted run bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accordion as acc
from accordion.train.data import GlobalOrder, Share, loader_of
from tests.devices import device

VOCAB, SEQ, STEPS, ACCUMULATE = 32, 8, 6, 2
SEQUENCES = (torch.arange(20 * SEQ + 1) * 7 % VOCAB).unfold(0, SEQ + 1, SEQ)  # 20: an epoch ends within the run


class Run:
    """A run with dropout, accumulation, fp16 with a changing scale, a schedule, and shuffled sequences."""

    def __init__(self, mesh, seed):
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3)) for _ in range(2)]
        model = nn.Sequential(nn.Embedding(VOCAB, 16), *blocks, nn.Linear(16, VOCAB))
        precision = acc.Precision(params=torch.float16)
        self.model = acc.shard(model, mesh, units=lambda name, _: name in "12", precision=precision)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler(device().type, init_scale=2.0**18, growth_interval=2)
        share = Share(rank=mesh.get_rank(), world=mesh.size(), micro_batch=1, accumulate=ACCUMULATE)
        self.state = {
            "scheduler": torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7),
            "scaler": self.scaler,
            "order": GlobalOrder(len(SEQUENCES), share, seed=3),
            "random": acc.checkpoint.RandomState(),
        }
        torch.manual_seed(100 * seed + mesh.get_rank())

    def batches(self):
        return iter(loader_of(SEQUENCES, self.state["order"], None, pins=False))

    def step(self, batches):
        """Return the inputs, the losses, and the scale afterwards."""
        seen, losses = [], []
        for i in range(ACCUMULATE):
            batch = next(batches).to(device())
            with acc.no_sync(self.model) if i + 1 < ACCUMULATE else torch.enable_grad():
                logits = self.model(batch[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) / ACCUMULATE
                self.scaler.scale(loss).backward()
            seen.append(batch.tolist())
            losses.append(loss.item())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.state["scheduler"].step()
        self.optimizer.zero_grad()
        return seen, losses, self.scaler.get_scale()


def left_and_taken_up(mesh, folder):
    calm = Run(mesh, 1)
    batches, wanted = calm.batches(), []
    for k in range(STEPS):
        wanted.append(calm.step(batches))
        acc.save(folder / f"{k}", calm.model, calm.optimizer, state=calm.state)
    with acc.full_params(calm.model):
        weights = [p.detach().clone() for p in calm.model.parameters()]
    for k in range(STEPS - 1):
        again = Run(mesh, 2 + k)
        acc.load(folder / f"{k}", again.model, again.optimizer, state=again.state)
        batches = again.batches()
        assert [again.step(batches) for _ in range(k + 1, STEPS)] == wanted[k + 1 :], f"left after step {k}"
        with acc.full_params(again.model):
            assert all(map(torch.equal, again.model.parameters(), weights)), f"left after step {k}"
    return wanted


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_run_interrupted_at_any_step_resumes_bit_for_bit(world, tmp_path):
    first, second = world.run(2, left_and_taken_up, tmp_path)
    scales = [scale for *_, scale in first]
    assert min(scales) < 2.0**18, "it falls within the run"
    assert max(scales[1:]) > min(scales), "it grows"
    assert [seen for seen, *_ in first] != [seen for seen, *_ in second]
