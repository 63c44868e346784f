"""Parts of a step compared with the whole: samples, tokens and ranks that must add up."""
