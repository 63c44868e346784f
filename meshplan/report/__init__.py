"""A report of a plan: one page with verdict, pictures and tables, that needs no network.

Puts on paper what other rooms have answered: it computes nothing, and asks nobody. `figures` makes
pictures part of a page, `tables` tables, `page` the page; `sections` says what stands where.
"""
