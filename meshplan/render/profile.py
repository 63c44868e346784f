"""A profile of a machine as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from meshplan.cost.calibration import LINKS_ARE_A_GUESS
from meshplan.cost.profile import Profile

_GIGA, _TERA = 1e9, 1e12


def _between_nodes(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield (name, figure) of what was measured between nodes and of reduce-scatters."""
    if profile.num_nodes > 1:
        yield "between nodes", f"{profile.inter_bytes_per_s / _GIGA:.3g} GB/s for each device"
    if profile.reduce_scatter_factor != 1:
        yield "reduce-scatter", f"{profile.reduce_scatter_factor:.2f} times an all-gather"


def profile_to_text(profile: Profile) -> Iterator[str]:
    """Yield lines on the speeds of a device, and on how well they explain the measured times."""
    yield f"{profile.device}, {profile.dtype}"
    products = profile.peak_flops * profile.efficiency / _TERA
    attention = profile.peak_flops * profile.attention_efficiency / _TERA
    guess = " (a guess)" if LINKS_ARE_A_GUESS in profile.sources else ""
    rows = (
        ("matmuls", f"{products:.3g} TFLOP/s ({profile.efficiency:.0%} of peak)"),
        ("attention", f"{attention:.3g} TFLOP/s"),
        ("memory", f"{profile.memory_bytes_per_s / _GIGA:.0f} GB/s"),
        ("kernel launch", f"{profile.launch_s * 1e6:.1f} us"),
        ("between devices", f"{profile.intra_bytes_per_s / _GIGA:.1f} GB/s" + guess),
        *_between_nodes(profile),
        ("from the host", f"{profile.pcie_bytes_per_s / _GIGA:.1f} GB/s"),
    )
    for name, figure in rows:
        yield f"  {name:16} {figure}"
    if profile.residual is not None:
        yield f"  fit error {profile.residual:.1%} (root mean square over {profile.num_runs} runs)"
    yield from (f"  {source}" for source in profile.sources)
