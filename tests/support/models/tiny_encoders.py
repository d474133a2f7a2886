"""Tiny encoders of many architectures, made from configs: seeded weights, small vocabularies.

Only their sizes are small: tokenizers, special tokens and options that change the computation are those of published
models.
"""

from __future__ import annotations

import json
import re
import string
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POSITIONS = 64
WIDTH = 32

# The texts whose words the tiny tokenizers know.
CORPUS = (
    "the cat sat on the mat and looked at the rain",
    "a dog ran across the green field after the red ball",
    "what a wonderful film, I would watch it again tomorrow",
    "the plot is dull and the acting is worse",
    "prices rose by three percent in the second quarter",
    "Please send the invoice to the office before Friday",
    "she reads old books about ships and the sea",
    "is this the right answer to the question?",
)

_LETTERS = sorted({*string.ascii_letters, *string.digits, *".,?!:"})
_WORDS = sorted({word for line in CORPUS for word in re.findall(r"\w\w+", line.lower())})


def word_pieces(special: tuple[str, ...]) -> dict[str, Any]:
    """Return letters and the words of the corpus. Not trained: WordPieceTrainer breaks ties differently in each run."""
    pieces = [*special, *_LETTERS, *(f"##{letter}" for letter in string.ascii_letters), *_WORDS]
    return {"vocab": {piece: index for index, piece in enumerate(pieces)}}


def unigrams(special: tuple[str, ...]) -> dict[str, Any]:
    """Return the same for SentencePiece, with scores: a word is more likely than two letters."""
    scored = [(piece, 0.0) for piece in special] + [("▁", -6.0)]
    scored += [(f"▁{word}", -9.0) for word in _WORDS]
    return {"vocab": scored + [(letter, -8.0) for letter in _LETTERS]}


def byte_pairs(special: tuple[str, ...]) -> dict[str, Any]:
    """Return a byte-level BPE vocabulary, trained on the corpus."""
    import tokenizers

    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer: Any = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    byte_level.train_from_iterator(CORPUS, trainer)
    learned = json.loads(byte_level.to_str())["model"]
    return {"vocab": learned["vocab"], "merges": [tuple(merge) for merge in learned["merges"]]}


