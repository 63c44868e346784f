"""The part of a tape that one pipeline stage runs, and a rank's passes through its schedule."""
