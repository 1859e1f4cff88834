"""Which grammar a request's output has to follow, if any."""

from collections.abc import Mapping
from typing import Any

from serve.http.errors import bad
from serve.http.grammar import ANY_OBJECT, Body, Matcher, Source, grammar_body, regex_body, schema_body, source
from serve.http.prompt import ChatPrompt
from serve.http.schema_types import closed
from serve.http.schemas import SamplingFields
from serve.http.schemas_chat import ChatRequest, ResponseFormat
from serve.http.service import Service
from serve.http.turn_grammar import Turn

Constraint = tuple[str, list[Body]]  # the field it comes from, and bodies of which the first that compiles is taken


async def chat_matcher(service: Service, body: ChatRequest, prompt: ChatPrompt) -> Matcher | None:
    """Grammar of the whole turn: the answer's constraint, and tool calls where they have to, may or must not come."""
    constraint = _one_constraint(body, _format_constraint(prompt.response_format))
    calls = "forbidden"
    functions = prompt.functions
    if prompt.choice == "required" or prompt.named:
        calls = "required"
        functions = tuple(f for f in functions if not prompt.named or f["name"] == prompt.choice)
    elif prompt.choice == "auto" and functions:
        calls = "allowed"
    strict_tools = calls == "allowed" and any(function.get("strict") for function in functions)
    if constraint is None and not (calls == "required" or strict_tools or (functions and calls == "forbidden")):
        return None
    if not service.tokenizer.xtml:
        if calls == "required":
            raise bad("tool_choice", "this checkpoint's output has no tool calls; choose auto or none")
        return await _plain(service, constraint)

    def build() -> Source:
        content = None if constraint is None or calls == "required" else _compiling(service, constraint[1])
        return service.turn_source(Turn(prompt.thinking, content, functions, calls, prompt.parallel))

    return await service.matcher(build, constraint[0] if constraint else "tools")


async def text_matcher(service: Service, fields: SamplingFields, schema: Constraint | None = None) -> Matcher | None:
    """Grammar of a plain text."""
    return await _plain(service, _one_constraint(fields, schema))


async def _plain(service: Service, constraint: Constraint | None) -> Matcher | None:
    if constraint is None:
        return None
    return await service.matcher(lambda: source(_compiling(service, constraint[1])), constraint[0])


def schema_constraint(param: str, schema: Mapping[str, Any], strict: bool) -> Constraint:
    """JSON that fits a schema; keywords that llguidance does not know are ignored."""
    exact = closed(schema) if strict else schema
    return param, [schema_body(exact), schema_body(exact, lenient=True)]


def _format_constraint(response_format: ResponseFormat | None) -> Constraint | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None or response_format.type == "json_object":
        return "response_format", [ANY_OBJECT]
    return schema_constraint(
        "response_format", response_format.json_schema.schema_, response_format.json_schema.strict is True
    )


def _one_constraint(fields: SamplingFields, schema: Constraint | None) -> Constraint | None:
    found = [] if schema is None else [schema]
    if fields.regex is not None:
        found.append(("regex", [regex_body(fields.regex)]))
    if fields.grammar is not None:
        found.append(("grammar", [_grammar(fields.grammar)]))
    if len(found) > 1:
        names = " and ".join(param for param, _ in found)
        raise bad(found[1][0], f"{names} constrain the same text; give one of them")
    return found[0] if found else None


def _grammar(text: str) -> Body:
    try:
        return grammar_body(text)
    except ValueError as error:
        raise bad("grammar", f"grammar cannot be used: {error}; correct it") from None


def _compiling(service: Service, bodies: list[Body]) -> Body:
    problems = []
    for body in bodies:
        problem = service.grammars.error(source(body))
        if problem is None:
            return body
        problems.append(problem)
    raise ValueError(problems[0])
