"""Ways to ask for each fact. Those in HELD_OUT are used by the evals only.

{x} is the thing asked about, with its article where it has one ("the Netherlands").
"""

from __future__ import annotations

import random

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
        "What country is {x} the capital of?", "Of which country is {x} the capital?",
        "What country has the capital {x}?",
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
        "How many protons does {x} have?", "Tell me the atomic number of {x}.",
        "What number is {x} in the periodic table?",
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
        "Say what the word {x} means.", "How would a dictionary define {x}?",
        "Please give the meaning of the word {x}.",
    ],
}  # fmt: skip

# Three more ways to train: a lead and an indirect question; a remark that names {x} and a question that does not.
LEADS = [
    "Tell me", "Say", "State", "Write", "Let me know", "Please say", "I want to know", "I would like to know",
    "Answer:",
    "Can you tell me", "Could you say", "Do you know", "Do you remember", "Explain", "Find out", "Guess", "Show me",
    "I forgot", "I am not sure", "My son asks", "My teacher asks", "My friend wants to know", "For a quiz:", "Quiz:",
    "Remind me", "Someone asked me", "Help me remember", "We need to know", "I have to write down", "Answer this:",
    "Now",
    "First,", "In one sentence,", "Briefly,", "In short:", "Honestly,", "By the way,", "For my homework:", "Urgent:",
    "Trivia:", "Test question:", "Question for you:", "I bet you know", "Look up", "Give me", "Maybe you know",
    "Please",
    "I am curious", "Nobody here knows", "The question is", "Would you say", "Just say", "Tell us", "Mention", "Recall",
]  # fmt: skip
INDIRECT: dict[str, list[str]] = {
    "capital": [
        "what the capital of {x} is", "which city is the capital of {x}", "what city is {x}'s capital",
        "the capital of {x}",
        "the name of the capital of {x}", "which capital {x} has", "what {x}'s capital city is called", "{x}'s capital",
        "the capital city of {x}", "what is the capital city in {x}", "what capital does {x} have",
        "the capital that {x} has",
    ],
    "currency": [
        "what the currency of {x} is", "which currency they use in {x}", "what {x}'s currency is",
        "the currency of {x}",
        "what money {x} uses", "which money people in {x} have", "what currency is used in {x}", "{x}'s currency",
        "the money used in {x}", "what people in {x} pay with", "the official currency in {x}",
        "what currency {x} has got",
    ],
    "languages": [
        "what language is spoken in {x}", "which languages people speak in {x}", "the official language of {x}",
        "what the language of {x} is", "which language they use in {x}", "the languages of {x}",
        "{x}'s official language",
        "what people in {x} speak", "which language is official in {x}", "the language people speak in {x}",
    ],
    "continent": [
        "which continent {x} is in", "on which continent {x} is", "what continent {x} belongs to",
        "the continent of {x}",
        "where {x} is", "where {x} is located", "in which continent {x} can be found", "{x}'s continent",
        "where {x} lies",
        "to which continent {x} belongs", "the continent on which {x} is found",
    ],
    "capital_of": [
        "which country has the capital {x}", "the country of which {x} is the capital",
        "what country {x} is the capital of",
        "which country {x} is the capital of", "the country with the capital {x}", "whose capital {x} is",
    ],
    "symbol": [
        "what the symbol of {x} is", "the chemical symbol of {x}", "which symbol {x} has", "how {x} is abbreviated",
        "what symbol is used for {x}", "the symbol for {x}", "{x}'s symbol", "what letters stand for {x}",
    ],
    "number": [
        "what the atomic number of {x} is", "the atomic number of {x}", "which atomic number {x} has",
        "how many protons {x} has", "{x}'s atomic number", "what number {x} has in the periodic table",
    ],
    "by_symbol": [
        "which element has the symbol {x}", "what element {x} is", "the element with the symbol {x}",
        "what {x} stands for",
        "the name of the element {x}", "which element is written as {x}", "what the symbol {x} means in chemistry",
    ],
    "by_number": [
        "which element has number {x}", "what element has {x} protons", "the element with the number {x}",
        "which element is number {x} in the periodic table", "the name of element {x}", "what element {x} is",
    ],
    "definition": [
        "what {x} means", "the meaning of {x}", "how you define {x}", "the definition of {x}",
        "what {x} is in a dictionary",
        "what the word {x} stands for", "what we mean by {x}", "what is meant by the word {x}", "how {x} is defined",
    ],
}  # fmt: skip
REMARKS = [
    "I live in {x}.", "I was in {x} last year.", "{x} is a nice country.", "We are flying to {x}.",
    "Let's talk about {x}.",
    "My friend comes from {x}.", "I read a book about {x}.", "Think of {x}.", "I like {x}.",
    "My next question is about {x}.",
    "I am writing a report on {x}.", "Consider the country {x}.", "We moved to {x}.", "Have you heard of {x}?",
    "Topic: {x}.",
    "I dream of seeing {x}.", "{x} is far away.", "My son studies {x} in school.", "Take {x} as an example.",
    "About {x}:",
]  # fmt: skip
ELEMENT_REMARKS = [
    "I read about {x}.", "Think of {x}.", "A chemistry question about {x}.", "We studied {x} in school.", "Take {x}.",
    "{x} is an element.", "Topic: {x}.", "Consider the element {x}.", "I work with {x}.", "About {x}:",
    "Let's talk about {x}.",
]  # fmt: skip
FOLLOW_UPS: dict[str, list[str]] = {
    "capital": ["What is its capital?", "What is the capital there?", "Which city is its capital?", "And the capital?",
                "Name its capital city.", "What is the name of the capital?", "Do you know the capital?"],
    "currency": ["What money do they use there?", "Which currency do I need there?", "What is its currency?",
                 "How do people pay there?", "What is the currency called?", "And the currency?"],
    "languages": ["What do people speak there?", "Which language is spoken there?", "What is its official language?",
                  "Which language do they speak?", "And the language?", "What are the official languages?"],
    "continent": ["Which continent is it in?", "Where is it?", "On what continent is that?", "Which continent is that?",
                  "What continent does it belong to?"],
    "symbol": ["What is its symbol?", "Which symbol does it have?", "What is the symbol?", "How is it abbreviated?",
               "What is its chemical symbol?"],
    "number": ["What is its atomic number?", "How many protons does it have?", "Which atomic number does it have?",
               "What is the atomic number?"],
}  # fmt: skip


