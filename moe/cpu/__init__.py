"""What this process knows of its CPU: threads and matrix products."""
