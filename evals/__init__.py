"""Accuracy of a running server, over HTTP only: nothing here imports the packages it measures."""
