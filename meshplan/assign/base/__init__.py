"""Shared by all decisions: their data classes, the precedence of rules, how a dim is sharded."""
