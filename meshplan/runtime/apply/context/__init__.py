"""Context parallelism: each rank of cp holds a part of the sequence of the same samples.

`parts` says which part and moves parts between ranks, `attention` sees what a model calls and
answers for the whole sequence, `proof` compares the first forward with one of the whole
sequence, `batch` cuts what the model is fed. Only public torch is used. Knows no model: a model
that this cannot make right is refused by the proof.
"""
