"""Tokenizers and chat templates created in memory: nothing is downloaded, every string can be tokenized."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertTokenizer,
    CLIPTokenizer,
    GemmaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    T5Tokenizer,
    XLMRobertaTokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from transformers import PixtralProcessor, Qwen2VLProcessor, Qwen3VLProcessor

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.-"
WIDTH = 32  # of every text encoder
PROMPT_WORDS = (
    "a very large number of dogs, one behind the other, on their way to the sea in the early morning and back; "
    "dog fog town at night rain snow boat lake mill bridge"
)

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT_TOKENS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def byte_vocabulary() -> dict[str, int]:
    return {letter: at for at, letter in enumerate(bytes_to_unicode().values())}


def word_pieces(words: str) -> list[str]:
    """Return each word and punctuation mark of `words`, with and without a space before it."""
    return sorted({space + piece for piece in re.findall(r"\w+|[^\w\s]", words) for space in ("", " ")})


def qwen(words: str = "") -> Qwen2Tokenizer:
    """A Qwen tokenizer that knows single bytes, its chat template's special tokens, and each word of `words`."""
    tokenizer = Qwen2Tokenizer(vocab=byte_vocabulary(), merges=[])
    tokenizer.add_tokens(word_pieces(words))
    tokenizer.add_special_tokens({"additional_special_tokens": CHAT_TOKENS})
    tokenizer.chat_template = CHAT
    return tokenizer


def clip() -> CLIPTokenizer:
    """A CLIP tokenizer that has single letters only."""
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def bert() -> BertTokenizer:
    """A BERT tokenizer over single letters."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    return BertTokenizer(vocab={piece: at for at, piece in enumerate(pieces)}, model_max_length=77)


def gemma() -> GemmaTokenizer:
    """A Gemma tokenizer over single letters."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *LETTERS, *LETTERS[:26].upper()]
    return GemmaTokenizer(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[])


def t5(max_length: int = 64) -> T5Tokenizer:
    """A T5 tokenizer over single letters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=max_length)


def xlm_roberta() -> XLMRobertaTokenizer:
    """An XLM-RoBERTa tokenizer over single letters."""
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0)]
    return XLMRobertaTokenizer(vocab=[*pieces, *((letter, -3.0) for letter in LETTERS)], model_max_length=77)


def qwen_vl(tokenizer: Qwen2Tokenizer) -> Qwen2VLProcessor:
    """The processor of the Qwen edit pipelines, which scales images to a few patches; needs torchvision."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    size = {"shortest_edge": 28 * 28, "longest_edge": 4 * 28 * 28}
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(size=size), chat_template=CHAT
    )


PIXTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}[SYSTEM_PROMPT]{% else %}[INST]"
    "{% endif %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}[IMG]{% endif %}"
    "{% endfor %}{% if message.role == 'system' %}[/SYSTEM_PROMPT]{% else %}[/INST]{% endif %}{% endfor %}"
)
PIXTRAL_TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]


def mistral() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes with Mistral's special tokens."""
    model = Tokenizer(BPE(vocab=byte_vocabulary(), merges=[]))
    model.pre_tokenizer = ByteLevel(add_prefix_space=False)
    model.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=PIXTRAL_TOKENS,
        padding_side="left",
    )


def pixtral() -> PixtralProcessor:
    """The processor of FLUX.2 dev; needs torchvision."""
    from transformers import PixtralImageProcessor, PixtralProcessor

    image_processor = PixtralImageProcessor(size={"longest_edge": 32}, patch_size={"height": 8, "width": 8})
    return PixtralProcessor(image_processor, mistral(), patch_size=8, spatial_merge_size=2, chat_template=PIXTRAL_CHAT)


LLAMA_TOKENS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>"]


def llama(words: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with Llama 3's special tokens, each word of `words` and blank lines."""
    model = Tokenizer(BPE(vocab=byte_vocabulary(), merges=[]))
    model.pre_tokenizer = ByteLevel(add_prefix_space=False)
    model.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=LLAMA_TOKENS,
    )
    tokenizer.add_tokens(["\n\n", *word_pieces(words)])
    start = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    return tokenizer


CODES = 32  # of an image; the first ids of GLM's vocabulary
GLM_CHAT = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|begin_of_image|><|image|><|end_of_image|>{% endif %}{% endfor %}{% endfor %}"
)


def glm() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes whose first ids are image codes, like GLM-Image's."""
    marks = ["<|begin_of_image|>", "<|end_of_image|>", "<pad>", "<sop>", "<eop>", "<|image|>"]
    pieces = [*(f"<code_{at}>" for at in range(CODES)), *marks, *byte_vocabulary()]
    model = Tokenizer(BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[]))
    model.pre_tokenizer = ByteLevel(add_prefix_space=False)
    model.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<|begin_of_image|>",
        eos_token="<|end_of_image|>",
        pad_token="<pad>",
        padding_side="left",
        extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
    )
    return tokenizer


def qwen3_vl(tokenizer: Qwen2Tokenizer) -> Qwen3VLProcessor:
    """The processor of Qwen-Image 2.1; needs torchvision."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    image_processor = Qwen2VLImageProcessor(
        size={"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return Qwen3VLProcessor(image_processor, tokenizer, Qwen3VLVideoProcessor(), chat_template=CHAT)
