"""Renders and parses with OpenAI's openai-harmony. Reads a JSON object from standard input, and prints one.

The vocabulary comes from a package too, so nothing is downloaded: openai-harmony reads it from a folder that we name.
"""

import base64
import json
import os
import sys
import tempfile

import bpe_openai

with tempfile.TemporaryDirectory() as folder:
    with open(f"{folder}/o200k_base.tiktoken", "wb") as file:
        for data, rank in bpe_openai.get_encoding("o200k_base")._mergeable_ranks.items():
            file.write(base64.b64encode(data) + b" %d\n" % rank)
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
    import openai_harmony as harmony

    ENCODING = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def render(messages, tools, date, effort):
    """The prompt of a chat request, as text."""
    system = harmony.SystemContent.new().with_conversation_start_date(date)
    system = system.with_reasoning_effort(harmony.ReasoningEffort(effort.capitalize()))
    rendered = [harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system)]
    instructions = messages[0]["content"] if messages[0]["role"] in ("system", "developer") else None
    if instructions or tools:
        developer = harmony.DeveloperContent.new()
        if instructions:
            developer = developer.with_instructions(instructions)
        if tools:
            described = [harmony.ToolDescription.new(t["name"], t["description"], t["parameters"]) for t in tools]
            developer = developer.with_function_tools(described)
        rendered.append(harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer))
    for message in messages[1:] if instructions else messages:
        rendered += turn(message)
    conversation = harmony.Conversation.from_messages(rendered)
    return ENCODING.decode_utf8(ENCODING.render_conversation_for_completion(conversation, harmony.Role.ASSISTANT))


def turn(message):
    """The messages of one chat message. A tool's result has the name of its function."""
    if message["role"] == "user":
        return [harmony.Message.from_role_and_content(harmony.Role.USER, message["content"])]
    if message["role"] == "tool":
        author = harmony.Author.new(harmony.Role.TOOL, f"functions.{message['name']}")
        said = harmony.Message.from_author_and_content(author, message["content"])
        return [said.with_recipient("assistant").with_channel("commentary")]
    say = lambda text: harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text)  # noqa: E731
    said = [say(message["reasoning"]).with_channel("analysis")] if "reasoning" in message else []
    for call in message.get("tool_calls", ()):
        called = say(call["function"]["arguments"]).with_channel("commentary")
        said.append(
            called.with_recipient(f"functions.{call['function']['name']}").with_content_type("<|constrain|>json")
        )
    return [*said, say(message["content"]).with_channel("final")] if message.get("content") else said


def parse(text):
    """Channel, recipient and text of each message that an answer has."""
    ids = ENCODING.encode(text, allowed_special="all")
    messages = ENCODING.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT)
    return [[m.channel, m.recipient, "".join(part.text for part in m.content)] for m in messages]


asked = json.load(sys.stdin)
told = {"prompts": [render(**each) for each in asked["prompts"]], "answers": [*map(parse, asked["answers"])]}
print(json.dumps(told))