# A clause that names {x} and a question after the comma.
CLAUSES = [
    "If I go to {x}", "When I travel to {x}", "If you live in {x}", "Before we fly to {x}", "As a tourist in {x}",
    "On a trip to {x}", "When someone visits {x}", "For somebody in {x}", "Inside {x}", "After a week in {x}",
    "Since I work in {x}", "While in {x}", "Reading about {x}", "Thinking of {x}", "In the case of {x}",
    "With {x} in mind",
    "When I look at {x}", "If we talk about {x}", "Standing in {x}", "Should I fly to {x}", "Studying {x}",
    "Now that I know {x}",
]  # fmt: skip
ELEMENT_CLAUSES = [
    "In chemistry, for {x}", "Reading about {x}", "With {x} in mind", "Taking {x} as an example", "For an atom of {x}",
    "In the case of {x}", "When writing about {x}", "If we talk about {x}", "Studying {x}", "As for {x}",
    "Looking up {x}",
]  # fmt: skip
AFTER_CLAUSE: dict[str, list[str]] = {
    "capital": [
        "which city is the capital", "what is the capital", "which city would be the capital",
        "which capital can I visit",
        "what city should I call the capital", "which city do we find as its capital", "which capital will I see",
        "what is the name of the capital", "which city is shown as capital", "which one is the capital city",
    ],
    "currency": [
        "which currency should I use", "what money would I need", "which currency must I have",
        "which currency is used",
        "what currency can I pay with", "what is the currency", "which money should I bring", "what do I pay with",
    ],
    "languages": [
        "which language should I speak", "what language would I hear", "which language must I know", "what is spoken",
        "which language can I use", "which language do people use", "what language will they answer in",
        "which language could I study", "what should I speak", "which languages are official",
    ],
    "continent": [
        "on which continent am I", "which continent would I be on", "what continent is that",
        "which continent do I visit",
        "on what continent is it", "which continent is it part of", "where on earth is it",
    ],
    "symbol": [
        "which symbol should I write", "what symbol is used", "which letters would I write", "what is the symbol",
        "which symbol is right", "what is its chemical symbol",
    ],
    "number": [
        "which atomic number should I write", "what would the atomic number be", "how many protons are there",
        "what is the count of protons", "which atomic number is correct", "what is its number",
    ],
}  # fmt: skip
FRAGMENTS: dict[str, list[str]] = {
    "capital": ["{x} and its capital?", "Capital of {x}, its name?", "The capital, {x}?",
    "City that is capital of {x}?"],
    "currency": ["{x} and its currency?", "Currency in {x}, its name?", "Money of {x}?", "The currency, {x}?"],
    "languages": ["{x} and its language?", "Language in {x}, its name?", "Spoken in {x}?", "Official tongue of {x}?"],
    "continent": ["{x} and its continent?", "Continent with {x} in it?", "{x} on the map, which continent?"],
    "symbol": ["{x} and its symbol?", "Symbol of {x}, its letters?", "Short form of {x}?", "The symbol, {x}?"],
    "number": ["{x} and its atomic number?", "Protons in {x}?", "Proton count of {x}?",
    "The number of protons in {x}, please?",
               "Protons of {x}, how many?", "Atomic number of {x}, the count?", "Number of {x} in the table?"],
}  # fmt: skip


def core(phrase: str) -> str:
    """What makes two phrasings the same: their words, without case and marks."""
    return "".join(letter for letter in phrase.lower() if letter.isalnum() or letter in " {}").strip()


RESERVED = {relation: {core(phrase) for phrase in phrases} for relation, phrases in HELD_OUT.items()}


def trained(relation: str, rng: random.Random) -> str:
    """A phrasing for training, never one of the held-out ones."""
    while True:
        roll = rng.random()
        if roll < 0.3:
            phrase = rng.choice(TRAIN[relation])
        elif roll < 0.35 and relation in FRAGMENTS:
            phrase = rng.choice(FRAGMENTS[relation])
        elif roll < 0.6 and relation in AFTER_CLAUSE:
            clauses = ELEMENT_CLAUSES if relation in ("symbol", "number") else CLAUSES
            phrase = f"{rng.choice(clauses)}, {rng.choice(AFTER_CLAUSE[relation])}?"
        elif roll < 0.85 or relation not in FOLLOW_UPS:
            phrase = f"{rng.choice(LEADS)} {rng.choice(INDIRECT[relation])}{rng.choice(['.', '?', '', '.'])}"
        else:
            remarks = ELEMENT_REMARKS if relation in ("symbol", "number") else REMARKS
            phrase = f"{rng.choice(remarks)} {rng.choice(FOLLOW_UPS[relation])}"
        if core(phrase) not in RESERVED[relation]:
            return phrase
