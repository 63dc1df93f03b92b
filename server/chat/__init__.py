"""`moe-serve chat`: talks to a running server in the terminal. `conversation` speaks HTTP, `command` the terminal."""
