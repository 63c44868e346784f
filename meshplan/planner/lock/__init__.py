"""plan.lock.yaml: the choices of a search, and whether they still stand."""
