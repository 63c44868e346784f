"""Answers about a decision: why, why not, what differs, what would fit."""
