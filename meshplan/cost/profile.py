"""Constants of the cost model: the shares of a datasheet's speeds that code reaches.

`profiles.json` has, for each framework whose runs were published, the few constants that tell a
model that was left out of the fit better than `GENERIC` does. They are shares and overheads, so
they hold for each device of which a datasheet is known; all others are those of `GENERIC`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from meshplan.errors import PlanError, Problem
from meshplan.layout.hardware import Cluster, Device, devices, own_fact, with_own_fact
from meshplan.model.graph import ModelGraph
from meshplan.shown import shown
from meshplan.spec.spec import PRECISION_WORDS, PROFILES, Spec
from meshplan.spec.values import join

_FILE: Final = Path(__file__).with_name("profiles.json")
_EAGER: Final = "hf-eager"

HOST_BYTES_PER_S: Final = 60e9
"""Memory bandwidth that the processors of one node reach together, in bytes per second.

Source: Ren et al. 2021 (ZeRO-Offload), table 4: PyTorch's Adam takes 1.39 s for 1e9 parameters
on two Xeon Platinum 8168, at 84 bytes per parameter (21 passes over float32, the `optimizer_bytes`
of `GENERIC`)."""


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Constants of a device from which, with a model and a plan, the time of a step follows.

    Args:
        device, framework, dtype: The device, framework and compute dtype that the constants belong
            to.
        peak_flops: Peak FLOP/s of the datasheet.
        efficiency: Share of the peak that large matrix products reach.
        attention_efficiency: Share of the peak that attention reaches.
        kernel_s: Seconds on the device that each kernel takes whatever its size.
        launch_s: Seconds that the host process takes for each kernel of a step, with the modules,
            hooks and autograd around it. It runs ahead of the device if it can.
        collective_s: Seconds that the host process takes for each tp collective.
        collective_rank_s: Further seconds that the host process takes for each tp collective, per
            rank of tp, if the plan has a pipeline that crosses nodes.
        collective_node_s: Seconds on the device that each tp collective takes, per doubling of the
            nodes that its group is on.
        memory_bytes_per_s: Memory bandwidth that elementwise kernels reach.
        intra_bytes_per_s, inter_bytes_per_s: Bandwidth that collectives reach, per device, within a
            node and between nodes.
        intra_latency_s, inter_latency_s: Seconds of one hop within a node and between nodes.
        contention: Seconds by which each second of hidden communication slows the computation that
            hides it.
        contention_alone: The `contention` of DDP if each of its ranks is alone on a node: a ring
            with hops only between nodes takes little of the device. None means `contention`.
        pcie_bytes_per_s: Bandwidth between the device and its host.
        optimizer_bytes: Bytes that an optimizer step reads and writes per byte of a parameter.
        tp_exposed: Share of tp communication that nothing hides.
        streamed_bytes_per_s: Memory bandwidth of kernels that stream large tensors and do nothing
            else, such as the sum of two gradients; 0 if it is `memory_bytes_per_s`.
        crossing_s: Seconds to send a tensor of any size to the next pipeline stage.
        congestion: Share by which sending a byte between nodes takes longer, per doubling of the
            nodes of the job, whose groups share the switches between them.
        host_bytes_per_s: Memory bandwidth that elementwise kernels reach on the processors of one
            node together.
        reduce_scatter_factor: Seconds of a reduce-scatter of large tensors, relative to an
            all-gather of the same tensors. 1 is a ring; gloo all-reduces and keeps a part, so that
            it takes 2.
        num_nodes: Number of nodes that were measured together. If it is 1, `inter_bytes_per_s` and
            `inter_latency_s` were not measured.
        gathers_once: If True, ZeRO-1 gathers parameters once, after the optimizer step, and not in
            each forward.
        ranks_per_node: Ranks of each of those nodes; `inter_bytes_per_s` holds if all of them send.
        sources: The origins of the constants.
        assumed_network: The bandwidth between nodes that was assumed, in words with its source; ""
            if the plan states it, or has one node.
        residual: Root mean square of the fit's relative errors; None if nothing was fitted.
        num_runs: Number of runs used for the fit.
    """

    device: str
    framework: str
    dtype: str
    peak_flops: float
    efficiency: float
    attention_efficiency: float
    kernel_s: float
    launch_s: float
    collective_s: float
    collective_rank_s: float
    collective_node_s: float
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    intra_latency_s: float
    inter_latency_s: float
    contention: float
    pcie_bytes_per_s: float
    optimizer_bytes: float
    tp_exposed: float = 1.0
    streamed_bytes_per_s: float = 0.0
    crossing_s: float = 0.0
    congestion: float = 0.0
    contention_alone: float | None = None
    host_bytes_per_s: float = HOST_BYTES_PER_S
    reduce_scatter_factor: float = 1.0
    num_nodes: int = 1
    ranks_per_node: int = 1
    gathers_once: bool = False
    sources: tuple[str, ...] = ()
    assumed_network: str = ""
    residual: float | None = None
    num_runs: int = 0

    @property
    def note(self) -> str:
        """A sentence on the origin of step times by these constants.

        It says whose constants they are and which network was assumed; "" for generic constants
        and links that the plan states.
        """
        whose = f" by constants for {self.framework}" if self.framework in PROFILES else ""
        assumed = f" assuming {self.assumed_network}" if self.assumed_network else ""
        return f"step times are estimated{whose}{assumed}" if whose or assumed else ""


