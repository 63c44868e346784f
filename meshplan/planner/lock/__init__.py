"""plan.lock.yaml: the choices of a search, and the check that they still hold."""
