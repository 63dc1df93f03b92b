"""Ways to ask for each fact. Those in HELD_OUT are used by the evals only.

{x} is the thing asked about, with its article where it has one ("the Netherlands").
"""

from __future__ import annotations

TRAIN: dict[str, list[str]] = {
    "capital": [
        "What is the capital of {x}?", "What's the capital of {x}?", "Which city is the capital of {x}?",
        "Name the capital of {x}.", "The capital of {x}?", "capital of {x}", "{x} capital", "{x}: capital?",
        "What is the capital city of {x}?", "Give me the capital of {x}.", "What city is {x}'s capital?",
        "{x}'s capital is what?", "Which is the capital city of {x}?", "I need the capital of {x}.",
        "The capital of {x} is", "What is {x}'s capital city?", "What do you call the capital of {x}?",
        "Which town is capital of {x}?", "Where is the government of {x}? Name the capital.",
        "whats the capital of {x}", "Tell me the capital of {x}.", "In {x}, what is the capital?",
        "Can you name the capital of {x}?", "Do you know the capital of {x}?", "Capital city of {x}?",
    ],
    "currency": [
        "What is the currency of {x}?", "What's the currency of {x}?", "Which currency is used in {x}?",
        "What currency does {x} use?", "Name the currency of {x}.", "currency of {x}", "{x} currency",
        "What money do people use in {x}?", "What money is used in {x}?", "What is the official currency of {x}?",
        "How do people pay in {x}?", "Which money does {x} have?", "What is {x}'s currency?", "Currency in {x}?",
        "Tell me the currency of {x}.", "The currency of {x} is", "In which currency do people pay in {x}?",
        "What is the money of {x} called?", "I travel to {x}. Which currency do I need?", "{x}: currency?",
    ],
    "languages": [
        "What language is spoken in {x}?", "Which language do people speak in {x}?", "language of {x}",
        "What is the official language of {x}?", "What are the official languages of {x}?", "{x} language",
        "What languages are spoken in {x}?", "Which languages do they speak in {x}?", "{x}: official language?",
        "What do people speak in {x}?", "Name the official language of {x}.", "Languages of {x}?",
        "Tell me the language of {x}.", "What language do they speak in {x}?", "What is {x}'s language?",
        "Official language of {x}?", "Which tongue is spoken in {x}?", "The language of {x} is",
    ],
    "continent": [
        "Which continent is {x} in?", "What continent is {x} on?", "On which continent is {x}?",
        "Where is {x}?", "Where is {x} located?", "continent of {x}", "{x} continent",
        "What continent does {x} belong to?", "In which part of the world is {x}?", "Where can I find {x}?",
        "Tell me the continent of {x}.", "Which continent is {x} part of?", "What is the continent of {x}?",
        "{x} is on which continent?", "{x}: which continent?", "{x} is in which continent?",
    ],
    "capital_of": [
        "{x} is the capital of which country?", "Which country has {x} as its capital?", "{x} is the capital of",
        "What country is {x} the capital of?", "Of which country is {x} the capital?", "What country has the capital {x}?",
        "{x} is the capital city of what country?", "Which country's capital is {x}?", "{x} is capital of what?",
    ],
    "symbol": [
        "What is the symbol of {x}?", "What's the chemical symbol for {x}?", "chemical symbol of {x}",
        "What is the chemical symbol of {x}?", "Symbol for {x}?", "Name the symbol of {x}.", "{x} symbol",
        "Which symbol does {x} have?", "How is {x} written as a symbol?", "What symbol stands for {x}?",
        "Tell me the symbol for {x}.", "What is the symbol for the element {x}?", "{x}: symbol?",
        "What is {x}'s chemical symbol?", "The symbol of {x} is", "Give me the element symbol of {x}.",
    ],
    "number": [
        "What is the atomic number of {x}?", "What's the atomic number of {x}?", "atomic number of {x}",
        "Which atomic number does {x} have?", "{x} atomic number", "Name the atomic number of {x}.",
        "How many protons does {x} have?", "Tell me the atomic number of {x}.", "What number is {x} in the periodic table?",
        "What is {x}'s atomic number?", "{x}: atomic number?", "How many protons are in an atom of {x}?",
        "The atomic number of {x} is", "Give me the atomic number for {x}.", "Which number is the element {x}?",
    ],
    "by_symbol": [
        "Which element has the symbol {x}?", "What element is {x}?", "What does {x} stand for in chemistry?",
        "Which element is {x}?", "{x} is the symbol of which element?", "Name the element with symbol {x}.",
        "What is the element {x}?", "element {x}", "{x} is which element?", "What chemical element is {x}?",
        "The symbol {x} means which element?", "What element has the chemical symbol {x}?",
    ],
    "by_number": [
        "Which element has atomic number {x}?", "What element has the atomic number {x}?", "element number {x}",
        "Name the element with atomic number {x}.", "What is element {x}?", "Which element is number {x}?",
        "What element has {x} protons?", "Which element has {x} protons?", "Element number {x} is",
        "What is the element with the atomic number {x}?", "element with atomic number {x}",
    ],
    "definition": [
        "What does {x} mean?", "Define {x}.", "What is the meaning of {x}?", "define {x}", "meaning of {x}",
        "What does the word {x} mean?", "Give me a definition of {x}.", "Explain the word {x}.",
        "What is the definition of {x}?", "What is meant by {x}?", "definition of {x}", "Define the word {x}.",
    ],
}  # fmt: skip

HELD_OUT: dict[str, list[str]] = {
    "capital": [
        "For {x}, name its capital city.", "I am learning about {x}; what is the name of its capital?",
        "Say which city the capital of {x} is.", "Looking at a map of {x}, which city is marked as the capital?",
    ],
    "currency": [
        "Say which currency {x} has.", "Someone living in {x} is paid in what currency?",
        "What is the name of the currency people spend in {x}?", "Looking at {x}, which currency is official there?",
    ],
    "languages": [
        "Say what the official language in {x} is.", "Someone from {x} speaks which language?",
        "Which official language or languages does {x} have?", "If I move to {x}, which language should I learn?",
    ],
    "continent": [
        "Say on what continent {x} lies.", "Looking at a world map, on which continent do I see {x}?",
        "The country {x} belongs to what continent?", "Name the continent where {x} is.",
    ],
    "capital_of": [
        "Say which country has the capital city {x}.", "The city {x} is the capital of what country?",
        "Name the country whose capital is {x}.",
    ],
    "symbol": [
        "Say the chemical symbol used for {x}.", "In the periodic table, what symbol is used for {x}?",
        "Which letters are the symbol of the element {x}?", "How do chemists write the symbol for {x}?",
    ],
    "number": [
        "Say the atomic number that {x} has.", "In the periodic table, what is the number of {x}?",
        "The element {x} has which atomic number?", "Count of protons in {x}, its atomic number?",
    ],
    "by_symbol": [
        "Say which element the symbol {x} stands for.", "In the periodic table, which element is written {x}?",
        "The chemical symbol {x} belongs to what element?",
    ],
    "by_number": [
        "Say which element has the atomic number {x}.", "In the periodic table, which element is at number {x}?",
        "Atomic number {x} belongs to which element?",
    ],
    "definition": [
        "Say what the word {x} means.", "How would a dictionary define {x}?", "Please give the meaning of the word {x}.",
    ],
}  # fmt: skip