GENERIC: Final[Mapping[str, float]] = MappingProxyType(
    {
        "efficiency": 0.65,
        "attention_efficiency": 0.40,
        "kernel_s": 2e-6,
        "launch_s": 8e-6,
        "collective_s": 4e-5,
        "collective_rank_s": 0.0,
        "collective_node_s": 0.0,
        "memory_share": 0.60,
        "intra_share": 0.75,
        "inter_share": 0.80,
        "intra_latency_s": 3e-6,
        "inter_latency_s": 15e-6,
        "contention": 0.30,
        "pcie_bytes_per_s": 25e9,
        "optimizer_bytes": 21.0,
        "tp_exposed": 1.0,
        "crossing_s": 0.0,
        "congestion": 0.0,
    }
)
"""Shares of the speeds on a datasheet, and constants not stated there. [Empirical]: typical of the
fitted profiles (products 0.49 to 0.78 where they are well determined, attention 0.2 to 0.8, memory
0.36 to 0.95, contention 0.2 to 1). Links: nccl-tests reach 361 of 450 GB/s on eight H200, 235 of
300 on eight A100, and 45 to 48 of 50 between nodes. `optimizer_bytes`: torch's AdamW with foreach
makes 21 passes over the parameters."""


@cache
def fitted() -> Mapping[tuple[str, str | None], Mapping[str, Any]]:
    """Return the entries of `profiles.json`, by framework and device; None is any device."""
    rows = json.loads(_FILE.read_text(encoding="utf-8"))["profiles"]
    return MappingProxyType({(row["framework"], row["device"]): row for row in rows})


_STREAMED: Final = 0.9
"""Share of the memory bandwidth on the datasheet that kernels on large tensors reach. Source: an
H200 reaches 4.40 of 4.8 TB/s (docs/evidence/h200.json)."""
_USUAL_PRODUCTS: Final = 794.5 / 989
"""Share of the peak that the fastest product reaches on the device that `GENERIC["efficiency"]` is
typical of, an H100. Source: see `Device.product_flops`."""


def _product_efficiency(device: Device, dtype: str) -> float:
    """Return the share of the peak that the products of a model reach by generic constants.

    It is proportional to what the fastest product reaches on the device: 0.87 of the peak on an
    A100, 0.51 on an MI300X.
    """
    usual, peak = GENERIC["efficiency"], device.peak_flops.get("bfloat16")
    if device.product_flops is None or peak is None or dtype == "float32":
        return usual
    return usual * (device.product_flops / peak / _USUAL_PRODUCTS)


def runs_of(framework: str, device: str) -> Mapping[str, Any] | None:
    """Return the entry of `profiles.json` for a framework on a device; None if it has no runs."""
    return fitted().get((framework, device)) or fitted().get((framework, None))


def framework_of(spec: Spec, graph: ModelGraph, device: str | None = None) -> str:
    """Return the name in `PROFILES` of the code that runs a plan's step.

    Without a statement of the plan, it follows from the model: modules of transformers run under
    the wrappers of meshplan, as the runs of hf-eager did. On a GPU that those runs did not have,
    their error is not known, and published H100 runs are slower: there, and for other models, the
    constants are generic.

    Args:
        spec: The plan's spec.
        graph: The model.
        device: Name of the GPU; None for the one that the spec states.
    """
    if spec.profile is not None:
        return spec.profile
    runs = fitted()[_EAGER, None]
    dtype = spec.precision.param or graph.dtype
    types = (module.qualified_type for module in graph.modules.values())
    if device is None and spec.hardware is not None:
        device = spec.hardware.gpu
    is_known = device in runs["devices"] and dtype == runs["dtype"]
    is_eager = is_known and any(each.startswith("transformers.") for each in types)
    return _EAGER if is_eager else PROFILES[0]


