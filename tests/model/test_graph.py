"""A model as a graph of its modules."""

from __future__ import annotations

import networkx

from tests.helpers.graphs import blocks


def test_a_graph_of_modules_is_a_tree_with_all_parameters():
    model = blocks()
    tree = model.to_networkx()
    assert networkx.is_arborescence(tree)
    assert set(tree) == set(model.modules)
    assert all(tree.nodes[fqn]["info"] is info for fqn, info in model.modules.items())
    assert sum(tree.nodes[fqn]["num_params"] for fqn in tree) == model.num_params
