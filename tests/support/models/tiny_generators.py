"""Tiny generative models of many architectures: seeded weights and a trained tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.models.tiny_encoders import CORPUS

CONTEXT = 96
_WORDS = 300

_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}
_WHOLE = {name: size for name, size in _SIZES.items() if name != "num_key_value_heads"}
_SIDES = {
    "d_model": 64,
    **{f"{side}_layers": layers for side, layers in (("encoder", 2), ("decoder", 3))},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 96 for side in ("encoder", "decoder")},
    "max_position_embeddings": CONTEXT,
    "decoder_start_token_id": 2,
    "init_std": 0.3,
}
# As many layers on both sides: transformers 5 sizes the decoder's KV cache by the encoder's layers.
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}

# The prefix of its config class, its model class, and the arguments of the config.
GENERATORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # Tied word embeddings, as in SmolLM2.
    "llama": ("Llama", "LlamaForCausalLM", {**_SIZES, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", _SIZES),
    "qwen3": ("Qwen3", "Qwen3ForCausalLM", {**_SIZES, "head_dim": 16}),
    "mistral": ("Mistral", "MistralForCausalLM", {**_SIZES, "sliding_window": 8}),
    "gemma2": ("Gemma2", "Gemma2ForCausalLM", {**_SIZES, "head_dim": 16, "sliding_window": 8}),
    # It rotates a quarter of each head, less than the operator supports.
    "gpt_neox": ("GPTNeoX", "GPTNeoXForCausalLM", _WHOLE),
    "gpt2": ("GPT2", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}),
    "bloom": ("Bloom", "BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "t5": ("T5", "T5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0, "n_positions": CONTEXT}),
    "umt5": ("UMT5", "UMT5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0, "n_positions": CONTEXT}),
    "bart": ("Bart", "BartForConditionalGeneration", _SIDES),
    "marian": ("Marian", "MarianMTModel", {**_SIDES, "scale_embedding": True}),
    # NLLB too: positions are counted from the padding id.
    "m2m_100": ("M2M100", "M2M100ForConditionalGeneration", {**_SIDES, "scale_embedding": True}),
}


def module(name: str) -> Any:
    import torch
    import transformers

    prefix, kind, fields = GENERATORS[name]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None}
    config = getattr(transformers, f"{prefix}Config")(vocab_size=_WORDS, **ids, **fields)
    torch.manual_seed(7)
    built = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for part in built.parameters():
            if part.dim() == 1:  # norms and biases that do something
                part += 0.1 * torch.randn_like(part)
    return built


def save(name: str, folder: Path) -> Path:
    module(name).save_pretrained(folder)
    tokenizer(has_end=GENERATORS[name][0] in ("T5", "UMT5", "Bart", "Marian", "M2M100")).save_pretrained(folder)
    return folder


def tokenizer(*, has_end: bool) -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer: Any = tokenizers.trainers.BpeTrainer(
        vocab_size=_WORDS,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if has_end:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 2)]
        )
    built = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=CONTEXT,
        model_input_names=["input_ids", "attention_mask"],
    )
    built.chat_template = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    return built
