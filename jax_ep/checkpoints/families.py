"""Where the checkpoints of each model family keep their MoE layers, and what their `config.json` calls the options.

`FAMILIES` has one row per `model_type`. Its facts are those of Hugging Face's model code and of the checkpoints
published for it; the names of parameters and options are those of `jax_ep.flax.MoE`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax_ep.checkpoints.files import short
from jax_ep.checkpoints.shards import Region, whole
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.types import Experts

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}
"""Names in `hidden_act`, and what `jax_ep.Experts` calls the same functions."""
REQUIRED = object()


class Rule(NamedTuple):
    """What a field of `config.json` may hold: values of these types; numbers, also those of a list, in a range."""

    kind: str
    types: tuple[type, ...]
    least: float = 0
    most: float = 0

    def allows(self, value: Any) -> bool:
        """Whether the value keeps the rule."""
        if self.types == (list,):
            each = self._replace(types=(int,))
            return type(value) is list and all(map(each.allows, value)) and len(set(value)) == len(value)
        return type(value) in self.types and (not self.most or self.least <= value <= self.most)

    def __str__(self) -> str:
        return f"{self.kind} from {self.least} to {self.most}" if self.most else self.kind


def _int(least: int, most: int) -> Rule:
    return Rule("an int", (int,), least, most)


def _number(least: float, most: float) -> Rule:
    return Rule("a number", (int, float), least, most)


_MAX_LAYERS, _MAX_SIZE, _MAX_EXPERTS, _MAX_FACTOR = 10_000, 1 << 24, 1 << 16, 1 << 20
_SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_group", "topk_group")
_FIRST_LAYERS = ("first_k_dense_replace", "moe_layer_start_index")
_STEPS = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step", "moe_layer_freq")
_EXTRA_EXPERTS = ("n_shared_experts", "moe_num_shared_experts", "zero_expert_num")
_FACTORS = ("routed_scaling_factor", "swiglu_alpha", "swiglu_limit")
SCHEMA: Mapping[str, Rule] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", *_FIRST_LAYERS), _int(0, _MAX_LAYERS)),
    "moe_layer_end_index": _int(-1, _MAX_LAYERS),
    **dict.fromkeys(_STEPS, _int(1, _MAX_LAYERS)),
    **dict.fromkeys(("mlp_only_layers", "moe_layers"), Rule("a list of different ints", (list,), 0, _MAX_LAYERS)),
    **dict.fromkeys((*_SIZES, "shared_expert_intermediate_size"), _int(1, _MAX_SIZE)),
    **dict.fromkeys((*_COUNTS, "num_experts_per_tok", "moe_k", "moe_topk"), _int(1, _MAX_EXPERTS)),
    **dict.fromkeys(_EXTRA_EXPERTS, _int(0, _MAX_EXPERTS)),
    **dict.fromkeys(_FACTORS, _number(1 / _MAX_FACTOR, _MAX_FACTOR)),
    "router_jitter_noise": _number(0, 1),
    **dict.fromkeys(("norm_topk_prob", "mlp_bias", "use_bias", "router_bias"), Rule("true or false", (bool,))),
    **dict.fromkeys(("hidden_act", "topk_method", "scoring_func", "quant_method"), Rule("text", (str,))),
    **dict.fromkeys(("text_config", "quantization_config"), Rule("an object", (dict,))),
}
"""Every field of `config.json` that is read, for all families: numbers are bounded before anything depends on them."""


class Key(NamedTuple):
    """A value of `config.json`: the names it may have there, and what a missing or empty one means."""

    names: tuple[str, ...]
    default: Any = REQUIRED
    only_if: tuple[str, Any] | None = None  # another name and its value; else the default


def key(*names: str, default: Any = REQUIRED, only_if: tuple[str, Any] | None = None) -> Key:
    """A `Key` of these names."""
    return Key(names, default, only_if)


class Stored(NamedTuple):
    """The tensors of one parameter: `{expert}` in a name stands for one tensor per expert.

    Attributes:
      names: tensors that stand side by side in the parameter: gates before what they multiply.
      transposed: the tensors are `[..., out, in]`; parameters are `[..., in, out]`.
      leading_one: the tensors have a first axis of size one, which the parameter lacks.
    """

    names: tuple[str, ...]
    transposed: bool = True
    leading_one: bool = False

    @property
    def per_expert(self) -> bool:
        """One tensor per expert."""
        return "{expert}" in self.names[0]

    def shape(self, region: Region) -> tuple[int, ...]:
        """Of the tensor that is this region of the parameter."""
        sizes = tuple(part.stop - part.start for part in region)
        return (1,) * self.leading_one + sizes[1 if self.per_expert else 0 :]

    def below(self, prefix: str) -> Stored:
        """The same tensors of one layer."""
        return self._replace(names=tuple(prefix + name for name in self.names))

    def places(self, shape: tuple[int, ...]) -> Iterator[tuple[str, Region]]:
        """The tensors of a parameter, which has this shape as it is stored, and the region of it that each one is."""
        for expert in range(shape[0] if self.per_expert else 1):
            for i, name in enumerate(self.names):
                region = list(whole(shape))
                if self.per_expert:
                    region[0] = slice(expert, expert + 1)
                if len(self.names) > 1:
                    width = shape[-2] // len(self.names)
                    region[-2] = slice(i * width, (i + 1) * width)
                yield name.format(expert=expert), tuple(region)


class Layers(NamedTuple):
    """Which decoder layers are MoE: those of `first` to `last` at every `step`, but for `dense`; or those `listed`."""

    count: Any = key("num_hidden_layers")
    first: Any = 0
    last: Any = -1
    step: Any = 1
    dense: Any = ()
    listed: Any = None


ALL_LAYERS = Layers()


class Refused(NamedTuple):
    """A value of `config.json` that must be missing or one of `allowed`, or else `why` is told.

    `of` is "routing" where the parameters can be read all the same, and "weights" where some would be left out.
    """

    name: str
    allowed: tuple[Any, ...]
    why: str
    of: str = "routing"


Form = dict[str, Stored]


@dataclasses.dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
      forms: names of the tensors by parameter, below the prefix of the layer; a checkpoint has one of these forms, and
        the first is the one that is written.
      options: keywords of `jax_ep.flax.MoE`, with a value or a `Key` each, beside the hidden size; scores are those of
        "softmax", renormalised, where nothing else is said.
      experts: fields of `jax_ep.Experts`, likewise, beside the activation.
      layers: which layers are MoE.
      refused: what of this family the package does not have.
      prefix: what names of the tensors of a layer begin with.
      section: the part of `config.json` that describes the decoder, where it is not the whole.
    """

    forms: tuple[Form, ...]
    options: Mapping[str, Any]
    experts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layers: Layers = ALL_LAYERS
    refused: tuple[Refused, ...] = ()
    prefix: str = "model.layers.{layer}."
    section: str | None = None


