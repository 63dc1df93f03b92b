"""`moe-serve bench`: a load generator for any OpenAI-compatible server.

`command` reads the flags, `probe` asks the server what it accepts, `processes` runs `load` in several client processes,
`summary` computes the figures, and `report` and `plot` show them. Each client process sends over its own `connection`s,
whose bytes `http11` and `events` parse.
"""
