"""Answers about a decision: why, why not, differences between plans, and changes that would fit."""
