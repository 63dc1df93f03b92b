"""Unit conversions with whole results."""

from __future__ import annotations

import random

from tools.tiny_models.data.example import Example, answer, casual, user
from tools.tiny_models.data.gen_arithmetic import multiply_steps
from tools.tiny_models.data.holdout import pair_held_out

# (large unit, small unit, how many small ones make a large one); plural names
FACTORS = [
    ("kilometers", "meters", 1000), ("meters", "centimeters", 100), ("centimeters", "millimeters", 10),
    ("meters", "millimeters", 1000), ("kilograms", "grams", 1000), ("grams", "milligrams", 1000),
    ("tons", "kilograms", 1000), ("liters", "milliliters", 1000), ("hours", "minutes", 60), ("minutes", "seconds", 60),
    ("days", "hours", 24), ("weeks", "days", 7), ("years", "months", 12), ("feet", "inches", 12),
    ("yards", "feet", 3), ("dozens", "pieces", 12), ("decades", "years", 10), ("centuries", "years", 100),
]  # fmt: skip
SHORT = {
    "kilometers": "km", "meters": "m", "centimeters": "cm", "millimeters": "mm", "kilograms": "kg", "grams": "g",
    "hours": "h", "minutes": "min", "seconds": "s", "liters": "l", "milliliters": "ml", "feet": "ft", "inches": "in",
}  # fmt: skip
SINGULAR = {"feet": "foot", "inches": "inch", "centuries": "century"}
ASK = [
    "How many {to} are in {n} {unit}?", "Convert {n} {unit} to {to}.", "{n} {unit} in {to}", "{n} {unit} to {to}",
    "What is {n} {unit} in {to}?", "How many {to} is {n} {unit}?", "convert {n} {unit} into {to}",
    "How many {to} do {n} {unit} have?", "{n} {unit} = ? {to}", "What are {n} {unit} in {to}?",
]  # fmt: skip

TO_FAHRENHEIT = ["Convert {n} C to F.", "What is {n} degrees Celsius in Fahrenheit?", "{n} celsius to fahrenheit"]
TO_CELSIUS = ["Convert {n} F to C.", "What is {n} degrees Fahrenheit in Celsius?", "{n} fahrenheit to celsius"]


def one(unit: str) -> str:
    return SINGULAR.get(unit, unit.removesuffix("s"))


def named(count: int, unit: str) -> str:
    return f"{count} {one(unit) if count == 1 else unit}"


def units(rng: random.Random) -> Example:
    """A conversion between two units, either way, or between Celsius and Fahrenheit."""
    if rng.random() < 0.12:
        return temperature(rng)
    while True:
        large, small, factor = rng.choice(FACTORS)
        count = rng.choice([1, rng.randint(2, 12), rng.randint(2, 99), rng.randint(1, 20) * 10])
        steps, additions = multiply_steps(count, factor)
        if not any(pair_held_out("add", x, y) for x, y in additions) and not pair_held_out("mul", count, factor):
            break
    down = rng.random() < 0.65
    total = count * factor
    source, target = (large, small) if down else (small, large)
    amount, result = (count, total) if down else (total, count)
    thought = f"1 {one(large)} = {named(factor, small)}. "
    thought += steps if down else f"{factor}*{count}={total}, so {count}"
    short = rng.random() < 0.3
    text = rng.choice(ASK).format(
        n=amount,
        unit=SHORT.get(source, source) if short else source if amount != 1 else one(source),
        to=SHORT.get(target, target) if short else target,
    )
    reply = f"{named(amount, source)} = {named(result, target)}."
    check = {"kind": "contains", "values": [named(result, target)]}
    messages = [user(casual(rng, text, 0.4)), answer(reply, thought)]
    return Example(category="units", messages=messages, key="", check=check)


def temperature(rng: random.Random) -> Example:
    while True:
        celsius = rng.randint(0, 20) * 5
        scaled = celsius * 9 // 5
        if not pair_held_out("add", scaled, 32):
            break
    fahrenheit = scaled + 32
    if rng.random() < 0.6:
        text = rng.choice(TO_FAHRENHEIT)
        text, thought = text.format(n=celsius), f"{celsius}*9/5={scaled}, {scaled}+32={fahrenheit}"
        reply = f"{celsius} degrees Celsius = {fahrenheit} degrees Fahrenheit."
    else:
        text = rng.choice(TO_CELSIUS)
        text, thought = text.format(n=fahrenheit), f"{fahrenheit}-32={scaled}, {scaled}*5/9={celsius}"
        reply = f"{fahrenheit} degrees Fahrenheit = {celsius} degrees Celsius."
    return Example(category="units", messages=[user(casual(rng, text, 0.4)), answer(reply, thought)], key="")
