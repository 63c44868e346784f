"""The ops of one microbatch of known decoder families, computed from the model's config."""
