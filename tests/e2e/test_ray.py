"""Ray Train on a local cluster of two CPU workers: reports, a node that will be taken away, and a run that goes on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.e2e.jobs import lines_of

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
PROGRAM = """
import sys, time
import ray, ray.train
import ray_train
from ray.train.torch import TorchTrainer

def train(config):
    import accordion as acc
    from vision_transformer import Task
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    def on_step(metrics):
        ray.train.report(metrics)
        if metrics["step"] == 6:
            context = ray.get_runtime_context()
            if ray.train.get_context().get_world_rank() == 0:
                reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
                deadline_ms = int(time.time() * 1000) + 600_000
                client = ray._raylet.GcsClient(address=context.gcs_address)
                assert client.drain_node(context.get_node_id(), reason, "taken away", deadline_ms)[0]
            while ray.train.get_preemption_info() is None:
                time.sleep(0.05)
        return ray.train.get_preemption_info() is not None

    return acc.fit(Task(), options=config, on_step=on_step)

if __name__ == "__main__":
    run_dir = sys.argv[1]
    ray_train.main([run_dir, "--steps", "4", "--report_every", "2"])
    options = {"run.dir": run_dir, "train.steps": 9, "train.micro_batch": 32, "log.tensorboard": False}
    result = TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=run_dir),
    ).fit()
    print(result.return_value)
"""


@pytest.mark.slow
def test_a_run_reports_to_ray_and_saves_if_a_node_will_be_taken_away(tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed here: pip install 'accordion-fsdp[ray]'")
    program, run_dir = tmp_path / "program.py", tmp_path / "run"
    program.write_text(PROGRAM)
    # A short name, because Ray's sockets are in there, and a socket's name has at most 107 letters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short:
        environ = {
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": short,
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
            "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path]),
        }
        done = subprocess.run(
            [sys.executable, str(program), str(run_dir)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environ},
            timeout=500,
        )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "state='finished', why='', step=4" in done.stdout, done.stdout[-6000:]
    assert "state='finished', why='', step=9" in done.stdout, done.stdout[-6000:]
    assert [line["step"] for line in lines_of(run_dir)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert "4 of 9 steps are done" in done.stdout
    assert "'step': 9, 'loss'" in done.stdout  # Ray logs each report
    saved = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert saved == ["step-000004", "step-000007", "step-000009"]  # the seventh for the node
