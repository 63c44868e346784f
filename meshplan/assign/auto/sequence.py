"""`sequence_parallel` with `auto`: find where the residual stream is sharded along the sequence.

The code between a rowwise projection and the next colwise one computes each position independently,
so each rank of tp can keep only some of the positions (Korthikanti et al. 2022, section 4.2). But
code reads the number of positions from the shapes of its inputs. The sequence is therefore sliced
and gathered only where modules are entered, so that inside a module it is either whole or sharded.
Which modules these are follows from the operations that read each value; a rehearsal checks that no
code uses a wrong number of positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from meshplan.assign.auto.choose import CutChoice
from meshplan.assign.auto.numbers import Rehearsals
from meshplan.assign.auto.proof import Refuted, summed_beside
from meshplan.assign.auto.regions import FlowUses
from meshplan.assign.auto.stream import Stream
from meshplan.model.dims.factors import Dim
from meshplan.model.dims.linker import argument, base_name, positions
from meshplan.model.dims.operations import ALONG, MIXES_ALONG, REDUCED
from meshplan.model.flow import UPDATE, Call, Op

_DIM: Final = 1
_VIEWS: Final = frozenset(
    (
        "view", "_unsafe_view", "reshape", "slice", "unsqueeze", "squeeze", "select", "split",
        "split_with_sizes",
    )
)  # fmt: skip
_NORMS: Final = frozenset(("native_layer_norm", "_fused_rms_norm"))


def find_stream(flow_uses: FlowUses, choice: CutChoice, rehearsals: Rehearsals) -> Stream:
    """Return where the sequence is sharded and gathered, given the chosen regions.

    A model may have several sequences, such as those of an encoder and of a decoder. The one that
    most blocks compute on is sharded if it can be, else the next one. If a sequence cannot be
    sharded up to the end of the model, try to gather it after the last block.

    Raises:
        Refuted: No sequence can be sharded; the message is the reason for the first one.
    """
    reasons: list[Refuted] = []
    for along in _sequences(flow_uses, choice):
        tried: list[Refuted] = []
        for end in (None, *_last_blocks(flow_uses, choice, along)):
            try:
                return _shown(flow_uses, choice, rehearsals, along, end)
            except Refuted as error:
                tried.append(error)
        reasons += tried[1:2] or tried  # The last block's, which tells of the blocks alone.
    if not reasons:
        raise Refuted("no rowwise module computes on a sequence, which dim 1 would be")
    raise reasons[0]


def _sequences(flow_uses: FlowUses, choice: CutChoice) -> list[Dim]:
    """Return the sequences that rowwise modules compute on, the most frequent one first."""
    counts: dict[Dim, int] = {}
    for call, word in _styled_calls(flow_uses, choice):
        along = _sequence_of(flow_uses, call) if word == "rowwise" else ()
        if along:
            counts[along] = counts.get(along, 0) + 1
    return sorted(counts, key=counts.__getitem__, reverse=True)


def _sequence_of(flow_uses: FlowUses, call: Call) -> Dim:
    """Return the factors of the sequence dim of a call's outputs; () if they have none in common.

    Outputs without a dim for samples have none.
    """
    dims = flow_uses.classes.dims
    found = {dims[v][_DIM] if len(dims[v]) > _DIM + 1 else () for _, v in call.outputs}
    return found.pop() if len(found) == 1 else ()


def _shown(
    flow_uses: FlowUses, choice: CutChoice, rehearsals: Rehearsals, along: Dim, end: Call | None
) -> Stream:
    """Return the sharding of a sequence up to the end of a call; all the way if `end` is None.

    Raises:
        Refuted: The sequence cannot be sharded so, or a rehearsal of it diverges.
    """
    walk = _SequenceWalk(flow_uses, choice, along, end)
    walk.run()
    found = walk.stream()
    size, length = rehearsals.size, flow_uses.classes.sizes_of(walk.along)
    if length % size:
        raise Refuted(f"the recorded sequence length {length} does not divide by tp {size}")
    difference = rehearsals.rehearse_stream(choice.regions, choice.attributes, found)
    if difference is not None:
        where = flow_uses.flow.calls[difference.call].module or "the model"
        what = f"on a shard of the sequence, {where} would not run the operations of one process: "
        raise Refuted(what + difference.text)
    return found


def _last_blocks(flow_uses: FlowUses, choice: CutChoice, along: Dim) -> Iterator[Call]:
    """Yield calls after which the sequence may be gathered, the outermost one first.

    Such a call contains the last rowwise projection on this sequence, but not all of them, and
    returns one tensor: the last block, for example, or its last part.
    """
    closing = [
        call
        for call, word in _styled_calls(flow_uses, choice)
        if word == "rowwise" and _sequence_of(flow_uses, call) == along
    ]
    common = _common(flow_uses, closing)
    inner = list(takewhile(lambda c: c is not common, flow_uses.flow.around(closing[-1].id)))
    for call in reversed(inner[1:]):
        if [path for path, _ in call.outputs] == [""]:
            yield call


def _styled_calls(flow_uses: FlowUses, choice: CutChoice) -> list[tuple[Call, str]]:
    words = {fqn: word for region in choice.regions for fqn, word in region.words.items()}
    words |= choice.gathered
    words |= dict.fromkeys(choice.proof.summed_modules, "gradients_added")
    return [(call, words[call.module]) for call in flow_uses.flow.calls if call.module in words]


def _common(flow_uses: FlowUses, calls: list[Call]) -> Call:
    """Return the innermost call that contains all of these calls and is none of them."""
    chains = [[c.id for c in flow_uses.flow.around(call.id)][1:] for call in calls]
    shared = set(chains[0]).intersection(*chains[1:])
    return flow_uses.flow.calls[max(shared, default=0)]


@dataclass(slots=True)
class _SequenceWalk:
    """Finds the values that are shards of the sequence, starting at rowwise outputs.

    Attributes:
        flow_uses: The recorded forward.
        choice: The chosen regions.
        along: The factors of the sequence dim.
        end: The call whose outputs are gathered; None if nothing is gathered at the end.
        ops: Indices of operations on shards.
        values: Ids of values that are shards.
        entered: Calls into which a whole value enters and is sliced there, by value id.
        gathers: By (id of a call, value id) of shards that are gathered on entry, the argument.
        taken: The styled call that contains an operation, by index of the operation.
        cut: Factors that the regions shard.
        waiting: Ids of shards whose readers are still to be visited.
        missing: (operation, value id, description) of inputs along the sequence that may not be
            shards yet.
    """

    flow_uses: FlowUses
    choice: CutChoice
    along: Dim
    end: Call | None
    ops: set[int] = field(default_factory=set)
    values: set[int] = field(default_factory=set)
    entered: dict[int, list[Call]] = field(default_factory=dict)
    gathers: dict[tuple[int, int], str] = field(default_factory=dict)
    taken: dict[int, Call] = field(default_factory=dict)
    cut: frozenset[int] = frozenset()
    waiting: list[int] = field(default_factory=list)
    missing: list[tuple[int, int, str]] = field(default_factory=list)

    def run(self) -> None:
        """Visit all operations on shards.

        Raises:
            Refuted: The sequence cannot be sharded.
        """
        self.cut = frozenset(r.factor for r in self.choice.regions)
        styled = _styled_calls(self.flow_uses, self.choice)
        self.taken = {n: call for call, _ in styled for n in range(*call.ops)}
        for call, word in styled:
            if word not in ("vocab", "rowwise"):
                self._gather_around(call)
        closing = [call for call, word in styled if self._closes(call, word)]
        for call in closing:
            for _, value in call.outputs:
                self._add(value)
        while self.waiting or self.missing:
            while self.waiting:
                self._follow(self.waiting.pop(0))
            # One at a time: slicing an earlier value can turn later ones into shards.
            for number, value, what in sorted(self.missing)[:1]:
                self.missing.remove((number, value, what))
                if not self._is_part(value, number):
                    self._enter(value, number, what)
        for path, value in self.flow_uses.flow.outputs:
            if self._is_part(value, len(self.flow_uses.flow.ops)):
                shown = f" (as {path})" if path else ""
                raise Refuted(f"the model returns a shard of the sequence{shown}")
        for change in self.flow_uses.flow.changes:
            if change.new is not None and self._is_part(change.new, len(self.flow_uses.flow.ops)):
                where = f"{change.module}.{change.name}".lstrip(".")
                raise Refuted(f"{where} stores a shard of the sequence, which other code may read")
        calls = self.flow_uses.flow.calls
        self.gathers = {
            (at, value): path
            for (at, value), path in self.gathers.items()
            if self._is_part(value, calls[at].ops[0])
        }

    def _closes(self, call: Call, word: str) -> bool:
        """Return True for a rowwise module whose output becomes a shard of the sequence."""
        return word == "rowwise" and _sequence_of(self.flow_uses, call) == self.along

    def _is_whole(self, call: Call, word: str) -> bool:
        """Return True for a styled call that computes on no shard of the sequence, as without it.

        Its sequence is another one, or is whole there.
        """
        if word == "rowwise":
            return not self._closes(call, word)
        return not self._is_part(call.inputs[0][1], call.ops[0])

    def stream(self) -> Stream:
        """Return what `run` found.

        Raises:
            Refuted: A module where the sequence is sliced or gathered is called more than once.
        """
        calls = self.flow_uses.flow.calls
        styled = _styled_calls(self.flow_uses, self.choice)
        whole = {call.module for call, word in styled if self._is_whole(call, word)}
        cuts = [(c.module, self._path(c, value)) for value, cs in self.entered.items() for c in cs]
        gathers = [(calls[c].module, path) for (c, _), path in self.gathers.items()]
        twice = [m for m, _ in (*cuts, *gathers) if len(self.flow_uses.calls[m]) > 1]
        inside = {
            call.module for call, _ in styled
            if any(call.inputs[0][1] == value and _holds(calls[around], call.ops[0])
                   for around, value in self.gathers)
        }  # fmt: skip
        twice += [m for m in inside if len(self.flow_uses.calls[m]) > 1]
        twice += [c.module for c, word in styled
                  if c.module in whole and not self._is_whole(c, word)]  # fmt: skip
        if twice:
            raise Refuted(f"{twice[0]} is called more than once")
        return Stream(
            cuts=tuple(sorted(cuts)),
            gathers=tuple(sorted(gathers)),
            ends=(self.end.module,) if self.end is not None else (),
            inside=frozenset(inside),
            taking=frozenset(c.module for c, w in styled if w in ("vocab", "gradients_added")),
            whole=frozenset(whole),
            ops=frozenset(self.ops),
            values=frozenset(self.values).difference(v for _, v in self.end.outputs)
            if self.end is not None
            else frozenset(self.values),
            summed=summed_beside(
                self.flow_uses, self.choice.regions, self.choice.gathered, self.choice.proof,
                frozenset(self.values), frozenset(self.entered),
            ),
        )  # fmt: skip

    def _gather_around(self, call: Call) -> None:
        """Move the gather of a styled call's input outwards, to the entry of a module around it.

        This is done as long as all readers of the value inside that module need the whole sequence.
        """
        flow, value = self.flow_uses.flow, call.inputs[0][1]
        for around in list(flow.around(call.id))[1:]:
            if around.parent is None or value not in (v for _, v in around.inputs):
                return
            inside = [self.taken.get(n) for n in flow.users(value) if _holds(around, n)]
            if any(reader is None or reader.inputs[0][1] != value for reader in inside):
                return
            for inner in flow.around(call.id):
                self.gathers.pop((inner.id, value), None)
            self.gathers[around.id, value] = self._path(around, value)

    def _path(self, call: Call, value: int) -> str:
        paths = [path for path, v in call.inputs if v == value]
        if len(paths) != 1 or "." in paths[0]:
            raise Refuted(f"{call.module} does not receive the sequence as exactly one argument")
        return paths[0]

    def _is_part(self, value: int, op: int) -> bool:
        """Return True if the operation with index `op` reads a shard of a value."""
        if value in self.values:
            ends = self.end is not None and value in (v for _, v in self.end.outputs)
            return not (ends and self.end is not None and op >= self.end.ops[1])
        return any(_holds(call, op) for call in self.entered.get(value, ()))

    def _add(self, value: int) -> None:
        if value not in self.values:
            self.values.add(value)
            self.waiting.append(value)

    def _follow(self, value: int) -> None:
        for number in self.flow_uses.flow.users(value):
            call = self.taken.get(number)
            if call is None and number not in self.ops and self._is_part(value, number):
                self._work(number, self.flow_uses.flow.ops[number])
            elif call is not None and call.inputs[0][1] != value:
                raise Refuted(f"{call.module} reads the sequence other than through its input")

    def _work(self, number: int, op: Op) -> None:
        """Check an operation on a shard, and add its outputs to the shards.

        Its other inputs along the sequence must be shards too; they are added to `missing`.

        Raises:
            Refuted: The operation mixes positions of the sequence, or it may.
        """
        self.ops.add(number)
        module = self.flow_uses.flow.calls[op.call].module
        what = base_name(op) + (f" in {module}" if module else "")
        dims, values = self.flow_uses.classes.dims, self.flow_uses.flow.values
        makers = {self.flow_uses.flow.producer(value) for value in op.mutates}
        # Such a tensor is the output of a styled module, or other code reads it unsharded.
        if not makers <= self.ops:
            raise Refuted(f"{what} writes in place into a tensor that other code made")
        if op.is_random and not _keeps_all(op):
            raise Refuted(f"{what} would draw random numbers for a shard of the sequence only")
        if not self._is_apart(op):
            raise Refuted(f"{what} may mix positions of the sequence")
        ndims = set()
        for value in op.inputs:
            if any(f in self.cut for dim in dims[value] for f in dim):
                raise Refuted(f"{what} combines the sequence with values sharded along another dim")
            if any(f in self.along for dim in dims[value] for f in dim):
                self._lies_along(value, what)
                self.missing.append((number, value, what))
                ndims.add(len(dims[value]))
        if len(ndims) > 1 or (len(op.inputs) > 1 and ndims != {len(dims[op.outputs[0]])}):
            raise Refuted(f"{what} combines sequences in tensors of different numbers of dims")
        for value in op.outputs:
            if values[value].shape:
                self._lies_along(value, what)
            self._add(value)

    def _is_apart(self, op: Op) -> bool:
        name, ndim = base_name(op), len(self.flow_uses.classes.dims[op.inputs[0]])
        for table, default in ((REDUCED, None), (MIXES_ALONG, -1)):
            if name in table:
                which = argument(op, table[name], "dim", default)
                is_known = isinstance(which, int | tuple | list) and not isinstance(which, bool)
                return is_known and _DIM not in positions(which, ndim)
        if name in _NORMS:
            return len(tuple(op.args[1])) < ndim - _DIM
        return op.is_pointwise or op.name == UPDATE or name in ALONG or name in _VIEWS

    def _lies_along(self, value: int, what: str) -> None:
        """Raise `Refuted` unless dim 1 of the value is the sequence, and no other dim is."""
        dims = self.flow_uses.classes.dims[value]
        others = [f for d, dim in enumerate(dims) if d != _DIM for f in dim]
        if len(dims) <= _DIM or dims[_DIM] != self.along or set(others) & set(self.along):
            raise Refuted(f"{what} takes or returns a sequence that is not dim 1 of its tensor")

    def _enter(self, value: int, number: int, what: str) -> None:
        """Slice a whole value that an operation combines with shards.

        It is sliced on entry to a module around the operation that receives it as an argument.

        Raises:
            Refuted: No such module receives the value.
        """
        flow = self.flow_uses.flow
        around = [
            call
            for call in flow.around(flow.ops[number].call)
            if call.parent is not None and any(v == value for _, v in call.inputs)
        ]
        users = flow.users(value)
        around = [c for c in around if all(_holds(c, n) for n in users)][:1] or around[-1:]
        if not around:
            raise Refuted(
                f"{what} combines a shard with a whole sequence that no enclosing module receives"
            )
        self._path(around[0], value)
        self.entered.setdefault(value, []).append(around[0])
        self.waiting.append(value)


def _holds(call: Call, op: int) -> bool:
    return call.ops[0] <= op < call.ops[1]


def _keeps_all(op: Op) -> bool:
    """Return True for dropout with probability 0."""
    return base_name(op) == "native_dropout" and op.args[1] == 0
