"""Pure functions from canonical weights to the layouts of kernel libraries."""
