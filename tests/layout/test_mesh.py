"""Where ranks stand in a mesh."""

from __future__ import annotations

from meshplan.layout.mesh import Axis, Loan, Mesh


def test_the_indices_of_all_ranks_are_those_of_each() -> None:
    axes = (Axis("pp", 2), Axis("dp_replicate", 3), Axis("dp_shard", 4), Axis("tp", 2))
    for mesh in (Mesh(axes), Mesh(axes, (Loan("ep", 2, "dp_shard"),))):
        for names in [
            (),
            ("pp",),
            ("tp", "dp_shard"),
            ("pp", "dp_replicate"),
            ("ep",),
            ("tp", "ep"),
        ]:
            each = [mesh.index(rank, names) for rank in range(mesh.world_size)]
            assert mesh.indices(names) == each
