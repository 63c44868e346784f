"""The ops of one microbatch, for the decoder families that are modelled from their config."""
