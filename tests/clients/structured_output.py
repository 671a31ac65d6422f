"""200 JSON-schema requests: every answer fits its schema, and the same seed gives the same text under every budget.

python structured_output.py http://127.0.0.1:PORT
"""

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai

COUNT = 200
BUDGETS = ["off", "chain", "auto", "tree:8", "tree:32", "tree:64"]
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=3)
MODEL = client.models.list().data[0].id


def schema(dice, depth=0):
    """A random schema whose values are bounded, so that an answer of any model ends."""
    kinds = ["enum", "integer", "boolean", "string", "pattern", "const", "null"] + (["object", "object", "array", "anyOf"] if depth < 3 else [])
    kind = "object" if depth == 0 else dice.choice(kinds)
    if kind == "object":
        names = dice.sample(["state", "count", "name", "items", "job", "größe", "a b", "x"], dice.randint(1, 3))
        return {"type": "object", "properties": {name: schema(dice, depth + 1) for name in names},
                "required": names[: dice.randint(1, len(names))], "additionalProperties": False}
    if kind == "array":
        least = dice.randint(0, 2)
        return {"type": "array", "items": schema(dice, depth + 1), "minItems": least, "maxItems": least + dice.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [schema(dice, depth + 1), schema(dice, depth + 1)]}
    if kind == "integer":
        least = dice.randint(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + dice.randint(0, 500)}
    return {
        "enum": {"enum": dice.sample(["done", "open", 7, None, True, "日本", "a\"b"], 3)},
        "boolean": {"type": "boolean"},
        "string": {"type": "string", "maxLength": dice.randint(0, 12)},
        "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]{1,3}$"},
        "const": {"const": dice.choice(["x", 3, False])},
        "null": {"type": "null"},
    }[kind]


def ask(index, wanted, budget):
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": f"Report number {index} as JSON."}], temperature=0.8, seed=index, max_tokens=1500,
        response_format={"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": wanted}},
        extra_body={"chat_template_kwargs": {"thinking": False}, "speculation": budget})
    return answer.choices[0]


def one(index):
    wanted = schema(random.Random(index))
    choices = [ask(index, wanted, budget) for budget in BUDGETS]
    texts = {choice.message.content for choice in choices}
    if len(texts) != 1:
        return f"{index}: texts differ: {texts}"
    if choices[0].finish_reason != "stop":
        return f"{index}: ended by {choices[0].finish_reason}: {choices[0].message.content[:200]!r}"
    try:
        jsonschema.validate(json.loads(choices[0].message.content), wanted)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{index}: {error}"
    return None


with ThreadPoolExecutor(4) as pool:
    problems = [problem for problem in pool.map(one, range(COUNT)) if problem]
for problem in problems:
    print("structured:", problem, file=sys.stderr)
print(f"{COUNT - len(problems)} passed, {len(problems)} failed")
sys.exit(bool(problems))
