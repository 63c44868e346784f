"""The part of a tape that one pipeline stage runs, and a rank's pass through its schedule."""
