"""Answers about a decision: why, why not, how two plans differ, and which changes would fit."""
