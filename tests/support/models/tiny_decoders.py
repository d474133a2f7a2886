"""Tiny generative models, and a plain reference decoder: PyTorch without a KV cache."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from hasten.backends import BACKENDS, DECODER, ENCODER, Artifact, Decoder, RunOptions, SupportsDecoding
from hasten.bundle import Bundle, BundleWriter, Manifest, VariantEntry
from hasten.bundle.manifest import SCHEMA, ModelOrigin
from hasten.core.generation_types import TEXT_GENERATION, GenerationSpec
from hasten.core.plan import Gate
from hasten.core.report import Agreement
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Signature
from hasten.core.text.tokenizer import Tokenizer, TokenizerSpec
from hasten.core.variant import Precision, Variant
from hasten.tasks import TaskSpec
from support.models import tiny_encoders

CONTEXT = 64
_BART = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SPECIAL = (BOS, PAD, EOS, "<unk>")


def byte_level() -> tokenizers.Tokenizer:
    """Return a tokenizer like GPT-2's: spaces belong to the next word, and any byte can be encoded."""
    made = tiny_encoders.byte_pairs(SPECIAL)
    backend = tokenizers.Tokenizer(models.BPE(made["vocab"], made["merges"]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """Return a tokenizer like Llama 2's: the first word has no space, and unknown characters become bytes."""
    return _sentence_pieces([f"<0x{byte:02X}>" for byte in range(256)])


def whole_characters() -> tokenizers.Tokenizer:
    """Return the same without bytes: the output of random weights is always valid text."""
    return _sentence_pieces([])


def _sentence_pieces(byte_pieces: list[str]) -> tokenizers.Tokenizer:
    pieces = [*SPECIAL, *byte_pieces, "▁", *string.ascii_letters, *".,?!"]
    merges = []
    for word in {word: None for line in tiny_encoders.CORPUS for word in line.split()}:
        for end in range(1, len(word) + 1):
            if f"▁{word[:end]}" not in pieces and word[end - 1] in pieces:
                pieces.append(f"▁{word[:end]}")
                merges.append((f"▁{word[: end - 1]}", word[end - 1]))
    vocab = {piece: position for position, piece in enumerate(pieces)}
    model = models.BPE(vocab, merges, byte_fallback=bool(byte_pieces), unk_token="<unk>", fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])])
    backend.add_special_tokens(list(SPECIAL))
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """Return a tokenizer like T5's: a Unigram model that ends every text with a token."""
    pieces = tiny_encoders.unigrams(SPECIAL)["vocab"]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, SPECIAL.index("<unk>")))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, SPECIAL.index(EOS))]
    )
    backend.add_special_tokens(list(SPECIAL))
    return backend


TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback, "metaspace": metaspace}


def ours(backend: tokenizers.Tokenizer, *, tidies_spaces: bool = False, max_length: int = CONTEXT) -> Tokenizer:
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    return Tokenizer(copy, TokenizerSpec(("input_ids",), max_length, tidies_spaces=tidies_spaces))


def theirs(backend: tokenizers.Tokenizer, **fields: Any) -> Any:
    import transformers

    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": "<unk>"}
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=copy, **names, **fields)


def vocabulary_of(backend: tokenizers.Tokenizer) -> int:
    return len(json.loads(backend.to_str())["model"]["vocab"])


def model(kind: str, vocabulary: int, seed: int = 1, **fields: Any) -> Any:
    """Return a transformers module with large random weights, so that it does not repeat one token."""
    import torch
    import transformers

    ends = {"bos_token_id": SPECIAL.index(BOS), "eos_token_id": SPECIAL.index(EOS), "pad_token_id": SPECIAL.index(PAD)}
    sizes: dict[str, Any] = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "initializer_range": 0.4},
        "llama": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"intermediate_size": 64, "max_position_embeddings": CONTEXT, "initializer_range": 0.3},
        "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "initializer_factor": 3.0}
        | {"relative_attention_max_distance": 32, "decoder_start_token_id": SPECIAL.index(PAD)}
        | {"tie_word_embeddings": False},
        "bart": {"d_model": 32, "max_position_embeddings": CONTEXT, "init_std": 0.4, "forced_eos_token_id": None}
        | {"decoder_start_token_id": SPECIAL.index(EOS)}
        | {f"{side}_{size_name}": size for side in ("encoder", "decoder") for size_name, size in _BART.items()},
    }
    config, head = {
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
        "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
    }[kind]
    torch.manual_seed(seed)
    made = head(config(vocab_size=vocabulary, **ends, **sizes[kind], **fields)).eval()
    made.generation_config.max_length = None
    if kind == "bart":
        made.generation_config.forced_bos_token_id = SPECIAL.index(BOS)
    if kind == "t5":
        # The bias is its only position information; unscaled logits would make every token certain.
        made.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data *= 5
        made.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data *= 5
        made.lm_head.weight.data *= 0.1
    return made


def starts_of(module: Any) -> tuple[int, ...]:
    """Return the first tokens of an encoder-decoder's answers, forced ones included."""
    saved_config = module.generation_config
    starts = (
        (saved_config.decoder_start_token_id, saved_config.forced_bos_token_id)
        if module.config.is_encoder_decoder
        else ()
    )
    return tuple(token for token in starts if token is not None)


