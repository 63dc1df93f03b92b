"""Requests to tokens: scheduler, paged KV, sampling, and the process that runs the step loop."""
