"""The result of `meshplan plan --what-if`: a chosen plan on other hardware."""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.planner.problem.decision import Evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A chosen plan on other hardware: with the same choices, and planned anew.

    Args:
        hardware: The changed fields, such as "gpu=b200".
        same: The plan with the same choices; None if it cannot run or does not fit there.
        why: Why there is no `same`; "" if there is.
        anew: The plan that the planner chooses there; None if there is none.
        why_not: Why there is no `anew`; "" if there is.
    """

    hardware: str
    same: Evaluated | None
    why: str
    anew: Evaluated | None
    why_not: str
