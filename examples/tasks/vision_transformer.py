"""A vision transformer on scikit-learn's digits:

accordion train --task examples/tasks/vision_transformer.py --train.steps 400 --train.micro_batch 64 --train.lr 2e-3

The model is transformers' ViT with random weights; its blocks are the units. The validation shows the accuracy on 360
images that are not trained on. Takes scikit-learn.
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification


@dataclass
class Task:
    """Handwritten digits.

    Args:
        width: of the hidden states
        layers: number of transformer blocks
        patch: side of a patch, in pixels of the 8 x 8
        held_out: images for validation
    """

    width: int = 48
    layers: int = 3
    patch: int = 2
    held_out: int = 360

    def model(self):
        sizes = {"hidden_size": self.width, "intermediate_size": 2 * self.width, "num_hidden_layers": self.layers}
        images = {"image_size": 8, "patch_size": self.patch, "num_channels": 1, "num_labels": 10}
        return ViTForImageClassification(ViTConfig(**sizes, **images, num_attention_heads=4, initializer_range=0.1))

    def dataset(self, split):
        data = load_digits()  # 1,797 images of 8 x 8 values from 0 to 16
        images = torch.from_numpy(data.images).float().div(8).sub(1).unsqueeze(1)
        train, held_out, *labels = train_test_split(
            images, torch.from_numpy(data.target), test_size=self.held_out, random_state=0
        )
        return TensorDataset(train, labels[0]) if split == "train" else TensorDataset(held_out, labels[1])

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images).logits, labels)

    def metrics(self, model, batch):
        images, labels = batch
        return {"accuracy": (model(images).logits.argmax(1) == labels).float().mean()}
