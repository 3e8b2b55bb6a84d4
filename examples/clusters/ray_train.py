"""The digits on a Ray cluster: python examples/clusters/ray_train.py /shared/runs/digits --workers 16 --gpus"""

import argparse
import sys
from pathlib import Path

import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

import accordion as acc

TASKS = Path(__file__).resolve().parents[1] / "tasks"


def train(config: dict) -> object:
    """Train on each worker, in the process group that Ray made, and return the result of the run."""
    from vision_transformer import Task

    def on_step(metrics: dict) -> bool:
        if metrics["step"] % config["report_every"] == 0:
            ray.train.report(metrics)  # waits for Ray, which takes one report in two seconds
        return ray.train.get_preemption_info() is not None  # a node will be taken away: save now

    return acc.fit(Task(), options=config["options"], on_step=on_step)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path, help="folder on storage that all nodes share")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--report_every", type=int, default=50)
    chosen = parser.parse_args(words)
    run_dir = str(chosen.run_dir.resolve())
    options = {"run.dir": run_dir, "train.steps": chosen.steps, "train.micro_batch": 32, "checkpoint.every": 100}
    ray.init(runtime_env={"working_dir": str(TASKS)})
    trainer = TorchTrainer(
        train,
        train_loop_config={"options": options, "report_every": chosen.report_every},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if chosen.gpus else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=chosen.workers, use_gpu=chosen.gpus),
        run_config=ray.train.RunConfig(storage_path=run_dir, failure_config=ray.train.FailureConfig(max_failures=3)),
    )
    print(trainer.fit().return_value)


if __name__ == "__main__":
    main(sys.argv[1:])
