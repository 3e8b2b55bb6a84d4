"""`stream_weights` delivers models of transformers under the names, and in the parts, in which `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import accordion as acc
from tests.devices import here
from tests.integrations.jobs import VOCABULARY, llama, needs, on_first_rank, on_library_job

pytestmark = needs("transformers")
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def built(kind: str) -> Any:
    import transformers

    torch.manual_seed(3)
    if kind == "tied llama":
        return here(llama(tie_word_embeddings=True))
    if kind == "mixture":  # fused experts, which files have one by one
        config = transformers.MixtralConfig(num_local_experts=4, vocab_size=VOCABULARY, **SIZES)
        return here(transformers.MixtralForCausalLM(config))
    vision = {"image_size": 28, "patch_size": 14, **{key: SIZES[key] for key in SIZES if "key_value" not in key}}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(vocab_size=VOCABULARY, **SIZES),
        vision_config=transformers.CLIPVisionConfig(**vision),
    )  # files have other names
    return here(transformers.LlavaForConditionalGeneration(config))


@pytest.mark.parametrize("kind", ["tied llama", "mixture", "vision"])
@on_library_job(2)
def test_names_and_parts_are_those_of_the_files(mesh: Any, kind: str, tmp_path: Path) -> None:
    plain = built(kind)
    on_first_rank(plain.save_pretrained, tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    model = acc.shard(built(kind), mesh)
    stream = acc.stream_weights(model, 2**12, changed_since="start")
    streamed = dict(stream)
    buffers = {name for name, _ in model.named_buffers()}
    assert streamed.keys() - buffers == expected.keys() - buffers
    assert all(torch.equal(streamed[name].cpu(), tensor) for name, tensor in expected.items())
    assert all(tensor.is_contiguous() for tensor in streamed.values())
    if kind != "mixture":
        return
    experts = model.model.layers[1].mlp.experts.down_proj
    if dist.get_rank() == 1:  # of one expert
        with torch.no_grad():
            experts.to_local()[-1].add_(1)
    names = [f"model.layers.1.block_sparse_moe.experts.{i}.w2.weight" for i in range(4)]
    broken = acc.stream_weights(model, 2**12, changed_since=stream)
    for name, _ in broken:
        if name == names[1]:
            break
    again = acc.stream_weights(model, 2**12, changed_since=broken)
    assert [name for name, _ in again] == names, "a consumer that has two of four experts gets them all again"
    assert list(acc.stream_weights(model, 2**12, changed_since=again)) == []
