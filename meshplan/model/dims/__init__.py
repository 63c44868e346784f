"""Classes of dims that belong together in a model, derived from its data flow.

Two dims belong together if an operation iterates over them together, index by index, so that they
must be sharded together. `factors` stores the classes, `operations` defines the effect of each
operation on dims, and `classes` applies these effects to a whole flow.
"""

from meshplan.model.dims.classes import DimClasses, classify

__all__ = ["DimClasses", "classify"]
