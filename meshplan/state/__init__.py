"""Saved training states, without torch: their files, their manifest, and which of them are whole.

A state is a folder `step-00000010` with one safetensors file per rank that had something to write,
and `manifest.json`, which is written last. The manifest gives each tensor its global shape and the
file and place of each of its pieces, so a state can be loaded under any layout.
"""