def characters(_: tuple[str, ...]) -> dict[str, Any]:
    """Return no vocabulary: the id of a character is its code point."""
    return {}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer class of transformers and its pieces; special tokens are ordered as in published vocabularies."""

    tokenizer: str
    pieces: Callable[[tuple[str, ...]], dict[str, Any]]
    special: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    # The special tokens around a text and a pair, of a tokenizer that is defined by its file alone.
    frames: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """The prefix of its classes, its vocabulary, and config values beyond the common sizes."""

    prefix: str
    vocabulary: Vocabulary
    config: Mapping[str, Any] = field(default_factory=dict)
    # Common sizes that its config names differently or does not have.
    without: tuple[str, ...] = ()
    # The class of the model without a head.
    base: str = "Model"


_SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
    "max_position_embeddings": POSITIONS,
}

_BRACKETS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ANGLES = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_DEBERTA = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
_ALBERT = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
_FUNNEL = ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<s>", "</s>")
_XLNET = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
_CAMEMBERT = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>", "<mask>")
_BIG_BIRD = ("<pad>", "</s>", "<s>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
# With token types, which newer versions of transformers omit unless the tokenizer file requests them.
_SEGMENTS = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}

BERT = Vocabulary("BertTokenizer", word_pieces, _BRACKETS)
ROBERTA = Vocabulary("RobertaTokenizer", byte_pairs, _ANGLES)
FILE_ALONE = Vocabulary(
    "PreTrainedTokenizerFast", byte_pairs, _BRACKETS, frames=("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]")
)
# Decoders that embed by their last token: an end token after each text, and padding on the left.
ENDED = Vocabulary(
    "PreTrainedTokenizerFast",
    byte_pairs,
    ("<pad>", "<bos>", "<eos>", "<unk>"),
    {"padding_side": "left"},
    frames=("$A <eos>", "$A $B <eos>"),
)
GEMMA = Vocabulary("PreTrainedTokenizerFast", byte_pairs, ENDED.special, frames=("<bos> $A <eos>", "<bos> $A $B <eos>"))
T5 = Vocabulary("T5Tokenizer", unigrams, ("<pad>", "</s>", "<unk>"), {"extra_ids": 4})
XLM_ROBERTA = Vocabulary("XLMRobertaTokenizer", unigrams, _ANGLES)
ALBERT = Vocabulary("AlbertTokenizer", unigrams, _ALBERT, _SEGMENTS)

# The first two positions are reserved for padding.
_SHIFTED = {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 4}
_T5 |= {"initializer_factor": 1.0, "relative_attention_max_distance": 24}
_DISENTANGLED = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}

ARCHITECTURES = {
    "bert": Architecture("Bert", BERT),
    "distilbert": Architecture(
        "DistilBert",
        Vocabulary("DistilBertTokenizer", word_pieces, _BRACKETS),
        {"dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 2 * WIDTH, "max_position_embeddings": POSITIONS},
        without=tuple(_SIZES),
    ),
    "electra": Architecture("Electra", BERT, {"embedding_size": 16}),
    "mpnet": Architecture(
        "MPNet", Vocabulary("MPNetTokenizer", word_pieces, ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")), _SHIFTED
    ),
    # It has no norm that would keep activations small.
    "mobilebert": Architecture(
        "MobileBert", BERT, {"embedding_size": 16, "intra_bottleneck_size": 16, "initializer_range": 0.25}
    ),
    "squeezebert": Architecture("SqueezeBert", BERT, {"embedding_size": WIDTH}),
    "convbert": Architecture("ConvBert", BERT, {"embedding_size": 16}),
    "ernie": Architecture("Ernie", BERT),
    "megatron-bert": Architecture("MegatronBert", BERT),
    "nomic_bert": Architecture("NomicBert", BERT),
    "roformer": Architecture("RoFormer", BERT, {"embedding_size": 16}),
    "funnel": Architecture(
        "Funnel",
        Vocabulary("FunnelTokenizer", word_pieces, _FUNNEL, _SEGMENTS),
        {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": WIDTH, "n_head": 4, "d_head": 8, "d_inner": 64}
        | {"initializer_std": 0.5},
        without=tuple(_SIZES),
    ),
    "roberta": Architecture("Roberta", ROBERTA, _SHIFTED),
    "roberta-prelayernorm": Architecture("RobertaPreLayerNorm", ROBERTA, _SHIFTED),
    "data2vec-text": Architecture("Data2VecText", ROBERTA, _SHIFTED),
    "ibert": Architecture("IBert", ROBERTA, _SHIFTED),
    "luke": Architecture(
        "Luke", Vocabulary("LukeTokenizer", byte_pairs, _ANGLES), {**_SHIFTED, "entity_vocab_size": 8}
    ),
    "longformer": Architecture("Longformer", ROBERTA, {**_SHIFTED, "attention_window": 8}),
    "deberta": Architecture("Deberta", Vocabulary("DebertaTokenizer", byte_pairs, _DEBERTA), _DISENTANGLED),
    "modernbert": Architecture(
        "ModernBert",
        FILE_ALONE,
        {"local_attention": 8, "layer_types": ["full_attention", "sliding_attention"]}
        | {"cls_token_id": 2, "sep_token_id": 3},
    ),
    "eurobert": Architecture("EuroBert", FILE_ALONE, {"mask_token_id": 4}),
    "xlm-roberta": Architecture("XLMRoberta", XLM_ROBERTA, _SHIFTED),
    "xlm-roberta-xl": Architecture("XLMRobertaXL", XLM_ROBERTA, _SHIFTED),
    "xmod": Architecture("Xmod", XLM_ROBERTA, {**_SHIFTED, "default_language": "en_XX"}),
    "camembert": Architecture("Camembert", Vocabulary("CamembertTokenizer", unigrams, _CAMEMBERT), _SHIFTED),
    "gte": Architecture("Gte", XLM_ROBERTA),
    "jina_embeddings_v3": Architecture("JinaEmbeddingsV3", XLM_ROBERTA),
    "albert": Architecture("Albert", ALBERT, {"embedding_size": 16}),
    "nystromformer": Architecture(
        "Nystromformer", ALBERT, {"num_landmarks": 8, "segment_means_seq_len": 8, "conv_kernel_size": 5}
    ),
    "yoso": Architecture("Yoso", ALBERT, {"type_vocab_size": 2}),
    "fnet": Architecture(
        "FNet", Vocabulary("FNetTokenizer", unigrams, _ALBERT), {"type_vocab_size": 4}, ("num_attention_heads",)
    ),
    "rembert": Architecture(
        "RemBert",
        Vocabulary("RemBertTokenizer", unigrams, ("<pad>", "[CLS]", "<unk>", "[SEP]", "[MASK]"), _SEGMENTS),
        {"input_embedding_size": 16, "output_embedding_size": 48},
    ),
    "deberta-v2": Architecture(
        "DebertaV2",
        Vocabulary("DebertaV2Tokenizer", unigrams, _DEBERTA),
        _DISENTANGLED | {"position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    ),
    "xlnet": Architecture(
        "XLNet",
        Vocabulary("XLNetTokenizer", unigrams, _XLNET, _SEGMENTS),
        {"d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 2 * WIDTH},
        without=tuple(_SIZES),
    ),
    "big_bird": Architecture(
        "BigBird", Vocabulary("BigBirdTokenizer", unigrams, _BIG_BIRD), {"block_size": 2, "num_random_blocks": 1}
    ),
    # An encoder-decoder, but the usual model for zero-shot classification.
    "bart": Architecture(
        "Bart",
        ROBERTA,
        {"d_model": WIDTH, "init_std": 0.5, "max_position_embeddings": POSITIONS}
        | {f"{side}_layers": 2 for side in ("encoder", "decoder")}
        | {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
        | {f"{side}_ffn_dim": 2 * WIDTH for side in ("encoder", "decoder")},
        without=tuple(_SIZES),
    ),
    "canine": Architecture("Canine", Vocabulary("CanineTokenizer", characters), {"num_hash_buckets": 64}),
}
# Embedders and classifiers that the support table does not cover: its study compares int8 too, on a CPU with VNNI.
EMBEDDING_ARCHITECTURES = {
    "t5": Architecture("T5", T5, {**_T5, "decoder_start_token_id": 0}, tuple(_SIZES), "EncoderModel"),
    "umt5": Architecture("UMT5", T5, {**_T5, "decoder_start_token_id": 0}, tuple(_SIZES), "EncoderModel"),
    # Decoders that serve as embedders and classifiers.
    "llama": Architecture("Llama", ENDED, _GROUPED),
    "mistral": Architecture("Mistral", ENDED, {**_GROUPED, "sliding_window": 8}),
    "qwen3": Architecture("Qwen3", ENDED, _GROUPED),
    # EmbeddingGemma: all tokens attend to each other, in most layers within a window.
    "gemma3_text": Architecture(
        "Gemma3Text",
        GEMMA,
        {**_GROUPED, "use_bidirectional_attention": True, "sliding_window": 8, "query_pre_attn_scalar": 8}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def save(
    architecture: str,
    head: str,
    folder: Path,
    *,
    cased: bool = False,
    positions: int = POSITIONS,
    tokenizer_max_length: int | None = POSITIONS,
    **config_values: object,
) -> None:
    """Save a model and its tokenizer with save_pretrained: `save("bert", "ForMaskedLM", folder)`.

    Other keywords go to its config.
    """
    import torch
    import transformers

    family = (ARCHITECTURES | EMBEDDING_ARCHITECTURES)[architecture]
    tokenizer = _tokenizer(family.vocabulary, cased=cased, max_length=tokenizer_max_length)
    config_fields: dict[str, Any] = {name: size for name, size in _SIZES.items() if name not in family.without}
    # Large, so that different texts get clearly different answers.
    config_fields |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.5}
    config_fields |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config_fields |= {**family.config, **config_values}
    if "max_position_embeddings" in config_fields:
        config_fields["max_position_embeddings"] += positions - POSITIONS
    config = getattr(transformers, f"{family.prefix}Config")(**config_fields)
    with warnings.catch_warnings():
        # Importing DeBERTa warns: it uses torch.jit.script, which is deprecated.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        kind = getattr(transformers, f"{family.prefix}{head}")
    torch.manual_seed(7)
    kind(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(vocabulary: Vocabulary, *, cased: bool, max_length: int | None) -> Any:
    import transformers

    options = {"model_max_length": max_length, **vocabulary.pieces(vocabulary.special), **vocabulary.options}
    if vocabulary.pieces is word_pieces:
        options["do_lower_case"] = not cased
    if vocabulary.frames is not None:
        options = _file_alone(options, vocabulary.special, vocabulary.frames)
    return getattr(transformers, vocabulary.tokenizer)(**options)


def _file_alone(options: dict[str, Any], special: tuple[str, ...], frames: tuple[str, str]) -> dict[str, Any]:
    """Return options for a tokenizer without a class of its own, defined by its file, like ModernBERT's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocab = options.pop("vocab")
    backend = Tokenizer(models.BPE(vocab, options.pop("merges")))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    around = [token for token in special if token in " ".join(frames).split()]
    backend.post_processor = processors.TemplateProcessing(
        single=frames[0], pair=frames[1], special_tokens=[(token, vocab[token]) for token in around]
    )
    names = {f"{token.strip('[]<>').lower()}_token": token for token in special}
    return options | names | {"tokenizer_object": backend, "model_input_names": ["input_ids", "attention_mask"]}
