"""Plans a built-in shape without torch: its parameters, the records of AdamW, operations and memory by formulas.

The tests compare all of it with models of transformers, and with the plan that torch's own optimizer gives.
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

# Kinds that these formulas are of; transformers makes the models of others.
KINDS = {
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "phi3", "olmo2", "olmo3", "ministral3",
    "glm4", "granite", "exaone4", "smollm3", "gpt_oss",
}  # fmt: skip
# Those whose heads normalize queries and keys, or that normalize all queries and keys together.
_HEAD_NORMS, _WHOLE_NORMS = {"qwen3", "qwen3_moe", "gemma3_text", "exaone4"}, {"olmo2", "olmo3"}
# Those that normalize what a block adds, and among them those that do not normalize what it is given.
_ONLY_POST_NORMS = {"olmo2", "olmo3", "exaone4"}
_POST_NORMS = _ONLY_POST_NORMS | {"gemma3_text", "glm4"}
# Bytes for each token that the backward of a block takes, which is computed again: of a hidden state, of one for each
# chosen expert, of a feed-forward part (of each chosen expert), of queries, and of keys or values.
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
# Those that have one matrix for the gate and what it opens for.
_FUSED = {"phi3", "glm4"}


class _Sizes:
    """The sizes of a decoder, from its config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.kind: str = config["model_type"]
        self.hidden: int = config["hidden_size"]
        # Of the feed-forward part, or of each expert.
        self.wide: int = config.get("moe_intermediate_size", config["intermediate_size"])
        self.layers: int = config["num_hidden_layers"]
        self.head: int = config["head_dim"]
        # Widths of all heads of queries, and of all of keys or values.
        self.queries: int = self.head * config["num_attention_heads"]
        self.keys: int = self.head * config["num_key_value_heads"]
        self.vocabulary: int = config["vocab_size"]
        # 0: the feed-forward part is dense.
        self.experts: int = config.get("num_local_experts", config.get("num_experts", 0))
        # Experts that compute a token.
        self.chosen: int = config.get("num_experts_per_tok", 1)

    @property
    def block_bytes(self) -> float:
        """Bytes for each token that the backward of a block takes."""
        widths = self.hidden, self.hidden * self.chosen, self.wide * self.chosen, self.queries, self.keys
        each = _BLOCK_BYTES.get(self.kind, _PLAIN_BLOCK_BYTES)
        return sum(nbytes * width for nbytes, width in zip(each, widths, strict=True))

    @property
    def products(self) -> tuple[int, int]:
        """Elements of the matrices that a token meets in a block: of all, and of the last product."""
        attention = self.hidden * (2 * self.queries + 2 * self.keys)
        if self.experts:
            routed = self.hidden * (self.experts + 3 * self.chosen * self.wide)
            return attention + routed, 0
        # With nothing after it, the last product is not computed again.
        last = 0 if self.kind in _POST_NORMS else self.hidden * self.wide
        return attention + 3 * self.hidden * self.wide, last


def _attention(sizes: _Sizes) -> dict[str, tuple[int, ...]]:
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
    """The parameters of a decoder, by the names of transformers."""
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
    """The operations and memory of one forward and backward in 16 bits, with activation checkpointing."""
    sizes, tokens, length = _Sizes(config), batch.tokens, batch.length
    products, last = sizes.products
    # Half of causal attention is masked; its backward has five products where the forward has two.
    attention = 2 * tokens * length * sizes.queries * sizes.layers
    blocks = 2 * tokens * products * sizes.layers
    head = 2 * tokens * sizes.hidden * sizes.vocabulary
    again = blocks - 2 * tokens * last * sizes.layers + attention
    # The inputs of blocks, and the end of the forward in float32.
    kept = 2 * tokens * sizes.hidden * sizes.layers
    wide_end = {"gemma3_text", "olmo2", "olmo3", "gpt_oss"}
    end = tokens * ((10 if sizes.kind in wide_end else 8) * sizes.hidden + 28)
    # The gradient of the LM head.
    words = 2 * sizes.vocabulary * sizes.hidden
    if batch.loss == "full":
        # In float32: logits, their logarithms, and gradients; or the gradient, beside those that it is made of.
        logits, again_head = 12 * tokens * sizes.vocabulary, 0
        gradients = words + 2 * tokens * (sizes.vocabulary + sizes.hidden)
    else:
        # Gradients are summed in float32, and logits are made twice.
        tile = tile_bytes(tokens, sizes.vocabulary, sizes.hidden, on_host=batch.on_host)
        logits, again_head = 0, head
        gradients = 3 * words + 8 * tokens * sizes.hidden + tile
    # The gradient of all experts at once.
    routed = 4 * sizes.experts * sizes.wide * sizes.hidden + tokens * (
        18 * sizes.hidden + sizes.chosen * (8 * sizes.hidden + 5 * sizes.wide)
    )
    # A tied LM head's gradient waits for that of the embedding, and then there are both and their sum.
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
    """The model of a built-in shape, and AdamW."""
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
            # The updates of a master of its own write values, and read none.
            update_values="never" if narrow else "resident",
        )
    )


def _record(name: str, parameter: Sketch, unit: str, state: str | None) -> engines.Record:
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
