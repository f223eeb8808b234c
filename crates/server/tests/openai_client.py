"""A session with the real `openai` client, against any running server.

    python3 openai_client.py http://127.0.0.1:8080/v1 [--key KEY]

Nothing is assumed of what the model says, only that temperature 0 says it twice. Prints one line
a check; the exit status is 0 if all hold, 1 if one does not, 77 if the client is not installed.
"""

import argparse
import concurrent.futures
import json
import sys
import time
import urllib.error
import urllib.request

try:
    import openai
except ImportError:
    print("skipped: needs the Python package openai (pip install openai)")
    sys.exit(77)

GREET = [{"role": "user", "content": "Hello! Who are you?"}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def greedy(client, **arguments):
    arguments = {"messages": GREET, "temperature": 0, "max_tokens": 40, **arguments}
    return client.chat.completions.create(model="whatever", **arguments)


def refused(kind, call):
    """The error of the class `kind` that `call` must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, got an answer")


def running(base):
    with urllib.request.urlopen(base + "/health") as response:
        return json.load(response)["running"]


def wait_until_ready(base):
    begun = time.monotonic()
    while True:
        try:
            running(base)
            return
        except urllib.error.HTTPError as error:
            assert error.code == 503 and time.monotonic() - begun < 300, error
            time.sleep(0.05)


def check_models(client, base):
    models = client.models.list().data
    assert len(models) == 1 and models[0].object == "model", models
    assert client.models.retrieve(models[0].id).id == models[0].id
    assert models[0].max_model_len == models[0].context_length > 0
    error = refused(openai.NotFoundError, lambda: client.models.retrieve("no-such-model"))
    assert error.code == "model_not_found", error


def check_whole(client, base):
    answer = greedy(client, extra_body=NO_THINKING)
    choice, usage = answer.choices[0], answer.usage
    assert answer.object == "chat.completion" and answer.model == "whatever"
    assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
    assert choice.finish_reason in ("stop", "length"), choice
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert answer.timings["predicted_n"] == usage.completion_tokens


def check_stream_is_the_whole_in_parts(client, base):
    for thinking in (False, True):
        extra = {"chat_template_kwargs": {"enable_thinking": thinking}}
        whole = greedy(client, extra_body=extra).choices[0]
        chunks = list(
            greedy(client, extra_body=extra, stream=True, stream_options={"include_usage": True})
        )
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant", chunks[0]
        *parts, last = chunks
        assert last.choices == [] and last.usage.total_tokens > 0, last
        assert all(chunk.usage is None for chunk in parts)
        deltas = [chunk.choices[0].delta for chunk in parts]
        assert "".join(delta.content or "" for delta in deltas) == whole.message.content
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert reasoning == (getattr(whole.message, "reasoning_content", None) or "")
        reasons = [chunk.choices[0].finish_reason for chunk in parts]
        assert reasons[-1] == whole.finish_reason and set(reasons[:-1]) <= {None}, reasons


def check_no_usage_unless_asked_for(client, base):
    assert all(chunk.usage is None for chunk in greedy(client, stream=True, max_tokens=3))


def check_sixteen_streams_at_once_say_what_each_says_alone(client, base):
    def one(content):
        messages = [{"role": "user", "content": content}]
        chunks = greedy(client, messages=messages, stream=True, extra_body=NO_THINKING)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    # Of different lengths, one of them longer than what is computed in one piece.
    contents = ["Hello!", "What is the capital of France?", "Hello! " * 300]
    contents += [f"How many metres are {n} kilometres? {'Please. ' * n}" for n in range(13)]
    alone = [one(content) for content in contents]
    with concurrent.futures.ThreadPoolExecutor(len(contents)) as pool:
        assert list(pool.map(one, contents)) == alone


def check_cancel_frees_the_slot(client, base):
    # Hot enough not to end by itself for a long time: only the client stops this.
    stream = greedy(client, stream=True, max_tokens=100_000, temperature=10, extra_body={"top_k": 0})
    for _, _chunk in zip(range(3), stream):
        pass
    stream.close()
    begun = time.monotonic()
    while running(base) > 0:
        assert time.monotonic() - begun < 2, "the slot is still taken after 2 s"
        time.sleep(0.01)


def check_limits_and_stops(client, base):
    answer = greedy(client, max_tokens=1)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 1
    answer = greedy(client, max_completion_tokens=2, max_tokens=openai.omit)
    assert answer.usage.completion_tokens <= 2
    text = greedy(client, extra_body=NO_THINKING).choices[0].message.content
    if len(text) > 3:
        stop = text[2:4]
        cut = greedy(client, extra_body=NO_THINKING, stop=[stop]).choices[0]
        assert cut.message.content == text[: text.index(stop)], cut
        assert cut.finish_reason == "stop"


def check_seeds_repeat(client, base):
    def sampled(seed):
        answer = greedy(client, temperature=1.5, seed=seed, extra_body=NO_THINKING)
        return answer.choices[0].message.content

    assert sampled(7) == sampled(7)


def check_logprobs(client, base):
    answer = greedy(client, logprobs=True, top_logprobs=3, max_tokens=5)
    tokens = answer.choices[0].logprobs.content
    assert 1 <= len(tokens) <= 5
    for token in tokens:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        # Greedy: the chosen one is the best.
        assert token.logprob == token.top_logprobs[0].logprob
        assert bytes(token.bytes).decode(errors="replace")


def check_completions(client, base):
    answer = client.completions.create(
        model="whatever", prompt="The capital of", max_tokens=1, echo=True, logprobs=2, temperature=0
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith("The capital of")
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs[0] is None and logprobs.token_logprobs[1] <= 0
    assert logprobs.text_offset[0] == 0
    n = answer.usage.prompt_tokens
    assert len(logprobs.tokens) == n + answer.usage.completion_tokens
    streamed = client.completions.create(
        model="whatever", prompt="The capital of", max_tokens=5, temperature=0, stream=True
    )
    whole = client.completions.create(
        model="whatever", prompt="The capital of", max_tokens=5, temperature=0
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def check_tools_are_offered(client, base):
    plain, offered = greedy(client, max_tokens=1), greedy(client, max_tokens=1, tools=[TOOL])
    hidden = greedy(client, max_tokens=1, tools=[TOOL], tool_choice="none")
    assert offered.usage.prompt_tokens > plain.usage.prompt_tokens == hidden.usage.prompt_tokens
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    history = [
        *GREET,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    greedy(client, messages=history, tools=[TOOL], max_tokens=1)


def check_refusals(client, base):
    bad = openai.BadRequestError
    error = refused(bad, lambda: greedy(client, messages=[{"role": "user", "content": "a b " * 600_000}]))
    assert error.code == "context_length_exceeded" and "maximum context length" in error.message
    for param, arguments in [
        ("temperature", {"temperature": -1}),
        ("top_p", {"top_p": 2}),
        ("n", {"n": 2}),
        ("max_tokens", {"max_tokens": -5}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": "required"}),
        ("response_format.type", {"response_format": {"type": "json_object"}}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "hi"}]}),
        ("messages", {"messages": []}),
        ("logit_bias.word", {"logit_bias": {"word": 1}}),
    ]:
        error = refused(bad, lambda: greedy(client, **arguments))
        assert error.param == param and param in error.message, (param, error)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    refused(bad, lambda: greedy(client, messages=[{"role": "user", "content": [image]}]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url", help="as in http://127.0.0.1:8080/v1")
    parser.add_argument("--key", default="none")
    arguments = parser.parse_args()
    base = arguments.base_url.rstrip("/").removesuffix("/v1")
    client = openai.OpenAI(base_url=base + "/v1", api_key=arguments.key, max_retries=0, timeout=300)
    wait_until_ready(base)
    failed = 0
    for name, check in list(globals().items()):
        if not name.startswith("check_"):
            continue
        try:
            check(client, base)
            print("ok    ", name[6:].replace("_", " "))
        except Exception as error:  # Every check is run, whatever the others say.
            failed += 1
            print("FAILED", name[6:].replace("_", " "), "--", type(error).__name__, error)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
