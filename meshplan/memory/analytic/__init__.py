"""Steps of models of known families, computed from the config alone and without torch."""
