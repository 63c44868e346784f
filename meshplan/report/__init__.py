"""A report on a plan: one page with verdict, pictures and tables that needs no network.

The package formats answers that others computed. `figures` turns pictures into elements of the
page, `tables` does so for tables, `sections` defines the content, and `page` makes the page.
"""
