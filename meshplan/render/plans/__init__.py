"""Text and JSON about searches: the plan, its alternatives, differences, and why not others."""
