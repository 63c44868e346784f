"""Configuration files of other tools: a table of keys for import, export and the pages."""
