"""What belongs together in a model, read from its data flow: classes of dims.

`factors` keeps the classes, `operations` says what each operation does to dims, `classes` runs
a whole flow through them.
"""

from meshplan.model.dims.classes import DimClasses, classify

__all__ = ["DimClasses", "classify"]
