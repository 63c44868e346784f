"""Files of strangers: nothing runs unasked, nothing hangs, nothing is left half written."""
