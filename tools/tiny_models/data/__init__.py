"""Generated conversations: one module per subject, the mix of them, and what is held out for the evals."""
