"""The text of a search: the plan, alternatives, differences, why not."""
