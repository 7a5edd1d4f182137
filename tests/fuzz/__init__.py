"""Random calls of every public operator: each ends in a typed error with nothing moved, or in the exact result."""
