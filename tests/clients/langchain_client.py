"""langchain-openai against a running server: python langchain_client.py http://127.0.0.1:PORT"""

import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from checks import checks, finish

URL = sys.argv[1]
check = checks("langchain")


def chat(**more):
    return ChatOpenAI(base_url=URL + "/v1", api_key="none", model="k26-mini", temperature=0, max_tokens=200, max_retries=0,
                      extra_body={"chat_template_kwargs": {"thinking": False}}, **more)


@tool
def get_weather(city: str) -> str:
    """Current weather in a city."""
    return "sunny"


@check("invoke")
def _():
    answer = chat().invoke("What is the capital of France?")
    assert answer.content == "The capital of France is Paris." and answer.usage_metadata["input_tokens"] == 17


@check("stream with usage")
def _():
    chunks = list(chat(stream_usage=True).stream("What is the capital of France?"))
    total = sum(chunks[1:], chunks[0])
    assert total.content == "The capital of France is Paris." and total.usage_metadata["output_tokens"] == 10


@check("tools")
def _():
    answer = chat().bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False).invoke("Weather in Oslo?")
    call = answer.tool_calls[0]
    assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str)
    history = [HumanMessage("Weather in Oslo?"), AIMessage(content="", tool_calls=[call]), ToolMessage("sunny", tool_call_id=call["id"])]
    chat().bind_tools([get_weather]).invoke(history)


@check("structured output")
def _():
    class Report(BaseModel):
        done: bool
        count: int = Field(ge=0, le=99)

    report = chat().with_structured_output(Report, method="json_schema").invoke([SystemMessage("Be brief."), HumanMessage("Report.")])
    assert isinstance(report.done, bool) and 0 <= report.count <= 99


@check("batch")
def _():
    answers = chat().batch(["What is the capital of France?"] * 4)
    assert [answer.content for answer in answers] == ["The capital of France is Paris."] * 4


finish()
