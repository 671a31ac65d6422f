"""The openai package against a running server: python openai_client.py http://127.0.0.1:PORT"""

import json
import sys
import time
import urllib.request

import openai

from checks import checks, finish

URL = sys.argv[1]
client = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
NO_THINKING = {"chat_template_kwargs": {"thinking": False}}
WEATHER = [{"type": "function", "function": {"name": "get_weather", "description": "Current weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"], "additionalProperties": False}}}]
check = checks("openai")


@check("models")
def _():
    assert client.models.retrieve(MODEL).max_model_len > 0


@check("completion")
def _():
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3, 4, 5,", max_tokens=6, temperature=0, logprobs=2, echo=True)
    assert answer.choices[0].text.startswith("1, 2, 3, 4, 5, 6"), answer.choices[0].text
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.total_tokens


@check("completion, streamed")
def _():
    stream = client.completions.create(model=MODEL, prompt=["1, 2, 3,", "2, 4, 6,"], max_tokens=6, temperature=0, stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert all(texts), texts


@check("chat")
def _():
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=32, extra_body=NO_THINKING)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop" and answer.usage.prompt_tokens == 17


@check("chat, streamed with usage")
def _():
    stream = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=32, stream=True,
                                            stream_options={"include_usage": True}, extra_body=NO_THINKING)
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ANSWER and chunks[-1].usage.completion_tokens == 10, chunks[-1]


@check("logprobs")
def _():
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=32, logprobs=True, top_logprobs=3,
                                            extra_body=NO_THINKING)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens and all(len(entry.top_logprobs) == 3 for entry in content)


@check("tools")
def _():
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Weather in Oslo?"}], temperature=0, max_tokens=200,
                                            tools=WEATHER, tool_choice="required", parallel_tool_calls=False, extra_body=NO_THINKING)
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls" and call.id == "functions.get_weather:0", call
    arguments = json.loads(call.function.arguments)
    history = [{"role": "user", "content": "Weather in Oslo?"}, answer.choices[0].message.model_dump(exclude_none=True),
               {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    again = client.chat.completions.create(model=MODEL, messages=history, temperature=0, max_tokens=16, tools=WEATHER, extra_body=NO_THINKING)
    assert isinstance(arguments["city"], str) and again.choices[0].finish_reason in ("stop", "length", "tool_calls")


@check("tools, streamed")
def _():
    with client.chat.completions.stream(model=MODEL, messages=[{"role": "user", "content": "Weather in Oslo?"}], temperature=0, max_tokens=200,
                                        tools=WEATHER, tool_choice={"type": "function", "function": {"name": "get_weather"}},
                                        parallel_tool_calls=False, extra_body=NO_THINKING) as stream:
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and "city" in json.loads(call.function.arguments)


@check("structured output")
def _():
    schema = {"type": "object", "properties": {"done": {"type": "boolean"}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
              "required": ["done", "count"], "additionalProperties": False}
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Report."}], temperature=0, max_tokens=100,
                                            response_format={"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": schema}},
                                            extra_body=NO_THINKING)
    value = json.loads(answer.choices[0].message.content)
    assert isinstance(value["done"], bool) and 0 <= value["count"] <= 99


@check("errors")
def _():
    for wanted, arguments in [
        (openai.NotFoundError, {"model": "nope"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"temperature": -1, "stream": True}),
    ]:
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": FRANCE, "max_tokens": 4, **arguments})
            raise AssertionError(f"{arguments} was accepted")
        except wanted as error:
            assert error.body["message"], error.body
    try:
        client.completions.create(model=MODEL, prompt=[261] * 100_000, max_tokens=4)
        raise AssertionError("an overflow was accepted")
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error.body


def running():
    text = urllib.request.urlopen(URL + "/metrics").read().decode()
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("vllm:num_requests_running"))


@check("cancellation")
def _():
    stream = client.chat.completions.create(model=MODEL, messages=FRANCE, max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    begun = time.time()
    while running() > 0:
        assert time.time() - begun < 2, "still running two seconds after the client left"
        time.sleep(0.02)


finish()
