"""plan.yaml and the files beside it: text becomes a `Spec`, or problems by line."""
