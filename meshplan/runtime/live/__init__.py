"""Planning of a live model: the planner's request, and the plan that all ranks then use."""
