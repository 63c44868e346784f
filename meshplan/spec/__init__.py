"""Read plan.yaml and its companion files: text becomes a `Spec`, or problems by line."""
