"""Meshplan inside other tools: their trainers, and their configuration files."""
