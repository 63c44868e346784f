"""Choose the option of each block and the cuts between stages: exact solutions and lower bounds."""