def profile_of_plan(
    spec: Spec, graph: ModelGraph, cluster: Cluster, dtype: str, measured: Profile | None = None
) -> Profile:
    """Return the constants for a step of a plan: measured ones, or those of `framework_of`.

    Args:
        spec: The plan's spec.
        graph: The model.
        cluster: The devices and links.
        dtype: The dtype in which the plan computes.
        measured: A measured profile; None if nothing was measured.

    Raises:
        PlanError: As `profile_of` and `measured_for`.
    """
    if measured is not None:
        return measured_for(measured, cluster, dtype)
    return profile_of(cluster, framework_of(spec, graph, cluster.device.name), dtype)


def profile_of(cluster: Cluster, framework: str = PROFILES[0], dtype: str = "bfloat16") -> Profile:
    """Return the constants for a step on this cluster.

    Args:
        cluster: The devices and links.
        framework: One of `PROFILES`: the code that runs the step.
        dtype: The dtype in which matrix products are computed.

    Raises:
        PlanError: A speed that the time depends on is not known, or the framework's runs are of
            another dtype; the message states what to change.
    """
    if problems := list(_unknown(cluster, dtype)):
        raise PlanError(problems)
    if framework == PROFILES[0]:
        return resolve(cluster, "native", dtype, {})
    facts = runs_of(framework, cluster.device.name)
    assert facts is not None, framework
    if facts["dtype"] != dtype:
        what = f"the runs of {framework} computed in {facts['dtype']}, but the plan in {dtype}"
        fix = f"write profile: {PROFILES[0]}, or set precision to one that computes in "
        raise PlanError(Problem(what, fix=fix + facts["dtype"]))
    return resolve(cluster, framework, dtype, facts)


def resolve(cluster: Cluster, framework: str, dtype: str, facts: Mapping[str, Any]) -> Profile:
    """Return a profile in which shares of the datasheet are multiplied by its speeds.

    Args:
        cluster: The devices and links.
        framework: The framework whose code runs.
        dtype: The dtype in which matrix products are computed.
        facts: An entry of `profiles.json`. Constants that are not in it are those of `GENERIC`, but
            for the speed of products where that of the device was measured.
    """
    device = cluster.device
    constants = {
        **GENERIC,
        "efficiency": _product_efficiency(device, dtype),
        **facts.get("constants", {}),
    }
    memory, peak = device.memory_bytes_per_s, device.peak_flops[dtype]
    assert memory is not None
    intra = cluster.intra.bytes_per_s if cluster.intra else device.intra_bytes_per_s
    inter = cluster.inter.bytes_per_s if cluster.inter else None
    sources = tuple(facts.get("sources", ())) or (
        *device.sources,
        *((cluster.inter.source,) if cluster.inter and cluster.inter.source else ()),
        "[Empirical] shares of the datasheet: meshplan.cost.profile.GENERIC",
    )
    return Profile(
        device=device.name,
        framework=framework,
        dtype=dtype,
        peak_flops=peak,
        efficiency=constants["efficiency"],
        attention_efficiency=constants["attention_efficiency"],
        kernel_s=constants["kernel_s"],
        launch_s=constants["launch_s"],
        collective_s=constants["collective_s"],
        collective_rank_s=constants["collective_rank_s"],
        collective_node_s=constants["collective_node_s"],
        memory_bytes_per_s=memory * constants["memory_share"],
        streamed_bytes_per_s=memory * _STREAMED,
        # A link that is never used needs a finite bandwidth, too.
        intra_bytes_per_s=(intra or inter or memory) * constants["intra_share"],
        inter_bytes_per_s=(inter or intra or memory) * constants["inter_share"],
        intra_latency_s=constants["intra_latency_s"],
        inter_latency_s=constants["inter_latency_s"],
        contention=constants["contention"],
        pcie_bytes_per_s=constants["pcie_bytes_per_s"],
        optimizer_bytes=constants["optimizer_bytes"],
        tp_exposed=constants["tp_exposed"],
        crossing_s=constants["crossing_s"],
        congestion=constants["congestion"],
        contention_alone=constants.get("contention_alone"),
        gathers_once=facts.get("gathers_once", False),
        sources=sources,
        assumed_network=_assumed_network(cluster),
        residual=facts.get("residual"),
        num_runs=facts.get("num_runs", 0),
    )


def _assumed_network(cluster: Cluster) -> str:
    """Return `Profile.assumed_network` for a cluster."""
    link = cluster.inter
    if cluster.nodes == 1 or link is None or not link.source:
        return ""
    return f"{link.bytes_per_s / 1e9:g} GB/s per GPU between nodes ({link.source})"


