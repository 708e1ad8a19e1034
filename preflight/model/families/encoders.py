"""Encoder-decoder models (T5, BART, Whisper families) and encoders alone (BERT families)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from preflight.model.families.parts import MOST_LAYERS, architecture, embedding, linear, norm, parameter
from preflight.model_shape import Config, ConfigTrouble, Layers, LayoutUnknown, ModelShape, Module, read_dtype


def _layers(c: Config, *names: str) -> int:
    count = c.number(*names, least=1)
    if count is None:
        raise ConfigTrouble(f"none of {', '.join(names)} is set; without it nothing can be counted")
    if count > MOST_LAYERS:
        raise ConfigTrouble(f"{names[0]} is {count}; at most {MOST_LAYERS} are believed")
    return count


def t5(c: Config) -> ModelShape:
    """T5, mT5, UMT5. transformers 5 always ties the head to the shared embedding, whatever the file says."""
    hidden = c.number("d_model", "hidden_size", least=1) or 512
    inner, heads = c.number("d_ff", least=1) or 2048, c.number("num_heads", least=1) or 8
    wide = heads * (c.number("d_kv", least=1) or 64)
    layers = _layers(c, "num_layers")
    decoder_layers = c.number("num_decoder_layers", least=1) or layers
    gated = (c.word("feed_forward_proj", default="relu") or "").startswith("gated")
    buckets = c.number("relative_attention_num_buckets", default=32) or 32
    rows = c.need("vocab_size")
    every = c.model_type == "umt5"  # UMT5 has relative positions in every layer, T5 only in the first

    def attention(at: str, name: str) -> list[Module]:
        return [linear(f"{at}.{name}.{part}", hidden, wide) for part in ("q", "k", "v")] + [
            linear(f"{at}.{name}.o", wide, hidden)
        ]

    def stack(name: str, count: int, cross: bool) -> tuple[list[Layers], list[Module]]:
        at = f"{name}.block.*.layer.*"
        names = ("wi_0", "wi_1") if gated else ("wi",)
        modules = [
            *attention(at, "SelfAttention"),
            *(attention(at, "EncDecAttention") if cross else []),
            *(linear(f"{at}.DenseReluDense.{part}", hidden, inner) for part in names),
            linear(f"{at}.DenseReluDense.wo", inner, hidden),
            norm(f"{at}.layer_norm", hidden, each=3 if cross else 2),
        ]
        positions = embedding(f"{name}.block.*.layer.*.SelfAttention.relative_attention_bias", buckets, heads)
        outside = [norm(f"{name}.final_layer_norm", hidden)]
        if every:
            modules.append(positions)
        else:
            outside.append(positions)
        kind = "decoder" if cross else "encoder"
        return [Layers(count, "attention", tuple(modules), stack=kind, cross_attention=cross)], outside

    encoder, encoder_rest = stack("encoder", layers, False)
    decoder, decoder_rest = stack("decoder", decoder_layers, True)
    return ModelShape(
        model_type=c.model_type, architecture=architecture(c.raw), structure="known", hidden_size=hidden,
        layers=decoder_layers, heads=heads, kv_heads=heads, head_dim=wide // heads, intermediate_size=inner,
        vocab_size=rows, max_position=c.number("n_positions"), gated_mlp=gated,
        activation=c.word("feed_forward_proj"), tied_embeddings=True, dtype=read_dtype(c.raw),
        groups=(*decoder, *encoder), rest=(embedding("shared", rows, hidden), *encoder_rest, *decoder_rest),
        encoder_decoder=True,
    )  # fmt: skip


def bart(c: Config) -> ModelShape:
    """BART, mBART, Pegasus, Marian, M2M-100 and Whisper: the layers of the first Transformer."""
    kind = c.model_type or ""
    whisper = kind == "whisper"
    if (architecture(c.raw) or "").endswith("ForCausalLM"):
        raise LayoutUnknown(f"{kind}: only its decoder is asked for, which is not laid out here")
    hidden = c.number("d_model", "hidden_size", least=1) or 1024
    heads = c.number("decoder_attention_heads", least=1) or 16
    rows = c.need("vocab_size")

    def block(at: str, inner: int, cross: bool) -> tuple[Module, ...]:
        made: list[Module] = []
        for name in ("self_attn", "encoder_attn") if cross else ("self_attn",):
            for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
                made.append(linear(f"{at}.{name}.{part}", hidden, hidden, not (whisper and part == "k_proj")))
            made.append(norm(f"{at}.{name}_layer_norm", hidden, True))
        made += [linear(f"{at}.fc1", hidden, inner, True), linear(f"{at}.fc2", inner, hidden, True)]
        return (*made, norm(f"{at}.final_layer_norm", hidden, True))

    inner = c.number("decoder_ffn_dim", least=1) or 4096
    encoder = Layers(_layers(c, "encoder_layers"), "attention",
                     block("model.encoder.layers.*", c.number("encoder_ffn_dim", least=1) or inner, False),
                     stack="encoder")  # fmt: skip
    decoder = Layers(_layers(c, "decoder_layers"), "attention", block("model.decoder.layers.*", inner, True),
                     cross_attention=True)  # fmt: skip
    rest: list[Module] = [embedding("model.decoder.embed_tokens" if whisper else "model.shared", rows, hidden)]
    if whisper:
        mels = c.number("num_mel_bins", default=80, least=1) or 80
        rest += [
            parameter("model.encoder.conv1", hidden, mels, 3, kind="conv", bias=hidden),
            parameter("model.encoder.conv2", hidden, hidden, 3, kind="conv", bias=hidden),
            embedding("model.encoder.embed_positions", c.number("max_source_positions") or 1500, hidden),
            embedding("model.decoder.embed_positions", c.number("max_target_positions") or 448, hidden),
            norm("model.encoder.layer_norm", hidden, True),
            norm("model.decoder.layer_norm", hidden, True),
        ]
    else:
        positions = c.common("max_position") or 1024
        if kind in ("bart", "mbart"):
            rest += [
                embedding(f"model.{part}.embed_positions", positions + 2, hidden) for part in ("encoder", "decoder")
            ]
            rest += [norm(f"model.{part}.layernorm_embedding", hidden, True) for part in ("encoder", "decoder")]
        elif kind in ("pegasus", "marian"):  # sinusoids, stored as parameters
            rest += [embedding(f"model.{part}.embed_positions", positions, hidden) for part in ("encoder", "decoder")]
        if kind in ("mbart", "pegasus", "m2m_100"):
            rest += [norm(f"model.{part}.layer_norm", hidden, True) for part in ("encoder", "decoder")]
    tied = c.flag("tie_word_embeddings", default=True)
    if not tied:
        rest.append(linear("lm_head", hidden, rows))
    return ModelShape(
        model_type=kind, architecture=architecture(c.raw), structure="known", hidden_size=hidden,
        layers=decoder.count, heads=heads, kv_heads=heads, head_dim=hidden // heads, intermediate_size=inner,
        vocab_size=rows, max_position=c.common("max_position"), gated_mlp=False,
        activation=c.word("activation_function"), tied_embeddings=tied, dtype=read_dtype(c.raw),
        groups=(decoder, encoder), rest=tuple(rest), encoder_decoder=True,
    )  # fmt: skip


def bert(c: Config) -> ModelShape:
    """BERT and RoBERTa; the head that its architecture names is counted."""
    hidden, layers, heads = c.need("hidden_size"), _layers(c, "num_hidden_layers"), c.common("heads") or 12
    inner, rows = c.common("intermediate_size") or 3072, c.need("vocab_size")
    base = "roberta" if "roberta" in (c.model_type or "") else "bert"
    at = f"{base}.encoder.layer.*"
    modules = (
        *(linear(f"{at}.attention.self.{part}", hidden, hidden, True) for part in ("query", "key", "value")),
        linear(f"{at}.attention.output.dense", hidden, hidden, True),
        norm(f"{at}.attention.output.LayerNorm", hidden, True),
        linear(f"{at}.intermediate.dense", hidden, inner, True),
        linear(f"{at}.output.dense", inner, hidden, True),
        norm(f"{at}.output.LayerNorm", hidden, True),
    )
    positions = c.number("max_position_embeddings", default=512, least=1) or 512
    kinds = c.number("type_vocab_size", default=2) or 0
    rest: list[Module] = [
        embedding(f"{base}.embeddings.word_embeddings", rows, hidden),
        embedding(f"{base}.embeddings.position_embeddings", positions, hidden),
        embedding(f"{base}.embeddings.token_type_embeddings", kinds, hidden),
        norm(f"{base}.embeddings.LayerNorm", hidden, True),
    ]
    name = architecture(c.raw) or ""
    if name.endswith(("ForMaskedLM", "LMHeadModel", "ForCausalLM", "ForPreTraining")):
        head = "lm_head" if base == "roberta" else "cls.predictions.transform"
        rest += [
            linear(f"{head}.dense", hidden, hidden, True),
            norm(f"{head}.{'layer_norm' if base == 'roberta' else 'LayerNorm'}", hidden, True),
            parameter(f"{head}.bias", rows),
        ]
    if name.endswith("ForPreTraining"):
        rest += [linear("cls.seq_relationship", hidden, 2, True)]
    if name.endswith("ForSequenceClassification"):
        labels = c.raw.get("id2label")
        number = len(labels) if isinstance(labels, dict) and labels else 2
        if base == "roberta":
            rest.append(linear("classifier.dense", hidden, hidden, True))
        rest.append(linear("classifier.out_proj" if base == "roberta" else "classifier", hidden, number, True))
    pooled = name.endswith(("Model", "ForPreTraining", "ForNextSentencePrediction", "ForMultipleChoice")) and bool(name)
    if (pooled and not name.endswith("LMHeadModel")) or (name.endswith("ForSequenceClassification") and base == "bert"):
        rest.append(linear(f"{base}.pooler.dense", hidden, hidden, True))
    if name.endswith("Model") and not name.endswith("LMHeadModel"):  # the bare model has no prefix
        modules = tuple(replace(m, path=m.path.removeprefix(f"{base}.")) for m in modules)
        rest = [replace(m, path=m.path.removeprefix(f"{base}.")) for m in rest]
    return ModelShape(
        model_type=c.model_type, architecture=architecture(c.raw), structure="known", hidden_size=hidden, layers=layers,
        heads=heads, kv_heads=heads, head_dim=hidden // heads, intermediate_size=inner, vocab_size=rows,
        max_position=positions - 2 if base == "roberta" else positions, gated_mlp=False,
        activation=c.word("hidden_act"), tied_embeddings=True, dtype=read_dtype(c.raw),
        groups=(Layers(layers, "attention", modules, stack="encoder"),), rest=tuple(rest), encoder_only=True,
        head_path="cls.predictions.decoder",
    )  # fmt: skip


BUILDERS: dict[str, Callable[[Config], ModelShape]] = {
    "t5": t5,
    "mt5": t5,
    "umt5": t5,
    "bart": bart,
    "mbart": bart,
    "pegasus": bart,
    "marian": bart,
    "m2m_100": bart,
    "whisper": bart,
    "bert": bert,
    "roberta": bert,
    "xlm-roberta": bert,
}
