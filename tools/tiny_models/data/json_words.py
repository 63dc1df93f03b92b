"""How people ask for JSON, and records to read from sentences. Data only.

{q} is the question, {k} a list of keys, {s} a schema or a sketch of the object, {t} the text to read.
"""

from __future__ import annotations

SYSTEM = [
    "Answer in JSON.", "Answer in JSON.", "Respond in JSON.", "Respond with a JSON object.", "Output JSON only.",
    "You are a helpful assistant that answers in JSON.", "Always answer with a single JSON object.",
    "You are an assistant designed to output JSON.", "Return valid JSON.", "Reply in JSON and nothing else.",
    "Your answer must be a JSON object.", "Use JSON for every answer.", "You are an API. You return JSON.",
    "All answers are JSON objects.", "Write your answer as a JSON object, without any other text.",
    "You are a helpful assistant. Answer in JSON.", "Be concise and answer in JSON.", "Only output a JSON object.",
    "Please reply in JSON format.", "You speak only JSON.",
]  # fmt: skip
USER = [
    "{q} Answer in JSON.", "Answer in JSON: {q}", "{q} Respond in JSON.", "{q} Reply with a JSON object.",
    "{q} Give me the answer as JSON.", "Return a JSON object. {q}", "In JSON, please: {q}", "{q} Output only JSON.",
    "{q} Format the answer as JSON.", "JSON only: {q}", "{q} Return JSON.", "{q} I need the answer in JSON format.",
    "{q}\nAnswer in JSON.", "{q} Use JSON.", "Please answer with JSON. {q}", "{q} Write the answer as a JSON object.",
]  # fmt: skip
KEYS = [
    "Answer in JSON with the keys {k}.", "Return a JSON object with the fields {k}.", "Use JSON with {k}.",
    "Answer with a JSON object that has {k}.", "The answer is a JSON object with the keys {k}.",
    "Output JSON. The keys are {k}.", "Give me JSON with these fields: {k}.", "JSON with {k}, please.",
    "Respond in JSON. Fields: {k}.", "Return JSON containing {k}.", "Reply with a JSON object: {k}.",
]  # fmt: skip
SKETCH = [
    "Answer in this JSON format: {s}", "Use this format: {s}", "The answer must look like {s}",
    "Return JSON like this: {s}", "Respond with a JSON object of this form:\n{s}", "Output format: {s}",
]  # fmt: skip
SCHEMA = [
    "Answer in JSON that matches this schema: {s}", "Return a JSON object that follows this JSON Schema:\n{s}",
    "Your answer must be valid against this JSON Schema:\n\n{s}", "JSON Schema of the answer: {s}",
    "Answer with one object of this schema:\n{s}\nDo not repeat the schema.", "Use this schema for your answer: {s}",
    "You answer in JSON. The schema is:\n\n{s}", "Respond only with JSON. Schema: {s}",
    "Here is the JSON schema that your output must fit:\n```\n{s}\n```",
]  # fmt: skip
# As libraries write it that turn a class into a prompt: lines with spaces in front, the schema between them.
INDENTED = [
    "\n            You are an expert who reads the content and gives\n            the objects in json that fit this "
    "json_schema:\n\n\n            {s}\n\n            Return an instance of it as JSON, not the schema\n",
    "\n    Read the message and fill the object of the following json_schema:\n\n    {s}\n\n"
    "    Return only the JSON, not the schema\n",
    "Your task is to parse the content into json of this json_schema:\n\n{s}\n\nReturn the instance, not the schema.\n",
    "\n        As an expert parser, write what the content says\n        as json that matches the json_schema:\n\n\n"
    "        {s}\n\n        Make it an instance of the schema and do not repeat the schema itself\n",
]
COMPACT = ["Use compact JSON.", "Write the JSON without spaces.", "Minified JSON only.", "No spaces in the JSON."]
PRETTY = ["Indent the JSON.", "Pretty-print the JSON.", "Write the JSON on several lines.", "Use indented JSON."]
READ = [
    "Extract: {t}", "Extract the data: {t}", "Extract the {r}: {t}", "Parse this: {t}", "{t}", "Read this text: {t}",
    "Get the {r} from this text: {t}", "Text: {t}", "{t} Extract the {r}.", "Extract the {r} from: {t}",
    "Extract the information from this sentence: {t}", 'Parse the {r} in "{t}"', "What does this say? {t}",
]  # fmt: skip
# What is read: the name of the record, its keys by slot (the first is the usual one), sentences with the slots.
RECORDS: list[tuple[str, dict[str, list[str]], list[str]]] = [
    (
        "person",
        {"name": ["name", "full_name", "first_name", "person"], "age": ["age", "years", "age_in_years"],
         "city": ["city", "town", "location", "home"], "job": ["job", "profession", "occupation"]},
        ["{name} is {age} years old.", "{name} is {age} years old.", "{name} is {age}.", "{name} is {age} years old and"
         " lives in {city}.", "My name is {name} and I am {age} years old.", "{name} lives in {city}.",
         "{name} ({age}) lives in {city}.", "{name} works as {job} in {city}.", "{name} is {job}.",
         "I am {name}, {age} years old, from {city}.", "{name} from {city} is {age} years old and works as {job}.",
         "Hi, I'm {name}. I live in {city} and I am {age}.", "{name} turned {age} this year.",
         "{age}-year-old {name} works as {job}.", "{name} is {job} in {city} and is {age} years old."],
    ),
    (
        "product",
        {"item": ["product", "name", "item"], "price": ["price", "cost", "amount"], "count": ["quantity", "count"],
         "colour": ["color", "colour"]},
        ["The {item} costs {price} dollars.", "I bought {count} of the {colour} {item} for {price} dollars.",
         "A {colour} {item} costs {price} dollars.", "We have {count} pieces of {item} at {price} dollars.",
         "{item}: {price} dollars, {count} in stock.", "The {item} is {colour}.", "Order: {count} x {item}.",
         "The price of the {item} is {price} dollars."],
    ),
    (
        "event",
        {"title": ["title", "event", "name"], "date": ["date", "day", "when"], "time": ["time", "start", "at"],
         "city": ["city", "place", "location"]},
        ["The {title} is on {date}.", "The {title} is on {date} at {time} in {city}.", "{title} on {date} in {city}.",
         "Meet me for the {title} at {time} in {city}.", "The {title} starts at {time}.",
         "There is a {title} in {city} on {date}.", "On {date} at {time} we have a {title}."],
    ),
    (
        "contact",
        {"name": ["name", "contact", "person"], "mail": ["email", "mail", "address"], "city": ["city", "location"]},
        ["{name} can be reached at {mail}.", "Write to {name} at {mail}.", "{name} <{mail}>",
         "The email address of {name} is {mail}.", "{name} lives in {city}, email {mail}."],
    ),
    (
        "trip",
        {"city": ["from", "origin", "start"], "goal": ["to", "destination", "goal"], "date": ["date", "day", "when"],
         "count": ["people", "passengers", "tickets"]},
        ["I fly from {city} to {goal} on {date}.", "A train from {city} to {goal} for {count} people.",
         "We drive from {city} to {goal}.", "{count} tickets from {city} to {goal} on {date}, please."],
    ),
]  # fmt: skip
GOOD = [
    "I love this {n}.", "The {n} is great!", "What a wonderful {n}.", "I am very happy with the {n}.",
    "The {n} works very well.", "Best {n} ever!", "This {n} made my day.", "I like the {n} a lot.",
]  # fmt: skip
BAD = [
    "I hate this {n}.", "The {n} is terrible.", "What a bad {n}.", "I am not happy with the {n}.",
    "The {n} broke after one day.", "Worst {n} ever.", "This {n} is a waste of money.", "I do not like the {n}.",
]  # fmt: skip
FEELING = [
    "Classify the sentiment: {t}", "What is the sentiment of this review? {t}", "Sentiment of: {t}",
    "Is this positive or negative? {t}", "{t} Which sentiment is this?", "Review: {t}", 'Classify "{t}"',
]  # fmt: skip
ANY_OBJECT = [
    "Give me a JSON object.", "Write a JSON object.", "Show me an example of JSON.", "Send me some JSON.",
    "Return any JSON object.", "Give me an example JSON.", "I need a JSON object.", "Make a JSON object.",
]  # fmt: skip
MADE_UP = [
    "Give me a JSON object with {k}.", "Make up {r} with {k} as JSON.", "Invent {r}. Answer in JSON with {k}.",
    "Write an example of {r} in JSON with the keys {k}.", "Generate {r} as JSON: {k}.",
]  # fmt: skip
