"""Themes, fonts, pages and files that every picture shares."""
