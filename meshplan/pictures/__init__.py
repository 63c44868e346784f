"""Pictures of a plan before it runs, one for each question.

Every picture has a pure part, which turns a plan into facts, and a part that draws these facts.
Facts have no pixels, and drawing computes no facts. matplotlib is imported inside the drawing
functions and without `pyplot`, so no global state changes.
"""
