"""Classes of dims that belong together in a model, derived from its data flow.

`factors` stores the classes, `operations` defines the effect of each operation on dims, and
`classes` runs a whole flow through them.
"""

from meshplan.model.dims.classes import DimClasses, classify

__all__ = ["DimClasses", "classify"]
