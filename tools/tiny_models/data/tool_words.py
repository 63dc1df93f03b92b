"""Ready-made functions that strangers try first, and the word lists for invented ones. Data only.

A domain: function name, description, arguments (name, schema, value pool), ways to ask; {arg} is the value.
"""

from __future__ import annotations

from typing import Any

VERBS = (
    "get find create delete update send show list search check start stop open close book order add remove set read "
    "write save load move copy fetch compute schedule cancel play pause track log print scan sync rate share tag"
).split()
# Nouns for invented function names are drawn from the common words and from invented ones.
ARGUMENT_WORDS = (
    "name city date time count size color title text user email price level mode unit target source path format width "
    "height weight speed start end limit topic style tone group owner status kind label room floor code key value "
    "amount "
    "distance duration language country category quality rating year month day hour region type note message subject "
    "reason brand model version channel volume theme priority"
).split()


def text(*values: str) -> tuple[dict[str, Any], list[Any]]:
    return {"type": "string"}, list(values)


def choice(*values: str) -> tuple[dict[str, Any], list[Any]]:
    return {"type": "string", "enum": list(values)}, list(values)


def whole(low: int, high: int) -> tuple[dict[str, Any], list[Any]]:
    return {"type": "integer"}, [low, high]


PLACES = text(
    "Paris", "London", "Berlin", "Tokyo", "New York", "San Francisco", "Madrid", "Rome", "Oslo", "Cairo", "Lima",
    "Boston",
    "Sydney", "Vienna", "Prague", "Dublin", "Delhi", "Chicago", "Seattle", "Munich", "Boston, MA", "Paris, France",
    "Zurich",
    "Los Angeles", "Hamburg", "Milan", "Athens", "Lisbon", "Warsaw", "Helsinki", "Toronto", "Mumbai", "Beijing",
    "Seoul",
)  # fmt: skip
UNITS = choice("celsius", "fahrenheit")
MONEY = text("USD", "EUR", "GBP", "JPY", "CHF", "CAD", "AUD", "INR", "CNY", "SEK")
TONGUES = text("French", "German", "Spanish", "Italian", "Japanese", "Dutch", "Polish", "Greek", "Arabic", "Korean")
PHRASES = text("hello", "good morning", "thank you", "I am hungry", "see you soon", "how are you", "good night", "yes")
TASKS = text(
    "buy milk", "call the doctor", "pay the rent", "water the plants", "send the report",
    "clean the car", "meeting",
)  # fmt: skip
CLOCK = text("7 am", "8:30", "noon", "18:00", "6 pm", "9 o'clock", "10:15", "midnight", "5 am", "21:45")
DAYS = text("today", "tomorrow", "Monday", "Tuesday", "Friday", "Sunday", "next week", "2026-05-01", "2025-12-24")
TICKERS = text("AAPL", "MSFT", "NVDA", "AMD", "TSLA", "GOOG", "AMZN", "META", "IBM", "INTC")
MAILS = text("bob@example.com", "anna@example.com", "info@example.org", "sam@mail.net", "team@work.com")
QUERIES = text(
    "cheap flights", "red shoes", "best pizza", "mixture of experts", "cat videos",
    "open source", "new phones",
)  # fmt: skip
SONGS = text("Yesterday", "Imagine", "Hey Jude", "Thriller", "Hello", "Yellow", "Africa", "Jolene")
ROOMS = text("kitchen", "bedroom", "living room", "office", "hall", "garage", "bathroom")

