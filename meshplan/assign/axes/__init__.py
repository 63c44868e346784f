"""The axes pp, cp and ep: pipeline stages, context parallelism and expert parallelism."""
