"""Pictures of a plan before it runs, one for each question.

Every picture has a pure part, which turns a plan into facts, and a part that draws these. Facts
know no pixels, and what is drawn computes nothing. matplotlib is imported by what draws, inside of
functions, and without `pyplot`: nothing global is changed.
"""
