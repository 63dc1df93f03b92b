"""Random numbers of a request: the number for a token depends on the request's seed and the token's index alone.

Nothing is stored, so neighbours in the batch, the order of steps and preemption cannot change a draw.
"""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15  # odd, from the golden ratio: successive counters differ in about half of their bits


def _mix(value: int) -> int:
    """The finalizer of SplitMix64: a bijection of 64 bits in which every input bit moves every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    """Number in [0, 1) on a grid of 2**-52, for the token with this index (0 is the first generated one)."""
    start = _mix((seed + _GAMMA) & _MASK)  # neighbouring seeds must not give shifted copies of one sequence
    return float(_mix((start + (index + 1) * _GAMMA) & _MASK) >> 12) * 2.0**-52
