"""The interface of attention over the paged KV cache. Knows no weights: projections and rope belong to the families.

Shape letters: T tokens of the step, H query heads, G KV heads, D key dim, V value dim.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from model.batch import ForwardBatch, KvLayerSpec, LayerKv
from model.config import ModelSettingsError, UnsupportedModelError
from model.norm import RmsNorm
from model.rope import rotate_
from moe.device import Device, arch_of

# Where each implementation lives, in the order in which "auto" asks them on a GPU; imported on first use.
ATTENTION_MODULES = {
    "flashinfer": "model.attention.flashinfer",
    "triton": "model.attention.triton",
    "torch": "model.attention.torch",
}
_implementations: dict[str, type["Attention"]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Shape and rules of one layer's attention.

    `window`: tokens a query sees, itself included; None for all. `values_in_keys`: the values are the first
    `value_dim` numbers of each key (absorbed MLA), so nothing else is cached.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    values_in_keys: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.window is not None and self.window < 1:
            raise UnsupportedModelError(f"attention window is {self.window}: a query must at least see itself")

    @property
    def kv_spec(self) -> KvLayerSpec:
        """What the cache stores for a layer of this kind."""
        return KvLayerSpec(
            num_heads=self.num_kv_heads,
            key_dim=self.key_dim,
            value_dim=0 if self.values_in_keys else self.value_dim,
            window=self.window,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionDtypes:
    """Types of the numbers: `model` of queries and results, `kv` of what the cache holds."""

    model: torch.dtype = torch.bfloat16
    kv: torch.dtype = torch.bfloat16


BF16 = AttentionDtypes()


class Attention(ABC):
    """One implementation, shared by all layers of a model.

    `plan` is called once a step; what depends on lengths and pages alone is computed there, not per layer.
    """

    name: ClassVar[str]
    is_capturable: ClassVar[bool] = False  # a decode step neither waits for the device nor needs lengths on the host
    plans_by_tables: ClassVar[bool] = False  # `update_plan` reads page tables

    def __init__(self, specs: Sequence[AttentionSpec], device: torch.device, dtypes: AttentionDtypes = BF16) -> None:
        """Prepare for layers of the given kinds.

        Raises:
            UnsupportedModelError: a kind of layer, GPU or type of numbers that this implementation cannot serve.
        """
        self.specs = tuple(dict.fromkeys(specs))
        self.device = device
        self.arch = _arch(device)
        self.dtypes = dtypes
        if reason := self.verdict(self.specs, device, self.arch, dtypes):
            raise refusal(self.name, reason)

    @classmethod
    def verdict(
        cls, specs: Sequence[AttentionSpec], device: torch.device, arch: str, dtypes: AttentionDtypes
    ) -> str | None:
        """None if it can serve layers of these kinds there, with what is installed here, else why not."""
        reason, lack = cls.unfit_reason(specs, device, arch, dtypes), cls.lacks(device)
        return reason or (f"it needs {lack}" if lack else None)

    @classmethod
    def unfit_reason(
        cls, specs: Sequence[AttentionSpec], device: torch.device, arch: str, dtypes: AttentionDtypes
    ) -> str | None:
        """None if it can serve layers of these kinds there once all is installed, else the first reason why not."""
        reasons = (cls.unsupported_reason(spec, device) for spec in dict.fromkeys(specs))
        return next((reason for reason in reasons if reason), None) or cls.unusable_reason(arch, dtypes)

    @classmethod
    def lacks(cls, device: torch.device) -> str | None:
        """What must be installed here for it to run on such a device; None if nothing."""
        del device
        return None

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """None if layers of this kind can be served on the device, else why not."""
        del spec, device
        return None

    @classmethod
    def unusable_reason(cls, arch: str, dtypes: AttentionDtypes) -> str | None:
        """None if it runs on this architecture (sm90, gfx942, cpu) with numbers of these types, else why not."""
        del arch, dtypes
        return None

    @classmethod
    def not_chosen_reason(cls, specs: Sequence[AttentionSpec], arch: str) -> str | None:
        """None if "auto" may take it wherever it can serve, else why it must be asked for by name."""
        del specs, arch
        return None

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> Any:
        """Everything `run` needs besides tensors of the layer; for this batch only."""

    def plan_for_graph(self, batch: ForwardBatch) -> Any:
        """A plan for a step to be captured, whose rows may have other lengths and pages in each replay.

        The tensors of the batch stay where they are; its host-side lengths do not bind a replay.
        """
        return self.plan(batch)

    def update_plan(self, plan: Any, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        """Bring a plan of `plan_for_graph` up to date with the lengths of its rows, padding included.

        Called before each replay, outside the graph. The batch's tensors then hold the step if `plans_by_tables`; else
        the graph may still have to fill them. Does not wait for the device.
        """
        del plan, query_lens, seq_lens

    @abstractmethod
    def run(
        self,
        spec: AttentionSpec,
        plan: Any,
        kv: LayerKv,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGV: torch.Tensor | None,
        sinks_H: torch.Tensor | None,
        rotation_T1D: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate q and k if a rotation is given, write keys and values to their slots, then attend; returns [T, H, V].

        The rotation (complex64 [T, 1, D/2], see `model.rope`) may change q and k in place.

        `sinks_H` is one more logit per head in the softmax denominator, not multiplied by the scale.
        """

    def run_latents(
        self,
        spec: AttentionSpec,
        plan: Any,
        kv: LayerKv,
        q_THD: torch.Tensor,
        q_pe_THP: torch.Tensor,
        latents_TD: torch.Tensor,
        norm: RmsNorm,
        rotation_T1D: torch.Tensor,
    ) -> torch.Tensor:
        """Absorbed MLA from what the projections give: norm and rotate, cache, attend; returns [T, H, V].

        `q_THD` has the first V numbers of each query; the last P, the rotated `q_pe_THP`, are written here.
        `latents_TD` is a latent, not yet normed, and k_pe. All but the weights may change in place.
        """
        rope_dim = spec.key_dim - spec.value_dim
        latents_TC, k_pe_T1P = latents_TD[:, : spec.value_dim], latents_TD[:, None, spec.value_dim :]
        rotate_(q_pe_THP, rotation_T1D)
        rotate_(k_pe_T1P, rotation_T1D)
        q_THD[..., -rope_dim:] = q_pe_THP
        keys_T1D = torch.cat((norm(latents_TC)[:, None], k_pe_T1P), dim=-1)
        return self.run(spec, plan, kv, q_THD, keys_T1D, None, None)


