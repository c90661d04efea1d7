# SPDX-License-Identifier: Apache-2.0
"""The tokenizer and chat template of the tiny models: one character, one token.

So a prompt's length in tokens is its length in characters, and text that the model
wrote is tokenized back to the very tokens it wrote.
"""

import json
from pathlib import Path

VOCAB_SIZE = 512
PRELUDE_TOKENS = 256
SPECIAL = (
    "<bos>",
    "<eos>",
    "<unk>",
    "<pad>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
_INSTRUCTIONS = (
    "You are a careful assistant. Answer from the documents you were given, name the "
    "page you rely on, say so when you are not sure, keep to the language of the "
    "question, and never guess a number. Tools: search(query), read(page), note(text)."
)


def alphabet() -> list[str]:
    """The characters that are tokens: ASCII text, then letters from U+00C0 on."""
    ascii_text = ["\n", "\t", *map(chr, range(32, 127))]
    letters = [c for c in map(chr, range(0xC0, 0x400)) if c.isalpha()]
    return (ascii_text + letters)[: VOCAB_SIZE - len(SPECIAL)]


def prelude() -> str:
    """The instructions that start every chat: ``PRELUDE_TOKENS`` with their markers."""
    room = PRELUDE_TOKENS - len(("<bos>", "<|system|>", "<|end|>"))
    return _INSTRUCTIONS[:room].ljust(room, ".")


def chat_template() -> str:
    """Jinja template: the prelude, then each message from its role to ``<|end|>``."""
    return (
        "{{ '<bos><|system|>" + prelude() + "<|end|>' }}"
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer, its configuration and the chat template to ``folder``."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet()))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template(),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
