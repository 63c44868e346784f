"""Checks of the live model during training, which raise before a wrong value is trained on."""