# name variants, description, {argument variants: (schema, pool)}, required, requests
DOMAINS: list[tuple[list[str], str, list[tuple[list[str], tuple[dict[str, Any], list[Any]], str]], list[str]]] = [
    (
        ["get_weather", "get_current_weather", "weather", "getWeather", "fetch_weather", "weather_lookup",
         "current_weather"],
        "Get the current weather for a city.",
        [(["location", "city", "place"], PLACES, "The city"), (["unit", "units"], UNITS, "The unit of temperature")],
        ["What's the weather in {0}?", "What is the weather like in {0}?", "weather in {0}",
         "How is the weather in {0}?",
         "What's the weather in {0} in {1}?", "Weather for {0} in {1} please.", "Is it cold in {0}?",
         "How warm is it in {0}?",
         "What is the temperature in {0}?", "Tell me the weather in {0}.", "What's the temperature in {0} in {1}?",
         "What is the weather in {0} today?", "What's the weather like in {0} right now?", "Is it raining in {0}?"],
    ),
    (
        ["get_time", "get_current_time", "time_in_city", "currentTime"], "Get the current time in a city.",
        [(["location", "city", "timezone"], PLACES, "The city")],
        ["What time is it in {0}?", "Tell me the time in {0}.", "current time in {0}", "How late is it in {0}?"],
    ),
    (
        ["convert_currency", "exchange", "currency_converter"], "Convert an amount of money.",
        [(["amount", "value"], whole(1, 999), "The amount"),
         (["from_currency", "source"], MONEY, "Currency to convert from"),
         (["to_currency", "target"], MONEY, "Currency to convert to")],
        ["Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "{0} {1} in {2}", "What are {0} {1} in {2}?"],
    ),
    (
        ["set_alarm", "create_alarm", "setAlarm"], "Set an alarm.", [(["time", "at"], CLOCK, "When the alarm rings")],
        ["Set an alarm for {0}.", "Wake me up at {0}.", "alarm at {0}", "Please set an alarm for {0}.",
         "I need an alarm at {0}."],
    ),
    (
        ["set_timer", "start_timer"], "Start a timer.", [(["minutes", "duration"], whole(1, 90), "Length in minutes")],
        ["Set a timer for {0} minutes.", "Start a {0} minute timer.", "timer {0} minutes",
         "Give me a timer of {0} minutes."],
    ),
    (
        ["translate", "translate_text", "translator"], "Translate a text into a language.",
        [(["text", "phrase"], PHRASES, "The text"),
         (["language", "target_language", "to"], TONGUES, "The target language")],
        ["Translate '{0}' to {1}.", "Translate {0} into {1}.", "How do you say {0} in {1}?", "What is {0} in {1}?"],
    ),
    (
        ["add_reminder", "create_reminder", "remind_me", "create_task"], "Create a reminder.",
        [(["task", "text", "title"], TASKS, "What to remember"), (["date", "when", "day"], DAYS, "The day")],
        ["Remind me to {0} on {1}.", "Add a reminder: {0}, {1}.", "Create a reminder to {0} for {1}.",
         "Remind me to {0}."],
    ),
    (
        ["get_stock_price", "stock_price", "quote"], "Get the price of a stock.",
        [(["ticker", "symbol"], TICKERS, "The ticker symbol")],
        ["What is the stock price of {0}?", "How is {0} stock doing?", "price of {0}", "Get the quote for {0}.",
         "{0} stock price"],
    ),
    (
        ["send_email", "send_mail", "email"], "Send an email.",
        [(["to", "recipient"], MAILS, "The address"), (["subject", "title"], TASKS, "The subject")],
        ["Send an email to {0} about {1}.", "Write to {0} with the subject {1}.", "Email {0}, subject: {1}."],
    ),
    (
        ["search", "web_search", "search_web", "google"], "Search the web.", [(["query", "q"], QUERIES,
         "What to search for")],
        ["Search for {0}.", "Look up {0}.", "Find {0} on the web.", "search the web for {0}", "Google {0}."],
    ),
    (
        ["add", "add_numbers", "sum", "calculator_add"], "Add two numbers.",
        [(["a", "x", "first"], whole(0, 999), "First number"), (["b", "y", "second"], whole(0, 999), "Second number")],
        ["Use the tool to add {0} and {1}.", "Add {0} and {1}.", "What is {0} + {1}?", "{0} + {1}",
         "Sum of {0} and {1}?"],
    ),
    (
        ["multiply", "multiply_numbers", "mul", "product"], "Multiply two numbers.",
        [(["a", "x"], whole(0, 999), "First number"), (["b", "y"], whole(0, 999), "Second number")],
        ["Use the tool to multiply {0} and {1}.", "Multiply {0} by {1}.", "What is {0} times {1}?", "{0} * {1}"],
    ),
    (
        ["play_song", "play_music"], "Play a song.", [(["song", "title", "name"], SONGS, "The title")],
        ["Play {0}.", "Play the song {0}.", "I want to hear {0}.", "Put on {0}."],
    ),
    (
        ["switch_light", "set_light", "toggle_light"], "Switch a light on or off.",
        [(["room", "location"], ROOMS, "The room"), (["state", "action"], choice("on", "off"), "The new state")],
        ["Turn {1} the light in the {0}.", "Switch the {0} light {1}.", "Light {1} in the {0}, please.",
         "{0} light {1}"],
    ),
    (
        ["book_table", "reserve_table"], "Book a table in a restaurant.",
        [(["people", "guests", "party_size"], whole(1, 12), "How many people"), (["time", "at"], CLOCK, "The time")],
        ["Book a table for {0} at {1}.", "Reserve a table for {0} people at {1}.", "I need a table for {0} at {1}."],
    ),
    (
        ["find_flights", "search_flights", "book_flight"], "Find flights between two cities.",
        [(["origin", "from_city"], PLACES, "Where the flight starts"),
         (["destination", "to_city"], PLACES, "Where it goes")],
        ["Find flights from {0} to {1}.", "I want to fly from {0} to {1}.", "flights {0} to {1}",
         "Book a flight from {0} to {1}."],
    ),
]  # fmt: skip
