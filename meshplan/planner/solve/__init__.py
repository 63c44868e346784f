"""Best-first search over the configurations, each solved exactly."""
