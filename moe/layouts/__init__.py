"""Pure functions that convert canonical weights to the layouts of kernel libraries."""
