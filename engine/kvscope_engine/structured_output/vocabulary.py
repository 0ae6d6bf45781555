"""Converts a model's vocabulary for XGrammar: the bytes of each token, without special tokens.

Special tokens are excluded from every grammar. They do not appear in an answer's text, so a string with one would be
shorter than the string that the grammar counted. Ids between the end of the vocabulary and the width of the logits are
never sampled.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvscope_engine.structured_output.grammar_messages import Vocabulary
from kvscope_engine.tokenization.tokenizer import Tokenizer

BYTE_PIECES = 128
"""Minimum number of byte tokens, such as <0x0A>, in a vocabulary that counts as one with byte fallback. A
complete set has 256 byte tokens.
"""


def vocabulary_of(tokenizer: Tokenizer, num_logits: int, ends: Collection[int]) -> Vocabulary:
    """Return the vocabulary for logits of width `num_logits`. `ends` are the token ids that may follow a complete
    text.
    """
    special = tokenizer.special_token_ids
    encoded = [""] * num_logits
    for token, token_id in tokenizer.vocabulary.items():
        if token_id < num_logits and token_id not in special:
            encoded[token_id] = token
    return Vocabulary(_vocab_type(tokenizer), encoded, sorted(token for token in ends if token < num_logits))


def tokenizer_info(vocabulary: Vocabulary) -> Any:
    import xgrammar

    kind, num_logits = xgrammar.VocabType[vocabulary.kind], len(vocabulary.tokens)
    return xgrammar.TokenizerInfo(vocabulary.tokens, kind, vocab_size=num_logits, stop_token_ids=vocabulary.ends)


def json_token_mask(info: Any, num_logits: int) -> NDArray[np.int32]:
    """Return a mask of the tokens without control characters other than line breaks.

    JSON strings have no control characters, but XGrammar (0.2.8) allows them in strings of bounded length. The mask
    also excludes tabs between tokens of JSON syntax.
    """
    allowed = np.ones(-(-num_logits // 32) * 32, np.bool_)
    for token_id, text in enumerate(info.decoded_vocab):
        allowed[token_id] = not any(byte < 0x20 and byte not in b"\n\r" for byte in text)
    return np.packbits(allowed, bitorder="little").view(np.int32)


def _vocab_type(tokenizer: Tokenizer) -> str:
    """Return the encoding of the token texts, as a name in XGrammar's `VocabType`. The encodings write " a" as
    "Ġa", "▁a", or " a".
    """
    if tokenizer.is_byte_level:
        return "BYTE_LEVEL"
    vocabulary = tokenizer.vocabulary
    has_bytes = sum(f"<0x{byte:02X}>" in vocabulary for byte in range(256)) >= BYTE_PIECES
    return "BYTE_FALLBACK" if has_bytes or "▁" in vocabulary else "RAW"
