"""Addition, subtraction, multiplication and exact division, with column steps as the thought."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.tiny_models.data.example import Example, answer, casual, user
from tools.tiny_models.data.holdout import pair_held_out, pair_key

ASK = {
    "+": [
        "What is {a} + {b}?", "{a}+{b}", "{a} + {b}", "{a} + {b} =", "What's {a} plus {b}?", "Add {a} and {b}.",
        "{a} plus {b}", "What is the sum of {a} and {b}?", "Calculate {a} + {b}.", "Compute {a}+{b}",
        "How much is {a} + {b}?", "what is {a} plus {b}", "{a}+{b}=?", "Sum {a} and {b}", "{a} and {b} together?",
        "Solve {a} + {b}", "I have {a} apples and get {b} more. How many apples do I have?",
        "There are {a} red and {b} blue balls. How many balls are there?", "What do you get if you add {a} to {b}?",
        "Can you add {a} and {b}?", "If I add {b} to {a}, what do I get?", "whats {a}+{b}",
    ],
    "-": [
        "What is {a} - {b}?", "{a}-{b}", "{a} - {b}", "{a} - {b} =", "What's {a} minus {b}?", "{a} minus {b}",
        "Subtract {b} from {a}.", "Calculate {a} - {b}.", "How much is {a} - {b}?", "{a}-{b}=?", "Compute {a}-{b}",
        "What is the difference of {a} and {b}?", "Take {b} away from {a}.", "whats {a}-{b}",
        "I have {a} coins and lose {b}. How many coins are left?",
    ],
    "*": [
        "What is {a} * {b}?", "{a}*{b}", "{a} x {b}", "{a} times {b}", "What's {a} times {b}?", "Multiply {a} by {b}.",
        "What is the product of {a} and {b}?", "Calculate {a} * {b}.", "{a} * {b} =", "How much is {a} x {b}?",
        "Compute {a}*{b}", "{a}x{b}", "Multiply {a} and {b}", "whats {a} times {b}", "{a} × {b}",
        "There are {a} boxes with {b} pens each. How many pens are there?",
    ],
    "/": [
        "What is {a} / {b}?", "{a}/{b}", "{a} divided by {b}", "Divide {a} by {b}.", "{a} / {b} =",
        "What's {a} divided by {b}?", "How much is {a} / {b}?", "Calculate {a} ÷ {b}.",
    ],
}  # fmt: skip
CATEGORY = {"+": "addition", "-": "subtraction", "*": "multiplication", "/": "division"}


def add_steps(a: int, b: int) -> str:
    """Column addition from the right: '8+6=14 4 carry 1, 7+5+1=13 3 carry 1, 4+3+1=8, so 834'."""
    width = max(len(str(a)), len(str(b)))
    first, second = str(a).zfill(width), str(b).zfill(width)
    steps, carry = [], 0
    for place in reversed(range(width)):
        total = int(first[place]) + int(second[place]) + carry
        step = f"{first[place]}+{second[place]}" + ("+1" if carry else "") + f"={total}"
        carry = total // 10
        steps.append(step + (f" {total % 10} carry 1" if carry and place else ""))
    return ", ".join(steps) + f", so {a + b}"


def subtract_steps(a: int, b: int) -> str:
    """Column subtraction with borrowing; needs a >= b."""
    width = len(str(a))
    first, second = str(a), str(b).zfill(width)
    steps, borrow = [], 0
    for place in reversed(range(width)):
        top, bottom = int(first[place]), int(second[place])
        taken = f"-{bottom}" + ("-1" if borrow else "")
        need = bottom + borrow
        borrow = int(top < need)
        steps.append(f"{top + 10 * borrow}{taken}={top + 10 * borrow - need}" + (" borrow 1" if borrow else ""))
    return ", ".join(steps) + f", so {a - b}"


def multiply_steps(a: int, b: int) -> tuple[str, list[tuple[int, int]]]:
    """Partial products and their sums; also the additions that the text gives away."""
    parts, additions = [], []
    products = []
    for digit_a, place_a in zip(reversed(str(a)), range(4), strict=False):
        for digit_b, place_b in zip(reversed(str(b)), range(4), strict=False):
            x, y = int(digit_a) * 10**place_a, int(digit_b) * 10**place_b
            if x and y:
                parts.append(f"{x}*{y}={x * y}")
                products.append(x * y)
    total = products[0] if products else 0
    for product in products[1:]:
        additions.append((total, product))
        parts.append(f"{total}+{product}: {add_steps(total, product)}")
        total += product
    return ("; ".join(parts) or "times 0 is 0"), additions


def operands(rng: random.Random, digits: tuple[int, ...]) -> int:
    size = rng.choice(digits)
    return rng.randint(0 if size == 1 else 10 ** (size - 1), 10**size - 1)


def solve(sign: str, a: int, b: int) -> tuple[str, int]:
    """The thought and the result."""
    if sign == "+":
        return add_steps(a, b), a + b
    if sign == "-":
        if a < b:
            return f"{b} is more: {subtract_steps(b, a)}, negative: {a - b}", a - b
        return subtract_steps(a, b), a - b
    if sign == "*":
        return multiply_steps(a, b)[0], a * b
    return f"{b}*{a // b}={a}, so {a // b}", a // b


def build(sign: str, a: int, b: int, text: str) -> Example:
    thought, result = solve(sign, a, b)
    shown = {"*": "*", "/": "/"}.get(sign, sign)
    reply = f"{a} {shown} {b} = {result}."
    kind = {"+": "add", "-": "sub", "*": "mul", "/": "mul"}[sign]
    return Example(
        category=CATEGORY[sign],
        messages=[user(text), answer(reply, thought)],
        key=f"{kind}:{pair_key(a, b)}",
        check={"kind": "number", "value": result},
    )


def leaks(sign: str, a: int, b: int) -> bool:
    """True where the item, or an addition inside its steps, is reserved for the evals."""
    if sign == "+":
        return pair_held_out("add", a, b)
    if sign == "-":
        return pair_held_out("sub", a, b)
    if sign == "/":
        return pair_held_out("mul", b, a // b)
    return pair_held_out("mul", a, b) or any(pair_held_out("add", x, y) for x, y in multiply_steps(a, b)[1])


def draw(sign: str, rng: random.Random) -> tuple[int, int]:
    if sign == "+":
        return operands(rng, (1, 2, 2, 3, 3, 3, 4)), operands(rng, (1, 2, 2, 3, 3, 3, 4))
    if sign == "-":
        a, b = operands(rng, (1, 2, 2, 3, 3)), operands(rng, (1, 2, 2, 3, 3))
        return (a, b) if rng.random() < 0.15 else (max(a, b), min(a, b))
    if sign == "*":
        if rng.random() < 0.1:
            return operands(rng, (3,)), operands(rng, (1,))
        return operands(rng, (1, 1, 2, 2)), operands(rng, (1, 1, 2, 2))
    b, quotient = rng.randint(1, 12), rng.randint(0, 12)
    return b * quotient, b


def train(sign: str, rng: random.Random) -> Example:
    """A training item of one operation."""
    while True:
        a, b = draw(sign, rng)
        if not leaks(sign, a, b):
            return build(sign, a, b, casual(rng, rng.choice(ASK[sign]).format(a=a, b=b), share=0.5))


def chain(rng: random.Random) -> Example:
    """Three numbers added one after the other."""
    while True:
        a, b, c = (operands(rng, (1, 2, 2)) for _ in range(3))
        if not (pair_held_out("add", a, b) or pair_held_out("add", a + b, c)):
            break
    thought = f"{a}+{b}: {add_steps(a, b)}; {a + b}+{c}: {add_steps(a + b, c)}"
    text = casual(rng, rng.choice(["What is {a} + {b} + {c}?", "{a}+{b}+{c}", "Add {a}, {b} and {c}."]), 0.0)
    reply = f"{a} + {b} + {c} = {a + b + c}."
    messages = [user(casual(rng, text.format(a=a, b=b, c=c))), answer(reply, thought)]
    return Example(category="addition", messages=messages, key="")


def arithmetic(rng: random.Random) -> Example:
    """A training item of any operation."""
    sign = rng.choices(["+", "-", "*", "/", "chain"], weights=[50, 20, 18, 6, 6], k=1)[0]
    return chain(rng) if sign == "chain" else train(sign, rng)


def held_out(sign: str, seed: int) -> Iterator[Example]:
    """Endless unseen items; addition and subtraction have two or three digits."""
    rng = random.Random(f"{sign}{seed}")
    kind = {"+": "add", "-": "sub", "*": "mul"}[sign]
    seen: set[str] = set()
    while True:
        a, b = draw("*", rng) if sign == "*" else (operands(rng, (2, 3)), operands(rng, (2, 3)))
        if sign == "-":
            a, b = max(a, b), min(a, b)
        key = pair_key(a, b)
        if pair_held_out(kind, a, b) and key not in seen:
            seen.add(key)
            yield build(sign, a, b, rng.choice(ASK[sign]).format(a=a, b=b))
