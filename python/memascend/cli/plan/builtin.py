"""Plans the training of a built-in model shape by AdamW, without torch: computes operations and memory by formulas.

The tests compare the results of the formulas with traces of transformers' models, and with plans for torch's AdamW.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

from memascend import storage as engines
from memascend.cli.plan.subject import Subject, Trace, tile_bytes
from memascend.plan.decision import Decision, Facts, decided
from memascend.plan.outline import Dtype, Outline, Sketch
from memascend.plan.units import find_units

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.cli.plan.subject import Batch
    from memascend.plan.options import Options
    from memascend.plan.units import Unit

# The values of `model_type` for which this module has formulas. Models of all other kinds are made by transformers.
KINDS = {
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "phi3", "olmo2", "olmo3", "ministral3",
    "glm4", "granite", "exaone4", "smollm3", "gpt_oss",
}  # fmt: skip
# Kinds that normalize queries and keys. Kinds in `_HEAD_NORMS` normalize each head alone. Kinds in `_WHOLE_NORMS`
# normalize all heads together.
_HEAD_NORMS, _WHOLE_NORMS = {"qwen3", "qwen3_moe", "gemma3_text", "exaone4"}, {"olmo2", "olmo3"}
# Kinds that normalize the outputs of attention and of the feed-forward part. Kinds in `_ONLY_POST_NORMS` do not
# normalize the inputs of attention and of the feed-forward part.
_ONLY_POST_NORMS = {"olmo2", "olmo3", "exaone4"}
_POST_NORMS = _ONLY_POST_NORMS | {"gemma3_text", "glm4"}
# For some kinds, five factors that give the bytes of a block's activations at the peak of the block's backward. All
# other kinds have the factors in `_PLAIN_BLOCK_BYTES`. For each token, the bytes are a sum of five products, and each
# product is a factor in bytes times a width. The widths are, in order: the hidden state, the hidden states of all
# chosen experts, the feed-forward parts of all chosen experts, queries, keys.
_BLOCK_BYTES = {
    "qwen3": (18, 0, 12, 14, 6),
    "phi3": (18, 0, 12, 10, 0),
    "gemma3_text": (54, 0, 8, 16, 8),
    "olmo2": (36, 0, 8, 16, 8),
    "olmo3": (36, 0, 8, 16, 8),
    "glm4": (48, 0, 8, 10, 0),
    "exaone4": (34, 0, 8, 14, 6),
    "qwen3_moe": (18, 10, 8, 14, 6),
    "mixtral": (18, 10, 10, 6, 0),
    "gpt_oss": (18, 10, 17.7, 10, 0),
}
_PLAIN_BLOCK_BYTES = (18, 0, 12, 8, 0)
# Kinds without experts that have a single matrix for the gate projection and the up projection.
_FUSED = {"phi3", "glm4"}


class _Sizes:
    """The sizes of a decoder, read from the decoder's config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.kind: str = config["model_type"]
        self.hidden: int = config["hidden_size"]
        # The width of the feed-forward part, or of each expert.
        self.wide: int = config.get("moe_intermediate_size", config["intermediate_size"])
        self.layers: int = config["num_hidden_layers"]
        self.head: int = config["head_dim"]
        # The width of all query heads together, and of all key heads together. Values have the same width as keys.
        self.queries: int = self.head * config["num_attention_heads"]
        self.keys: int = self.head * config["num_key_value_heads"]
        self.vocabulary: int = config["vocab_size"]
        # The number of experts in a block. 0: the feed-forward part is dense.
        self.experts: int = config.get("num_local_experts", config.get("num_experts", 0))
        # The number of experts that compute a token. 1 if the feed-forward part is dense.
        self.chosen: int = config.get("num_experts_per_tok", 1)

    @property
    def block_bytes(self) -> float:
        """The bytes of activations for each token at the peak of a block's backward."""
        widths = self.hidden, self.hidden * self.chosen, self.wide * self.chosen, self.queries, self.keys
        each = _BLOCK_BYTES.get(self.kind, _PLAIN_BLOCK_BYTES)
        return sum(nbytes * width for nbytes, width in zip(each, widths, strict=True))

    @property
    def products(self) -> tuple[int, int]:
        """The number of matrix elements by which a block multiplies each token, and how many a recomputation skips."""
        attention = self.hidden * (2 * self.queries + 2 * self.keys)
        if self.experts:
            routed = self.hidden * (self.experts + 3 * self.chosen * self.wide)
            return attention + routed, 0
        # Activation checkpointing recomputes a block up to the last tensor that the backward needs. The recomputation
        # skips the block's last product, except if a norm follows this product. The second returned number is 0 if
        # nothing is skipped.
        last = 0 if self.kind in _POST_NORMS else self.hidden * self.wide
        return attention + 3 * self.hidden * self.wide, last


