"""Steps of a model of a known family, from its config alone and without torch."""
