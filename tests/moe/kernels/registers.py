"""Finds, in Hopper's machine code, writes to registers that a running product may still read.

A product (HGMMA) reads its left operand from four registers of each thread while later instructions run. Products form
groups, closed by `gsb0`; `WARPGROUP.DEPBAR.LE gsb0, N` waits until at most N groups are unfinished. Triton prints an
instruction a line, control bits and a tab before it, and labels on lines of their own.
"""

import re

_INSTRUCTION = re.compile(r"^\S*\t(?:@!?U?P\w+ )?(?P<name>[A-Z][\w.]*)\s*(?P<operands>.*);$")
_LABEL = re.compile(r"^(\w+):$")
_WITHOUT_RESULT = (
    "ST", "LDGSTS", "LDGDEPBAR", "BAR", "BRA", "BSYNC", "BSSY", "DEPBAR", "ERRBAR", "EXIT", "FENCE", "MEMBAR", "NOP",
    "RED", "RET", "SYNCS", "UBLK", "UTM", "WARPSYNC", "WARPGROUP", "ACQBULK", "CCTL",
)  # fmt: skip
_REGISTERS_OF_OPERAND = 4
_ROUNDS = 3  # through a loop: a group may be unfinished for more than one


def overwritten_operands(sass: str) -> tuple[int, list[str]]:
    """How many products read registers, and the instructions that write a register before its product is done.

    The code is followed from its first line to its last, each loop with products a few times.
    """
    code, places = _parse(sass)
    products: set[int] = set()
    found = []
    unfinished: list[set[int]] = []
    group: set[int] = set()
    rounds: dict[int, int] = {}
    place = 0
    while place < len(code):
        name, operands, line = code[place]
        if name == "BRA":
            target = next((places[word] for word in re.findall(r"\w+", operands) if word in places), len(code))
            if target <= place and rounds.get(place, 1) < _ROUNDS and any(n == "HGMMA" for n, *_ in code[target:place]):
                rounds[place] = rounds.get(place, 1) + 1
                place = target
                continue
        elif name == "HGMMA":
            left = re.match(r"R\d+, R(\d+),", operands)
            if left:
                products.add(place)
                group = group | set(range(int(left[1]), int(left[1]) + _REGISTERS_OF_OPERAND))
            if "gsb0" in operands:
                unfinished.append(group)
                group = set()
        elif name == "WARPGROUP" and (wait := re.match(r"gsb0, (\w+)", operands)):
            num_left = int(wait[1], 16)
            unfinished = unfinished[-num_left:] if num_left else []
        elif _result(name, operands, line) & group.union(*unfinished):
            found.append(line)
        place += 1
    return len(products), found


def _parse(sass: str) -> tuple[list[tuple[str, str, str]], dict[str, int]]:
    """(name up to its first point, operands, line) of every instruction, and the place after every label."""
    code: list[tuple[str, str, str]] = []
    places = {}
    for line in map(str.strip, sass.splitlines()):
        if label := _LABEL.match(line):
            places[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append((instruction["name"].partition(".")[0], instruction["operands"], line))
    return code, places


def _result(name: str, operands: str, line: str) -> set[int]:
    """The registers that an instruction writes."""
    first = re.match(r"R(\d+)\b", operands)
    if first is None or name.startswith(_WITHOUT_RESULT):
        return set()
    return set(range(int(first[1]), int(first[1]) + _width(line.split("\t", 1)[1].split(" ", 1)[0])))


def _width(full_name: str) -> int:
    if matrices := re.match(r"LDSM\..*\.([124])$", full_name):
        return int(matrices[1])
    if ".128" in full_name:
        return 4
    return 2 if re.search(r"\.64\b|\.WIDE\b|^CS2R|^D(FMA|ADD|MUL)", full_name) else 1
