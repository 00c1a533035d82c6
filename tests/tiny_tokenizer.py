"""Tiny tokenizers: a byte-level one without merges, whose ids are bytes and then special tokens, and SentencePiece models."""

from __future__ import annotations

import io
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<end>"
VOCAB_SIZE = 257
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_tokenizer(directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json with a chat template; ids 0..255 are bytes, 256 is the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


# Words, spaces of all kinds, what normalization changes, and what no vocabulary of this size has.
TEXTS = (
    "the quick brown fox jumps over the lazy dog",
    "  two spaces,   three\n\tand a tab ",
    "numbers 12345 and 3.14, the_under▁score",
    "naïve café, ﬁne ½ Ａｂｃ, 日本語 и русский 🙂",
    "",
    " ",
)


def save_sentencepiece(directory: Path, **options) -> None:
    """Trains a SentencePiece model of 400 pieces into tokenizer.model; ids 0 to 2 are <unk>, <s> and </s>.

    `options` are the trainer's; without them BPE with bytes for what is unknown, the text kept as it is, a space before it.
    """
    import sentencepiece

    stems = ("jump", "quick", "brown", "lazy", "number", "space", "under", "over", "night", "word", "fox", "dog", "the")
    ends = ("", "s", "ed", "er", "ing", "ly", "ness", " of", " and 12")
    kept = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    kept |= {"remove_extra_whitespaces": False, "add_dummy_prefix": True, "vocab_size": 400, "num_threads": 1}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{stem}{end} {other}" for stem in stems for end in ends for other in stems]),
        model_writer=model,
        minloglevel=2,
        **kept | options,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
