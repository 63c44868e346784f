"""Plans on a cluster of network namespaces: what is predicted of links and steps, and measured."""
