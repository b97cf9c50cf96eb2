"""Talks to a server with OpenAI's client, as a user's program does. Usage: openai_client.py BASE_URL"""

import sys

import openai

MODEL = "demo"
QUESTION = [{"role": "user", "content": "What is kvferry?"}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 40}


def expect(error, request):
    """Calls `request`, which has to raise exactly this error; returns it."""
    try:
        request()
    except error as raised:
        assert type(raised) is error, f"expected {error}, got {type(raised)}"
        return raised
    raise AssertionError(f"expected {error}, got an answer")


def models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    expect(openai.NotFoundError, lambda: client.models.retrieve("no-such-model"))


def chat(client):
    whole = client.chat.completions.create(messages=QUESTION, **GREEDY)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    text, usage = whole.choices[0].message.content, whole.usage
    assert text and usage.prompt_tokens > 0 and usage.completion_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens is not None

    stream = client.chat.completions.create(
        messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == text, (pieces, text)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def completions(client):
    whole = client.completions.create(prompt="The ferry crosses", **GREEDY)
    text = whole.choices[0].text
    assert whole.object == "text_completion" and text and whole.usage.completion_tokens > 0
    stream = client.completions.create(prompt="The ferry crosses", stream=True, **GREEDY)
    assert "".join(choice.text for chunk in stream for choice in chunk.choices) == text

    ids = client.completions.create(prompt=[[100, 200, 300], [400, 500]], **GREEDY)
    assert [choice.index for choice in ids.choices] == [0, 1]
    assert ids.usage.prompt_tokens == 5

    left = client.completions.create(prompt="The ferry crosses", stream=True, **{**GREEDY, "max_tokens": 500})
    next(iter(left))
    left.close()


def errors(client):
    missing = expect(
        openai.NotFoundError,
        lambda: client.chat.completions.create(**{**GREEDY, "model": "gpt-4"}, messages=QUESTION),
    )
    assert missing.status_code == 404 and "gpt-4" in missing.message and missing.param == "model"
    for wrong in ({"temperature": 3}, {"max_tokens": 0}, {"top_p": 0}):
        bad = expect(
            openai.BadRequestError,
            lambda: client.chat.completions.create(**{**GREEDY, **wrong}, messages=QUESTION),
        )
        assert bad.param == next(iter(wrong)), bad
    for streams in (False, True):
        long = [1 + i % 100 for i in range(5000)]
        expect(openai.BadRequestError, lambda: client.completions.create(prompt=long, stream=streams, **GREEDY))
    expect(openai.BadRequestError, lambda: client.chat.completions.create(messages=[], **GREEDY))


def main():
    # No retries: what fails once fails the test.
    client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0, timeout=60)
    for check in (models, chat, completions, errors):
        check(client)
        print(check.__name__, "ok")
    print("all checks passed")


if __name__ == "__main__":
    main()