def _each(block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Form:
    """Three tensors per expert."""
    one = f"{block}.experts.{{expert}}"
    return {
        "w_gate_up": Stored((f"{one}.{gate}.weight", f"{one}.{up}.weight")),
        "w_down": Stored((f"{one}.{down}.weight",)),
    }


def _fused(block: str, *, suffix: str = "", transposed: bool = True) -> Form:
    """Two tensors for all experts."""
    return {
        "w_gate_up": Stored((f"{block}.experts.gate_up_proj{suffix}",), transposed),
        "w_down": Stored((f"{block}.experts.down_proj{suffix}",), transposed),
    }


def _shared(name: str) -> Form:
    """Three tensors for all shared experts."""
    return {
        "shared_gate_up": Stored((f"{name}.gate_proj.weight", f"{name}.up_proj.weight")),
        "shared_down": Stored((f"{name}.down_proj.weight",)),
    }


def _bias(name: str, *, leading_one: bool = False) -> Form:
    """The bias of the selection."""
    return {"router_bias": Stored((f"{name}e_score_correction_bias",), False, leading_one)}


def _router(name: str) -> Form:
    return {"router": Stored((f"{name}.weight",))}


_OF_ALL: dict[str, Any] = {"hidden_size": key("hidden_size"), "score": "softmax", "renormalize": True}
_TOP_K = key("num_experts_per_tok")
_LOCAL: dict[str, Any] = {
    "intermediate_size": key("intermediate_size"),
    "num_experts": key("num_local_experts", "num_experts"),
    "num_experts_per_tok": _TOP_K,
}
_QWEN: dict[str, Any] = {
    "intermediate_size": key("moe_intermediate_size"),
    "num_experts": key("num_experts", "num_local_experts"),
    "num_experts_per_tok": _TOP_K,
    "renormalize": key("norm_topk_prob", default=False),
}
_QWEN_LAYERS = Layers(step=key("decoder_sparse_step", default=1), dense=key("mlp_only_layers", default=()))
_DEEPSEEK: dict[str, Any] = {
    "intermediate_size": key("moe_intermediate_size"),
    "num_experts": key("n_routed_experts", "num_local_experts", "num_experts"),
    "num_experts_per_tok": _TOP_K,
    "num_shared_experts": key("n_shared_experts", default=0),
    "routed_scale": key("routed_scaling_factor", default=1.0),
}
_DEEPSEEK_V3 = _DEEPSEEK | {
    "score": "sigmoid",
    "renormalize": key("norm_topk_prob", default=True),
    "num_groups": key("n_group", default=1),
    "topk_groups": key("topk_group", default=1),
    "group_score": "top2_sum",
    "bias_routing": True,
}
_DEEPSEEK_LAYERS = Layers(first=key("first_k_dense_replace", default=0))
_EVERY_LAYER = Refused("moe_layer_freq", (1,), "dense layers between MoE layers are not known here", "weights")
_SIGMOID = Refused("scoring_func", ("sigmoid",), "the router of this family is known with sigmoid scores alone")
_DEEPSEEK_V3_FORMS = tuple(
    _router("mlp.gate") | _bias("mlp.gate.") | experts | _shared("mlp.shared_experts")
    for experts in (_each("mlp"), _fused("mlp"))
)
_MIXTRAL_EACH = _router("block_sparse_moe.gate") | _each("block_sparse_moe", "w1", "w3", "w2")
_GPT_OSS = (
    _router("mlp.router")
    | {"b_router": Stored(("mlp.router.bias",), False)}
    | {"b_gate_up": Stored(("mlp.experts.gate_up_proj_bias",), False)}
    | {"b_down": Stored(("mlp.experts.down_proj_bias",), False)}
)
_LLAMA4 = Family(
    forms=(
        _router("feed_forward.router")
        | _fused("feed_forward", transposed=False)
        | _shared("feed_forward.shared_expert"),
    ),
    options=_LOCAL | {"score": "sigmoid", "renormalize": False, "num_shared_experts": 1},
    experts={"weight_on": "input"},
    layers=Layers(step=key("interleave_moe_layer_step", default=1), listed=key("moe_layers", default=None)),
)

FAMILIES: Mapping[str, Family] = {
    "mixtral": Family((_MIXTRAL_EACH, _router("mlp.gate") | _fused("mlp")), _LOCAL),
    "qwen2_moe": Family(
        forms=tuple(
            _router("mlp.gate")
            | experts
            | _shared("mlp.shared_expert")
            | {"shared_gate": Stored(("mlp.shared_expert_gate.weight",))}
            for experts in (_each("mlp"), _fused("mlp"))
        ),
        options=_QWEN
        | {
            "num_shared_experts": 1,
            "shared_intermediate_size": key("shared_expert_intermediate_size"),
            "shared_expert_gate": True,
        },
        layers=_QWEN_LAYERS,
    ),
    "qwen3_moe": Family(
        forms=tuple(_router("mlp.gate") | experts for experts in (_each("mlp"), _fused("mlp"))),
        options=_QWEN,
        layers=_QWEN_LAYERS,
    ),
    "olmoe": Family(
        forms=tuple(_router("mlp.gate") | experts for experts in (_each("mlp"), _fused("mlp"))),
        options=_QWEN | {"intermediate_size": key("intermediate_size")},
    ),
    "deepseek_v2": Family(
        forms=tuple(
            _router("mlp.gate") | experts | _shared("mlp.shared_experts") for experts in (_each("mlp"), _fused("mlp"))
        ),
        options=_DEEPSEEK
        | {
            "renormalize": False,
            "num_groups": key("n_group", default=1, only_if=("topk_method", "group_limited_greedy")),
            "topk_groups": key("topk_group", default=1, only_if=("topk_method", "group_limited_greedy")),
            "group_score": "max",
        },
        layers=_DEEPSEEK_LAYERS,
        refused=(
            Refused("topk_method", ("greedy", "group_limited_greedy"), "DeepSeek-V2's router knows these alone"),
            Refused("scoring_func", ("softmax",), "DeepSeek-V2's router is known with softmax scores alone"),
            Refused("norm_topk_prob", (False,), "published models of this family do not renormalise"),
            Refused("mlp_bias", (False,), "shared experts have no biases here", "weights"),
            _EVERY_LAYER,
        ),
    ),
    "deepseek_v3": Family(
        forms=_DEEPSEEK_V3_FORMS,
        options=_DEEPSEEK_V3,
        layers=_DEEPSEEK_LAYERS,
        refused=(_SIGMOID, Refused("topk_method", ("noaux_tc",), "DeepSeek-V3's router knows it alone"), _EVERY_LAYER),
    ),
    "glm4_moe": Family(forms=_DEEPSEEK_V3_FORMS, options=_DEEPSEEK_V3, layers=_DEEPSEEK_LAYERS),
    "minimax_m2": Family(
        forms=(
            _MIXTRAL_EACH | _bias("block_sparse_moe."),
            _router("mlp.gate") | _fused("mlp") | _bias("mlp."),
        ),
        options=_LOCAL | {"score": "sigmoid", "bias_routing": True},
        refused=(_SIGMOID,),
    ),
    "ernie4_5_moe": Family(
        forms=(
            _router("mlp.gate")
            | _bias("mlp.moe_statics.", leading_one=True)
            | _each("mlp")
            | _shared("mlp.shared_experts"),
            _router("mlp.gate")
            | _bias("mlp.gate.moe_statics.", leading_one=True)
            | _fused("mlp")
            | _shared("mlp.shared_experts"),
        ),
        options={
            "intermediate_size": key("moe_intermediate_size"),
            "num_experts": key("moe_num_experts", "num_experts"),
            "num_experts_per_tok": key("moe_k", "num_experts_per_tok"),
            "num_shared_experts": key("moe_num_shared_experts", default=0),
            "bias_routing": True,
        },
        layers=Layers(
            first=key("moe_layer_start_index", default=0),
            last=key("moe_layer_end_index", default=-1),
            step=key("moe_layer_interval", default=1),
        ),
        refused=(Refused("use_bias", (False,), "shared experts have no biases here", "weights"),),
    ),
    "gpt_oss": Family(
        forms=(
            _GPT_OSS | _fused("mlp", transposed=False),
            _GPT_OSS | _fused("mlp", suffix="_blocks"),  # MXFP4
        ),
        options=_LOCAL | {"use_bias": True, "router_use_bias": True},
        experts={
            "interleaved": True,
            "alpha": key("swiglu_alpha", default=1.702),
            "clamp": key("swiglu_limit", default=7.0),
            "up_offset": 1.0,
        },
    ),
    "llama4_text": _LLAMA4,
    "llama4": dataclasses.replace(_LLAMA4, prefix="language_model.model.layers.{layer}.", section="text_config"),
    "phimoe": Family(
        forms=(_MIXTRAL_EACH, _router("mlp.router") | _fused("mlp")),
        options=_LOCAL | {"score": "sparsemixer"},
        refused=(Refused("router_jitter_noise", (0.01,), "sparsemixer_router takes another, flax.MoE does not"),),
    ),
    "longcat_flash": Family(
        forms=tuple(
            _router("mlp.router.classifier") | _bias("mlp.router.") | experts
            for experts in (_each("mlp"), _fused("mlp"))
        ),
        options={
            "intermediate_size": key("expert_ffn_hidden_size", "moe_intermediate_size"),
            "num_experts": key("n_routed_experts", "num_local_experts"),
            "num_experts_per_tok": key("moe_topk", "num_experts_per_tok"),
            "renormalize": False,
            "routed_scale": key("routed_scaling_factor", default=1.0),
            "bias_routing": True,
            "num_identity_experts": key("zero_expert_num", default=0),
        },
        layers=Layers(count=key("num_layers")),
        refused=(
            Refused("norm_topk_prob", (False,), "published models of this family do not renormalise"),
            Refused("router_bias", (False,), "the bias of its router is used by no published code", "weights"),
        ),
    ),
}


def find(function: str, config: Mapping[str, Any]) -> Family:
    """The row of a parsed `config.json`."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"{function}: model_type is {short(name)}, expected one of {', '.join(sorted(FAMILIES))}; Checkpoint.read"
            " reads tensors of other models by their names."
        )
    return FAMILIES[name]


def field(function: str, config: Mapping[str, Any], name: str) -> Any:
    """What `config` has for a name of `SCHEMA`; None where it is missing or null."""
    value, rule = config.get(name), SCHEMA[name]
    if value is not None and not rule.allows(value):
        raise ValueError(
            f"{function}: config.json has {name}={short(value)}, expected {rule}; use the config.json of the"
            " checkpoint."
        )
    return value


def check_quantization(function: str, config: Mapping[str, Any]) -> None:
    """Check `quantization_config`: matrices in FP8 have a scale per block of 128 by 128."""
    quantization = field(function, config, "quantization_config") or {}
    field(function, quantization, "quant_method")
    size = quantization.get("weight_block_size")
    if size is not None and size != [GROUP_SIZE, GROUP_SIZE]:
        raise ValueError(
            f"{function}: quantization_config has weight_block_size={short(size)}, expected [{GROUP_SIZE},"
            f" {GROUP_SIZE}]; convert checkpoints with other blocks, or read tensors as they are with Checkpoint.read."
        )


def _decoder(function: str, config: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """The row, and the part of `config` that describes the decoder."""
    family = find(function, config)
    check_quantization(function, config)
    inner = config if family.section is None else field(function, config, family.section)
    if inner is None:
        raise ValueError(
            f"{function}: config.json of a {config['model_type']} has no object {family.section!r}, expected the"
            " decoder's options in it; use the config.json of the checkpoint."
        )
    return family, inner


def _value(function: str, wanted: Any, config: Mapping[str, Any]) -> Any:
    """A constant, or what `config` has for a `Key`."""
    if not isinstance(wanted, Key):
        return wanted
    values: dict[str, Any] = {}
    if wanted.only_if is None or field(function, config, wanted.only_if[0]) == wanted.only_if[1]:
        values = {name: field(function, config, name) for name in wanted.names if config.get(name) is not None}
    different = [value for value in values.values() if value != next(iter(values.values()))]
    if different:
        raise ValueError(
            f"{function}: config.json has {short(values)}, expected one value; use the config.json of the checkpoint."
        )
    if values:
        return next(iter(values.values()))
    if wanted.default is REQUIRED:
        raise ValueError(
            f"{function}: config.json has no {_names(wanted)}, which this model_type needs; use the config.json of the"
            " checkpoint."
        )
    return wanted.default


def _names(wanted: Any) -> str:
    return " or ".join(map(repr, wanted.names)) if isinstance(wanted, Key) else repr(wanted)


def refuse(function: str, config: Mapping[str, Any], *, of: str) -> None:
    """Raises for what the package does not have: of its "routing", or of its "weights"."""
    family, inner = _decoder(function, config)
    for name, allowed, why, about in family.refused:
        value = field(function, inner, name)
        if about == of and value is not None and value not in allowed:
            expected = f", expected {' or '.join(repr(v) for v in allowed)}" if allowed else ""
            remedy = (
                "read them with Checkpoint.read"
                if of == "weights"
                else "read the parameters with Checkpoint.moe_weights and route in your own code, before jax_ep.moe"
            )
            raise NotImplementedError(f"{function}: config.json has {name}={short(value)}{expected}: {why}; {remedy}.")


def moe_options(function: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `jax_ep.flax.MoE`."""
    refuse(function, config, of="weights")
    refuse(function, config, of="routing")
    family, inner = _decoder(function, config)
    activation = _value(function, key("hidden_act", default="silu"), inner)
    if activation not in ACTIVATIONS:
        raise NotImplementedError(
            f"{function}: config.json has hidden_act={short(activation)}, expected one of {', '.join(ACTIVATIONS)};"
            " pass a JAX function as the activation of jax_ep.Experts yourself."
        )
    fields = {name: _value(function, wanted, inner) for name, wanted in family.experts.items()}
    return _options(function, config) | {"experts": Experts(ACTIVATIONS[activation], **fields)}


def _options(function: str, config: Mapping[str, Any]) -> dict[str, Any]:
    family, inner = _decoder(function, config)
    wanted = _OF_ALL | dict(family.options)
    options = {name: _value(function, value, inner) for name, value in wanted.items()}
    experts = options["num_experts"] + options.get("num_identity_experts", 0)
    groups, chosen_groups = options.get("num_groups", 1), options.get("topk_groups", 1)
    limits = {
        "num_groups": (experts, "experts"),
        "topk_groups": (groups, "groups of experts"),
        "num_experts_per_tok": (experts // groups * chosen_groups, "experts in the chosen groups"),
    }
    for name, (most, what) in limits.items():
        if options.get(name, 1) > most:
            raise ValueError(
                f"{function}: config.json has {options[name]} for {_names(wanted[name])}, expected at most the {most}"
                f" {what}; use the config.json of the checkpoint."
            )
    if experts % groups:
        raise ValueError(
            f"{function}: config.json has {groups} for {_names(wanted['num_groups'])}, expected a divisor of the"
            f" {experts} experts; use the config.json of the checkpoint."
        )
    return options


def moe_layers(function: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Which decoder layers are MoE."""
    refuse(function, config, of="weights")
    family, inner = _decoder(function, config)
    count, first, last, step, dense, listed = (_value(function, wanted, inner) for wanted in family.layers)
    if listed is not None:
        if any(layer >= count for layer in listed):
            raise ValueError(
                f"{function}: config.json has {short(listed)} for {_names(family.layers.listed)}, expected layers below"
                f" the number of layers, {count}; use the config.json of the checkpoint."
            )
        return tuple(listed)
    end = count if last == -1 else min(last + 1, count)
    return tuple(layer for layer in range(first, end) if (layer + 1) % step == 0 and layer not in dense)


def shapes(function: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The parameters that a MoE layer of this model has, and their shapes."""
    refuse(function, config, of="weights")
    options = _options(function, config)
    experts, hidden, width = (options[name] for name in ("num_experts", "hidden_size", "intermediate_size"))
    columns = experts + options.get("num_identity_experts", 0)  # the others have no matrices
    found = {"router": (hidden, columns), "w_gate_up": (experts, hidden, 2 * width), "w_down": (experts, width, hidden)}
    if options.get("router_use_bias"):
        found["b_router"] = (columns,)
    if options.get("bias_routing"):
        found["router_bias"] = (columns,)
    if options.get("use_bias"):
        found |= {"b_gate_up": (experts, 2 * width), "b_down": (experts, hidden)}
    shared = options.get("num_shared_experts", 0) * options.get("shared_intermediate_size", width)
    if shared:
        found |= {"shared_gate_up": (hidden, 2 * shared), "shared_down": (shared, hidden)}
        if options.get("shared_expert_gate"):
            found["shared_gate"] = (hidden, 1)
    return found
