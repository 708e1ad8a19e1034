"""Does the tokenizer load, and has it the tokens that its chat template writes?"""

from __future__ import annotations

from collections.abc import Mapping

from preflight.findings import Finding, Level, quote
from preflight.model.chat_template import Rendered, Tokenizer
from preflight.model.model_directory import ModelDirectory
from preflight.model.support import release

_SOURCE = "transformers 5.24, tokenization_utils_base.py and models/auto/tokenization_auto.py"

# Classes that bring no special tokens of their own: what the files do not name is not there.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def check_tokenizer_files(tokenizer: Tokenizer, directory: ModelDirectory, transformers: str | None) -> list[Finding]:
    """What stops AutoTokenizer although every file is valid JSON."""
    config = tokenizer.config.object
    kind = config.get("tokenizer_class")
    wrong = [
        f"{key} is {type(config[key]).__name__}"
        for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        if config.get(key) is not None and not isinstance(config[key], (str, dict))
    ]
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict) and any(not isinstance(value, dict) for value in decoder.values()):
        wrong.append("an entry of added_tokens_decoder is no object")
    found = [_damaged_file(name, why) for name, why in tokenizer.damaged.items()]
    if wrong:
        found.append(
            Finding(
                "tokenizer-config-refused",
                Level.FAIL,
                f"tokenizer_config.json holds what transformers refuses: {'; '.join(wrong)}.",
                "A special token is a text or an AddedToken object; anything else ends in a TypeError.",
                ('write the token as text, for example `"eos_token": "</s>"`',),
                _SOURCE,
            )
        )
    missing = [name for name in tokenizer.needs_code if not directory.has(name)]
    if missing and not directory.has("tokenizer.json"):
        found.append(
            Finding(
                "tokenizer-code-missing",
                Level.FAIL,
                f"The tokenizer needs Python code that is not here: {quote(', '.join(missing), 120)}.",
                "No tokenizer.json could stand in for it, and trust_remote_code=True finds nothing to run.",
                ("download the .py files from the model's own repository and review them",),
                _SOURCE,
            )
        )
    if kind == "TokenizersBackend" and transformers and release(transformers) < (5,):
        found.append(
            Finding(
                "tokenizer-class-too-new",
                Level.FAIL,
                f"The tokenizer was saved by transformers 5 (class TokenizersBackend); {transformers} lacks it.",
                "It stops with: Tokenizer class TokenizersBackend does not exist or is not currently imported.",
                (
                    '`pip install "transformers>=5"`',
                    'or change tokenizer_class in tokenizer_config.json to "PreTrainedTokenizerFast"',
                ),
                _SOURCE,
            )
        )
    return found


def _damaged_file(name: str, why: str) -> Finding:
    what = {
        "git-lfs": f"{name} is a Git LFS pointer, not the file itself.",
        "empty": f"{name} is empty.",
        "web-page": f"{name} is a web page that was saved in its place.",
        "cut": f"{name} ends in the middle: the download was cut.",
    }[why]
    return Finding(
        "tokenizer-file-damaged",
        Level.FAIL,
        what,
        "AutoTokenizer cannot be loaded from it, or takes a slower way that lacks tokens.",
        ("`git lfs install && git lfs pull`",) if why == "git-lfs" else (f"download {name} again",),
        _SOURCE,
    )


def check_tokens_there(tokenizer: Tokenizer, rendered: Mapping[str, Rendered]) -> list[Finding]:
    """An end of sequence, a padding token, and the markers that the chat template writes."""
    if not tokenizer.present or tokenizer.config.trouble:
        return []
    found: list[Finding] = []
    plain = tokenizer.config.object.get("tokenizer_class") in _PLAIN_CLASSES
    if plain and "eos_token" not in tokenizer.tokens:
        found.append(
            Finding(
                "no-eos-token",
                Level.WARN,
                "The tokenizer names no end-of-sequence token.",
                "Nothing tells the model where an answer ends, so it is not learned; TRL and most collators need one.",
                ("set eos_token in tokenizer_config.json to the token that ends an answer in the chat template",),
                _SOURCE,
            )
        )
    elif plain and "pad_token" not in tokenizer.tokens:
        found.append(
            Finding(
                "no-pad-token",
                Level.OK,
                "The tokenizer names no padding token.",
                "TRL's SFTTrainer takes the end-of-sequence token; other collators stop with: Asking to pad but the "
                "tokenizer does not have a padding token. Setting one that is not the end keeps the end in the loss.",
                source=_SOURCE,
            )
        )
    seen = rendered.get(tokenizer.used(tools=False) or "", Rendered())
    text = seen.texts.get("user+assistant", "")
    strange = [marker for marker in tokenizer.strange_markers if marker in text]
    if strange:
        found.append(
            Finding(
                "template-tokens-unknown",
                Level.WARN,
                f"The chat template writes {quote(', '.join(strange[:4]))}, for which this tokenizer has no token.",
                "Each is split into several pieces of plain text, which the model never saw as the mark of a turn. "
                "Usual where the template of another model was copied.",
                (
                    "use a template that is made of this tokenizer's own tokens",
                    "or add them as special tokens, `model.resize_token_embeddings(len(tokenizer))`, and train the new "
                    "rows with modules_to_save=[embed_tokens, lm_head]",
                ),
                _SOURCE,
            )
        )
    return found
