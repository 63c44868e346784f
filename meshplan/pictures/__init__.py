"""Pictures of a plan before it runs, one for each question.

The code of a picture has two parts. A function such as `mesh_map` computes from a plan the facts to
show, without matplotlib; a function such as `draw_mesh` draws these facts and computes no others.
matplotlib is imported inside the drawing functions and without `pyplot`, whose global state would
change.
"""