def _attention(sizes: _Sizes) -> dict[str, tuple[int, ...]]:
    """Returns, by name, the shapes of the attention's parameters in a block."""
    hidden, queries, keys = sizes.hidden, sizes.queries, sizes.keys
    biased = {"gpt_oss": "qkvo", "qwen2": "qkv", "glm4": "qkv"}.get(sizes.kind, "")
    shapes: dict[str, tuple[int, ...]] = {}
    if sizes.kind == "gpt_oss":
        shapes["sinks"] = (queries // sizes.head,)
    if sizes.kind == "phi3":
        shapes["o_proj.weight"] = (hidden, queries)
        shapes["qkv_proj.weight"] = (queries + 2 * keys, hidden)
        return shapes
    for part, out, into in (("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, queries)):
        shapes[f"{part}_proj.weight"] = (out, into)
        if part in biased:
            shapes[f"{part}_proj.bias"] = (out,)
    if sizes.kind in _HEAD_NORMS | _WHOLE_NORMS:
        whole = sizes.kind in _WHOLE_NORMS
        shapes["q_norm.weight"] = (queries if whole else sizes.head,)
        shapes["k_norm.weight"] = (keys if whole else sizes.head,)
    return shapes


def _feed_forward(sizes: _Sizes) -> dict[str, tuple[int, ...]]:
    """Returns, by name, the shapes of the feed-forward part's parameters in a block."""
    hidden, wide, experts = sizes.hidden, sizes.wide, sizes.experts
    if sizes.kind == "gpt_oss":
        return {
            "router.weight": (experts, hidden),
            "router.bias": (experts,),
            "experts.gate_up_proj": (experts, hidden, 2 * wide),
            "experts.gate_up_proj_bias": (experts, 2 * wide),
            "experts.down_proj": (experts, wide, hidden),
            "experts.down_proj_bias": (experts, hidden),
        }
    if experts:
        gate = {"gate.weight": (experts, hidden)}
        matrices = {
            "experts.gate_up_proj": (experts, 2 * wide, hidden),
            "experts.down_proj": (experts, hidden, wide),
        }
        return {**gate, **matrices} if sizes.kind == "mixtral" else {**matrices, **gate}
    if sizes.kind in _FUSED:
        return {"gate_up_proj.weight": (2 * wide, hidden), "down_proj.weight": (hidden, wide)}
    return {
        "gate_proj.weight": (wide, hidden),
        "up_proj.weight": (wide, hidden),
        "down_proj.weight": (hidden, wide),
    }


def outline(config: Mapping[str, Any], dtype: Dtype) -> Outline:
    """Returns an `Outline` of a decoder. The parameters have the same names as in transformers."""
    sizes = _Sizes(config)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if sizes.kind in _ONLY_POST_NORMS:
        norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
    elif sizes.kind == "glm4":
        norms += ["post_self_attn_layernorm", "post_mlp_layernorm"]
    elif sizes.kind in _POST_NORMS:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    block = {f"self_attn.{name}": shape for name, shape in _attention(sizes).items()}
    block |= {f"mlp.{name}": shape for name, shape in _feed_forward(sizes).items()}
    block |= {f"{name}.weight": (sizes.hidden,) for name in norms}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocabulary, sizes.hidden)}
    for layer in range(sizes.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (sizes.hidden,)
    shapes["lm_head.weight"] = (sizes.vocabulary, sizes.hidden)
    tree = Outline.of(shapes, dtype)
    if config["tie_word_embeddings"]:
        tree.children["lm_head"].own["weight"] = tree.children["model"].children["embed_tokens"].own["weight"]
    return tree


def traced(config: Mapping[str, Any], batch: Batch) -> Trace:
    """Computes the operations and the memory of one forward and backward with activation checkpointing, in 16 bits."""
    sizes, tokens, length = _Sizes(config), batch.tokens, batch.length
    products, last = sizes.products
    # Attention has two matrix products in a forward, and five in a backward. Half of each product is masked.
    attention = 2 * tokens * length * sizes.queries * sizes.layers
    blocks = 2 * tokens * products * sizes.layers
    head = 2 * tokens * sizes.hidden * sizes.vocabulary
    again = blocks - 2 * tokens * last * sizes.layers + attention
    # `kept`: bytes of the inputs of all blocks, which activation checkpointing keeps. `end`: bytes of the activations
    # after the last block, some of them in float32.
    kept = 2 * tokens * sizes.hidden * sizes.layers
    wide_end = {"gemma3_text", "olmo2", "olmo3", "gpt_oss"}
    end = tokens * ((10 if sizes.kind in wide_end else 8) * sizes.hidden + 28)
    # The bytes of the LM head's gradient.
    words = 2 * sizes.vocabulary * sizes.hidden
    if batch.loss == "full":
        # At the LM head, the memory has two peaks, and `peak` below uses the larger one. The first peak is `logits`:
        # the bytes of the logits, of the log-softmax, and of the gradient of the logits, all in float32. The second
        # peak is `gradients`: the bytes of the LM head's gradient, and of the 16-bit gradients of logits and hidden
        # states.
        logits, again_head = 12 * tokens * sizes.vocabulary, 0
        gradients = words + 2 * tokens * (sizes.vocabulary + sizes.hidden)
    else:
        # A chunked loss sums gradients in float32, and the backward computes the logits again.
        tile = tile_bytes(tokens, sizes.vocabulary, sizes.hidden, on_host=batch.on_host)
        logits, again_head = 0, head
        gradients = 3 * words + 8 * tokens * sizes.hidden + tile
    # The bytes of the gradient of `experts.gate_up_proj` in a block, and of activations that exist at the same time.
    routed = 4 * sizes.experts * sizes.wide * sizes.hidden + tokens * (
        18 * sizes.hidden + sizes.chosen * (8 * sizes.hidden + 5 * sizes.wide)
    )
    # If the LM head is tied to the embedding, the LM head's gradient waits until the embedding's gradient exists. At
    # the end, the two gradients and their sum exist at the same time (3 * waiting).
    waiting = words if config["tie_word_embeddings"] else 0
    block = waiting + max(int(tokens * sizes.block_bytes), routed if sizes.experts else 0)
    peak = max(kept + end + max(logits, gradients), kept + block, 3 * waiting)
    of_logits = logits if peak == kept + end + logits else 0
    at_head = peak == kept + end + gradients and batch.loss == "chunked"
    of_parameters = 0 if of_logits else min(peak, 3 * words if at_head else words)
    return Trace(
        tokens=tokens,
        forward=blocks + attention + head,
        backward=2 * (blocks + head) + attention * 5 // 2 + again + again_head,
        peak=peak,
        held={
            "logits and their gradients": of_logits,
            "gradients of parameters": of_parameters,
            "activations": peak - of_logits - of_parameters,
        },
        kept=kept + end,
        recomputes=True,
        loss=batch.loss,
    )


def subject(name: str, config: Mapping[str, Any], dtype: str) -> Subject:
    """Describes the training of a built-in shape by AdamW."""
    tree = outline(config, Dtype(dtype))
    parameters = dict(tree.named_parameters())
    count = sum(parameter.numel() for parameter in parameters.values())
    units = find_units(tree)
    tied = parameters["model.embed_tokens.weight"].nbytes if config["tie_word_embeddings"] else 0

    @functools.cache
    def plan(options: Options, ranks: int) -> Decision:
        assert ranks == 1, "several ranks are planned with torch"
        return _planned(units, parameters, options)

    return Subject(
        by=f"the shape of {name}",
        parameters=count,
        trained=count,
        tied_bytes=tied,
        dtype=dtype,
        longest=config["max_position_embeddings"],
        checkpointing="gradient_checkpointing_enable",
        plan=plan,
        trace=functools.cache(functools.partial(traced, config)),
    )


def _planned(units: tuple[Unit, ...], parameters: Mapping[str, Sketch], options: Options) -> Decision:
    """Makes the same plan as `offload()` with torch's AdamW."""
    narrow = next(iter(parameters.values())).dtype == "float16"
    return decided(
        Facts(
            options=options,
            units=units,
            records=[
                _record(name, parameters[name], unit.name, options.state) for unit in units for name in unit.parameters
            ],
            optimizer="AdamW",
            gradient_bytes={name: parameter.nbytes for name, parameter in parameters.items()},
            replayed=frozenset(parameters),
            durability=options.durability,
            staged=options.computes_on != "cpu",
            unplaced=options.paths is None,
            # A float16 parameter has a separate float32 master weight. The update reads the master weight, and writes
            # the float16 values without reading them.
            update_values="never" if narrow else "resident",
        )
    )


def _record(name: str, parameter: Sketch, unit: str, state: str | None) -> engines.Record:
    """Describes the record of a parameter, with the state that AdamW keeps. `state` is the format of this state."""
    width = "" if state in (None, "fp32") else str(state)
    if width == "8bit" and (parameter.numel() < engines.MIN_8BIT_SIZE or name == "model.embed_tokens.weight"):
        width = ""
    form = f"compact {width}" if width and parameter.dtype == "bfloat16" else width
    kept = form or ("compact" if parameter.dtype == "bfloat16" else "")
    plain = ["exp_avg", "exp_avg_sq"] if parameter.dtype == "float32" else ["master", "exp_avg", "exp_avg_sq"]
    described = (
        engines.described_state(parameter.dtype, parameter.shape, kept)
        if kept
        else [(of, "float32", list(parameter.shape)) for of in plain]
    )
    return engines.Record(
        name=name,
        values=cast("Any", parameter),
        state={of: cast("Any", Sketch(tuple(shape), Dtype(dtype))) for of, dtype, shape in described},
        unit=unit,
        spill=cast("Any", parameter.dtype),
        format=form or None,
    )
