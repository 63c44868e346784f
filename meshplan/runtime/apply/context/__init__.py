"""Context parallelism: each rank along cp computes on a part of the sequence of the same samples.

`parts` defines the part of each rank and exchanges parts between ranks. `attention` intercepts
calls of the model and computes their result for the whole sequence. `proof` compares the first
forward with one on the whole sequence. `batch` splits the model's inputs. Only public torch APIs
are used, and nothing depends on a particular model: the proof refuses a model that cannot be run
this way.
"""
