"""The log of a step that follows from a config, with everything stated that an estimate decides."""

from __future__ import annotations

from meshplan.garbage import no_collection
from meshplan.memory.analytic.microbatches import analytic_microbatches
from meshplan.memory.decoder.attention_kernel import check_fused
from meshplan.memory.decoder.experts import Spread
from meshplan.memory.log.events import EventLog
from meshplan.memory.replay import replay
from meshplan.plan.plan import Plan


@no_collection()
def analytic_log(
    plan: Plan,
    *,
    batch: int,
    seq_len: int,
    optimizer: str = "adamw",
    rank: int = 0,
    is_cuda: bool = True,
    in_place: bool = True,
    foreach: bool = True,
    spread: Spread | None = None,
    has_host: bool = False,
    device: str = "",
) -> EventLog:
    """Return the event log of one step of a causal LM of transformers, optimizer state included.

    Args:
        plan: A plan for a graph of `blueprint`.
        batch: Sequences of this rank per forward of the training loop; a pipeline splits these
            further into its microbatches.
        seq_len: Tokens of one sequence.
        optimizer: A name of `spec.OPTIMIZER_STATES`.
        rank: The rank whose step is returned.
        is_cuda: If True, compute the log for CUDA's kernels, otherwise for those of a CPU.
        in_place: If True, several gradients of one tensor are added up in place, as torch does
            unless a dispatch mode is active.
        foreach: If True, the optimizer updates parameters together, as torch does on a GPU.
        spread: Distribution of experts and tokens over ep; None for the plan's.
        has_host: If True, host memory is separate from the device's, and has the optimizer's step
            counts.
        device: A device name of `hardware`; "" if unknown.

    Raises:
        PlanError: There are no rules for the model's ops, or for a feature of the plan.
    """
    check_fused(plan, seq_len, is_cuda=is_cuda, device=device)
    works = analytic_microbatches(
        plan, batch, seq_len, is_cuda=is_cuda, in_place=in_place, spread=spread, device=device
    )
    trace = works.of_rank(rank)
    return replay(trace, plan, optimizer, rank=rank, foreach=foreach, has_host=has_host)
