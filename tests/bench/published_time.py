"""Published runs, timed: seconds of a step, and which of several plans is the fastest.

`python -m tests.bench.published FILE.jsonl --what time,ranking --json OUT`. Constants are those
with which `plan` estimates if `profile:` names the framework of the row, and no row can have
constants of its own. Rows of the groups that a profile was fitted to are marked in-sample. Jobs
that stood still, as nearly a third of one source's did, leave the score and are counted beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from meshplan.cost.profile import runs_of
from tests.bench.mapping import Row, SkipError, checked
from tests.bench.row_check import UNFORESEEN, named
from tests.bench.time_mapping import Case, case_of
from tests.bench.time_predict import batches, predict

FEWEST: Final = 3
"""Plans that make an order."""


def predict_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One answer for each row."""
    out: list[dict[str, Any]] = []
    by_key: dict[tuple[str, str, str], list[tuple[int, Case]]] = defaultdict(list)
    for row in rows:
        answer: dict[str, Any] = {
            **named(row),
            "predicted_s": None, "predicted_tokens_per_s_per_gpu": None, "skipped": None,
        }  # fmt: skip
        out.append(answer)
        try:
            case = case_of(checked(row))
            if _facts(case.key) is None:
                raise SkipError(f"no profile of {' '.join(case.key)}")
        except SkipError as error:
            answer["skipped"] = str(error)
        except UNFORESEEN as error:
            answer["skipped"] = f"{type(error).__name__}: {error}"
        else:
            by_key[case.key].append((len(out) - 1, case))
    for key, members in by_key.items():
        facts, cases = _facts(key), [case for _, case in members]
        assert facts is not None
        told = predict(cases, facts, batches(cases))
        for (place, case), seconds in zip(members, told, strict=True):
            out[place] |= {
                "framework": " ".join(key),
                "is_stalled": case.is_stalled(seconds),
                "in_sample": case.group in facts.get("groups", ()),
                "predicted_s": float(seconds),
                "predicted_tokens_per_s_per_gpu": case.tokens / seconds / case.gpus,
                "real_s": case.real_s,
                "order": [str(case.shape), case.tokens, case.gpus, *key],
            }
    return out


def _facts(key: tuple[str, str, str]) -> Mapping[str, Any] | None:
    """The constants of a case's framework and device; None if it has no runs to take them from."""
    return {"gathers_once": True} if key[0] == "generic" else runs_of(*key[:2])


def times(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors by framework and group."""
    members: dict[str, list[float]] = defaultdict(list)
    stalled = 0
    for answer in answers:
        if answer["skipped"] is None and answer["is_stalled"]:
            stalled += 1
        elif answer["skipped"] is None:
            error = abs(answer["predicted_s"] / answer["real_s"] - 1)
            for name in ("all", answer["framework"], f"  {answer['group']}"):
                members[name].append(error)
    skipped: dict[str, int] = defaultdict(int)
    for answer in answers:
        if answer["skipped"] is not None:
            skipped[answer["skipped"]] += 1
    return {
        "errors": {
            name: {"rows": len(each), "median": float(np.median(each)),
                   "p90": float(np.quantile(each, 0.9))}
            for name, each in members.items()
        },
        "stalled": stalled,
        "skipped": dict(sorted(skipped.items(), key=lambda pair: -pair[1])),
    }  # fmt: skip


def ranking(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How well plans of one model, batch, framework and number of GPUs are put in order."""
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for answer in answers:
        if answer["skipped"] is None and not answer["is_stalled"]:
            pair = (answer["predicted_s"], answer["real_s"])
            groups[tuple(answer["order"])].append(pair)
    rows = []
    for key, pairs in groups.items():
        told, real = (np.array(column) for column in zip(*pairs, strict=True))
        if len(pairs) < FEWEST:
            continue
        rows.append({
            "framework": " ".join(key[3:]), "gpus": key[2], "plans": len(pairs),
            "spearman": spearman(told, real),
            "regret": float(real[np.argmin(told)] / real.min() - 1),
        })  # fmt: skip
    out: dict[str, Any] = {"groups": rows, "summary": {}}
    for name in ("all", *sorted({row["framework"] for row in rows})) if rows else ():
        chosen = [row for row in rows if name in ("all", row["framework"])]
        regrets = [row["regret"] for row in chosen]
        out["summary"][name] = {
            "groups": len(chosen), "plans": sum(row["plans"] for row in chosen),
            "spearman": float(np.median([row["spearman"] for row in chosen])),
            "regret_median": float(np.median(regrets)),
            "regret_p90": float(np.quantile(regrets, 0.9)),
        }  # fmt: skip
    return out


def spearman(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """The correlation of ranks; equal values share theirs."""

    def ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place])

    x, y = ranks(a), ranks(b)
    if x.std() == 0 or y.std() == 0:
        return 1.0 if x.std() == y.std() else 0.0
    return float(np.corrcoef(x, y)[0, 1])


def table(time: Mapping[str, Any] | None, order: Mapping[str, Any] | None) -> str:
    """What a person reads."""
    lines = []
    if time is not None:
        lines.append(f"{'seconds of a step':44} {'rows':>6} {'median':>7} {'p90':>7}")
        for name, e in time["errors"].items():
            lines.append(f"{name:44} {e['rows']:6} {e['median']:7.1%} {e['p90']:7.1%}")
        lines.append(f"stalled {time['stalled']:5}  (left out: their network stood still)")
        lines += [f"skipped {n:5}  {why}" for why, n in time["skipped"].items()]
    if order is not None and order["groups"]:
        lines.append(
            f"{'order of plans':44} {'groups':>6} {'Spearman':>8} {'regret':>7} {'p90':>7}"
        )
        for name, e in order["summary"].items():
            lines.append(
                f"{name:44} {e['groups']:6} {e['spearman']:8.3f} {e['regret_median']:7.1%}"
                f" {e['regret_p90']:7.1%}"
            )
    return "\n".join(lines)
