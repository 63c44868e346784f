"""Memory of training steps of known model families, from the config alone and without torch."""