def spec_of(module: Any, **fields: Any) -> GenerationSpec:
    config = module.config
    named = {"bos_token": BOS, "eos_token": EOS}
    return GenerationSpec(
        CONTEXT, config.vocab_size, (config.eos_token_id,), starts_of(module), special_tokens=named, **fields
    )


class PlainDecoder:
    """A `Decoder` that asserts the contract of its callers."""

    def __init__(self, module: Any, slots: int = 8) -> None:
        self.module = module
        self.slots = slots
        self.rows: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        # The calls in order: prefill, decode, fork and free, with their slots.
        self.log: list[tuple[str, tuple[int, ...]]] = []

    def prefill(self, slot: int, ids: Any) -> Any:
        assert 0 <= slot < self.slots, slot
        assert slot not in self.rows, f"slot {slot} is not empty"
        self.log.append(("begin", (slot,)))
        prompt = [int(token) for token in ids]
        self.prompts[slot] = prompt
        self.rows[slot] = list(starts_of(self.module)) or prompt
        return self._logits([slot])[0]

    def decode(self, slots: Sequence[int], ids: Any) -> Any:
        assert len(set(slots)) == len(slots) == len(ids)
        self.log.append(("step", tuple(slots)))
        for slot, token in zip(slots, ids, strict=True):
            self.rows[slot] = [*self.rows[slot], int(token)]
        # Sequences of one length at a time, without padding.
        alike: dict[tuple[int, int], list[int]] = {}
        for position, slot in enumerate(slots):
            alike.setdefault((len(self.rows[slot]), len(self.prompts[slot])), []).append(position)
        logits = np.empty((len(slots), self.module.config.vocab_size), np.float32)
        for indices in alike.values():
            logits[indices] = self._logits([slots[position] for position in indices])
        return logits

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert not set(sources) & set(targets) or len(set(targets)) == len(targets)
        self.log.append(("copy", tuple(targets)))
        before, prompts = dict(self.rows), dict(self.prompts)
        for source, target in zip(sources, targets, strict=True):
            self.rows[target], self.prompts[target] = before[source], prompts[source]

    def free(self, slot: int) -> None:
        self.log.append(("end", (slot,)))
        del self.rows[slot], self.prompts[slot]

    def close(self) -> None:
        self.rows.clear()

    def _logits(self, slots: Sequence[int]) -> Any:
        import torch

        rows, prompts = [torch.tensor([tokens[slot] for slot in slots]) for tokens in (self.rows, self.prompts)]
        with torch.inference_mode():
            if self.module.config.is_encoder_decoder:
                made = self.module(input_ids=prompts, decoder_input_ids=rows)
            else:
                made = self.module(input_ids=rows)
        return made.logits[:, -1].numpy().copy()


def artifact(module: Any, folder: Path) -> Artifact:
    """Return the exported graphs of the module; export them only once."""
    names = (DECODER, ENCODER) if starts_of(module) else (DECODER,)
    if not (folder / f"{DECODER}.onnx").exists():
        _export(module, folder)
    graphs = {name: f"{name}.onnx" for name in names}
    return Artifact(Variant("onnxruntime", Precision.FP32), Signature((), (), max_length=CONTEXT), folder, graphs)


def _export(module: Any, folder: Path) -> None:
    from hasten.builder.export.decoder import export_decoder, rotary_tables
    from hasten.builder.export.encoder_decoder import export_encoder_decoder

    if starts := starts_of(module):
        export_encoder_decoder(module, folder, starts, (CONTEXT, CONTEXT))
    else:
        export_decoder(module, folder / f"{DECODER}.onnx", rotary_tables(module, CONTEXT))


def onnx_decoder(module: Any, folder: Path, slots: int = 8) -> Decoder:
    """Open the decoder of the ONNX Runtime backend."""
    backend = BACKENDS.get("onnxruntime")
    assert isinstance(backend, SupportsDecoding)
    return backend.open_decoder(artifact(module, folder), RunOptions(1), slots)


def bundle(module: Any, backend: tokenizers.Tokenizer, folder: Path, spec: GenerationSpec) -> Bundle:
    """Write the bundle of a build, without its verification and benchmark."""
    made = folder / "made"
    made.mkdir()
    fp32 = artifact(module, made)
    backend.save(str(folder / "tokenizer.json"))
    agreement = Agreement("same next token", 1.0, 1, 0.0, 0.0, 1.0)
    entry = VariantEntry("onnxruntime-fp32", "onnxruntime", Precision.FP32, "cpu", (), dict(fp32.graphs), agreement)
    manifest = Manifest(
        schema=SCHEMA,
        hasten="0",
        created="2026-01-02T03:04:05+00:00",
        model=ModelOrigin("acme/generator", None, type(module).__name__),
        task=TaskSpec(TEXT_GENERATION),
        tokenizer=TokenizerSpec(("input_ids",), CONTEXT),
        signature=fp32.signature,
        graphs={},
        variants=(entry,),
        gate=Gate(),
        machine=this_machine(),
        files={},
        generation=spec,
    )
    with BundleWriter(folder / "bundle") as writer:
        writer.add_variant(fp32)
        writer.add_tokenizer(folder / "tokenizer.json")
        return writer.commit(manifest)