def _unknown(cluster: Cluster, dtype: str) -> list[Problem]:
    """Return a problem for each speed of the device or its links that is not known."""
    device, out = cluster.device, []
    if dtype not in device.peak_flops:
        words = [word for word, of in PRECISION_WORDS.items() if of["param"] in device.peak_flops]
        fix = f"set precision: {join(words)}" if words else ""
        if words and (facts := with_own_fact(device, dtype)):
            fix += f"; or write {facts}"
        others = ", ".join(name for name, d in devices().items() if dtype in d.peak_flops)
        what = f"{device.name} has no known {dtype} throughput"
        if fact := own_fact(device, dtype):
            fix = f"add {fact}=181e12 (operations per second) to its facts"
        out.append(Problem(what, fix=fix or f"set gpu in hardware: to one of {others}"))
    if device.memory_bytes_per_s is None:
        what = f"{device.name} has no known memory bandwidth"
        known = ", ".join(name for name, d in devices().items() if d.memory_bytes_per_s)
        fix = f"set gpu in hardware: to one of {known}"
        if fact := own_fact(device, "memory_bytes_per_s"):
            fix = f"add {fact}=960GB/s to its facts"
        out.append(Problem(what, fix=fix))
    if cluster.gpus_per_node > 1 and cluster.intra is None and device.intra_bytes_per_s is None:
        what = f"{device.name} has no known bandwidth between the GPUs of one node"
        out.append(Problem(what, fix="add intra: 25GB/s (per GPU, one way) to hardware:"))
    return [*out, *_unknown_network(cluster)]


def _unknown_network(cluster: Cluster) -> list[Problem]:
    """Return a problem if the cluster has several nodes and the speed between them is not known."""
    if cluster.nodes == 1 or cluster.inter is not None:
        return []
    what = (
        "the plan states no bandwidth between nodes, and there is no usual one for nodes of "
        f"{cluster.device.name}"
    )
    return [Problem(what, fix="add inter: 50GB/s (per GPU, one way) to hardware:")]


def on_cluster(profile: Profile, cluster: Cluster) -> Profile:
    """Return a profile that was measured on some machines, for a cluster of such machines.

    What was measured between nodes is kept. Otherwise the plan's bandwidth between nodes is used.

    Raises:
        PlanError: The profile was measured on another device, or between nodes with another number
            of ranks, or the speed of the network is not known.
    """
    is_measured = profile.num_nodes > 1
    problems = [] if is_measured else _unknown_network(cluster)
    if profile.device != cluster.device.name:
        what = f"the profile was measured on {profile.device}, not on {cluster.device.name}"
        problems.insert(0, Problem(what, fix="run meshplan calibrate on a machine of the plan"))
    ranks = profile.ranks_per_node
    if is_measured and cluster.nodes > 1 and ranks != cluster.gpus_per_node:
        # Ranks of a node share its link, so the bandwidth of each depends on their number.
        what = f"the network was measured with {ranks} ranks on each node, and the plan has "
        what += str(cluster.gpus_per_node)
        fix = f"run meshplan calibrate with --nproc-per-node {cluster.gpus_per_node}"
        problems.append(Problem(what, fix=fix))
    if problems:
        raise PlanError(problems)
    if is_measured or cluster.inter is None:
        return profile
    reached = cluster.inter.bytes_per_s * GENERIC["inter_share"]
    return replace(profile, inter_bytes_per_s=reached, assumed_network=_assumed_network(cluster))


def measured_for(profile: Profile, cluster: Cluster, dtype: str) -> Profile:
    """Return a measured profile for a plan on a cluster of such machines.

    Args:
        profile: The measured profile.
        cluster: The cluster.
        dtype: The dtype in which the plan computes.

    Raises:
        PlanError: The profile was measured on another device or in another dtype, or the speed of
            the network is not known.
    """
    if profile.dtype != dtype:
        what = f"the profile was measured in {profile.dtype}, but the plan computes in {dtype}"
        fix = f"leave the profile out, or set precision to one that computes in {profile.dtype}"
        raise PlanError(Problem(what, fix=fix))
    return on_cluster(profile, cluster)


def without(profile: Profile, *, network: bool) -> Profile:
    """Return a profile with idealised hardware, for a lower bound on a plan's time.

    Args:
        profile: The profile of the real hardware.
        network: If True, communication takes no time; if False, the profile is returned unchanged.
    """
    if not network:
        return profile
    return replace(
        profile, intra_bytes_per_s=float("inf"), inter_bytes_per_s=float("inf"),
        intra_latency_s=0.0, inter_latency_s=0.0, contention=0.0, collective_node_s=0.0,
    )  # fmt: skip