def register_attention(cls: type[Attention]) -> type[Attention]:
    """Class decorator: makes an implementation known under its `name`."""
    if cls.name in _implementations:
        raise ModelSettingsError(f"attention backend {cls.name} is registered twice")
    _implementations[cls.name] = cls
    return cls


def make_attention(
    requested: str, specs: Sequence[AttentionSpec], device: torch.device, dtypes: AttentionDtypes = BF16
) -> Attention:
    """The implementation called `requested`; "auto" is the fastest that serves the device and every kind of layer.

    On an H200 the Triton kernels take 0.02 to 0.25 of torch's time (`benchmarks/results/attention_h200.json`).

    Raises:
        ModelSettingsError: an unknown name (the known ones are listed), or one whose package is not installed.
        UnsupportedModelError: a kind of layer that it cannot serve.
    """
    if requested == "auto":
        return _load(choose_attention(specs, device, dtypes))(specs, device, dtypes)
    try:
        return _load_known(requested)(specs, device, dtypes)
    except ImportError as error:
        raise _cannot_be_imported(requested, error) from error


def check_attention(
    requested: str, specs: Sequence[AttentionSpec], device: torch.device, dtypes: AttentionDtypes, gpu: Device | None
) -> None:
    """Refuse what `make_attention` would, without making it. `gpu` need not be here, so packages do not count for it.

    Raises:
        ModelSettingsError: as `make_attention` says.
        UnsupportedModelError: a kind of layer, GPU or type of numbers that `requested` cannot serve, or a package that
            it lacks.
    """
    if requested == "auto":
        return
    try:
        implementation = _load_known(requested)
    except ModelSettingsError:
        if gpu is None or requested not in ATTENTION_MODULES:
            raise
        return  # a package that this machine lacks
    if gpu is None:
        reason = implementation.verdict(specs, device, _arch(device), dtypes)
    else:
        reason = implementation.unfit_reason(specs, device, gpu.arch, dtypes)
    if reason:
        raise refusal(requested, reason)


def refusal(name: str, reason: str) -> UnsupportedModelError:
    """Why an implementation cannot serve, as an error for the user."""
    return UnsupportedModelError(f"attention backend {name}: {reason}; choose auto or torch")


def choose_attention(
    specs: Sequence[AttentionSpec], device: torch.device, dtypes: AttentionDtypes = BF16, arch: str | None = None
) -> str:
    """What "auto" takes: on a GPU the first that serves every kind of layer and may be chosen, elsewhere torch.

    `arch`: architecture of the device, by default of this machine's.
    """
    if device.type != "cuda":
        return "torch"
    arch = arch or _arch(device)
    usable = (name for name, reason in attention_verdicts(specs, device, dtypes, arch).items() if reason is None)
    return next((name for name in usable if not_chosen_reason(name, specs, arch) is None), "torch")


def not_chosen_reason(name: str, specs: Sequence[AttentionSpec], arch: str) -> str | None:
    """None if "auto" may take this implementation wherever it can serve, else why not."""
    return _load(name).not_chosen_reason(specs, arch)


def attention_verdicts(
    specs: Sequence[AttentionSpec], device: torch.device, dtypes: AttentionDtypes = BF16, arch: str | None = None
) -> dict[str, str | None]:
    """By implementation, in the order of "auto": None if it serves the device and every kind of layer, else why not."""
    found: dict[str, str | None] = {}
    arch = arch or _arch(device)
    for name in ATTENTION_MODULES:
        try:
            implementation = _load(name)
        except ImportError as error:
            found[name] = f"it cannot be imported: {error}"
        else:
            found[name] = implementation.verdict(specs, device, arch, dtypes)
    return found


def _arch(device: torch.device) -> str:
    """Architecture of the device; of a GPU that this machine does not have, its type."""
    return device.type if device.type == "cuda" and not torch.cuda.is_available() else arch_of(device)


def _load_known(requested: str) -> type[Attention]:
    if requested not in ATTENTION_MODULES:
        raise ModelSettingsError(
            f"attention backend {requested!r} is unknown; known: auto, {', '.join(ATTENTION_MODULES)}"
        )
    try:
        return _load(requested)
    except ImportError as error:
        raise _cannot_be_imported(requested, error) from error


def _cannot_be_imported(name: str, error: ImportError) -> ModelSettingsError:
    return ModelSettingsError(f"attention backend {name} cannot be imported: {error}")


def _load(name: str) -> type[Attention]:
    importlib.import_module(ATTENTION_MODULES[name])
    return _implementations[name]
