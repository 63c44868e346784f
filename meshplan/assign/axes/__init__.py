"""The axes that are no layouts of parameters: pipeline stages, context and expert parallelism."""
