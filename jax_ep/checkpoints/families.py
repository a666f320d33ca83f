"""Table of model families: tensor names of their MoE layers, and the options in their `config.json`.

`FAMILIES` has one row per `model_type`. Its facts come from Hugging Face's model code and published checkpoints; names
of parameters and options are those of `jax_ep.flax.MoE`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax_ep.checkpoints.shards import Region, whole
from jax_ep.core import json_files
from jax_ep.core.fp8 import GROUP_SIZE
from jax_ep.core.json_files import BOOLEAN, OBJECT, TEXT, Schema, integer, integers, mapping, number, optional, record
from jax_ep.core.router import Router, SharedExperts
from jax_ep.types import Activation, Experts
from jax_ep.values import shown

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}
"""Maps names in `hidden_act` to names of `jax_ep.Experts`."""
REQUIRED = object()


_MAX_LAYERS, _MAX_SIZE, _MAX_EXPERTS, _MAX_FACTOR = 10_000, 1 << 24, 1 << 16, 1 << 20
_SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_group", "topk_group")
_FIRST_LAYERS = ("first_k_dense_replace", "moe_layer_start_index")
_STEPS = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step", "moe_layer_freq")
_EXTRA_EXPERTS = ("n_shared_experts", "moe_num_shared_experts", "zero_expert_num")
_FACTORS = ("routed_scaling_factor", "swiglu_alpha", "swiglu_limit")
_QUANTIZED = {
    "num_bits": integer(1, 64),
    "type": TEXT,
    "symmetric": BOOLEAN,
    "group_size": optional(integer(-1, _MAX_SIZE)),
}
_GROUP = record({"weights": optional(record(_QUANTIZED, more=True, fewer=_QUANTIZED))}, more=True, fewer=("weights",))
_TRANSFORM = record({"apply": json_files.array(record({"location": TEXT}, more=True))}, more=True, fewer=("apply",))
SCHEMA: Mapping[str, Schema] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", *_FIRST_LAYERS), integer(0, _MAX_LAYERS)),
    "moe_layer_end_index": integer(-1, _MAX_LAYERS),
    **dict.fromkeys(_STEPS, integer(1, _MAX_LAYERS)),
    **dict.fromkeys(("mlp_only_layers", "moe_layers"), integers(0, _MAX_LAYERS)),
    **dict.fromkeys((*_SIZES, "shared_expert_intermediate_size"), integer(1, _MAX_SIZE)),
    **dict.fromkeys((*_COUNTS, "num_experts_per_tok", "moe_k", "moe_topk"), integer(1, _MAX_EXPERTS)),
    **dict.fromkeys(_EXTRA_EXPERTS, integer(0, _MAX_EXPERTS)),
    **dict.fromkeys(_FACTORS, number(1 / _MAX_FACTOR, _MAX_FACTOR)),
    "router_jitter_noise": number(0, 1),
    **dict.fromkeys(("norm_topk_prob", "mlp_bias", "use_bias", "router_bias"), BOOLEAN),
    **dict.fromkeys(("hidden_act", "topk_method", "scoring_func", "quant_method"), TEXT),
    **dict.fromkeys(("text_config", "quantization_config"), OBJECT),
    "config_groups": mapping(_GROUP, TEXT),
    "transform_config": record({"config_groups": mapping(_TRANSFORM, TEXT)}, more=True, fewer=("config_groups",)),
    "bits": integer(1, 64),
    "group_size": integer(-1, _MAX_SIZE),
    **dict.fromkeys(("version", "checkpoint_format"), TEXT),
    **dict.fromkeys(("zero_point", "desc_act", "sym"), BOOLEAN),
}
"""Schemas of all fields of `config.json` that any family reads; numbers are bounded."""


class Key:
    """A value of `config.json`: its possible names, and its default if it is missing or null.

    `only_if` is another name and its value; with any other value there, the default applies.
    """

    def __init__(self, *names: str, default: Any = REQUIRED, only_if: tuple[str, Any] | None = None) -> None:
        self.names, self.default, self.only_if = names, default, only_if

    def __str__(self) -> str:
        return " or ".join(map(repr, self.names))


class Stored(NamedTuple):
    """The tensors of one parameter: `{expert}` in a name stands for one tensor per expert."""

    names: tuple[str, ...]  # tensors that are concatenated in the parameter, gate before up
    transposed: bool = True  # the tensors are `[..., out, in]`; parameters are `[..., in, out]`
    leading_one: bool = False  # the tensors have an extra first axis of size one

    @property
    def per_expert(self) -> bool:
        """Whether each expert has its own tensor."""
        return "{expert}" in self.names[0]

    def shape(self, region: Region) -> tuple[int, ...]:
        """Return the shape of the tensor that holds this region of the parameter."""
        sizes = tuple(part.stop - part.start for part in region)
        return (1,) * self.leading_one + sizes[1 if self.per_expert else 0 :]

    def with_prefix(self, prefix: str) -> Stored:
        """Prepend a prefix to the names."""
        return self._replace(names=tuple(prefix + name for name in self.names))

    def places(self, shape: tuple[int, ...]) -> Iterator[tuple[str, Region]]:
        """Yield each tensor of a parameter, and the region of its stored `shape` that the tensor holds."""
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
    """Which decoder layers are MoE: every `step`-th from `first` to `last` except `dense`, or those `listed`."""

    count: Any = Key("num_hidden_layers")
    first: Any = 0
    last: Any = -1
    step: Any = 1
    dense: Any = ()
    listed: Any = None


ALL_LAYERS = Layers()


class Restriction(NamedTuple):
    """A value of `config.json` that must be missing or one of `allowed`; `reason` explains why.

    `of` is "routing" if the parameters can still be read, and "weights" if some would be left out.
    """

    name: str
    allowed: tuple[Any, ...]
    reason: str
    of: str = "routing"


Form = dict[str, Stored]


@dataclasses.dataclass(frozen=True)
class Family:
    """One row of the table.

    Options, and fields of a `Router`, `SharedExperts` and `Experts`, are each a value or a `Key`.
    """

    forms: tuple[Form, ...]  # alternative tensor names by parameter, below the prefix; the first one is written
    options: Mapping[str, Any]  # keywords of `jax_ep.flax.MoE`, except those below
    router: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shared_experts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # empty or `num` of 0: none
    experts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # without the activation
    layers: Layers = ALL_LAYERS  # which layers are MoE
    restrictions: tuple[Restriction, ...] = ()  # values of the config that the package requires
    prefix: str = "model.layers.{layer}."  # of the tensor names of a layer
    section: str | None = None  # the part of `config.json` that describes the decoder; None for all of it


def _each(block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Form:
    """Return names of three tensors per expert."""
    one = f"{block}.experts.{{expert}}"
    return {
        "w_gate_up": Stored((f"{one}.{gate}.weight", f"{one}.{up}.weight")),
        "w_down": Stored((f"{one}.{down}.weight",)),
    }


def _fused(block: str, *, suffix: str = "", transposed: bool = True) -> Form:
    """Return names of two tensors for all experts."""
    return {
        "w_gate_up": Stored((f"{block}.experts.gate_up_proj{suffix}",), transposed),
        "w_down": Stored((f"{block}.experts.down_proj{suffix}",), transposed),
    }


def _both(others: Form) -> tuple[Form, Form]:
    """Return both forms of experts in `mlp`: three tensors per expert, or two for all experts."""
    return others | _each("mlp"), others | _fused("mlp")


def _shared(name: str) -> Form:
    """Return names of three tensors for all shared experts."""
    return {
        "shared_gate_up": Stored((f"{name}.gate_proj.weight", f"{name}.up_proj.weight")),
        "shared_down": Stored((f"{name}.down_proj.weight",)),
    }


def _bias(name: str, *, leading_one: bool = False) -> Form:
    """Return the name of the bias of expert selection."""
    return {"router_bias": Stored((f"{name}e_score_correction_bias",), False, leading_one)}


def _router(name: str) -> Form:
    return {"router": Stored((f"{name}.weight",))}


def _sizes(width: Key, experts: Key, chosen: Key = Key("num_experts_per_tok")) -> dict[str, Any]:  # noqa: B008
    sizes = {"intermediate_size": width, "num_experts": experts, "num_experts_per_tok": chosen}
    return {"hidden_size": Key("hidden_size")} | sizes


_LOCAL = _sizes(Key("intermediate_size"), Key("num_local_experts", "num_experts"))
_QWEN = _sizes(Key("moe_intermediate_size"), Key("num_experts", "num_local_experts"))
_QWEN_ROUTER = {"renormalize": Key("norm_topk_prob", default=False)}
_QWEN_LAYERS = Layers(step=Key("decoder_sparse_step", default=1), dense=Key("mlp_only_layers", default=()))
_DEEPSEEK = _sizes(Key("moe_intermediate_size"), Key("n_routed_experts", "num_local_experts", "num_experts"))
_DEEPSEEK_SHARED = {"num": Key("n_shared_experts", default=0)}
_SCALE = {"scale": Key("routed_scaling_factor")}
_SCALE_OR_1 = {"scale": Key("routed_scaling_factor", default=1.0)}
_GLM4_ROUTER = _SCALE_OR_1 | {
    "score": "sigmoid",
    "renormalize": Key("norm_topk_prob", default=True),
    "num_groups": Key("n_group", default=1),
    "topk_groups": Key("topk_group", default=1),
    "group_score": "top2_sum",
    "selection_bias": True,
}
# Without these, transformers takes values that are not 1.
_DEEPSEEK_V3_ROUTER = _GLM4_ROUTER | _SCALE | {"num_groups": Key("n_group"), "topk_groups": Key("topk_group")}
_DEEPSEEK_LAYERS = Layers(first=Key("first_k_dense_replace", default=0))
_NOT_RENORMALIZED = Restriction("norm_topk_prob", (False,), "published models of this family do not renormalize")
_EVERY_LAYER = Restriction("moe_layer_freq", (1,), "dense layers between MoE layers are not supported", "weights")
_SIGMOID = Restriction("scoring_func", ("sigmoid",), "only sigmoid scores are supported for this family")
_DEEPSEEK_V3_FORMS = _both(_router("mlp.gate") | _bias("mlp.gate.") | _shared("mlp.shared_experts"))
_DEEPSEEK_V3 = Family(
    forms=_DEEPSEEK_V3_FORMS,
    options=_DEEPSEEK,
    router=_DEEPSEEK_V3_ROUTER,
    shared_experts=_DEEPSEEK_SHARED,
    layers=_DEEPSEEK_LAYERS,
    restrictions=(
        _SIGMOID,
        Restriction("topk_method", ("noaux_tc",), "DeepSeek-V3's router supports only this value"),
        _EVERY_LAYER,
    ),
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
    options=_LOCAL,
    router={"score": "sigmoid", "renormalize": False},
    shared_experts={"num": 1},
    experts={"weight_on": "input"},
    layers=Layers(step=Key("interleave_moe_layer_step", default=1), listed=Key("moe_layers", default=None)),
)

FAMILIES: Mapping[str, Family] = {
    "mixtral": Family((_MIXTRAL_EACH, _router("mlp.gate") | _fused("mlp")), _LOCAL),
    "qwen2_moe": Family(
        forms=_both(
            _router("mlp.gate")
            | _shared("mlp.shared_expert")
            | {"shared_gate": Stored(("mlp.shared_expert_gate.weight",))}
        ),
        options=_QWEN,
        router=_QWEN_ROUTER,
        shared_experts={"num": 1, "intermediate_size": Key("shared_expert_intermediate_size"), "gate": True},
        layers=_QWEN_LAYERS,
    ),
    "qwen3_moe": Family(_both(_router("mlp.gate")), _QWEN, _QWEN_ROUTER, layers=_QWEN_LAYERS),
    "olmoe": Family(_both(_router("mlp.gate")), _QWEN | {"intermediate_size": Key("intermediate_size")}, _QWEN_ROUTER),
    "deepseek_v2": Family(
        forms=_both(_router("mlp.gate") | _shared("mlp.shared_experts")),
        options=_DEEPSEEK,
        router=_SCALE_OR_1
        | {
            "renormalize": False,
            "num_groups": Key("n_group", default=1, only_if=("topk_method", "group_limited_greedy")),
            "topk_groups": Key("topk_group", default=1, only_if=("topk_method", "group_limited_greedy")),
            "group_score": "max",
        },
        shared_experts=_DEEPSEEK_SHARED,
        layers=_DEEPSEEK_LAYERS,
        restrictions=(
            Restriction("topk_method", ("greedy", "group_limited_greedy"), "DeepSeek-V2's router supports only these"),
            Restriction("scoring_func", ("softmax",), "only softmax scores are supported for DeepSeek-V2"),
            _NOT_RENORMALIZED,
            Restriction("mlp_bias", (False,), "biases of shared experts are not supported", "weights"),
            _EVERY_LAYER,
        ),
    ),
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), _DEEPSEEK_V3),
    "glm4_moe": Family(_DEEPSEEK_V3_FORMS, _DEEPSEEK, _GLM4_ROUTER, _DEEPSEEK_SHARED, layers=_DEEPSEEK_LAYERS),
    "minimax_m2": Family(
        forms=(_MIXTRAL_EACH | _bias("block_sparse_moe."), _router("mlp.gate") | _fused("mlp") | _bias("mlp.")),
        options=_LOCAL,
        router={"score": "sigmoid", "selection_bias": True},
        restrictions=(_SIGMOID,),
    ),
    "ernie4_5_moe": Family(
        forms=tuple(
            _router("mlp.gate") | _bias(statics, leading_one=True) | experts | _shared("mlp.shared_experts")
            for statics, experts in (("mlp.moe_statics.", _each("mlp")), ("mlp.gate.moe_statics.", _fused("mlp")))
        ),
        options=_sizes(
            Key("moe_intermediate_size"), Key("moe_num_experts", "num_experts"), Key("moe_k", "num_experts_per_tok")
        ),
        router={"selection_bias": True},
        shared_experts={"num": Key("moe_num_shared_experts", default=0)},
        layers=Layers(
            first=Key("moe_layer_start_index", default=0),
            last=Key("moe_layer_end_index", default=-1),
            step=Key("moe_layer_interval", default=1),
        ),
        restrictions=(Restriction("use_bias", (False,), "biases of shared experts are not supported", "weights"),),
    ),
    "gpt_oss": Family(
        forms=(
            _GPT_OSS | _fused("mlp", transposed=False),
            _GPT_OSS | _fused("mlp", suffix="_blocks"),  # MXFP4
        ),
        options=_LOCAL | {"use_bias": True},
        restrictions=(Restriction("hidden_act", ("silu",), "the published model has one activation, a clamped SiLU"),),
        router={"logit_bias": True},
        experts={
            "interleaved": True,
            "alpha": Key("swiglu_alpha", default=1.702),
            "clamp": Key("swiglu_limit", default=7.0),
            "up_offset": 1.0,
        },
    ),
    "llama4_text": _LLAMA4,
    "llama4": dataclasses.replace(_LLAMA4, prefix="language_model.model.layers.{layer}.", section="text_config"),
    "phimoe": Family(
        forms=(_MIXTRAL_EACH, _router("mlp.router") | _fused("mlp")),
        options=_LOCAL,
        router={"score": "sparsemixer"},
        restrictions=(Restriction("router_jitter_noise", (0.01,), "flax.MoE does not support other values"),),
    ),
    "longcat_flash": Family(
        forms=_both(_router("mlp.router.classifier") | _bias("mlp.router.")),
        options=_sizes(
            Key("expert_ffn_hidden_size", "moe_intermediate_size"),
            Key("n_routed_experts", "num_local_experts"),
            Key("moe_topk", "num_experts_per_tok"),
        ),
        router=_SCALE
        | {
            "renormalize": False,
            "selection_bias": True,
            "num_identity_experts": Key("zero_expert_num", default=0),
        },
        layers=Layers(count=Key("num_layers")),
        restrictions=(
            _NOT_RENORMALIZED,
            Restriction("router_bias", (False,), "no published code uses the bias of its router", "weights"),
        ),
    ),
}


class Model:
    """The MoE layers of a model, from its parsed `config.json`; errors start with `function`. See `FAMILIES`.

    Raises:
      ValueError: the `model_type` is unknown, or a value is out of range.
      NotImplementedError: the model has weights that `jax_ep.flax.MoE` does not support.
    """

    def __init__(self, function: str, config: Mapping[str, Any]) -> None:
        self._function = function
        name = config.get("model_type")
        if not isinstance(name, str) or name not in FAMILIES:
            raise ValueError(
                f"{function}: model_type is {shown(name)}, expected one of {', '.join(sorted(FAMILIES))};"
                " Checkpoint.read reads tensors of other models by their names."
            )
        check_quantization(function, config)
        self.family = FAMILIES[name]
        self._config = config
        if self.family.section is not None:
            section = _field(function, config, self.family.section)
            if section is None:
                raise self._error(f"no {self.family.section!r}", "the options of the decoder in it")
            self._config = section
        self._check_restrictions("weights", "read them with Checkpoint.read")

    def _error(self, got: str, expected: str) -> ValueError:
        return ValueError(
            f"{self._function}: config.json has {got}, expected {expected}; use the config.json of the checkpoint."
        )

    def _check_restrictions(self, of: str, remedy: str) -> None:
        for name, allowed, reason, about in self.family.restrictions:
            value = _field(self._function, self._config, name)
            if about == of and value is not None and value not in allowed:
                raise NotImplementedError(
                    f"{self._function}: config.json has {name}={shown(value)}, expected"
                    f" {' or '.join(map(repr, allowed))}: {reason}; {remedy}."
                )

    def _value(self, wanted: Any) -> Any:
        """Return a constant, or the config's value of a `Key`."""
        if not isinstance(wanted, Key):
            return wanted
        names = wanted.names
        if wanted.only_if and _field(self._function, self._config, wanted.only_if[0]) != wanted.only_if[1]:
            names = ()
        found = {name: _field(self._function, self._config, name) for name in names}
        values = {name: value for name, value in found.items() if value is not None}
        if any(value != next(iter(values.values())) for value in values.values()):
            raise self._error(shown(values), "one value")
        if not values and wanted.default is REQUIRED:
            raise self._error(f"no {wanted}", "it for this model_type")
        return next(iter(values.values()), wanted.default)

    def moe_options(self) -> dict[str, Any]:
        """Return keyword arguments of `jax_ep.flax.MoE`."""
        self._check_restrictions(
            "routing", "read the parameters with Checkpoint.moe_weights and route in custom code, before jax_ep.moe"
        )
        activation = self._value(Key("hidden_act", default="silu"))
        if activation not in ACTIVATIONS:
            raise NotImplementedError(
                f"{self._function}: config.json has hidden_act={shown(activation)}, expected one of"
                f" {', '.join(ACTIVATIONS)}; pass a JAX function as the activation of jax_ep.Experts."
            )
        fields = {name: self._value(wanted) for name, wanted in self.family.experts.items()}
        return self._options() | {"experts": Experts(ACTIVATIONS[activation], **fields)}

    def _options(self) -> dict[str, Any]:
        """Return the options without the experts."""
        options = {name: self._value(value) for name, value in self.family.options.items()}
        options["router"] = self._router(options["num_experts"], options["num_experts_per_tok"])
        shared = {name: self._value(value) for name, value in self.family.shared_experts.items()}
        return options | ({"shared_experts": SharedExperts(**shared)} if shared.get("num") else {})

    def _router(self, num_experts: int, top_k: int) -> Router:
        """Return the router, after checks of the sizes that depend on several values of the config."""
        wanted = self.family.router
        fields = {name: self._value(value) for name, value in wanted.items()}
        experts = num_experts + fields.get("num_identity_experts", 0)
        groups, chosen_groups = fields.get("num_groups", 1), fields.get("topk_groups", 1)
        limits = (
            (groups, wanted.get("num_groups"), experts, "experts"),
            (chosen_groups, wanted.get("topk_groups"), groups, "groups of experts"),
            (
                top_k,
                self.family.options["num_experts_per_tok"],
                experts // groups * chosen_groups,
                "experts in the chosen groups",
            ),
        )
        for value, key, most, what in limits:
            if value > most:
                raise self._error(f"{value} for {key}", f"at most the {most} {what}")
        if experts % groups:
            raise self._error(f"{groups} for {wanted['num_groups']}", f"a divisor of the {experts} experts")
        if groups == 1:
            fields.pop("group_score", None)
        return Router(**fields)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        count, first, last, step, dense, listed = map(self._value, self.family.layers)
        if listed is None:
            end = count if last == -1 else min(last + 1, count)
            return tuple(layer for layer in range(first, end) if (layer + 1) % step == 0 and layer not in dense)
        if any(layer >= count for layer in listed):
            raise self._error(
                f"{shown(listed)} for {self.family.layers.listed}", f"layers below the number of layers, {count}"
            )
        return tuple(listed)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of an MoE layer of this model."""
        options = self._options()
        experts, hidden, width = (options[name] for name in ("num_experts", "hidden_size", "intermediate_size"))
        router: Router = options["router"]
        columns = experts + router.num_identity_experts  # identity experts have no weights
        shared_experts: SharedExperts | None = options.get("shared_experts")
        shared = shared_experts.num * (shared_experts.intermediate_size or width) if shared_experts else 0
        found = {
            "router": (hidden, columns),
            "w_gate_up": (experts, hidden, 2 * width),
            "w_down": (experts, width, hidden),
            "b_router": (columns,) if router.logit_bias else None,
            "router_bias": (columns,) if router.selection_bias else None,
            "b_gate_up": (experts, 2 * width) if options.get("use_bias") else None,
            "b_down": (experts, hidden) if options.get("use_bias") else None,
            "shared_gate_up": (hidden, 2 * shared) if shared else None,
            "shared_down": (shared, hidden) if shared else None,
            "shared_gate": (hidden, 1) if shared_experts and shared_experts.gate else None,
        }
        return {name: shape for name, shape in found.items() if shape is not None}


def _field(function: str, config: Mapping[str, Any], name: str) -> Any:
    """Return the value of a name of `SCHEMA`, or None if it is missing or null."""
    value = config.get(name)
    if value is not None:
        try:
            SCHEMA[name](value, name)
        except ValueError as error:
            raise ValueError(f"{function}: config.json has {error}; use the config.json of the checkpoint.") from error
    return value


def check_quantization(function: str, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Check `quantization_config`: FP8 weights have a scale per 128 x 128 block. Return formats of packed weights."""
    quantization = _field(function, config, "quantization_config") or {}
    _field(function, quantization, "quant_method")
    size = quantization.get("weight_block_size")
    if size is not None and size != [GROUP_SIZE, GROUP_SIZE]:
        raise ValueError(
            f"{function}: quantization_config has weight_block_size={shown(size)}, expected [{GROUP_SIZE},"
            f" {GROUP_SIZE}]; convert checkpoints with other blocks, or read tensors as they are with Checkpoint.read."
        )
    transforms = (_field(function, quantization, "transform_config") or {}).get("config_groups", {})
    for name, one in transforms.items():  # At other locations, a transform is a part of the stored weights.
        if any(at["location"] in ("input", "output") for at in one.get("apply", ())):
            raise NotImplementedError(
                f"{function}: quantization_config has the transform {shown(name)} of tokens, expected weights alone;"
                " quantize without it, or read tensors as they are with Checkpoint.read."
            )
    groups = _field(function, quantization, "config_groups") or {}
    return [group["weights"] for group in groups.values() if group.get("weights")]


def grouped_options(function: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `quantization_config` that describe the tensors of AutoAWQ and GPTQ; None if missing."""
    quantization = _field(function, config, "quantization_config") or {}
    names = ("quant_method", "bits", "group_size", "version", "zero_point", "checkpoint_format", "desc_act", "sym")
    return {name: _field(function, quantization, name) for name in names}
