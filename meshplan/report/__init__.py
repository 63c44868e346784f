"""A report on a plan: one HTML page with a verdict, pictures and tables. It loads no other file.

The package formats answers that other packages computed. `figures` and `tables` turn pictures and
tables into HTML, `sections` makes the content of each section, and `page` joins them to a page.
"""
