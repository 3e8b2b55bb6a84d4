"""Tiny models of transformers, one for each model family, without downloads: their classes, configurations and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from tests.devices import device
from tests.support.compare import seeded
from tests.support.family_inputs import (
    VOCAB,
    Inputs,
    captioned,
    causal,
    classified,
    draw_ids,
    forecast,
    image,
    masked,
    mel,
    pixels,
    qwen,
    seen,
    translated,
    wave,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family. `cls`: a model class of transformers. `config`: keywords of its config class. `inputs`: draws one batch.

    `bf16`: "yes" if the model computes with bfloat16 weights, "with buffers" if only with bfloat16 buffers too, "no" if not.
    `bf16_tolerance`: largest error in bfloat16; larger if both runs round gradients at different places: a router that casts
    its weight to float32 in its forward has a float32 gradient unsharded, and autograd adds gradients of several calls of a unit
    in bfloat16. `fails`: why it does not train sharded with the default units; "" if it does.
    """

    cls: str
    inputs: Callable[[torch.Generator], Inputs]
    config: Mapping[str, Any]
    bf16: Literal["yes", "with buffers", "no"] = "yes"
    bf16_tolerance: float = 1e-6
    fails: str = ""

    def make(self) -> Any:
        import transformers

        cls = getattr(transformers, self.cls)
        return cls(cls.config_class(**self.config))

    def build(self) -> Any:
        """Return the model on the device of the tests, with the same random weights on every rank."""
        return seeded(self.make, 11)

    def batch(self, step: int, rank: int) -> Inputs:
        made = self.inputs(torch.Generator().manual_seed(100 * step + rank))
        return {name: value.to(device()) if isinstance(value, torch.Tensor) else value for name, value in made.items()}


IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**IDS, **WIDTH, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
ENCODER = {**IDS, **WIDTH, "max_position_embeddings": 64}
GPT = {**IDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
T5 = {
    **IDS, "eos_token_id": 1, "decoder_start_token_id": 0, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
}  # fmt: skip
SIDES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
BART = {**IDS, **SIDES, "max_position_embeddings": 64, "decoder_start_token_id": 2}
SERIES = {
    **SIDES, "prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2, 3], "num_time_features": 1,
}  # fmt: skip
PATCHES = {**WIDTH, "image_size": 16, "patch_size": 4}
SPEECH: dict[str, Any] = {
    **IDS, **WIDTH, "conv_dim": (16, 16), "conv_kernel": (10, 4), "conv_stride": (5, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "ctc_loss_reduction": "mean",
}  # fmt: skip
TOWERS: dict[str, Any] = {"text_config": ENCODER, "vision_config": PATCHES, "projection_dim": 16}


def family(cls: str, inputs: Callable[[torch.Generator], Inputs], *configs: Mapping[str, Any], **config: Any) -> Family:
    return Family(cls=cls, inputs=inputs, config={key: v for c in (*configs, config) for key, v in c.items()})


def decoder(cls: str, **config: Any) -> Family:
    return family(cls, causal, DECODER, **config)


def encoder(cls: str, inputs: Callable[[torch.Generator], Inputs] = masked, **config: Any) -> Family:
    return family(cls, inputs, ENCODER, **config)


def translator(cls: str, **config: Any) -> Family:
    return family(cls, translated, BART, **config)


ALL = (
    # decoders
    decoder("LlamaForCausalLM"),
    decoder("MistralForCausalLM", sliding_window=4),
    decoder("Qwen2ForCausalLM"),
    decoder("Qwen3ForCausalLM", tie_word_embeddings=True),
    decoder("GemmaForCausalLM"),
    decoder("Gemma2ForCausalLM", sliding_window=4),
    decoder("Gemma3ForCausalLM", sliding_window=4),
    decoder("Phi3ForCausalLM"),
    decoder("PhiForCausalLM"),
    decoder("StableLmForCausalLM"),
    decoder("Starcoder2ForCausalLM"),
    decoder("OlmoForCausalLM"),
    decoder("Olmo2ForCausalLM"),
    decoder("CohereForCausalLM"),
    decoder("GraniteForCausalLM"),
    decoder("Glm4ForCausalLM"),
    decoder("SmolLM3ForCausalLM"),
    decoder("NemotronForCausalLM"),
    decoder("PersimmonForCausalLM"),
    family("GPT2LMHeadModel", causal, GPT),
    family("GPTNeoForCausalLM", causal, GPT, attention_types=[[["global", "local"], 1]], window_size=4),
    family("GPTNeoXForCausalLM", causal, GPT, intermediate_size=48),
    family("GPTJForCausalLM", causal, GPT, rotary_dim=4),
    family("GPTBigCodeForCausalLM", causal, GPT),
    family("CodeGenForCausalLM", causal, GPT, rotary_dim=4),
    family("OPTForCausalLM", causal, GPT, ffn_dim=48, word_embed_proj_dim=16),
    family("BloomForCausalLM", causal, IDS, hidden_size=32, n_layer=2, n_head=4),
    family("FalconForCausalLM", causal, GPT),
    family("MptForCausalLM", causal, IDS, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    decoder("ArceeForCausalLM"),
    decoder("ApertusForCausalLM"),
    decoder("Ernie4_5ForCausalLM"),
    decoder("HeliumForCausalLM"),
    decoder("SeedOssForCausalLM"),
    decoder("Exaone4ForCausalLM", sliding_window=4),
    decoder("Olmo3ForCausalLM", sliding_window=4),
    decoder("Cohere2ForCausalLM", sliding_window=4),
    decoder("GlmForCausalLM"),
    decoder("DiffLlamaForCausalLM"),
    decoder("BitNetForCausalLM"),
    decoder("NanoChatForCausalLM"),
    decoder("Ministral3ForCausalLM"),
    decoder("HunYuanDenseV1ForCausalLM"),
    family("CTRLLMHeadModel", causal, IDS, n_embd=32, dff=48, n_layer=2, n_head=4, n_positions=64),
    replace(family("OpenAIGPTLMHeadModel", causal, IDS, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        bf16="with buffers"),
    family("BioGptForCausalLM", causal, GPT, intermediate_size=48),
    family("XGLMForCausalLM", causal, IDS, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4,
        max_position_embeddings=64),
    # mixtures of experts
    family("MixtralForCausalLM", lambda g: causal(g, 4), DECODER, num_local_experts=8, output_router_logits=True),
    decoder("Qwen2MoeForCausalLM", num_experts=8, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    decoder("Qwen3MoeForCausalLM", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16),
    decoder("OlmoeForCausalLM", num_experts=8, num_experts_per_tok=2),
    decoder("GptOssForCausalLM", num_local_experts=8, num_experts_per_tok=2, sliding_window=4),
    decoder("DeepseekV3ForCausalLM", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=1, head_dim=4),
    decoder("GraniteMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    decoder("PhimoeForCausalLM", num_local_experts=4),
    decoder("JetMoeForCausalLM", num_local_experts=4, kv_channels=8),
    decoder("DeepseekV2ForCausalLM", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=1, head_dim=4),
    decoder("Glm4MoeForCausalLM", n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1),
    decoder("Ernie4_5_MoeForCausalLM", moe_num_experts=8, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=1),
    decoder("Llama4ForCausalLM", num_local_experts=4, intermediate_size_mlp=48, interleave_moe_layer_step=2,
        attention_chunk_size=8),
    replace(decoder("MiniMaxForCausalLM", num_local_experts=4, block_size=4,
        layer_types=["linear_attention", "full_attention"]), bf16="with buffers"),
    # states instead of, or beside, attention
    family("MambaForCausalLM", causal, IDS, hidden_size=32, num_hidden_layers=2, state_size=4,
        rescale_prenorm_residual=True),
    family("Mamba2ForCausalLM", causal, IDS, hidden_size=32, num_hidden_layers=2, state_size=4, num_heads=8, head_dim=8,
        n_groups=2, chunk_size=4),
    family("FalconMambaForCausalLM", causal, IDS, hidden_size=32, num_hidden_layers=2, state_size=4),
    decoder("JambaForCausalLM", num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, num_experts=4,
        mamba_d_state=4),
    decoder("ZambaForCausalLM", num_hidden_layers=4, mamba_d_state=4, n_mamba_heads=2, attention_hidden_size=64,
        attention_head_dim=16, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"]),
    decoder("RecurrentGemmaForCausalLM", num_hidden_layers=3, lru_width=32, attention_window_size=4),
    decoder("Qwen3NextForCausalLM", num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16),
    family("RwkvForCausalLM", causal, IDS, hidden_size=32, num_hidden_layers=2, context_length=64),
    decoder("BambaForCausalLM", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1,
        mamba_d_state=4, mamba_chunk_size=4),
    decoder("Lfm2ForCausalLM", full_attn_idxs=[1], block_ff_dim=48),
    # encoders
    encoder("BertForMaskedLM"),
    encoder("RobertaForMaskedLM"),
    encoder("AlbertForMaskedLM", embedding_size=16),
    encoder("ElectraForMaskedLM", embedding_size=16),
    family("DistilBertForMaskedLM", masked, IDS, dim=32, n_layers=2, n_heads=4, hidden_dim=48,
        max_position_embeddings=64),
    encoder("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    encoder("MPNetForMaskedLM"),
    encoder("ModernBertForMaskedLM", num_hidden_layers=3, local_attention=4, cls_token_id=1, sep_token_id=2),
    encoder("LongformerForMaskedLM", attention_window=4),
    replace(encoder("FNetForMaskedLM", inputs=causal), bf16="no"),
    family("XLNetLMHeadModel", causal, IDS, d_model=32, n_layer=2, n_head=4, d_inner=48),
    encoder("XLMRobertaForMaskedLM"),
    encoder("CamembertForMaskedLM"),
    encoder("DebertaForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    encoder("BigBirdForMaskedLM", attention_type="original_full"),
    encoder("ConvBertForMaskedLM", embedding_size=32, head_ratio=2, conv_kernel_size=3),
    encoder("MobileBertForMaskedLM", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    encoder("RoFormerForMaskedLM", embedding_size=32),
    encoder("MegatronBertForMaskedLM"),
    encoder("EsmForMaskedLM", position_embedding_type="rotary", mask_token_id=3),
    encoder("RemBertForMaskedLM", input_embedding_size=16, output_embedding_size=16),
    encoder("LayoutLMForMaskedLM"),
    family("XLMWithLMHeadModel", causal, IDS, emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=64),
    replace(family("PerceiverForMaskedLM", masked, IDS, d_model=32, d_latents=32, num_latents=6,
        num_self_attends_per_block=2, num_blocks=2, num_self_attention_heads=4, num_cross_attention_heads=4,
        qk_channels=32, v_channels=32, max_position_embeddings=12), bf16_tolerance=2**-7),
    # encoder-decoders
    family("T5ForConditionalGeneration", translated, T5),
    family("MT5ForConditionalGeneration", translated, T5),
    family("UMT5ForConditionalGeneration", translated, T5),
    family("LongT5ForConditionalGeneration", translated, T5, local_radius=3),
    replace(family("SwitchTransformersForConditionalGeneration", translated, T5, num_experts=4, expert_capacity=6,
        num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1), bf16_tolerance=2**-7),
    translator("BartForConditionalGeneration"),
    translator("MBartForConditionalGeneration"),
    translator("MarianMTModel"),
    translator("PegasusForConditionalGeneration"),
    translator("M2M100ForConditionalGeneration"),
    translator("LEDForConditionalGeneration", max_encoder_position_embeddings=64, max_decoder_position_embeddings=64,
        attention_window=4),
    family("ProphetNetForConditionalGeneration", translated, IDS, hidden_size=32, encoder_ffn_dim=48,
        num_encoder_layers=2, num_encoder_attention_heads=4, decoder_ffn_dim=48, num_decoder_layers=2,
        num_decoder_attention_heads=4, max_position_embeddings=64, decoder_start_token_id=2),
    translator("BlenderbotForConditionalGeneration"),
    translator("PLBartForConditionalGeneration"),
    translator("PegasusXForConditionalGeneration", block_size=4, num_global_tokens=2),
    translator("BigBirdPegasusForConditionalGeneration", attention_type="original_full"),
    replace(translator("NllbMoeForConditionalGeneration", num_experts=4, expert_capacity=8, encoder_sparse_step=2,
        decoder_sparse_step=2), bf16_tolerance=2**-7),
    family("T5GemmaForConditionalGeneration", translated, encoder={**DECODER, "sliding_window": 4}, decoder={**DECODER,
        "sliding_window": 4}),
    # vision
    family("ViTForImageClassification", classified, PATCHES),
    family("DeiTForImageClassification", classified, PATCHES),
    family("BeitForImageClassification", classified, PATCHES, use_relative_position_bias=True),
    family("Dinov2ForImageClassification", classified, PATCHES),
    family("SwinForImageClassification", classified, image_size=16, patch_size=2, embed_dim=16, depths=[2, 2],
        num_heads=[2, 4], window_size=4),
    family("ConvNextForImageClassification", classified, hidden_sizes=[16, 32], depths=[2, 2], num_stages=2),
    replace(family("ResNetForImageClassification", classified, embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2],
        layer_type="basic"), bf16="with buffers"),
    family("SegformerForImageClassification", classified, num_encoder_blocks=2, depths=[2, 2], sr_ratios=[2, 1],
        hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
        decoder_hidden_size=16),
    replace(family("MobileViTForImageClassification", lambda g: classified(g, 64), image_size=64,
        hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 40], num_attention_heads=4),
        bf16="with buffers"),
    family("ViTMAEForPreTraining", pixels, PATCHES, decoder_hidden_size=16, decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4, decoder_intermediate_size=24),
    family("ImageGPTForImageClassification", lambda g: {"input_ids": draw_ids(g, 2, 12),
        "labels": torch.tensor([0, 1])}, vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=2, n_head=4),
    replace(family("Swinv2ForImageClassification", classified, image_size=16, patch_size=2, embed_dim=16, depths=[2, 2],
        num_heads=[2, 4], window_size=4), bf16="with buffers"),
    family("ConvNextV2ForImageClassification", classified, hidden_sizes=[16, 32], depths=[2, 2], num_stages=2),
    replace(family("RegNetForImageClassification", classified, embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2],
        groups_width=8), bf16="with buffers"),
    replace(family("MobileNetV2ForImageClassification", lambda g: classified(g, 32), image_size=32,
        depth_multiplier=0.25), bf16="with buffers"),
    family("PoolFormerForImageClassification", classified, depths=[2, 2], hidden_sizes=[16, 32], patch_sizes=[3, 3],
        strides=[2, 2], padding=[1, 1], num_encoder_blocks=2),
    replace(family("CvtForImageClassification", classified, embed_dim=[16, 32], num_heads=[2, 4], depth=[1, 2],
        patch_sizes=[3, 3], patch_stride=[2, 2], patch_padding=[1, 1], mlp_ratio=[2.0, 2.0],
        attention_drop_rate=[0.0, 0.0], drop_rate=[0.0, 0.0], drop_path_rate=[0.0, 0.0], qkv_bias=[True, True],
        cls_token=[False, True], qkv_projection_method=["dw_bn", "dw_bn"], kernel_qkv=[3, 3], padding_kv=[1, 1],
        stride_kv=[2, 2], padding_q=[1, 1], stride_q=[1, 1]), bf16="with buffers"),
    family("PvtV2ForImageClassification", classified, image_size=16, num_encoder_blocks=2, depths=[2, 2],
        sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4],
        mlp_ratios=[2, 2]),
    family("HieraForImageClassification", lambda g: classified(g, 32), image_size=[32, 32], embed_dim=16, depths=[1, 2],
        num_heads=[2, 4], patch_stride=[4, 4], masked_unit_size=[4, 4], num_query_pool=1, query_stride=[2, 2]),
    family("FocalNetForImageClassification", classified, image_size=16, patch_size=2, embed_dim=16,
        hidden_sizes=[16, 32], depths=[2, 2], focal_levels=[2, 2], focal_windows=[3, 3]),
    replace(family("EfficientNetForImageClassification", lambda g: classified(g, 32), image_size=32,
        width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320), bf16="with buffers"),
    family("YolosModel", pixels, PATCHES, image_size=[16, 16], num_detection_tokens=4),
    family("VideoMAEForVideoClassification", lambda g: {"pixel_values": torch.randn(2, 4, 3, 16, 16, generator=g),
        "labels": torch.tensor([0, 1])}, PATCHES, num_frames=4, tubelet_size=2),
    family("TimesformerForVideoClassification", lambda g: {"pixel_values": torch.randn(2, 4, 3, 16, 16, generator=g),
        "labels": torch.tensor([0, 1])}, PATCHES, num_frames=4),
    replace(family("DetrModel", lambda g: pixels(g, 32), SIDES, num_queries=5, use_timm_backbone=False,
        use_pretrained_backbone=False, backbone=None, backbone_config={"model_type": "resnet", "embedding_size": 8,
        "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "out_features": ["stage2"]}),
        bf16="with buffers"),
    # several towers
    family("CLIPModel", captioned, TOWERS),
    family("SiglipModel", captioned, TOWERS),
    family("BlipForConditionalGeneration", lambda g: {**causal(g), **pixels(g)}, TOWERS),
    family("AltCLIPModel", captioned, TOWERS),
    family("ChineseCLIPModel", captioned, TOWERS),
    family("MetaClip2Model", captioned, TOWERS),
    family("CLIPSegModel", captioned, TOWERS),
    family("GitForCausalLM", lambda g: {**causal(g), **pixels(g)}, ENCODER, vision_config=PATCHES),
    family("ViltForQuestionAnswering", lambda g: {"input_ids": draw_ids(g, 2, 8), "pixel_values": image(g),
        "labels": torch.rand(2, 2, generator=g)}, ENCODER, PATCHES),
    family("LlavaForConditionalGeneration", seen, text_config={"model_type": "llama", **DECODER},
        vision_config={"model_type": "clip_vision_model", **PATCHES}, image_token_id=VOCAB - 1,
        vision_feature_layer=-1),
    family("PaliGemmaForConditionalGeneration", lambda g: {**seen(g), "token_type_ids": torch.zeros(2, 24,
        dtype=torch.long)}, text_config={"model_type": "gemma", **DECODER},
        vision_config={"model_type": "siglip_vision_model", **PATCHES}, image_token_id=VOCAB - 1, projection_dim=32),
    family("Gemma3ForConditionalGeneration", lambda g: {**seen(g, 4), "token_type_ids": torch.zeros(2, 12,
        dtype=torch.long)}, text_config={**DECODER, "sliding_window": 4},
        vision_config={"model_type": "siglip_vision_model", **PATCHES}, image_token_id=VOCAB - 1,
        mm_tokens_per_image=4),
    family("Idefics3ForConditionalGeneration", lambda g: {**seen(g, 4), "pixel_values": image(g)[:, None]},
        text_config={"model_type": "llama", **DECODER}, vision_config=PATCHES, image_token_id=VOCAB - 1,
        scale_factor=2),
    family("Qwen2VLForConditionalGeneration", qwen, text_config={**DECODER, "rope_scaling": {"type": "mrope",
        "mrope_section": [1, 1, 2]}}, vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4,
        "patch_size": 4, "mlp_ratio": 2}, image_token_id=VOCAB - 1, video_token_id=VOCAB - 2,
        vision_start_token_id=VOCAB - 3, vision_end_token_id=VOCAB - 4),
    family("Qwen2_5_VLForConditionalGeneration", qwen, text_config={**DECODER, "rope_scaling": {"type": "mrope",
        "mrope_section": [1, 1, 2]}}, vision_config={"depth": 2, "hidden_size": 32, "out_hidden_size": 32,
        "intermediate_size": 48, "num_heads": 4, "patch_size": 4, "window_size": 8, "fullatt_block_indexes": [1]},
        image_token_id=VOCAB - 1, video_token_id=VOCAB - 2, vision_start_token_id=VOCAB - 3,
        vision_end_token_id=VOCAB - 4),
    family("Blip2ForConditionalGeneration", lambda g: seen(g, 3), vision_config=PATCHES, qformer_config={**ENCODER,
        "encoder_hidden_size": 32}, text_config={"model_type": "opt", **GPT, "ffn_dim": 48, "word_embed_proj_dim": 32},
        num_query_tokens=3, image_token_id=VOCAB - 1),
    # audio
    family("WhisperForConditionalGeneration", lambda g: mel(g, 8, 24), BART, num_mel_bins=8, max_source_positions=12,
        max_target_positions=16),
    replace(family("Speech2TextForConditionalGeneration", lambda g: mel(g, 24, 8), BART, input_feat_per_channel=8,
        conv_channels=16, max_source_positions=48, max_target_positions=16), bf16="with buffers"),
    family("Wav2Vec2ForCTC", wave, SPEECH),
    family("HubertForCTC", wave, SPEECH),
    family("WavLMForCTC", wave, SPEECH),
    family("ASTForAudioClassification", lambda g: {"input_values": torch.randn(2, 24, 16, generator=g),
        "labels": torch.tensor([0, 1])}, WIDTH, patch_size=8, max_length=24, num_mel_bins=16),
    family("MoonshineForConditionalGeneration", lambda g: {"input_values": torch.randn(2, 1600, generator=g),
        "labels": draw_ids(g, 2, 7)}, IDS, hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
        decoder_start_token_id=1),
    replace(family("SpeechT5ForSpeechToText", wave, SPEECH, SIDES, positional_dropout=0.0, decoder_start_token_id=2,
        max_length=16), bf16="with buffers"),
    family("SEWForCTC", wave, SPEECH, squeeze_factor=2),
    family("UniSpeechForCTC", wave, SPEECH),
    family("Data2VecAudioForCTC", wave, SPEECH, num_conv_pos_embeddings=2, conv_pos_kernel_size=3),
    replace(family("Wav2Vec2ConformerForCTC", wave, SPEECH, conv_depthwise_kernel_size=3), bf16="with buffers"),
    family("Wav2Vec2BertForCTC", lambda g: {"input_features": torch.randn(2, 24, 16, generator=g), "labels": draw_ids(g,
        2, 3)}, SPEECH, feature_projection_input_dim=16, conv_depthwise_kernel_size=3, left_max_position_embeddings=4,
        right_max_position_embeddings=4),
    replace(family("ClapModel", lambda g: {"input_ids": draw_ids(g, 2, 8), "input_features": torch.randn(2, 1, 64, 16,
        generator=g), "is_longer": torch.zeros(2, 1, dtype=torch.bool), "return_loss": True}, text_config=ENCODER,
        audio_config={"spec_size": 32, "num_mel_bins": 16, "patch_size": 4, "patch_stride": [4, 4], "window_size": 4,
        "hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [2, 2], "num_attention_heads": [2, 4],
        "enable_fusion": False, "num_classes": 2}, projection_dim=16), bf16="with buffers"),
    family("MusicgenForCausalLM", lambda g: {"input_ids": draw_ids(g, 4, 8), "labels": draw_ids(g, 2, 8, 2)}, IDS,
        hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, num_codebooks=2,
        max_position_embeddings=64),
    # series
    family("DecisionTransformerModel", lambda g: {"states": torch.randn(2, 5, 6, generator=g), "actions": torch.randn(2,
        5, 3, generator=g), "rewards": torch.randn(2, 5, 1, generator=g), "returns_to_go": torch.randn(2, 5, 1,
        generator=g), "timesteps": torch.arange(5).repeat(2, 1), "attention_mask": torch.ones(2, 5)}, state_dim=6,
        act_dim=3, hidden_size=32, n_layer=2, n_head=4, max_ep_len=16),
    replace(family("PatchTSTForPrediction", lambda g: {"past_values": torch.randn(2, 16, 3, generator=g),
        "future_values": torch.randn(2, 4, 3, generator=g)}, context_length=16, patch_length=4, patch_stride=4,
        prediction_length=4, num_input_channels=3, d_model=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48),
        bf16="with buffers"),
    family("TimeSeriesTransformerForPrediction", forecast, SERIES),
    # what does not work
    family("FunnelForMaskedLM", masked, IDS, block_sizes=[1, 2], d_model=32, n_head=4, d_head=8, d_inner=48),
    replace(encoder("SqueezeBertForMaskedLM", embedding_size=32),
        fails="it calls `layer.forward(...)`, which skips all its hooks; `acc.entry_point(layer, \"forward\")` of each helps"),
    replace(family("ReformerModelWithLMHead", lambda g: causal(g, 16), IDS, is_decoder=True,
        attn_layers=["local", "lsh"], attention_head_size=8, num_attention_heads=4, hidden_size=32,
        feed_forward_size=48, axial_pos_shape=[4, 4], axial_pos_embds_dim=[16, 16], max_position_embeddings=16,
        local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_buckets=2),
        fails="its backward runs parts of a layer, which are no units"),
)  # fmt: skip
FAMILIES = {f.cls: f for f in ALL}
