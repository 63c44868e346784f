"""plan.lock.yaml: the choices of a search, and the checks that they still apply to the plan."""
